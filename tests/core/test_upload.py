"""Copies to a device go through pinned memory and are safe on every stream.

The tests record the calls to streams; CPU memory stands in for the device's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import tritoncp
from tritoncp import and_masks, causal, create_block_mask, document
from tritoncp.core import upload
from tritoncp.core.upload import DeviceCopy
from tritoncp.distributed import collectives
from tritoncp.kernels.launch import Launch
from tritoncp.selection.visible import VisiblePairs

CPU = torch.device("cpu")
S, BLOCK = 32, 8


def storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


class Recorder(upload.Streams):
    """A stand-in for Streams that records every call; ``stream`` is the current one."""

    def __init__(self) -> None:
        self.stream, self.capturing = 0, False
        self.calls: list[tuple[Any, ...]] = []
        self.pinned_memory: dict[int, Tensor] = {}
        self.memory: dict[int, Tensor] = {}
        self.ready: set[tuple[int, int]] = set()  # (memory, stream that may read it)
        self.copied_before: dict[int, int] = {}  # event -> memory whose copy it follows

    def is_asynchronous(self, device: torch.device) -> bool:
        return True

    def current(self, device: torch.device) -> int:
        return self.stream

    def is_capturing(self, device: torch.device) -> bool:
        return self.capturing

    def pinned(self, nbytes: int) -> Tensor:
        memory = torch.empty(max(1, nbytes), dtype=torch.uint8)  # of one byte at least: it has an address
        self.pinned_memory[storage(memory)] = memory
        return memory

    def copy(self, pinned: Tensor, device: torch.device) -> Tensor:
        assert not self.capturing
        assert storage(pinned) in self.pinned_memory, "a copy from pageable memory"
        memory = pinned.clone()
        self.memory[storage(memory)] = memory  # keeps the memory alive, so that its address is not reused
        self.ready.add((storage(memory), self.stream))
        self.calls.append(("copy", storage(memory), self.stream))
        return memory

    def record_event(self, device: torch.device) -> int:
        kind, memory, stream = self.calls[-1]
        assert (kind, stream) == ("copy", self.stream), "an event that does not follow its copy"
        self.calls.append(("event", memory, stream))
        return memory

    def wait(self, event: int, device: torch.device) -> None:
        assert not self.capturing
        self.calls.append(("wait", event, self.stream))

    def record_use(self, memory: Tensor, device: torch.device) -> None:
        assert ("wait", storage(memory), self.stream) in self.calls, "a use without a wait"
        self.ready.add((storage(memory), self.stream))
        self.calls.append(("use", storage(memory), self.stream))

    def count(self, *kinds: str) -> Counter[tuple[Any, ...]]:
        return Counter(call for call in self.calls if call[0] in kinds)


@pytest.fixture(autouse=True)
def no_shared_plans() -> Iterator[None]:
    """Plans behind masks are cached, and a plan keeps the copies that a recorder has seen."""
    tritoncp.plan_cache_clear()
    yield
    tritoncp.plan_cache_clear()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    new = Recorder()
    monkeypatch.setattr(upload, "STREAMS", new)
    return new


# -- one copy, many streams -----------------------------------------------------------------------------

Uses = list[tuple[int, int, bool]]  # copy, stream, under capture


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.booleans()), max_size=30))
@pytest.mark.bar(22)
def test_each_stream_waits_once_for_each_copy_before_it_reads_it(uses: Uses) -> None:
    """Uses are in any order, and a copy is made at its first use. The stream that made a copy never waits for
    it; every other stream waits once, before its first use, and records its use once. A capturing stream does
    neither, and no copy is made on it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upload, "STREAMS", recorder := Recorder())
        copies: dict[int, DeviceCopy[Tensor]] = {}
        makers: dict[int, int] = {}  # by memory
        expected: set[tuple[int, int]] = set()  # (memory, stream) of uses outside of captures
        for number, recorder.stream, recorder.capturing in uses:
            if number not in copies:
                host = torch.full((3,), number)
                if recorder.capturing:
                    with pytest.raises(RuntimeError, match="once before the capture"):
                        DeviceCopy([host], CPU, lambda x: x)
                    continue
                copies[number] = DeviceCopy([host], CPU, lambda x: x)
                makers[recorder.calls[-1][1]] = recorder.stream
            before = len(recorder.calls)
            value = copies[number].on_current_stream()
            assert value.tolist() == [number] * 3
            if recorder.capturing:
                assert len(recorder.calls) == before
                continue
            assert (storage(value), recorder.stream) in recorder.ready
            if makers[storage(value)] != recorder.stream:
                expected.add((storage(value), recorder.stream))
        for kind in ("wait", "use"):
            assert recorder.count(kind) == Counter((kind, *pair) for pair in expected)
        assert len(recorder.count("copy")) == len(recorder.count("event")) == len(copies)


def test_tensors_of_any_type_and_layout_travel_in_one_copy(recorder: Recorder) -> None:
    tensors = [
        torch.arange(5, dtype=torch.int32),
        torch.tensor(True),
        torch.empty(0, 3, dtype=torch.int64),
        torch.randn(4, 6).T,
        torch.arange(3).expand(2, 3),
        torch.randn(3, dtype=torch.float64).requires_grad_(),
        torch.randn(7).bfloat16(),
    ]
    copies = DeviceCopy(tensors, CPU, lambda *x: x).on_current_stream()
    for tensor, copy in zip(tensors, copies, strict=True):
        assert copy.dtype == tensor.dtype and torch.equal(copy, tensor) and not copy.requires_grad
        assert copy.data_ptr() % 16 == recorder.memory[storage(copy)].data_ptr() % 16
    assert len(recorder.pinned_memory) == len(recorder.count("copy")) == 1


# -- whole calls ------------------------------------------------------------------------------------------


class Indices(TorchFunctionMode):
    """A mode that checks indexing: every index is an upload that the current stream may read."""

    CHOOSING = (Tensor.index_select, Tensor.__getitem__, Tensor.__setitem__)

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder, self.num_checked = recorder, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.CHOOSING and args[0].is_floating_point():
            for index in (
                x for x in tree_leaves(args[1:]) if isinstance(x, Tensor) and x.dtype == torch.int64
            ):
                assert (storage(index), self.recorder.stream) in self.recorder.ready, func
                self.num_checked += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launched(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the integer tensors that each launch reads, and check that the current stream may read them."""
    counts: list[int] = []
    run = Launch.__call__

    def checked(launch: Launch) -> None:
        tensors = [x for x in tree_leaves(list(launch.values)) if isinstance(x, Tensor)]
        integers = [x for x in tensors if not x.is_floating_point() and x.numel()]
        for x in integers:
            assert (storage(x), recorder.stream) in recorder.ready, launch.kernel.__name__
        counts.append(len(integers))
        run(launch)

    monkeypatch.setattr(Launch, "__call__", checked)
    return counts


ODD = torch.arange(S) % 3 == 0
IDS = torch.arange(S) // 12


def dilated(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (ODD[q] | ODD[kv])


def untranslatable(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return torch.cumsum(IDS, 0).msort()[q] % 3 != kv % 3


MASKS = {
    "intervals": and_masks(causal(), document(lengths=[13, S - 13])),
    "captures": dilated,
    "bits": untranslatable,
}
CALLS = [
    *[("fetch", "captures"), ("fetch", "intervals"), ("ring", "bits"), ("ulysses+ring", "captures")],
    *[pytest.param(one, "captures", marks=pytest.mark.long) for one in ("allgather", "ring", "ulysses")],
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("schedule", "kind"), CALLS)
def test_every_stream_records_its_use_of_every_tensor_of_a_plan(
    schedule: str, kind: str, recorder: Recorder, launched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward on the stream that makes the copies, forward and backward on another one: there nothing is
    copied, and each copy is waited for once."""
    recorder.stream, shift = 7, torch.tensor(3)
    indices, lockstep = Indices(recorder), collectives.lockstep

    def observed(schedules: Any) -> Any:
        with indices:  # modes around a call do not see its operations
            return lockstep(schedules)

    monkeypatch.setattr(collectives, "lockstep", observed)
    world = tritoncp.simulate(4 if schedule == "ulysses+ring" else 2)
    mask = create_block_mask(MASKS[kind], 1, 1, S, S, BLOCK_SIZE=BLOCK)
    plan = world.make_plan(mask, schedule=schedule)
    leaves = [
        [t.requires_grad_() for t in world.shard(torch.randn(1, 2, S, 4), plan, dim=2)] for _ in range(3)
    ]
    recorder.calls.clear()  # shards are used on one stream, and not cached

    def attend() -> list[Tensor]:
        return world.flex_attention(*leaves, lambda s, b, h, q, kv: s + (q - kv) * shift, plan)

    want = attend()
    cached = {memory for _, memory, _ in recorder.count("event")}
    assert cached and not recorder.count("wait", "use") and max(launched) > 0
    recorder.stream = 8
    outs = attend()
    torch.autograd.grad([out.sum() for out in outs], [x for tensors in leaves for x in tensors])
    assert all(map(torch.equal, outs, want))
    assert {memory for _, memory, _ in recorder.count("event")} == cached
    assert recorder.count("wait", "use") == Counter(
        (do, memory, 8) for do in ("wait", "use") for memory in cached
    )
    assert bool(indices.num_checked) == (schedule == "fetch")


def test_a_capture_uses_the_copies_of_an_earlier_call(recorder: Recorder) -> None:
    mask = create_block_mask(dilated, 1, 1, S, S, BLOCK_SIZE=BLOCK)
    q, plan = torch.randn(1, 2, S, 8), tritoncp.make_plan(mask)
    recorder.calls.clear()  # the mask_mod was called
    recorder.stream, recorder.capturing = 1, True
    with pytest.raises(RuntimeError, match=r"cpu while a CUDA graph is captured.*once before the capture"):
        tritoncp.flex_attention(q, q, q, plan)
    with pytest.raises(RuntimeError, match=r"shard and unshard .call these outside of the graph"):
        tritoncp.shard(q, plan, dim=2)
    assert not recorder.calls
    recorder.stream, recorder.capturing = 0, False
    want, before = tritoncp.flex_attention(q, q, q, plan), list(recorder.calls)
    recorder.stream, recorder.capturing = 1, True
    assert torch.equal(tritoncp.flex_attention(q, q, q, plan), want)
    assert recorder.calls == before
    recorder.capturing = False  # captured work did not run: the stream has not waited yet
    tritoncp.flex_attention(q, q, q, plan)
    assert {call[0] for call in recorder.calls[len(before) :]} == {"wait", "use"}


def test_every_stream_records_its_use_of_a_cached_permutation(recorder: Recorder) -> None:
    lengths = torch.tensor([0, 4, 12])
    x = torch.arange(12)
    for recorder.stream in (0, 1, 0, 1):
        reordered = tritoncp.dual_chunk_to_contiguous(x, lengths, world_size=2)
        assert torch.equal(tritoncp.contiguous_to_dual_chunk(reordered, lengths, world_size=2), x)
    assert [kind for kind, *_ in recorder.calls] == ["copy", "event"] * 2 + ["wait", "use"] * 2


def test_every_stream_records_its_use_of_the_tables_that_selected_keys_are_looked_up_in(
    recorder: Recorder,
) -> None:
    mask = create_block_mask(and_masks(causal(), document(lengths=[12, 20])), 1, 1, S, S, BLOCK_SIZE=BLOCK)
    pairs, want = VisiblePairs(mask, mask.mask_mod), mask.to_dense(1, 1)
    at, head = torch.arange(S)[None], torch.zeros(1, dtype=torch.long)
    recorder.calls.clear()
    for recorder.stream in (0, 1, 0, 1):
        assert torch.equal(pairs(0, head, at, at), want)
    assert [kind for kind, *_ in recorder.calls] == ["copy", "event", "wait", "use"]


@pytest.mark.parametrize("streams", [Recorder, upload.Streams])
def test_a_permutation_first_used_under_inference_mode_serves_training(
    streams: type[upload.Streams], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "STREAMS", streams())
    cu_seqlens, x = torch.tensor([0, 4, 12]), torch.arange(12.0)
    with torch.inference_mode():
        first = tritoncp.contiguous_to_dual_chunk(x, cu_seqlens, world_size=2)
    leaf = x.clone().requires_grad_()
    result = tritoncp.contiguous_to_dual_chunk(leaf, cu_seqlens, world_size=2)
    (grad,) = torch.autograd.grad(result, leaf, first)
    assert torch.equal(result, first) and torch.equal(grad, x)


def test_uncached_copies_go_through_pinned_memory(recorder: Recorder) -> None:
    """The rows of a shard, and 0-d numbers on the CPU, which are copied at every call."""
    plan = tritoncp.make_plan(create_block_mask(causal(), 1, 1, S, S, BLOCK_SIZE=BLOCK), world_size=2)
    recorder.calls.clear()
    tritoncp.shard(torch.arange(S), plan, dim=0)
    assert [kind for kind, *_ in recorder.calls] == ["copy"]
    q, factor = torch.randn(1, 2, S, 8), torch.tensor(0.5)

    def attend(**options: Any) -> Tensor:
        return tritoncp.flex_attention(q, q, q, lambda s, b, h, i, j: s * factor, causal(), **options)

    attend()
    for value in (0.5, 2.0):
        factor.fill_(value)
        recorder.calls.clear()
        got = attend()
        assert [kind for kind, *_ in recorder.calls] == ["copy"]
        factor.fill_(1.0)
        torch.testing.assert_close(got, attend(scale=value * 8**-0.5))
