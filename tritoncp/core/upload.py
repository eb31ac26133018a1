"""Copies of host tensors to a device, through pinned memory, that are safe to use on several streams.

A cached copy may be read on other streams than the one that made it. Each such stream waits once for the end
of the copy, and is recorded once with the allocator (`record_stream`), which then reuses freed memory only
after the kernels that read it have ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
ALIGNMENT = 128  # bytes between the starts of tensors in one buffer: a cache line


class Streams:
    """The stream operations of a device that uploads need."""

    def is_asynchronous(self, device: torch.device) -> bool:
        """Return whether work on the device is queued on streams."""
        return device.type == "cuda"

    def current(self, device: torch.device) -> int:
        """Return the raw handle of this thread's current stream."""
        return int(torch._C._cuda_getCurrentRawStream(device.index))

    def is_capturing(self, device: torch.device) -> bool:
        """Return whether the current stream is being captured into a CUDA graph."""
        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()

    def pinned(self, nbytes: int) -> Tensor:
        """Allocate pinned host memory. It may be freed while copies from it are queued: torch's host
        allocator reuses it only after an event that a non_blocking copy_ records."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, pinned: Tensor, device: torch.device) -> Tensor:
        """Queue a copy on the current stream."""
        return pinned.to(device, non_blocking=True)

    def record_event(self, device: torch.device) -> Any:
        """Record an event on the current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event

    def wait(self, event: Any, device: torch.device) -> None:
        """Make the current stream wait for an event."""
        torch.cuda.current_stream(device).wait_event(event)

    def record_use(self, memory: Tensor, device: torch.device) -> None:
        """Record with the allocator that the current stream reads this memory."""
        memory.record_stream(torch.cuda.current_stream(device))


STREAMS = Streams()  # tests replace these with a recorder


def upload(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy CPU tensors to ``device`` for use on the current stream; return tensors on a GPU unchanged.

    Not for cached copies, which need a :class:`DeviceCopy`.
    """
    if not STREAMS.is_asynchronous(device) or torch.compiler.is_compiling():
        return [x if x.device == device else x.to(device) for x in tensors]
    return _upload(tensors, device)[0]


class DeviceCopy(Generic[T]):
    """A value made from copies of tensors on a device, for use on all its streams.

    Under CUDA graph capture streams do not wait: the copy was made before the capture (under capture this
    raises) and has ended, since ``torch.cuda.graph`` and ``make_graphed_callables`` synchronise the device
    before they capture. A program that calls ``capture_begin`` itself has to synchronise too. A graph does
    not keep the memory alive: its owner has to keep the plan.

    >>> DeviceCopy([torch.ones(2)], torch.device("cpu"), torch.sum).on_current_stream()
    tensor(2.)
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device, make: Callable[..., T]) -> None:
        """Copy the tensors. make: function from the copies to the value.

        Autograd can save the copies, even if they are made under inference_mode.
        """
        self._memory: Tensor | None = None
        self._streams: set[int] = set()  # streams that may read the memory
        self._lock = threading.Lock()
        copies = list(tensors)
        with torch.inference_mode(False):
            if STREAMS.is_asynchronous(device):
                copies, self._memory = _upload(tensors, device)
            if self._memory is not None:
                self._device, self._event = self._memory.device, STREAMS.record_event(device)
                self._streams.add(STREAMS.current(self._device))
            self._value = make(*copies)

    def on_current_stream(self) -> T:
        """Return the value for use by work that is queued on the current stream next. Call it at each use."""
        if self._memory is not None and STREAMS.current(self._device) not in self._streams:
            self._admit_current_stream()
        return self._value

    def _admit_current_stream(self) -> None:
        """Make the current stream wait for the copy, and record its use of the memory."""
        assert self._memory is not None
        with self._lock:
            stream = STREAMS.current(self._device)
            if stream in self._streams or STREAMS.is_capturing(self._device):
                return
            STREAMS.wait(self._event, self._device)
            STREAMS.record_use(self._memory, self._device)
            self._streams.add(stream)  # comes last: afterwards other threads on this stream skip the lock


def _upload(tensors: Sequence[Tensor], device: torch.device) -> tuple[list[Tensor], Tensor | None]:
    """Copy the CPU tensors to the device in one transfer. Return (all tensors on the device, memory that the
    copies share, or None without copies)."""
    on_host = [x for x in tensors if x.device.type == "cpu"]
    if not on_host:
        return list(tensors), None
    if STREAMS.is_capturing(device):
        raise RuntimeError(
            f"CPU tensors cannot be copied to {device} while a CUDA graph is captured: make the same call "
            "once before the capture, with the same plan or mask and the same shapes. Copied at every call "
            f"are only 0-d CPU tensors that a score_mod captures (move them to {device}), and indices of "
            "shard and unshard (call these outside of the graph)"
        )
    starts, end = [], 0
    for x in on_host:
        starts.append(end)
        end += -(-x.nbytes // ALIGNMENT) * ALIGNMENT
    pinned = STREAMS.pinned(end)
    for start, x in zip(starts, on_host, strict=True):
        _view(pinned, start, x).copy_(x.detach())
    memory = STREAMS.copy(pinned, device)
    copies = iter([_view(memory, start, x) for start, x in zip(starts, on_host, strict=True)])
    return [next(copies) if x.device.type == "cpu" else x for x in tensors], memory


def _view(memory: Tensor, start: int, like: Tensor) -> Tensor:
    """View the bytes from ``start`` on as a tensor with the dtype and shape of ``like``."""
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)
