"""The all-gather schedule: the order of its messages, its cached launches, and head groups of any size."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

import tritoncp
from tests.kernels.support.harness import (
    F32,
    F64,
    QKV,
    agree,
    close,
    cotangents,
    oracle,
    over_ranks,
    qkv,
    same,
)
from tests.multiprocess.ranks import run as on_ranks
from tritoncp.cpu.engine import CpuEngine
from tritoncp.distributed import collectives
from tritoncp.distributed.collectives import AllGather, ReduceScatter, Wait
from tritoncp.distributed.schedules import SCHEDULES, allgather, schedule_of
from tritoncp.masks import Mask, and_masks, causal, create_block_mask, document
from tritoncp.ops import engine_factory
from tritoncp.planning import traffic
from tritoncp.planning.build import build
from tritoncp.planning.plan import Plan

pytestmark = pytest.mark.usefixtures("cpu_engine")  # unless a test asks for kernels
MASK = create_block_mask(and_masks(causal(), document(lengths=[9, 15])), None, None, 24, 24, BLOCK_SIZE=8)


def per_head(heads: int) -> Mask:
    """A mask with block lists and a bitmap for every head."""
    bits = torch.rand(1, heads, 24, 24, generator=torch.Generator().manual_seed(0)) < 0.3
    return create_block_mask(lambda b, h, q, kv: bits[b, h, q, kv], 1, heads, 24, 24, BLOCK_SIZE=8)


# -- head groups --------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 8))
def test_head_groups_are_every_head_once_in_few_pieces(kv_heads: int, group: int) -> None:
    sizes = traffic.head_groups(kv_heads, 1)
    assert 0 < len(sizes) <= traffic.HEAD_GROUPS and min(sizes) > 0
    heads = torch.arange(kv_heads)[None]
    pieces, queries = (
        heads.split(sizes, 1),
        heads.repeat_interleave(group, 1).split([n * group for n in sizes], 1),
    )
    for keys, reading in zip(pieces, queries, strict=True):
        assert set(keys[0].tolist()) == set(reading[0].tolist())


@pytest.mark.parametrize("small", [0, 1 << 20])
def test_few_bytes_are_gathered_at_once(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "SMALL", small)
    gathers: list[tuple[int, ...]] = []

    def watched(x: Tensor) -> collectives.AllGather:
        gathers.append(tuple(x.shape))
        return collectives.AllGather(x)

    monkeypatch.setattr(allgather, "AllGather", watched)
    x, mask = qkv(24, heads=6, kv_heads=3, dim=4, dtype=F64), per_head(6)
    start = cotangents(x)
    agree(over_ranks(x, build(mask, 3), start=start), oracle(x, mask, start=start), 1e-10)
    group_sizes = [3] if small else [2, 1]
    assert [
        heads for _, _, heads, _ in gathers[::3]
    ] == group_sizes * 2  # of the first rank: forward, then backward


# -- order of messages --------------------------------------------------------------------------------


class Told(CpuEngine):
    """An engine that records its steps."""

    def __init__(self, said: list[Any]) -> None:
        super().__init__(0.5)
        object.__setattr__(self, "said", said)

    def forward(self, *args: Any, **kw: Any) -> Any:
        return self._saying(super().forward(*args, **kw))

    def dkdv(self, *args: Any, **kw: Any) -> Any:
        return self._saying(super().dkdv(*args, **kw))

    def _saying(self, step: Any) -> Any:
        return lambda: (self.said.append("compute"), step())


def story(schedule: collectives.Schedule[Any], world_size: int, said: list[str]) -> Any:
    """Drive one rank whose neighbours send zeros; record its requests."""
    answer: Any = None
    while True:
        try:
            request = schedule.send(answer)
        except StopIteration as stop:
            return stop.value
        if isinstance(request, Wait):
            said.append(f"wait {request.ticket.works[0]}")
            answer = request.ticket.result
            continue
        number = Counter(type(a).__name__ for a in said if not isinstance(a, str))[type(request).__name__]
        said.append(request)
        x = request.x
        gather = isinstance(request, AllGather)
        result = torch.cat([x, x.new_zeros((world_size - 1) * x.shape[0], *x.shape[1:])]) if gather else x
        answer = collectives.Ticket(
            result if gather else x[: x.shape[0] // world_size], [f"{type(request).__name__} {number}"]
        )


def names(said: list[Any]) -> list[str]:
    return [one if isinstance(one, str) else type(one).__name__ for one in said]


def rank_zero(x: QKV, plan: Plan) -> QKV:
    return QKV(*(tritoncp.shard(t, plan, dim=2) for t in x))


def test_the_next_heads_fly_while_these_are_computed() -> None:
    plan = build(MASK, 2)
    x = rank_zero(qkv(24, heads=4, dtype=F64), plan)
    said: list[Any] = []
    engine = Told(said)
    out, lse, _ = story(allgather.forward(plan, engine, *x, False), 2, said)
    first, second = ["AllGather", "wait AllGather 0", "AllGather", "compute"], ["wait AllGather 1", "compute"]
    assert names(said) == first + second
    said.clear()
    story(allgather.backward(plan, engine, *x, torch.ones_like(out), lse, torch.zeros_like(lse)), 2, said)
    home = ["wait ReduceScatter 0", "wait ReduceScatter 1"]  # gradients fly until the end
    assert names(said) == [*first, "ReduceScatter", *second, "ReduceScatter", *home]


@pytest.mark.parametrize("dtype", [torch.bfloat16, F32, F64], ids=str)
def test_keys_travel_as_they_are_and_gradients_in_float32(dtype: torch.dtype) -> None:
    plan = build(MASK, 3)
    x = rank_zero(qkv(24, heads=3, dtype=dtype, dim=4, v_dim=6), plan)
    said: list[Any] = []
    out, lse, _ = story(allgather.forward(plan, CpuEngine(0.5), *x, False), 3, said)
    grads = story(allgather.backward(plan, CpuEngine(0.5), *x, out, lse, torch.zeros_like(lse)), 3, said)
    sums = F64 if dtype == F64 else F32
    for request in said:
        if isinstance(request, AllGather):
            assert (
                request.x.dtype == dtype and request.x.shape[0] == plan.kv.s_max and request.x.shape[3] == 10
            )
        if isinstance(request, ReduceScatter):
            assert request.x.dtype == sums and request.x.shape[0] == 3 * plan.kv.s_max
    heads = [one.x.shape[2] for one in said if isinstance(one, AllGather)]
    assert heads == [2, 1, 2, 1]
    assert [g.dtype for g in grads] == [sums] * 3  # rounded once, by the op
    assert [g.shape for g in grads] == [t.shape for t in x]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_rank_sends_nothing(schedule: str) -> None:
    x = qkv(24, heads=4, dtype=F64)
    said: list[Any] = []
    plan = build(MASK, schedule=schedule)
    out, lse, top = story(schedule_of(plan).forward(plan, CpuEngine(0.25), *x, True), 1, said)
    grads = story(
        schedule_of(plan).backward(plan, CpuEngine(0.25), *x, out, lse, (out * out).sum(3)), 1, said
    )
    assert said == []
    want = oracle(x, MASK, start=(out, lse * 0), scale=0.25)
    for a, b, name in zip((out, lse, top, *grads), (*want[:3], *want.grads), ("out", "lse", "top", *"qkv")):
        close(a, b, name)


# -- results ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*heads cannot be divided")
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


@pytest.mark.filterwarnings("ignore:.*heads cannot be divided")
@pytest.mark.parametrize("schedule", ["local", *SCHEDULES])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_results_lie_in_memory_as_what_they_are_made_from(
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


@pytest.mark.filterwarnings("ignore:.*heads cannot be divided")
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


@pytest.mark.filterwarnings("ignore:.*heads cannot be divided")
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

    run()  # translating the score_mod saves tensors of its own
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        outs, lses = run()
    own = *outs, *lses, slope, *(s for side in shards for s in side)
    own_addresses = {t.untyped_storage().data_ptr() for t in own}
    more = [t for t in saved if t.untyped_storage().data_ptr() not in own_addresses]
    assert sum(t.numel() for t in more) <= 1  # the plan's handle
    assert len(saved) == 5 * world_size + 1 + len(more)


# -- over processes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", [False, True], ids=["cpu", "kernels"])
def test_real_ranks_compute_what_lockstep_does(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit on the CPU engine in float64 with two ranks, where a sum has one order."""
    monkeypatch.setattr(engine_factory, "uses_triton", lambda device: kernels)
    plan = build(MASK, 2)
    x = qkv(24, heads=2, dtype=F64)
    dout, dlse = cotangents(x)

    whole = over_ranks(x, plan, start=(dout, dlse))

    def shards(rank: int, *tensors: Tensor) -> list[Tensor]:
        pads = [-torch.inf if t is whole.lse else 0 for t in tensors]
        return [tritoncp.shard(t, plan.for_rank(rank), dim=2, pad=pad) for t, pad in zip(tensors, pads)]

    def work(group: Any) -> list[Tensor]:
        leaves = [t.requires_grad_() for t in shards(group.rank(), *x)]
        rank_plan = plan.for_rank(group.rank())
        out, lse = tritoncp.flex_attention(*leaves, rank_plan, group, return_lse=True)
        grads = torch.autograd.grad([out, lse], leaves, shards(group.rank(), dout, dlse))
        return [out.detach(), lse.detach(), *grads]

    agree(whole, oracle(x, MASK, start=(dout, dlse)), 1e-10)
    assert not all(bool(plan.for_rank(rank).valid.all()) for rank in range(2))  # one shard is padded
    for rank, answer in enumerate(on_ranks(2, work)):
        same(answer, shards(rank, whole.out, whole.lse, *whole.grads))


def test_a_plan_with_another_schedule_is_another_plan() -> None:
    """Objects cached with a plan survive ``replace``; launches of one schedule do not serve another."""

    def work(group: Any) -> list[bool]:
        plan = tritoncp.make_plan(MASK, group, schedule="fetch")
        x = tritoncp.shard(torch.ones(1, 2, 24, 16).cumsum(2), plan, dim=2)
        plans = [replace(plan, schedule=name, handle=None).pinned() for name in ("fetch", "ring", "ulysses")]
        outs = [tritoncp.flex_attention(x, x, x, p, group) for p in plans * 2]
        return [torch.allclose(y, outs[0], atol=1e-5) for y in outs]

    assert on_ranks(2, work) == [[True] * 6] * 2
