"""The exchange of heads for sequence: cuts that do not divide, rows of ranks, and two-dimensional meshes."""

from __future__ import annotations

import re
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import tritoncp
from tests.multiprocess import ranks
from tests.zoo import MASKS, SCORES, Answer, agree, differentiate, oracle, simulated, tensors
from tritoncp import make_plan, simulate
from tritoncp.distributed.collectives import Wait, lockstep
from tritoncp.distributed.schedules import SCHEDULES, head_exchange
from tritoncp.distributed.schedules.head_exchange import HeadExchange, Side
from tritoncp.distributed.schedules.ulysses import stretches
from tritoncp.planning import traffic

pytestmark = pytest.mark.usefixtures("cpu_engine")  # unless a test asks for kernels
CLOSE = {"atol": 1e-8, "rtol": 1e-8, "grad_atol": 1e-8}
BETWEEN = ("ulysses", "ulysses+ring")


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
def test_what_goes_by_heads_comes_back_by_tokens(drawn: Any) -> None:
    """After the exchange a rank has its heads of all tokens; back, all heads of its own tokens, multiplied by
    the number of ranks that had them."""
    (heads, kv_heads), q_rows, kv_rows, (d, e), batch = drawn
    degree, parts = len(q_rows), traffic.trade(heads, kv_heads, len(q_rows))
    q, kv = (Side(part, max(rows)) for part, rows in zip(parts, (q_rows, kv_rows)))
    specs = (heads, d, q_rows, q), (kv_heads, d, kv_rows, kv), (kv_heads, e, kv_rows, kv)
    inputs = [[torch.randn(batch, h, n, c) for n in rows] for h, c, rows, _ in specs]  # [tensor][rank]
    back = [[torch.full_like(x, torch.nan) for x in xs] for xs in inputs]

    def rank(i: int) -> Any:
        exchange = HeadExchange(SimpleNamespace(rank=0), i, degree, degree, q, kv, heads // kv_heads)
        sides = [side for *_, side in specs]
        whole = yield from exchange.to_heads(*((xs[i], side) for xs, side in zip(inputs, sides)))
        yield from exchange.to_sequence(*((x, side, xs[i]) for x, side, xs in zip(whole, sides, back)))
        flight = yield exchange.statistic_request(whole[0][..., 0].contiguous())
        return whole, exchange.join_statistic(inputs[0][i], (yield Wait(flight)))

    head_shards, statistics = zip(*lockstep([rank(i) for i in range(degree)]), strict=True)
    assert all(torch.equal(own_rows, x[..., 0]) for own_rows, x in zip(statistics, inputs[0], strict=True))
    for place, (h, _, _, side) in enumerate(specs):
        padded = [torch.nn.functional.pad(x, (0, 0, 0, side.rows - x.shape[2])) for x in inputs[place]]
        for i, whole in enumerate(head_shards):
            own_heads = slice(side.heads[i].start, side.heads[i].stop)
            assert torch.equal(whole[place], torch.cat([x[:, own_heads] for x in padded], 2))
        times = torch.tensor([sum(head in part for part in side.heads) for head in range(h)]).view(-1, 1, 1)
        for x, y in zip(inputs[place], back[place]):
            torch.testing.assert_close(y, x * times)


@pytest.mark.filterwarnings("ignore:.*heads cannot be divided")
@pytest.mark.parametrize("schedule", BETWEEN)
@pytest.mark.parametrize("world", [3, 4, 6])
@pytest.mark.parametrize("heads", [(6, 2), (5, 1), (4, 4), (9, 3)])
def test_heads_need_not_divide(heads: tuple[int, int], world: int, schedule: str) -> None:
    """Every head has its own mask and score, so that a head in the wrong place shows."""
    qkv, mask = tensors(heads, torch.float64, dim=8, v_dim=12), MASKS["random"](heads[0])
    score = SCORES["relative"](heads[0], torch.float64)
    plan = make_plan(mask, world_size=world, rank=0, schedule=schedule)
    agree(simulated(qkv, plan, score), oracle(qkv, mask, score), **CLOSE)


@pytest.mark.parametrize("engine", ["kernels"], indirect=True)
def test_kernels_launch_shared_heads_in_pieces(engine: str) -> None:
    qkv, mask = tensors((5, 1), torch.float64), MASKS["document"](5)
    score = SCORES["alibi"](5, torch.float64)
    plan = make_plan(mask, world_size=3, rank=0, schedule="ulysses")
    agree(simulated(qkv, plan, score), oracle(qkv, mask, score), **CLOSE)


@pytest.mark.parametrize("schedule", BETWEEN)
@pytest.mark.parametrize(("batch", "rows"), [(0, 32), (1, 0), (2, 0)])
def test_nothing_is_traded_too(batch: int, rows: int, schedule: str) -> None:
    world = simulate(2)
    mask = tritoncp.create_block_mask(tritoncp.causal(), 1, 1, rows, rows, BLOCK_SIZE=16)
    plan = world.make_plan(mask, schedule=schedule)
    shards = [x.requires_grad_() for x in world.shard(torch.randn(batch, 2, rows, 16), plan, dim=2)]
    outs, lses = world.flex_attention(shards, shards, shards, plan, return_lse=True)
    grads = torch.autograd.grad(outs, shards, outs)
    for x, out, lse, grad in zip(shards, outs, lses, grads, strict=True):
        assert out.shape == grad.shape == x.shape and lse.shape == x.shape[:3]


def test_fewer_heads_than_ranks_is_said_once(monkeypatch: Any) -> None:
    monkeypatch.setattr(head_exchange, "_WARNED", set())
    world, x = simulate(8), torch.randn(1, 3, 64, 16)
    plan = world.make_plan(tritoncp.full_mask(64, 64, block=8), schedule="ulysses")
    shards = world.shard(x, plan, dim=2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        world.flex_attention(shards, shards, shards, plan)
        world.flex_attention(shards, shards, shards, plan)
    (text,) = [str(w.message) for w in said if "cannot be divided" in str(w.message)]
    assert re.match("3 heads cannot be divided among 8 ranks: rows of 2 ranks.*the 4 rows", text)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dims", [(16, 1), (1, 16), (1, 1)])
def test_single_channels_travel_as_a_process_group_needs_them(dims: tuple[int, int], schedule: str) -> None:
    """Three ranks that share KV heads: a part of a message of K and V is then not contiguous by itself."""
    qkv, mask = tensors((6, 2), torch.float64, dim=dims[0], v_dim=dims[1]), MASKS["document"](6)
    score, world = SCORES["relative"](6, torch.float64), simulate(3)
    plan = world.make_plan(mask, schedule=schedule)
    agree(simulated(qkv, plan, score), oracle(qkv, mask, score), **CLOSE)
    xs = [world.shard(x.detach().bfloat16(), plan, dim=2, side=side) for x, side in zip(qkv, SIDES)]
    leaves = [x.requires_grad_() for shards in xs for x in shards]
    outs = world.flex_attention(*xs, plan, enable_gqa=True)
    grads = torch.autograd.grad(sum(out.float().sum() for out in outs), leaves)  # dK and dV in float32 there
    assert all(grad.shape == x.shape and bool(grad.isfinite().all()) for grad, x in zip(grads, leaves))


def single_channels(group: Any, dims: tuple[int, int], schedule: str) -> list[torch.Tensor]:
    torch.manual_seed(3)
    qkv = [x.detach().bfloat16() for x in tensors((6, 2), torch.float64, dim=dims[0], v_dim=dims[1])]
    plan = make_plan(MASKS["document"](6), group, schedule=schedule)
    shards = [tritoncp.shard(x, plan, dim=2, side=side).requires_grad_() for x, side in zip(qkv, SIDES)]
    out = tritoncp.flex_attention(*shards, plan, enable_gqa=True, mesh=group)
    grads = torch.autograd.grad(out.float().square().sum(), shards)
    return [tritoncp.unshard(x, plan, group, dim=2, side=side) for x, side in zip(grads, SIDES)]


SIDES = ("q", "kv", "kv")


@pytest.mark.parametrize("dims", [(16, 1), (1, 16)])
def test_three_processes_share_heads_of_single_channels(dims: tuple[int, int]) -> None:
    traded, gathered = (ranks.run(3, single_channels, dims, way)[0] for way in ("ulysses", "allgather"))
    for x, y in zip(traded, gathered, strict=True):
        assert (x - y).abs().max() <= 2**-5 * y.abs().max()


# -- meshes of two dimensions -----------------------------------------------------------------------------


def on_a_mesh(group: Any, schedule: str) -> Answer:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    torch.manual_seed(3)
    qkv, mask = tensors((6, 2), torch.float64, dim=8, v_dim=8), MASKS["document"](6)
    score = SCORES["relative"](6, torch.float64)
    plan = make_plan(mask, mesh, schedule=schedule)
    assert plan.degree == 2
    q, k, v = (tritoncp.shard(x, plan, dim=2, side=side) for x, side in zip(qkv, ("q", "kv", "kv")))
    out, lse = tritoncp.flex_attention(q, k, v, score.mod, plan, enable_gqa=True, return_lse=True, mesh=mesh)
    out, lse = (tritoncp.unshard(x, plan, mesh, dim=2, grad="slice") for x in (out, lse))
    answer = differentiate(out, lse, qkv, score.wants)
    for x in (*answer[2:5], *answer.captured):
        torch.distributed.all_reduce(x, group=group)
    return answer


@pytest.mark.parametrize("schedule", ["auto", *BETWEEN])
def test_four_processes_on_a_mesh_are_the_oracle(schedule: str) -> None:
    torch.manual_seed(3)
    qkv, mask = tensors((6, 2), torch.float64, dim=8, v_dim=8), MASKS["document"](6)
    want = oracle(qkv, mask, SCORES["relative"](6, torch.float64))
    for answer in ranks.run(4, on_a_mesh, schedule, timeout=120):
        agree(answer, want, **CLOSE)


def refused(group: Any) -> list[str]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ring", "ulysses"))
    mask, said = MASKS["causal"](1), []
    x, plan = torch.zeros(1, 1, 60, 16), make_plan(mask, mesh)
    y = tritoncp.shard(torch.zeros(1, 1, 120, 16), plan, dim=2)
    calls = (
        lambda: make_plan(mask, mesh, schedule="ring"),
        lambda: tritoncp.flex_attention(x, x, x, mask, mesh),
        lambda: tritoncp.flex_attention(y, y, y, plan, mesh),
    )  # fmt: skip
    for call in calls:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            call()
        said.append(str(caught.value))
    return said


def test_what_a_mesh_of_two_dimensions_cannot_do_is_said() -> None:
    for ring, raw, heads in ranks.run(2, refused):
        assert "1 x 2 ranks" in ring and "got schedule='ring'" in ring
        assert "needs a plan" in raw
        assert "trades heads among 2 ranks, the query has 1" in heads
