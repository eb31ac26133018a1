"""Schedules: their messages and memory, the memory order of their results, and head groups of any size."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention.flex_attention import AuxRequest
from torch.testing._internal.distributed.fake_pg import FakeStore

import tritoncp
from tests.kernels.support.harness import F32, F64, agree, cotangents, oracle, over_ranks, qkv
from tests.multiprocess.ranks import run as on_ranks
from tritoncp import Mask, and_masks, causal, create_block_mask, document
from tritoncp.call import engine_factory
from tritoncp.core.records import replace
from tritoncp.distributed import collectives
from tritoncp.distributed.collectives import AllGather, ReduceScatter, Ticket
from tritoncp.distributed.schedules import SCHEDULES, buffers
from tritoncp.distributed.schedules.buffers import laid_out_as
from tritoncp.planning.build import build
from tritoncp.planning.costs import traffic

pytestmark = pytest.mark.usefixtures("cpu_engine", "in_pieces")  # unless a test asks for kernels
MASK = create_block_mask(and_masks(causal(), document(lengths=[9, 15])), None, None, 24, 24, BLOCK_SIZE=8)


def per_head(heads: int) -> Mask:
    """A mask with block lists and a bitmap for every head."""
    bits = torch.rand(1, heads, 24, 24, generator=torch.Generator().manual_seed(0)) < 0.3
    return create_block_mask(lambda b, h, q, kv: bits[b, h, q, kv], 1, heads, 24, 24, BLOCK_SIZE=8)


# -- head groups --------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 8))
def test_head_groups_have_every_head_once_in_few_groups(kv_heads: int, group: int) -> None:
    sizes = traffic.head_groups(kv_heads, 1)
    assert 0 < len(sizes) <= traffic.HEAD_GROUPS and min(sizes) > 0
    heads = torch.arange(kv_heads)[None]
    pieces, queries = (
        heads.split(sizes, 1),
        heads.repeat_interleave(group, 1).split([n * group for n in sizes], 1),
    )
    for keys, reading in zip(pieces, queries, strict=True):
        assert set(keys[0].tolist()) == set(reading[0].tolist())


@pytest.mark.sample(5)
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_intervals_of_one_head_are_not_used_for_another(schedule: str, world_size: int) -> None:
    """Lists of the first head serve all; each rank has fewer queries than heads."""
    size, heads = world_size, 6
    mask = create_block_mask(lambda b, h, q, kv: kv <= q - h % 2, None, None, size, size, BLOCK_SIZE=size)
    mask = mask.with_intervals()
    x = qkv(size, heads=heads, kv_heads=heads, dtype=F64)
    plan, start = build(mask, world_size, balancer=None, schedule=schedule), cotangents(x)
    agree(over_ranks(x, plan, start=start), oracle(x, mask, start=start), 1e-12)


# -- messages -----------------------------------------------------------------------------------------


def record_requests(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the requests of the first rank of simulated worlds."""
    requests: list[Any] = []
    run_turn = collectives._run_turn
    monkeypatch.setattr(collectives, "_run_turn", lambda turn: requests.append(turn[0]) or run_turn(turn))
    return requests


@pytest.mark.sample(4)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, F64], ids=str)
def test_keys_are_sent_as_they_are_and_gradients_in_float32_at_least(
    dtype: torch.dtype, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their sums equal the reference, also if batch rows read different keys."""
    requests = record_requests(monkeypatch)
    documents = document(lengths=[[9, 15], [3, 21]])
    mask = create_block_mask(and_masks(causal(), documents), 2, None, 24, 24, BLOCK_SIZE=4)
    x, plan = qkv(24, batch=2, heads=3, dtype=dtype, dim=4, v_dim=6), build(mask, 3, schedule=schedule)
    start = cotangents(x)
    results = over_ranks(x, plan, start=start)
    if dtype == F64:
        agree(results, oracle(x, mask, start=start), 1e-10)
    sums = torch.promote_types(dtype, F32)
    messages = [request for request in requests if not isinstance(request, Ticket)]
    assert {request.x.dtype for request in messages} == {dtype, sums}
    reduced = [request.x for request in requests if isinstance(request, ReduceScatter)]
    assert all(x.dtype == sums and x.shape[0] == 3 * plan.kv.s_max for x in reduced)


@pytest.mark.parametrize("less", [0, 1])
def test_few_bytes_are_gathered_in_one_message(less: int, monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = 8 * 3 * (4 + 4) * 8  # a rank's tokens, KV heads, channels of keys and values, float64
    monkeypatch.setattr(traffic, "SMALL", nbytes + less)
    requests = record_requests(monkeypatch)
    x, mask = qkv(24, heads=6, kv_heads=3, dim=4, dtype=F64), per_head(6)
    start = cotangents(x)
    agree(over_ranks(x, build(mask, 3), start=start), oracle(x, mask, start=start), 1e-10)
    gathered = [request.x.shape[2] for request in requests if isinstance(request, AllGather)]
    assert gathered == ([3] if less else [2, 1]) * 2  # forward, then backward


@pytest.mark.parametrize("schedule", ["allgather", "fetch", "ring"])
def test_ranks_that_read_no_keys_of_others_send_none(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = record_requests(monkeypatch)
    mask = create_block_mask(document(lengths=[8, 5, 3, 7]), None, None, 23, 23, BLOCK_SIZE=4)
    x, plan = qkv(23, heads=4, kv_heads=2, dtype=F64), build(mask, 3, balancer=None, schedule=schedule)
    start = cotangents(x)
    agree(over_ranks(x, plan, start=start), oracle(x, mask, start=start), 1e-10)
    assert not requests and plan.bytes_sent(batch=1, kv_heads=2, head_dim=8) == 0


# -- results ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_results_may_be_edited(schedule: str) -> None:
    """Results are no views, and share no memory with each other."""
    world = tritoncp.simulate(2)
    plan = world.make_plan(MASK, schedule=schedule)
    shards = [[s.requires_grad_() for s in world.shard(t, plan, dim=2)] for t in qkv(24, heads=2)]
    wants = AuxRequest(lse=True, max_scores=True)
    outs, aux = world.flex_attention(*shards, plan, return_aux=wants)
    results = [*outs, *aux.lse, *aux.max_scores]
    before = [t.detach().clone() for t in results]
    for t in results:
        t.mul_(2)
    assert all(torch.equal(t, 2 * b) for t, b in zip(results, before, strict=True))


ORDERS = {"BSHD": (0, 2, 1), "SBHD": (2, 0, 1), "HBSD": (1, 0, 2), "BHSD": (0, 1, 2)}


@pytest.mark.sample(3)
@pytest.mark.parametrize("schedule", ["local", *SCHEDULES])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_results_have_the_memory_order_of_their_inputs(
    schedule: str, order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that transposes its inputs transposes the results back without a copy; the numbers stay the
    same. The usual memory order is also the one that kernels write results and messages in."""
    if (order, schedule) == (ORDERS["BSHD"], "ulysses"):
        monkeypatch.setattr(engine_factory, "uses_triton", lambda device: True)
    world = tritoncp.simulate(1 if schedule == "local" else 2)
    plan = world.make_plan(MASK, **({} if schedule == "local" else {"schedule": schedule}))
    x = qkv(24, batch=2, heads=4, kv_heads=2, dim=4, v_dim=6, dtype=F64)
    back = [order.index(i) for i in range(3)] + [3]

    def laid(t: Tensor) -> Tensor:
        return t.permute(*order, 3).contiguous().permute(back).detach().requires_grad_()

    def run(shards: list[list[Tensor]]) -> list[Tensor]:
        outs = world.flex_attention(*shards, plan, enable_gqa=True)
        leaves = [t for ts in shards for t in ts]
        return [*outs, *torch.autograd.grad([o.square().sum() for o in outs], leaves)]

    plain = [[t.contiguous().detach().requires_grad_() for t in world.shard(t, plan, dim=2)] for t in x]
    got, want = run([list(map(laid, ts)) for ts in plain]), run(plain)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        assert a.permute(*order, 3).is_contiguous() and b.is_contiguous()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_in_inference_mode_share_no_memory(schedule: str) -> None:
    """In inference mode views are not marked as views."""
    world = tritoncp.simulate(2)
    plan = world.make_plan(MASK, schedule=schedule)
    x = qkv(24, batch=2, heads=2, dim=4)
    shards = [
        [t.transpose(1, 2).contiguous().transpose(1, 2) for t in world.shard(t, plan, dim=2)] for t in x
    ]
    leaves = [t.requires_grad_() for ts in shards for t in ts]
    outs = world.flex_attention(*shards, plan)
    with torch.inference_mode():
        grads = torch.autograd.grad(outs, leaves, [torch.ones_like(out) for out in outs])
    assert len({grad.untyped_storage().data_ptr() for grad in grads}) == len(grads)
    assert all(grad.transpose(1, 2).is_contiguous() for grad in grads)


# -- tensors saved for backward -----------------------------------------------------------------------


@pytest.mark.sample(7)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world_size", [1, 4])
def test_only_the_shard_and_its_outputs_are_kept_by_reference(world_size: int, schedule: str) -> None:
    """Autograd saves no copy, and no tensor whose size grows with the global sequence."""
    world = tritoncp.simulate(world_size)
    plan = world.make_plan(MASK, schedule=schedule)
    slope = torch.rand(2, requires_grad=True)
    shards = [[s.requires_grad_() for s in world.shard(t, plan, dim=2)] for t in qkv(24, heads=2)]

    def run() -> tuple[list[Tensor], list[Tensor]]:
        return world.flex_attention(*shards, lambda s, b, h, q, kv: s * slope[h], plan, return_lse=True)

    run()  # translating the score_mod saves tensors too
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        outs, lses = run()
    own = *outs, *lses, slope, *(s for side in shards for s in side)
    own_addresses = {t.untyped_storage().data_ptr() for t in own}
    more = [t for t in saved if t.untyped_storage().data_ptr() not in own_addresses]
    assert sum(t.numel() for t in more) <= 1  # the plan's handle
    assert len(saved) == 5 * world_size + 1 + len(more)


# -- over processes -----------------------------------------------------------------------------------


def test_a_plan_with_another_schedule_is_another_plan() -> None:
    """Objects cached with a plan survive ``replace``; launches of one schedule do not serve another."""

    def work(group: Any) -> list[bool]:
        plan = tritoncp.make_plan(MASK, group, schedule="fetch")
        x = tritoncp.shard(torch.ones(1, 2, 24, 16).cumsum(2), plan, dim=2)
        plans = [replace(plan, schedule=name, handle=None).pinned() for name in ("fetch", "ring", "ulysses")]
        outs = [tritoncp.flex_attention(x, x, x, p, group) for p in plans * 2]
        return [torch.allclose(y, outs[0], atol=1e-5) for y in outs]

    assert on_ranks(2, work) == [[True] * 6] * 2


def test_results_have_the_layout_of_queries_of_unbounded_length() -> None:
    """The last chunk of a graph has such queries. Values may have other channels than queries, and rows may
    be the innermost dimension."""
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        whole = env.create_unbacked_symint()
        rows = whole - (whole + 1) // 2
        torch._check(rows >= 0)
        q = torch.empty_strided((2, 3, rows, 8), (24 * rows, 8, 24, 1))
        out = laid_out_as(q, 4)
        pairs = (rows, rows), (rows + 1, rows), (rows, rows + 1)
        assert [buffers._is_less(*pair) for pair in pairs] == [False, False, True]
        turned = [torch.empty_strided((2, 3, n, 8), (24 * n, 8 * n, 1, n)) for n in (whole, rows)]
        innermost = [laid_out_as(x, 8).stride(3) for x in (q, *turned)]
    assert out.stride()[1:] == (4, 12, 1) and innermost == [1, 1, 1]


def test_a_message_ends_with_zeros() -> None:
    k, v = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 2)
    message = buffers.pack(k, v, 6)
    assert all(map(torch.equal, buffers.views(message[:4], k), (k, v))) and not message[4:].any()


@pytest.mark.parametrize("add", [False, True])
def test_partial_sums_of_keys_are_added_unless_batch_rows_share_them(add: bool) -> None:
    """The engine of a GPU may split the query heads of a KV head; each part is computed in separate
    memory."""

    class Engine:
        def split(self, *_: Any) -> int:
            return 2

        def dkdv(self, step: Any, dk: Tensor, dv: Tensor, dq: Any, **options: Any) -> Any:
            assert dk.shape[1] == 2 * options.get("split", 1)
            parts = [x if x.stride(0) else x[:1] for x in (dk, dv)]  # each element is written once
            return lambda: [x.copy_(i + options.get("add", False) * x) for i, x in enumerate(parts, 1)]

    step: Any = SimpleNamespace(q=None, k=None, tables=None, lse=torch.empty(3, 4, 5))
    for own, times in ((torch.ones(3, 2, 5, 8), 2), (torch.ones(1, 2, 5, 8).expand(3, -1, -1, -1), 1)):
        grads = own.clone() if times == 2 else own, torch.ones(3, 2, 5, 6)
        buffers.dkdv(Engine(), step, *grads, None, add=add)
        for i, grad in enumerate(grads, 1):
            assert bool((grad == times * i + add).all())


# -- dry runs -----------------------------------------------------------------------------------------


@pytest.fixture
def rank_of_a_dry_run() -> Iterator[Any]:
    """Make this process rank 1 of 4 whose messages go nowhere, as torch's "fake" backend does."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:this plan places blocks")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_dry_run_computes_a_training_step(schedule: str, engine: str, rank_of_a_dry_run: Any) -> None:
    """It has the launches and the memory of a rank, and arbitrary results."""
    mask = create_block_mask(causal(), 1, 4, 64, 64, BLOCK_SIZE=8)
    plan = tritoncp.make_plan(mask, mesh=rank_of_a_dry_run, schedule=schedule)
    q, k, v = (torch.randn(1, 4, 16, 16, requires_grad=True) for _ in range(3))
    out = tritoncp.flex_attention(q, k, v, None, plan, mesh=rank_of_a_dry_run)
    out.sum().backward()
    assert [x.grad.shape for x in (q, k, v)] == [out.shape] * 3
