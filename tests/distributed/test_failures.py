"""A rank whose call raises, on real gloo processes: no number that any rank gets is wrong, every rank learns
who failed and why, and a new group works.

Three ranks train, and the program of each skips a batch whose call raised, as that of rank 1 alone does once.
"""

from __future__ import annotations

import inspect
import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import tritoncp
from tests.multiprocess.ranks import PATIENCE, attempt, run
from tritoncp.cpu.engine import CpuEngine
from tritoncp.distributed import collectives, consistency, failures, groups
from tritoncp.reference.dense import dense_attention

S, STEPS, BAD = 24, 5, 2  # rows, batches, and the batch with the fault
SCHEDULES = ("allgather", "ring", "fetch", "ulysses")
Fault = Callable[[dict[str, Any]], None]  # changes the arguments of the bad call, or plants an error

pytestmark = pytest.mark.usefixtures("cpu_engine", "in_pieces")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time in which ranks learn of a failure."""
    monkeypatch.setattr(failures, "SLICE", 0.2)


def mask_of() -> tritoncp.Mask:
    return tritoncp.create_block_mask(tritoncp.causal(), 1, 1, S, S, BLOCK_SIZE=4)


def batch(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(1, 4, S, 8, generator=generator, dtype=torch.float64) for _ in range(3)]


def train(group: Any, plan: tritoncp.Plan, step: int, fault: Fault | None = None, call: Any = None) -> bool:
    """Run one step; return whether out and gradients equal the whole batch."""
    shards = [tritoncp.shard(x, plan, dim=2).requires_grad_() for x in batch(step)]
    arguments = {"query": shards[0], "key": shards[1], "value": shards[2], "score_mod": None}
    if fault is not None:
        fault(arguments)
    out = (call or tritoncp.flex_attention)(**arguments, block_mask=plan, mesh=group)
    grads = torch.autograd.grad(out.square().sum(), shards)
    leaves = [x.requires_grad_() for x in batch(step)]
    whole = dense_attention(*leaves, plan.mask).out
    expected = whole.detach(), *torch.autograd.grad(whole.square().sum(), leaves)
    parts = [tritoncp.shard(x, plan, dim=2) for x in expected]
    return all(torch.allclose(x, y, atol=1e-8) for x, y in zip((out.detach(), *grads), parts, strict=True))


def fresh_group() -> Any:
    return dist.new_group(timeout=PATIENCE)


# -- faults ------------------------------------------------------------------------------------------------


def shorten(arguments: dict[str, Any]) -> None:
    for name in ("query", "key", "value"):
        arguments[name] = arguments[name][:, :, :-1]


def mix_dtypes(arguments: dict[str, Any]) -> None:
    arguments["query"] = arguments["query"].float()


def add_option(arguments: dict[str, Any]) -> None:
    arguments["kernel_options"] = {"NO_SUCH": 1}


def raise_in_mod(arguments: dict[str, Any]) -> None:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        raise ArithmeticError("of this rank's score_mod")

    arguments["score_mod"] = score_mod


def run_out_of_memory(name: str, step: int, error: type[BaseException] = MemoryError) -> Fault:
    """Raise in the engine's method ``name``, when it is called for the step-th time from now on."""

    def plant(arguments: dict[str, Any]) -> None:
        method, steps = getattr(CpuEngine, name), itertools.count(1)

        def failing(self: CpuEngine, *args: Any, **options: Any) -> Any:
            if next(steps) == step:
                setattr(CpuEngine, name, method)
                raise error("planted")
            return method(self, *args, **options)

        setattr(CpuEngine, name, failing)

    return plant


FAULTS: dict[str, tuple[Fault, str]] = {
    "length": (shorten, "ValueError: query has 7 rows"),
    "dtypes": (mix_dtypes, "ValueError: query is torch.float32"),
    "option": (add_option, "ValueError: unknown kernel option 'NO_SUCH'"),
    "score_mod": (raise_in_mod, "ArithmeticError: of this rank's score_mod"),
    "forward": (run_out_of_memory("forward", 1), "MemoryError: planted"),
    "dq": (run_out_of_memory("dq", 1), "MemoryError: planted"),
    "dkdv": (run_out_of_memory("dkdv", 1, KeyboardInterrupt), "KeyboardInterrupt: planted"),
}


def skip_bad_batches(group: Any, schedule: str, fault: Fault, faulty: int, call: Any = None) -> list[Any]:
    """Train, skipping batches whose call raises; then train with a new group."""
    few = fresh_group()
    plan = tritoncp.make_plan(mask_of(), few, schedule=schedule)
    faults = {BAD: fault} if group.rank() == faulty else {}
    results = [attempt(lambda i=i: train(few, plan, i, faults.get(i), call)) for i in range(STEPS)]
    again = fresh_group()
    return [*results, attempt(lambda: train(again, plan, 9))]


def check_skips(results_by_rank: list[list[Any]], faulty: int, own: str, published: str) -> None:
    """Assert that all ranks skip the bad batch and later ones; ``own`` and ``published``: the error of the
    faulty rank there, and in the errors of all others."""
    for rank, (first, second, bad, *later, new) in enumerate(results_by_rank):
        assert first is second is new is True
        assert re.match(own if rank == faulty else "PeerLost", bad, re.DOTALL), bad
        for error in (*later, *([] if rank == faulty else [bad])):
            assert re.search(f"of rank {faulty} failed: {published}", error), error
            assert "torch.distributed.new_group" in error
        assert all(error.startswith("GroupClosed: group") for error in later)


SAMPLE = [  # each fault once, and each schedule and rank
    ("allgather", "length", 1), ("ring", "dtypes", 2), ("fetch", "option", 0), ("allgather", "score_mod", 1),
    ("ring", "forward", 2), ("ulysses", "dq", 0), ("fetch", "dkdv", 2),
]  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("schedule", "name", "faulty"),
    [
        *SAMPLE,
        *(  # the ranks take turns
            pytest.param(schedule, name, (i + j) % 3, marks=pytest.mark.long)
            for (i, schedule), (j, name) in itertools.product(enumerate(SCHEDULES), enumerate(FAULTS))
            if (schedule, name) not in [row[:2] for row in SAMPLE]
        ),
    ],
)
def test_a_rank_that_fails_alone_closes_the_group_and_is_named(schedule: str, name: str, faulty: int) -> None:
    fault, said = FAULTS[name]
    check_skips(run(3, skip_bad_batches, schedule, fault, faulty), faulty, said, said)


# -- other calls -------------------------------------------------------------------------------------------


def calls_with_a_mistake(plan: tritoncp.Plan, mesh: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return calls of every public function, by name, that raise before any message: calls in which no other
    rank takes part, such as calls with ``mesh=None``, and calls in which all ranks do."""
    x, packed, edges = torch.ones(1, 1, S, 8), torch.ones(S, 1, 8), torch.tensor([0, 5])
    local, few, mod = plan.s_local, torch.ones(1, 4, 3, 8), tritoncp.causal()
    tree = tritoncp.tree([-1], [S])

    class Inner(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None: ...

    def with_mesh(mesh: Any) -> dict[str, Any]:
        place = {"world_size": 2} if mesh is None else {}
        inner: Any = tritoncp.ContextParallel()._apply(Inner(), mesh)
        return {
            "flex_attention": lambda: tritoncp.flex_attention(few, few, few, plan, mesh=mesh),
            "flex_attention by keyword": lambda: tritoncp.flex_attention(
                few, few, few, mesh=mesh, is_causal=1
            ),
            "make_plan": lambda: tritoncp.make_plan(plan.mask, mesh, schedule="no", **place),
            "unshard": lambda: tritoncp.unshard(x[:, :, :3], plan, mesh, dim=2),
            "reshard": lambda: tritoncp.reshard(x[:, :, :3], plan, None, mesh, dim=2),
            "roll": lambda: tritoncp.roll(x[:, :, :3], plan, 1, mesh, dim=2),
            "select_keys": lambda: tritoncp.select_keys(few, few, top=0, block_mask=plan, mesh=mesh),
            "varlen_attention": lambda: tritoncp.varlen_attention(packed, packed, packed, edges, mesh=mesh),
            "dual_chunk_to_contiguous": lambda: tritoncp.dual_chunk_to_contiguous(x, edges, mesh, **place),
            "contiguous_to_dual_chunk": lambda: tritoncp.contiguous_to_dual_chunk(x, edges, mesh, **place),
            "ContextParallel": lambda: inner(few, few, few, block_masks=plan),
        }

    alone = {
        "shard": lambda: tritoncp.shard(torch.ones(local + 1), plan, dim=0),
        "shard with a mesh": lambda: tritoncp.shard(torch.ones(local + 1), plan, mesh, dim=0),
        "shard by a mask": lambda: tritoncp.shard(torch.ones(local + 1), plan.mask, mesh, dim=0),
        "positions": lambda: tritoncp.positions(plan, tritoncp.tree([-1], [S + 1])),
        "tree_edges": lambda: tritoncp.tree_edges(plan, tree, torch.ones(S + 1).long()),
        "pack_trajectories": lambda: tritoncp.pack_trajectories([[0.5]]),
        "create_block_mask": lambda: tritoncp.create_block_mask(plan, 1, 1, S, S),
        "from_block_mask": lambda: tritoncp.from_block_mask(plan),
        "varlen_mask": lambda: tritoncp.varlen_mask(edges[1:], causal=True),
        "simulate": lambda: tritoncp.simulate(0),
        "simulate, reshard": lambda: tritoncp.reshard([x], plan, None, tritoncp.simulate(2), dim=2),
        "Plan": lambda: plan.for_rank(9),
        "Mask": lambda: plan.mask[9],
        "tree": lambda: tritoncp.tree([3], [S]),
        "document": lambda: tritoncp.document(),
        "prefix_lm": lambda: tritoncp.prefix_lm(0.5),
        "sliding_window": lambda: tritoncp.sliding_window(-3),
        "block_diffusion": lambda: tritoncp.block_diffusion(S, 0),
        "draft_blocks": lambda: tritoncp.draft_blocks([S], 0, context=S),
        "pack_batches": lambda: tritoncp.pack_batches([S], 0, ranks=2),
        "pack_stream": lambda: tritoncp.pack_stream([S], 0, ranks=2),
        "full_mask": lambda: tritoncp.full_mask(S, "8"),
        "and_masks": lambda: tritoncp.and_masks(mod, 3),
        "or_masks": lambda: tritoncp.or_masks(mod, 3),
        "not_": lambda: tritoncp.not_(3),
        "alibi": lambda: tritoncp.alibi(0),
        "softcap": lambda: tritoncp.softcap(0),
        "checkpoint_policy": lambda: tritoncp.checkpoint_policy([3]),
        **{f"{name} without a mesh": call for name, call in with_mesh(None).items()},
    }
    return alone, with_mesh(mesh)


def test_calls_with_a_mistake_are_of_every_public_function() -> None:
    plan = tritoncp.make_plan(mask_of(), world_size=2, rank=0)
    alone, together = calls_with_a_mistake(plan, None)
    without_arguments = {
        "causal",
        "Selection",
        "SelectionAuxOutput",
        "SelectionAuxRequest",
        "plan_cache_clear",
        "plan_cache_info",
        "SAVE_OPS",
        "balancers",
    }
    named = {re.split(r"[ ,]", name)[0] for name in (*alone, *together)}
    assert named == {*tritoncp.__all__} - without_arguments
    with_mesh = {name for name in named if "mesh" in inspect.signature(getattr(tritoncp, name)).parameters}
    assert {name.split()[0] for name in together} == (with_mesh - {"shard"}) | {"ContextParallel"}


@pytest.mark.long
def test_a_mistake_of_one_rank_outside_of_shared_calls_closes_no_group() -> None:
    """The next calls of all ranks have correct results, on the group of the plan and on other groups."""

    def work(group: Any) -> dict[str, Any]:
        few, other, results = fresh_group(), fresh_group(), {}
        plan = tritoncp.make_plan(mask_of(), few, schedule="ring")
        same = tritoncp.make_plan(mask_of(), other, schedule="ring")
        for step, (name, call) in enumerate(calls_with_a_mistake(plan, few)[0].items()):
            error = attempt(call) if group.rank() == 1 else "Error"
            results[name] = error, train(few, plan, step)
        return results | {"another group": ("Error", train(other, same, 0))}  # a closed group stays closed

    for results in run(3, work):
        for name, (error, trained) in results.items():
            assert re.match("[A-Za-z]*Error", error) and trained is True, (name, error)


@pytest.mark.long
def test_a_mistake_of_one_rank_in_a_shared_call_closes_only_the_group_of_the_call() -> None:
    """Also in the group's first call. The plan is known to other groups too."""

    def work(group: Any) -> dict[str, Any]:
        other, results, is_bad = fresh_group(), {}, group.rank() == 1
        same = tritoncp.make_plan(mask_of(), other, schedule="ring")
        for name in calls_with_a_mistake(same, None)[1]:
            few = fresh_group()
            plan = tritoncp.make_plan(mask_of(), few, schedule="ring") if name != "make_plan" else same
            right = partial(train, few, plan)
            call = calls_with_a_mistake(plan, few)[1][name] if is_bad else partial(right, 0)
            results[name] = attempt(call), train(other, same, 0), attempt(partial(right, 1))
        return results

    first, bad, last = run(3, work)
    for name, (error, elsewhere, closed) in bad.items():
        assert re.match("(Value|Type)Error", error) and elsewhere is True
        said = f"call [12] of rank 1 failed: {re.escape(error.splitlines()[0][:200])}"
        assert re.search(said, closed), (name, closed)
        for others in (first, last):
            lost, elsewhere, closed = others[name]
            assert lost.startswith("PeerLost") and re.search(said, lost), (name, lost)
            assert elsewhere is True and closed.startswith("GroupClosed") and re.search(said, closed)


@pytest.mark.long
@pytest.mark.parametrize("skew", [0.0, 0.25])
def test_ranks_that_fail_alike_go_on(skew: float) -> None:
    """They fail in checks before messages, once or twice in a row, while a plan is made, and between
    messages."""

    def work(group: Any) -> list[Any]:
        few, results = fresh_group(), []
        plan = tritoncp.make_plan(mask_of(), few, schedule="ring")
        planted = {1: shorten, 3: shorten, 4: add_option, 6: run_out_of_memory("forward", 1)}
        for step in range(8):
            time.sleep(skew * group.rank() * (step % 2))
            results.append(attempt(lambda i=step: train(few, plan, i, planted.get(i))))
        wrong = mask_of()
        pieces = torch.ones(1, 1, S, 8)  # every rank holds the whole sequence
        results.append(attempt(lambda: tritoncp.flex_attention(pieces, pieces, pieces, wrong, few)))
        return [*results, train(few, plan, 8)]

    for results in run(3, work):
        errors = {index: x.split(":")[0] for index, x in enumerate(results) if x is not True}
        assert errors == {
            1: "ValueError", 3: "ValueError", 4: "ValueError", 6: "MemoryError", 8: "ValueError",
        }, results  # fmt: skip


def test_ranks_that_fail_at_different_calls_do_not_go_on() -> None:
    """All ranks fail at the same message, and rank 1 again in the next call: its third call meets no older
    one."""

    def work(group: Any) -> list[Any]:
        few = fresh_group()
        plan = tritoncp.make_plan(mask_of(), few, schedule="allgather")
        bad = (1, 2) if group.rank() == 1 else (1,)
        return [attempt(lambda i=i: train(few, plan, i, shorten if i in bad else None)) for i in range(5)]

    for results in run(3, work):
        assert results[0] is True and all(isinstance(x, str) for x in results[1:]), results


# -- several groups ----------------------------------------------------------------------------------------


@pytest.mark.long
def test_one_rank_evaluates_and_fails_alone_without_a_mesh() -> None:
    def work(group: Any) -> list[Any]:
        few = fresh_group()
        plan = tritoncp.make_plan(mask_of(), few, schedule="fetch")
        own, results = tritoncp.make_plan(mask_of()), []
        for step in range(3):
            results.append(attempt(lambda i=step: train(few, plan, i)))
            if group.rank() == 0:
                results.append(attempt(lambda i=step: train(None, own, i)))
                assert attempt(lambda i=step: train(None, own, i, shorten)).startswith("ValueError")
        return results

    assert run(3, work) == [[True] * 6, [True] * 3, [True] * 3]


@pytest.mark.long
def test_ulysses_and_ring_on_a_mesh_of_two_dimensions() -> None:
    def work(group: Any) -> list[Any]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
        plan = tritoncp.make_plan(mask_of(), mesh, schedule="ulysses+ring")
        fault = run_out_of_memory("forward", 1) if group.rank() == 3 else None
        results = [attempt(lambda i=i: train(mesh, plan, i, fault if i == 1 else None)) for i in range(3)]
        again = fresh_group()  # the plan has the two dimensions
        return [*results, attempt(lambda: train(again, plan, 9))]

    for rank, (first, bad, later, new) in enumerate(run(4, work)):
        assert first is new is True
        assert bad == "MemoryError: planted" if rank == 3 else "call 3 of rank 3 failed: MemoryError" in bad
        assert later.startswith("GroupClosed") and "call 3 of rank 3 failed: MemoryError" in later


# -- compiled calls, TRITONCP_CHECK ---------------- ------------------------------------------------------


def shorten_key(arguments: dict[str, Any]) -> None:
    arguments["key"] = arguments["key"][:, :, :-1]  # another length than in the graph makes it a symbol


def pass_two_masks(arguments: dict[str, Any]) -> None:
    arguments["score_mod"] = mask_of()


def draw_in_mod(arguments: dict[str, Any]) -> None:
    numbers = iter(range(1, 1000))
    arguments["score_mod"] = lambda score, b, h, q, kv: (
        score * next(numbers)
    )  # a graph cannot hold an iterator


TRACED = "RuntimeError: ValueError while torch.compile traced"
FAULTS_IN_GRAPHS: dict[str, tuple[Fault, str, str]] = {  # fault, error of the rank, error that it publishes
    **{name: (fault, said, said) for name, (fault, said) in FAULTS.items()},
    "dtypes": (FAULTS["dtypes"][0], "Unsupported: .*one dtype", TRACED),
    "option": (FAULTS["option"][0], "Unsupported: .*unknown kernel option", TRACED),
    "key": (shorten_key, "Unsupported: .*do not fit together", TRACED),
    "arguments": (
        pass_two_masks,
        "Unsupported: .*block_mask: the fourth",
        "RuntimeError: TypeError while torch.compile traced",
    ),
    "arguments, in a graph with breaks": (pass_two_masks, said := "TypeError: block_mask: the fourth", said),
    "no graph": (
        draw_in_mod,
        "Unsupported: .*list",
        "RuntimeError: a graph break while torch.compile traced",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=[pytest.mark.long] * (x not in ("dtypes", "arguments")))
        for x in FAULTS_IN_GRAPHS
    ],
)
def test_compiled_calls(name: str) -> None:
    """The error is raised at run time, while the call is traced, or in the backward pass."""
    fault, own, published = FAULTS_IN_GRAPHS[name]
    fullgraph = not name.endswith("breaks")
    fast = torch.compile(tritoncp.flex_attention, backend="eager", fullgraph=fullgraph)
    check_skips(run(3, skip_bad_batches, "ring", fault, 1, fast), 1, own, published)


@pytest.mark.long
def test_a_missing_backward_pass_is_reported_if_checks_are_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(consistency, "CHECKED", True)

    def work(group: Any) -> list[Any]:
        few = fresh_group()
        plan = tritoncp.make_plan(mask_of(), few, schedule="ring")

        def skip(arguments: dict[str, Any]) -> None:
            tritoncp.flex_attention(**arguments, block_mask=plan, mesh=few)
            raise LookupError("in the program, before its backward pass")

        fault = skip if group.rank() == 1 else None
        return [attempt(lambda i=i: train(few, plan, i, fault if i == 1 else None)) for i in range(3)]

    for rank, (first, second, third) in enumerate(run(3, work)):
        assert first is True
        said = third if rank == 1 else second
        assert "Disagreement: the ranks differ in call" in said and "call 4: a backward pass" in said
        assert "GroupClosed" in third or rank == 1


# -- errors of lost messages -------------------------------------------------------------------------------


class StandIn:
    """A stand-in for a process group of three ranks, in one process, which torch knows: its store, this
    rank, the timeout of its backend."""

    group_name = "stand-in"

    def __init__(self, rank: int, store: Any, seconds: float = 9, backend: str = "gloo") -> None:
        self.rank, self.size, self.get_group_store = lambda: rank, lambda: 3, lambda: store
        options = SimpleNamespace(_timeout=timedelta(seconds=seconds))
        self._get_backend = mock.Mock(return_value=SimpleNamespace(options=options))
        dist.distributed_c10d._world.pg_map[self] = backend, store  # type: ignore[index]


@pytest.fixture(autouse=True)
def forget_stand_ins() -> Iterator[None]:
    yield
    known = dist.distributed_c10d._world.pg_map
    for group in [group for group in known if isinstance(group, StandIn)]:
        del known[group]


class DeadStore(dist.Store):
    """A store whose host is lost."""

    def add(self, *_: Any) -> int:
        raise RuntimeError("gone\nwith details")

    check = add


def test_a_store_that_hangs_keeps_no_process_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is asked once, for a limited time."""
    monkeypatch.setattr(failures, "STORE_TIMEOUT", 0.05)
    end, store, before = threading.Event(), mock.Mock(spec=dist.HashStore), {*threading.enumerate()}
    store.check.side_effect = lambda keys: not end.wait()
    monkeypatch.setattr(dist, "PrefixStore", lambda prefix, of: of)
    group = StandIn(0, store)
    record = failures.record_of(group)
    for _ in range(2):
        assert failures._read(group, record) and not record.has_store
    (thread,) = {*threading.enumerate()} - before
    assert thread.daemon
    end.set()
    thread.join()


@pytest.mark.parametrize(
    ("kinds", "absent", "text"),
    [
        ({1: failures.WAITED, 2: failures.FAILED}, (2,), "entry of rank 2. End the job"),
        ({1: failures.CLOSED, 2: failures.FAILED}, (2,), "entry of rank 2. End the job"),
        ({1: failures.CLOSED, 2: failures.WAITED}, (1,), "entry of rank 1. End the job"),
        ({2: failures.WAITED}, (1,), r"rank 1 did not come within 9 s .*\(lost\)"),
        ({}, (1, 2), "ranks 1, 2 did not come within 9 s"),
        (
            {1: failures.WAITED, 2: failures.WAITED},
            (),
            "nor did those of the others: entry of rank 1; entry of",
        ),
        (None, (), r"store does not answer.*\(lost\)"),
    ],
)
def test_the_error_of_a_lost_message_names_the_ranks_that_caused_it(
    kinds: dict[int, str] | None, absent: tuple[int, ...], text: str, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    store = DeadStore() if kinds is None else dist.HashStore()
    for rank, kind in (kinds or {}).items():
        failures._append(StandIn(rank, store), failures.LogEntry(rank, 4, kind, f"entry of rank {rank}"))
    group = StandIn(0, store)
    record = failures.record_of(group)
    message = failures.AwaitedMessage(5, "tensors", lambda: "a message")
    error = failures.peer_lost(group, record, message, "lost")
    assert error.absent == absent
    assert re.match(f"rank 0 of 3 was at a message, and .*{text}", str(error)), error
    assert record.closed.startswith("group 'stand-in' is closed in this process: ")
    assert {x.text for x in record.entries if x.rank == 0} <= {"call 1 of rank 0 waited in vain at a message"}
    assert kinds is not None or caplog.messages == ["the store of group 'stand-in' failed: gone"]


def test_the_error_of_a_lost_message_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    store, ranks = dist.HashStore(), [1, 2]

    def append(seconds: float) -> None:
        rank = ranks.pop()
        failures._append(StandIn(rank, store), failures.LogEntry(rank, 4, failures.WAITED, "an entry"))

    monkeypatch.setattr(failures.time, "sleep", append)  # between two looks at the log
    group = StandIn(0, store)
    message = failures.AwaitedMessage(5, "tensors", lambda: "a message")
    error = failures.peer_lost(group, failures.record_of(group), message, "lost")
    assert error.absent == () and not ranks


@pytest.mark.parametrize("present", [1, 2])
def test_a_communicator_is_made_once_all_ranks_are_there(present: int) -> None:
    """One or two of three ranks came."""

    def connect() -> None:
        assert present == 2
        raise RuntimeError("refused")

    store = dist.HashStore()
    store.add("present", present)
    with pytest.raises(failures.PeerLost, match="0 of 3 was at a call, and ranks 1, 2 did not") as error:
        groups._connect(StandIn(0, store, 0.5), store, "a call", connect)
    assert ("refused" in str(error.value)) == (present == 2)


class Waits(Exception):
    """Raised in place of a pause."""


@pytest.mark.parametrize(
    ("entries", "has_store", "error"),
    [
        ([(failures.FAILED, 5), (failures.FAILED, 5)], True, None),
        ([(failures.FAILED, 5)], True, Waits),
        ([], True, Waits),
        ([], False, failures.GroupClosed),
        *[([(kind, 5)], True, failures.GroupClosed) for kind in (failures.CLOSED, failures.WAITED)],
        *[([(failures.FAILED, 5), (failures.FAILED, n)], True, failures.GroupClosed) for n in (4, 6)],
    ],
)
def test_a_call_after_a_failure_waits_only_for_ranks_that_may_have_failed_alike(
    entries: list[tuple[str, int]],
    has_store: bool,
    error: type[Exception] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def pause(seconds: float) -> None:
        raise Waits

    monkeypatch.setattr(failures.time, "sleep", pause)
    group = StandIn(0, dist.HashStore())
    record = failures.record_of(group)
    record.messages = 5
    for rank, (kind, messages) in enumerate([(failures.FAILED, 5), *entries]):
        failures._append(group, failures.LogEntry(rank, messages, kind, f"entry of rank {rank}"))
    record.stopped, record.has_store = "entry of rank 0", has_store
    if error is None:
        assert failures.record_of(group).stopped == "" and record.messages == 6
    else:
        with pytest.raises(error):
            failures.record_of(group)
    assert bool(record.closed) == (error is failures.GroupClosed)


@pytest.mark.parametrize(
    ("entries", "waited", "has_store", "is_lost"),
    [
        ([(1, 4)], 0.0, True, True),
        ([(1, 5), (2, 6)], 0.0, True, False),  # these ranks have started the message
        ([(0, 4)], 0.0, True, False),
        ([], 8.9, True, False),
        ([], 9.0, True, True),
        ([], 8.9, False, False),
    ],
)
def test_a_message_is_lost_once_a_rank_has_stopped_before_it_or_time_is_up(
    entries: list[tuple[int, int]], waited: float, has_store: bool, is_lost: bool
) -> None:  # fmt: skip
    store = dist.HashStore()
    for rank, messages in entries:
        entry = failures.LogEntry(rank, messages, failures.CLOSED, "an entry")
        failures._append(StandIn(rank, store), entry)
    group = StandIn(0, store)
    record = failures.record_of(group)
    record.has_store = has_store
    message = failures.AwaitedMessage(5, "tensors", lambda: "a message")
    error = attempt(lambda: failures.check(group, record, message, waited, "late"))
    assert (error is not None and error.startswith("PeerLost: ")) == is_lost == bool(record.closed)


@pytest.mark.parametrize(
    ("backends", "device"), [("nccl", "cuda"), ("cpu:gloo,cuda:nccl", "cuda"), ("gloo", "cpu")]
)
def test_companions_share_the_timeout_of_the_tensors_backend(backends: str, device: str) -> None:
    """A group of NCCL alone has none for the CPU."""
    group = StandIn(0, dist.HashStore(), 7, backends)
    assert failures.timeout(group) == timedelta(seconds=7)
    group._get_backend.assert_called_once_with(torch.device(device))


@pytest.mark.parametrize(("times", "asked"), [((0.3, 0.3, 0), 2), ((0.3, 0.0), 1)])
def test_an_error_within_a_slice_is_raised_as_the_messages_error(
    times: tuple[float, ...], asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that takes longer than a slice is waited for again, only by `wait`."""
    clock, waits, checks = [0.0], iter(times), mock.Mock()

    def wait(limit: timedelta) -> None:
        clock[0] += (seconds := next(waits))
        if seconds or len(times) == 2:
            raise RuntimeError(f"after {seconds} s")

    monkeypatch.setattr(failures.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(failures, "check", checks)
    monkeypatch.setattr(failures, "peer_lost", lambda *facts: failures.PeerLost(str(facts[-1])))
    result = attempt(lambda: failures.wait(mock.Mock(spec=["wait"], wait=wait), None, None, mock.Mock()))
    assert (result, checks.call_count) == ("PeerLost: after 0.0 s" if len(times) == 2 else None, asked)


def test_the_first_failure_is_kept_and_a_shared_failure_is_ignored() -> None:
    store = dist.HashStore()
    group = StandIn(0, store)
    record = failures.record_of(group)
    failures.stop(group, consistency.Disagreement("of all ranks"))
    assert not store.num_keys() and not record.stopped
    failures._append(StandIn(1, store), failures.LogEntry(1, 0, failures.CLOSED, "an entry"))
    for name in ("first", "second"):
        failures.stop(group, ValueError(name))
    assert "call 1 of rank 0 failed: ValueError: first" in record.closed


def test_a_call_in_a_call_fails_once() -> None:
    group = StandIn(0, dist.HashStore())
    record = failures.record_of(group)
    with pytest.raises(ValueError, match="inner"), failures.closing(group), failures.closing(group):
        raise ValueError("inner")
    failures._read(group, record)
    assert record.stopped and not record.closed
    assert [entry.kind for entry in record.entries] == [failures.FAILED]


def test_a_failure_in_a_group_of_one_rank_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    def work(group: Any) -> list[str]:
        alone = [dist.new_group([rank]) for rank in range(2)][group.rank()]
        with pytest.raises(ValueError, match="rows"):
            train(alone, tritoncp.make_plan(mask_of(), alone), 0, shorten)
        return caplog.messages

    assert run(2, work) == [[], []]


@pytest.mark.parametrize("kind", [failures.CLOSED, failures.WAITED])
def test_ranks_fail_alike_if_the_calls_of_all_raise_after_equally_many_messages(kind: str) -> None:
    failed = [failures.LogEntry(rank, 4, failures.FAILED, "") for rank in range(2)]
    other = failures.LogEntry(1, 4, kind, "")
    later = failed[1]._replace(messages=5)
    assert failures.Record(entries=failed).stops(2) == []
    for entries in (failed[:1], [failed[0], other], [failed[0], later]):
        assert failures.Record(entries=entries).stops(2) == entries


def test_a_message_that_a_graph_cannot_start_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("refused")

    request = collectives.AllGather(torch.ones(1))
    text = (
        r"rank 0 of 3 was at turn 1 of a layer's schedule, AllGather.* ranks 1, 2 did not come .*\(refused\)"
    )
    for start in (refuse, lambda *_: collectives.Ticket(None, mock.Mock(wait=refuse), request, on_host=True)):
        monkeypatch.setattr(collectives, "_start", start)
        with pytest.raises(failures.PeerLost, match=text):
            collectives.start_in_graph(request, StandIn(0, dist.HashStore()))
