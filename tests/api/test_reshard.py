"""Tests of reshard: between all kinds of plans, in simulated worlds, on real ranks and in graphs."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import tritoncp
from tests.masks.packed_documents import cumulative
from tests.multiprocess import ranks
from tests.planning.test_placement import placements, random_mask
from tritoncp import Plan, full_mask, reshard, shard, unshard
from tritoncp.core import log_lines
from tritoncp.core.records import replace
from tritoncp.distributed import collectives, consistency
from tritoncp.planning import moves
from tritoncp.planning.build import build
from tritoncp.planning.placement import MOVABLE


@st.composite
def pairs(draw: Callable) -> tuple[int, Plan | None, Plan | None]:
    """Draw a number of ranks and two placements of one sequence; one of them may be natural order."""
    world, length = draw(st.integers(1, 8)), draw(st.integers(1, 30))
    one = placements(world, length)
    pair = [draw(one), draw(st.one_of(one, st.none()))]
    return world, *draw(st.permutations(pair))


def cut(world: Any, x: Tensor, plan: Plan | None, pad: float = 0) -> list[Tensor]:
    """Shard [S, 3, 2 batch rows] by a plan, or in even pieces."""
    if plan is not None:
        return world.shard(x, plan, dim=0, batch_dim=2, pad=pad)
    return list(x.split([len(part) for part in x.tensor_split(world.world_size)]))


WHERE = {"dim": -3, "batch_dim": 2}


@given(pairs(), st.sampled_from([torch.float64, torch.int64, torch.bool]))
def test_reshard_is_unshard_then_shard_there_and_back(case, dtype: torch.dtype) -> None:
    size, source, target = case
    world, length = tritoncp.simulate(size), (source or target).q.length
    x = torch.arange(1, 1 + length * 6).view(length, 3, 2).to(dtype)
    before, after = cut(world, x, source, 1), cut(world, x, target, 1)
    with mock.patch.object(collectives, "_run_all_to_alls", wraps=collectives._run_all_to_alls) as sends:
        moved = reshard(before, source, target, world, **WHERE, pad=1)
        back = reshard(moved, target, source, world, **WHERE, pad=1)
    assert all(map(torch.equal, moved, after)) and all(map(torch.equal, back, before))
    owners = torch.full((2, 2, length), -1)
    for at, plan in enumerate((source, target)):
        numbers = torch.arange(length)[:, None, None].expand(length, 3, 2)
        for rank, part in enumerate(cut(world, numbers, plan, -1)):
            for row in (0, 1):
                owners[at, row, part[:, 0, row][part[:, 0, row] >= 0]] = rank
    separate = any(plan is not None and plan.q.batch > 1 for plan in (source, target))
    changes = int((owners[0] != owners[1])[: 1 + separate].sum())
    rows = [sum(len(request.x) for request in call.args[0]) for call in sends.call_args_list]
    assert rows == ([changes] * 2 if changes else [])  # no message where no row changes ranks


@given(pairs())
def test_gradients_of_moved_rows_return_to_their_ranks(case) -> None:
    size, source, target = case
    world, length = tritoncp.simulate(size), (source or target).q.length
    x, y = torch.randn(2, length, 3, 2, dtype=torch.float64)
    leaves = [part.clone().requires_grad_() for part in cut(world, x, source)]
    moved = reshard(leaves, source, target, world, **WHERE)
    grads = torch.autograd.grad(moved, leaves, cut(world, y, target, 5.0), create_graph=True)
    assert all(map(torch.equal, grads, cut(world, y, source)))
    seeds = [torch.randn_like(part).requires_grad_() for part in moved]  # linear: grad of the grad is reshard
    (first, *_) = grads = torch.autograd.grad(moved, leaves, seeds, create_graph=True)
    again = torch.autograd.grad(grads, seeds, [part.detach() for part in leaves])
    assert all(map(torch.equal, again, moved)) and first.shape == leaves[0].shape


def test_padding_of_documents_that_a_plan_leaves_out_gets_the_pad_value() -> None:
    """A plan of padded documents has no row for their padding; its keys are placed apart from queries."""
    world = tritoncp.simulate(2)
    padded = {"cu_seqlens_q_padded": cumulative([8, 8]), "cu_seqlens_kv_padded": cumulative([16, 4])}
    mask = tritoncp.varlen_mask(cumulative([5, 8]), cumulative([9, 4]), causal=True, **padded, BLOCK_SIZE=4)
    plan = world.make_plan(mask)
    for side, length, tokens in (("q", 16, mask.tokens[0]), ("kv", 20, mask.tokens[1])):
        x = torch.arange(length)
        shards = world.shard(x, plan, dim=0, side=side, pad=-100)
        whole = torch.cat(reshard(shards, plan, None, world, dim=0, side=side, pad=-100))
        assert torch.equal(whole, torch.where(tokens, x, -100))


def test_dual_chunk_order_equals_a_plan_if_chunks_are_whole_blocks() -> None:
    world, x = tritoncp.simulate(4), torch.arange(64)
    mask = tritoncp.create_block_mask(tritoncp.causal(), 1, 1, 64, 64, BLOCK_SIZE=8)
    plan = world.make_plan(mask, balancer="head_tail")
    dual = tritoncp.contiguous_to_dual_chunk(x, torch.tensor([0, 64]), world_size=4)
    assert torch.equal(torch.cat(reshard(x.chunk(4), None, plan, world, dim=0)), dual)


def dtypes() -> list[torch.dtype]:
    """List the dtypes of tensors whose elements take whole bytes: no quantised and no narrower ones."""
    kinds = dict.fromkeys(kind for kind in vars(torch).values() if isinstance(kind, torch.dtype))
    return [kind for kind in kinds if not re.search(r"torch\.(q|u?int[1-7]$)", str(kind))]


def same_bits(one: Tensor, two: Tensor) -> bool:
    return one.dtype == two.dtype and torch.equal(*(x.contiguous().view(torch.uint8) for x in (one, two)))


def rows_of(dtype: torch.dtype) -> Tensor:
    """Random values [3, S, 2], or random bits of a dtype for which torch has none. (Operations of torch may
    change the bits of a NaN.)"""
    if dtype in MOVABLE:
        return torch.randint(0, 100, (3, S, 2)).to(dtype)
    return torch.randint(0, 256, (3, S, 2 * dtype.itemsize), dtype=torch.uint8).view(dtype)


@pytest.mark.sample(8)
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_rows_of_every_dtype_move_with_their_bits(dtype: torch.dtype) -> None:
    """Plans place batch rows alike or differently; rows move through padding and back."""
    x, world, (one, none, two, *_) = rows_of(dtype), tritoncp.simulate(2), plans_of_ranks(2)
    x = x[:2] if two.q.batch > 1 else x
    for source, target in ((one, two), (two, one), (one, none), (none, two)):
        shards = world.shard(x, source, dim=1)
        moved = reshard(shards, source, target, world, dim=1)
        assert all(map(same_bits, moved, world.shard(x, target, dim=1)))
        assert same_bits(world.unshard(moved, target, dim=1), x)


def test_rows_of_a_single_value_are_moved() -> None:
    """[1, S]: rows first, its dimension of size 1 has the stride S and is contiguous."""
    x, one = torch.randn(1, S), plans_of_ranks(2)[0]

    def work(group: Any) -> bool:
        plan = one.pinned().for_rank(group.rank())
        return torch.equal(unshard(shard(x, plan, dim=1), plan, group, dim=1), x)

    assert ranks.run(2, work) == [True, True]


def test_rows_of_every_dtype_move_between_real_ranks() -> None:
    xs = {dtype: rows_of(dtype)[:2] for dtype in dtypes()}

    def work(group: Any) -> dict[str, list[bool]]:
        few, results = dist.new_group(timeout=ranks.PATIENCE), {}
        one, _, two, *_ = [plan and plan.pinned().for_rank(group.rank()) for plan in plans_of_ranks(2)]
        for dtype, x in xs.items():
            part = shard(x, one, few, dim=1)
            moved = reshard(part, one, two, few, dim=1)
            whole = unshard(moved, two, few, dim=1)
            results[str(dtype)] = [same_bits(moved, shard(x, two, few, dim=1)), same_bits(whole, x)]
        return results

    for results in ranks.run(2, work):
        assert results == {str(dtype): [True, True] for dtype in xs}


@pytest.mark.parametrize("value", [1, -1.5, 0])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.uint64, torch.int16], ids=str)
def test_padding_of_any_dtype_has_its_value(value: float, dtype: torch.dtype) -> None:
    world, plan = tritoncp.simulate(2), build(random_mask(2, 6, 4, 8, 5), 2)
    x = torch.zeros(2, S).to(dtype)
    if not dtype.is_floating_point and value < 0:
        with pytest.raises(ValueError, match="is not a value of"):
            world.shard(x, plan, dim=1, pad=value)
        return
    for parts in (
        world.shard(x, plan, dim=1, pad=value),
        reshard(x.chunk(2, 1), None, plan, world, dim=1, pad=value),
    ):
        for rank, part in enumerate(parts):
            assert (part.double()[~plan.for_rank(rank).valid] == value).all()


def test_moves_are_computed_once_for_a_pair() -> None:
    world = tritoncp.simulate(4)
    plan = world.make_plan(tritoncp.create_block_mask(tritoncp.causal(), 1, 1, 64, 64, BLOCK_SIZE=4))
    shards = world.shard(torch.randn(64), plan, dim=0)
    with mock.patch("tritoncp.graph.reshard.moves_between", wraps=moves.moves_between) as computed:
        for _ in range(3):
            reshard([x.clone() for x in shards], plan, None, world, dim=0)
            reshard(shards, plan.for_rank(2), None, world, dim=0)
    assert computed.call_count == 4


# -- real ranks, and graphs -------------------------------------------------------------------------------

S = 44


def plans_of_ranks(size: int) -> list[Plan | None]:
    """Plans place rows alike or differently, with and without padding, and in natural order."""
    return [
        build(random_mask(1, 11, 0, 4, 3), size),
        None,
        build(random_mask(2, 6, 4, 8, 5), size),
        build(full_mask(S, S, block=4), size, lengths=[S - 3 * (size - 1)] + [3] * (size - 1)),
        build(random_mask(2, 15, 1, 3, 8), size, balancer="head_tail"),
    ]


def one_rank(group: Any, x: Tensor, y: Tensor, mesh_shape: tuple[int, ...]) -> tuple[list[Tensor], int]:
    """Reshard between all neighbours of a list of plans, by plain and compiled calls; return the results of
    the last round, and the number of graphs."""
    size, rank = group.size(), group.rank()
    mesh: Any = group
    if len(mesh_shape) == 2:
        mesh = dist.init_device_mesh("cpu", mesh_shape, mesh_dim_names=("ring", "ulysses"))
    plans = [
        p and replace(p, schedule="ulysses") for p in plans_of_ranks(size)
    ]  # a mesh for them may have two
    views = [None if p is None else p.pinned().for_rank(rank) for p in plans]
    counter, results = CompileCounterWithBackend("aot_eager"), []

    def call(part: Tensor, source: Plan | None, target: Plan | None) -> Tensor:
        return reshard(part * 2, source, target, mesh, dim=1) + 1

    for function in (call, torch.compile(call, backend=counter, fullgraph=True)):
        results.append([])
        for source, target in zip(views, [*views[1:], views[0]]):
            part = shard(x, source, group, dim=1).requires_grad_()
            out = function(part, source, target)
            assert torch.equal(out.detach(), shard(2 * x, target, group, dim=1) + 1)
            (grad,) = torch.autograd.grad(out, part, shard(y, target, group, dim=1))
            assert torch.equal(grad, shard(2 * y, source, group, dim=1))
            whole = unshard(part, views[2], mesh, dim=1, grad="sum") if source is views[2] else None
            if whole is not None:  # the two ways have equal gradients
                other = shard(2 * whole, target, group, dim=1) + 1
                assert torch.equal(other, out)
                (same,) = torch.autograd.grad(other, part, shard(y, target, group, dim=1))
                torch.testing.assert_close(same, grad)
            signs = reshard(part > 0, source, target, mesh, dim=1)
            assert torch.equal(signs, shard(x > 0, target, group, dim=1))
            results[-1] += [out.detach(), grad]
    assert all(map(torch.equal, *results))
    assert counter.frame_count <= len(views)  # one graph for each pair of plans or None
    return results[1], counter.frame_count


@pytest.mark.long
@pytest.mark.parametrize(
    "mesh_shape",
    [(1, 2), *(pytest.param(shape, marks=pytest.mark.long) for shape in ((2,), (3,), (2, 2), (4, 2)))],
)
def test_real_ranks_have_the_same_results_plain_and_compiled(mesh_shape: tuple[int, ...]) -> None:
    x, y = torch.randn(2, 2, S, 3, dtype=torch.float64)
    ranks.run(torch.Size(mesh_shape).numel(), one_rank, x, y, mesh_shape)


def gather_on_ranks(group: Any, x: Tensor, y: Tensor) -> int:
    """Gather the shards of plans, and of natural order, by plain calls and by one graph; return the number of
    graphs."""
    counter, mask = CompileCounterWithBackend("aot_eager"), full_mask(S, S, block=4)
    own = (group.rank() + 1) * y  # each rank has another gradient of its copy
    summed = sum(range(1, group.size() + 1)) * y

    def call(part: Tensor, order: Any, grad: str) -> Tensor:
        return unshard(part * 2, order, group, dim=1, grad=grad) + 1

    plans = [plan and plan.pinned().for_rank(group.rank()) for plan in plans_of_ranks(group.size())]
    cases = (
        (plans[0], "sum", summed),
        (plans[2], "sum", summed),
        (plans[4], "slice", own),
        (mask, "slice", own),
    )
    for function in (call, torch.compile(call, backend=counter, fullgraph=True)):
        for order, grad, whole in cases:
            part = shard(x, order, group, dim=1).requires_grad_()
            out = function(part, order, grad)
            assert torch.equal(out.detach(), 2 * x + 1)
            (dx,) = torch.autograd.grad(out, part, own)
            assert torch.equal(dx, shard(2 * whole, order, group, dim=1))
    fake = FakeTensorMode()
    with fake:
        part = torch.empty(2, part.shape[1], 3, requires_grad=True)
    out = call(part, order, "sum")
    assert type(out) is FakeTensor and out.shape == x.shape
    assert torch.autograd.grad(out.sum(), part)[0].shape == part.shape
    return counter.frame_count


@pytest.mark.long
def test_unshard_is_an_op_of_a_graph_on_real_ranks_and_on_fake_tensors() -> None:
    x, y = torch.randint(-9, 9, (2, 2, S, 3)).double()  # sums are exact in any order
    for graphs in ranks.run(2, gather_on_ranks, x, y):
        assert graphs <= 3, graphs  # for two kinds of gradients, plans, and sizes


@pytest.mark.long
def test_unshard_without_lengths_inverts_shard_on_real_ranks() -> None:
    """Sequences have any length, also one that the ranks cannot share evenly."""

    def work(group: Any) -> list[Any]:
        few, results = dist.new_group(timeout=ranks.PATIENCE), []
        for order in (None, tritoncp.causal()):
            for length in range(9):
                x = torch.arange(length)
                for part in (shard(x, order, few, dim=0), shard(x, order, few, dim=0).float()):
                    results.append(torch.equal(unshard(part, order, few, dim=0), x))
        part = shard(torch.arange(8.0), None, few, dim=0)
        fast = torch.compile(partial(unshard, dim=0), backend="eager", fullgraph=True)
        uneven = part if group.rank() else part[1:]
        return [
            results,
            ranks.attempt(lambda: unshard(uneven, None, few, dim=0)),
            ranks.attempt(lambda: fast(part, None, few)),
            unshard(part, None, few, dim=0).tolist(),
        ]

    for equal, uneven, graph, again in ranks.run(3, work):
        assert all(equal) and again == list(range(8))
        assert re.match(
            r"ValueError: x: the shards of all ranks have \[2, 3, 2\] rows;.* here \[3, 2, 2\]", uneven
        )
        assert "a graph cannot exchange: pass the plan" in graph, graph


def test_ranks_that_differ_raise_everywhere_before_data_moves() -> None:
    """Each call runs in a separate group; equal calls exchange facts once for a pair of plans and a shape."""

    def answers(group: Any) -> list[Any]:
        first = group.rank() == 0
        x, mask = torch.arange(32.0), full_mask(64, 64, block=4)
        one, other = (build(mask, 2, balancer=name).for_rank(group.rank()) for name in ("head_tail", None))
        calls = {
            "plans: rank 0 .*natural order to plan": (x, None, one if first else other),
            "plans: rank 0 against": (x, *((one, None) if first else (None, one))),
            "plans.*natural order to natural order": (x, None, one if first else None),
            "dtype.*float32.*float64": (x if first else x.double(), None, one),
            r"shape.*\[rows, 2\].*\[rows, 3\]": (x[:, None].repeat(1, 2 if first else 3), None, one),
        }
        gathers = {
            r"plans: rank 0 .*to the global tensor, grad='sum'.*grad='slice'": (
                x,
                one,
                "sum" if first else "slice",
            ),
            r"call: rank 0 against.*Rank 0 has call 1: unshard.*: reshard": (x, one, None),
            r"plans: rank 0 .*plan.*to the global": (x, one if first else other, "sum"),
        }
        results = []
        for pattern, (part, source, target) in (calls | gathers).items():
            few = dist.new_group(timeout=ranks.PATIENCE)
            if pattern in gathers and (target or first):
                call = partial(unshard, part, source, few, dim=0, grad=target)
            else:
                call = partial(reshard, part, source, target, few, dim=0)
            results.append((pattern, ranks.attempt(call)))
        few, counts = dist.new_group(timeout=ranks.PATIENCE), []
        pairs = [(None, one), (None, one), (one, None), (None, None), (None, one), (None, None)]
        with mock.patch.object(collectives, "exchange", wraps=collectives.exchange) as exchange:
            for is_checked in (False, True):  # TRITONCP_CHECK
                with mock.patch.object(consistency, "CHECKED", is_checked):
                    for pair in pairs:
                        reshard(x, *pair, few, dim=0)
                        counts.append(exchange.call_count)
        return [*results, counts]

    for *results, counts in ranks.run(2, answers):
        assert counts == [1, 1, 2, 3, 3, 3, 4, 5, 6, 7, 8, 9]
        for pattern, text in results:
            assert re.match(f"Disagreement: the ranks differ in {pattern}", text), text


def test_one_graph_serves_all_plans_of_a_size() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(lambda x, plan: reshard(x * 2, plan, None, dim=0), backend=counter, fullgraph=True)
    x = torch.randn(60, requires_grad=True)
    for seed in range(4):
        plan = build(random_mask(1, 15, 0, 4, seed), 1).pinned()
        torch.testing.assert_close(fast(x, plan), 2 * x)
    assert counter.frame_count == 1


def test_messages_log_their_bytes_once(caplog: pytest.LogCaptureFixture) -> None:
    log_lines._LOGGED._entries.clear()
    world, plan = tritoncp.simulate(2), build(full_mask(16, 16, block=4), 2, balancer="head_tail")
    shards = world.shard(torch.zeros(16, 3), plan, dim=0)
    with caplog.at_level("INFO", "tritoncp.messages"):
        for _ in range(2):
            reshard(shards, plan, None, world, dim=0)
    assert caplog.messages == [f"reshard, rank {r}: sends 4 of 8 rows, 48 bytes" for r in (0, 1)]
