"""The exchange of heads for sequence: cuts that do not divide, rows of ranks, and two-dimensional meshes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import tritoncp
from tests.cases import Case, check
from tests.multiprocess import ranks
from tests.multiprocess.case_on_ranks import check_ranks
from tritoncp import causal, create_block_mask, make_plan, simulate
from tritoncp.distributed.collectives import lockstep
from tritoncp.distributed.schedules.head_exchange import HeadExchange, Side
from tritoncp.distributed.schedules.ulysses import stretches
from tritoncp.planning.costs import traffic

pytestmark = pytest.mark.usefixtures("cpu_engine")  # unless a test asks for kernels
BETWEEN = ("ulysses", "ulysses+ring")
DOCUMENTS = ("causal documents of rows", 6)
SHARED_HEADS = Case(DOCUMENTS, "distances", world=3, balancer="ptrr", batch=2, heads=2, group=3)


@given(st.integers(1, 6), st.integers(1, 5), st.data())
def test_every_query_head_goes_to_one_rank_with_the_keys_it_reads(
    kv_heads: int, group: int, data: Any
) -> None:
    heads = kv_heads * group
    degree = data.draw(st.integers(1, heads))
    q_heads, kv_parts = traffic.trade(heads, kv_heads, degree)
    assert [head for part in q_heads for head in part] == list(range(heads))
    assert max(map(len, q_heads)) - min(map(len, q_heads)) <= 1
    for own_heads, keys in zip(q_heads, kv_parts):
        assert {head // group for head in own_heads} == set(keys)
        read = {}
        for q, kv in stretches(own_heads, group):
            share, rest = divmod(q.stop - q.start, kv.stop - kv.start)
            assert rest == 0
            read |= {own_heads[i]: keys[kv.start + (i - q.start) // share] for i in range(q.start, q.stop)}
        assert read == {head: head // group for head in own_heads}


@st.composite
def trades(draw: Any) -> tuple[tuple[int, int], list[int], list[int], tuple[int, int], int]:
    """(query heads, KV heads), rows of each rank's queries and keys, channels of keys and values, batch."""
    kv_heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    degree = draw(st.integers(1, min(5, kv_heads * group)))
    q_rows, kv_rows = (draw(st.lists(st.integers(0, 3), min_size=degree, max_size=degree)) for _ in range(2))
    channels = draw(st.sampled_from([(2, 2), (2, 3), (1, 4)]))
    return (kv_heads * group, kv_heads), q_rows, kv_rows, channels, draw(st.integers(0, 2))


@given(trades())
def test_tensors_sent_by_heads_come_back_by_tokens(drawn: Any) -> None:
    """After the exchange a rank has its heads of all tokens; back, all heads of its tokens, multiplied by
    the number of ranks that had them."""
    (heads, kv_heads), q_rows, kv_rows, (d, e), batch = drawn
    degree, parts = len(q_rows), traffic.trade(heads, kv_heads, len(q_rows))
    q, kv = (Side(part, max(rows)) for part, rows in zip(parts, (q_rows, kv_rows)))
    specs = (heads, d, q_rows, q), (kv_heads, d, kv_rows, kv), (kv_heads, e, kv_rows, kv)
    inputs = [[torch.randn(batch, h, n, c) for n in rows] for h, c, rows, _ in specs]  # [tensor][rank]

    def rank(i: int) -> Any:
        exchange = HeadExchange(SimpleNamespace(rank=0), i, degree, degree, q, kv, heads // kv_heads)
        sides = [side for *_, side in specs]
        whole = yield from exchange.to_heads(*((xs[i], side) for xs, side in zip(inputs, sides)))
        fields = [(x, side, xs[i]) for x, side, xs in zip(whole, sides, inputs)]
        return whole, (yield from exchange.to_sequence(*fields))

    head_shards, back = zip(*lockstep([rank(i) for i in range(degree)]))
    for place, (h, _, _, side) in enumerate(specs):
        padded = [torch.nn.functional.pad(x, (0, 0, 0, side.rows - x.shape[2])) for x in inputs[place]]
        for i, whole in enumerate(head_shards):
            own_heads = slice(side.heads[i].start, side.heads[i].stop)
            assert torch.equal(whole[place], torch.cat([x[:, own_heads] for x in padded], 2))
        times = torch.tensor([sum(head in part for part in side.heads) for head in range(h)]).view(-1, 1, 1)
        for x, own in zip(inputs[place], back):
            torch.testing.assert_close(own[place], x * times)


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", BETWEEN)
@pytest.mark.parametrize(("heads", "group", "world"), [(2, 4, 3), (1, 5, 3), (4, 1, 6), (3, 3, 6)])
def test_a_degree_need_not_divide_the_heads(heads: int, group: int, world: int, schedule: str) -> None:
    """Every head has another mask and score, so that a head in the wrong place is noticed. Of 8 query heads
    for 2 KV heads, the second of 3 ranks has one head of one KV head and two of the other."""
    check(Case(("bits", 0), "distances", schedule, world, "ptrr", heads=heads, group=group, dims=(8, 12)))


@pytest.mark.parametrize("schedule", BETWEEN)
@pytest.mark.parametrize(("batch", "rows"), [(0, 32), (1, 0), (2, 0)])
def test_empty_shards_are_exchanged_for_heads(batch: int, rows: int, schedule: str) -> None:
    world = simulate(2)
    mask = tritoncp.create_block_mask(tritoncp.causal(), 1, 1, rows, rows, BLOCK_SIZE=16)
    plan = world.make_plan(mask, schedule=schedule)
    shards = [x.requires_grad_() for x in world.shard(torch.randn(batch, 2, rows, 16), plan, dim=2)]
    outs, lses = world.flex_attention(shards, shards, shards, plan, return_lse=True)
    grads = torch.autograd.grad(outs, shards, outs)
    for x, out, lse, grad in zip(shards, outs, lses, grads, strict=True):
        assert out.shape == grad.shape == x.shape and lse.shape == x.shape[:3]


def test_fewer_heads_than_ranks_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tritoncp.messages")
    plan = make_plan(tritoncp.full_mask(80, 80, block=8), world_size=10, schedule="ulysses")
    HeadExchange.of(plan, *[torch.empty(1, 3, 8, 16)] * 2)
    assert caplog.messages == ["3 heads do not divide among 10 ranks: rows of 2 ranks exchange heads"]


@pytest.mark.long
def test_three_processes_share_heads_of_single_channels() -> None:
    check_ranks(replace(SHARED_HEADS, schedule="ulysses", dims=(1, 16), dtype=torch.bfloat16))


# -- meshes of two dimensions -----------------------------------------------------------------------------


def two_by_two(group: Any) -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))


@pytest.mark.long
def test_four_processes_on_a_mesh_have_the_results_of_the_reference() -> None:
    case = replace(SHARED_HEADS, world=4)
    check_ranks(*(replace(case, schedule=schedule) for schedule in BETWEEN), mesh_of=two_by_two)


def test_a_mesh_with_more_ranks_in_a_row_than_heads_is_refused() -> None:
    def work(group: Any) -> str:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ring", "ulysses"))
        mask = create_block_mask(causal(), 1, 1, 120, 120, BLOCK_SIZE=32)
        plan = make_plan(mask, mesh, schedule="ulysses")
        x = tritoncp.shard(torch.zeros(1, 1, 120, 16), plan, dim=2)
        return str(ranks.attempt(lambda: tritoncp.flex_attention(x, x, x, plan, mesh)))

    for said in ranks.run(2, work):
        assert "query has 1 heads, which the plan exchanges among 2 ranks" in said
