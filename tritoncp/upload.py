"""Copies of host tensors on a device: through pinned memory, and safe on every stream that reads them.

A copy that is kept is read on other streams than the one that made it. Each of them waits once for the copy
to end, and tells the allocator once that it reads the memory: memory that is freed under a running kernel is
then not handed out before the kernel has ended.
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
    """The calls by which uploads reach a device and its streams."""

    def is_asynchronous(self, device: torch.device) -> bool:
        """Whether work on the device is queued on streams."""
        return device.type == "cuda"

    def current(self, device: torch.device) -> int:
        """The current stream of this thread, by its raw handle."""
        return int(torch._C._cuda_getCurrentRawStream(device.index))

    def is_capturing(self, device: torch.device) -> bool:
        """Whether the current stream is being captured into a CUDA graph."""
        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()

    def pinned(self, nbytes: int) -> Tensor:
        """Pinned host memory. Freed memory is reused after the copies that were queued from it have ended:
        a non_blocking copy_ records an event with torch's host allocator."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, pinned: Tensor, device: torch.device) -> Tensor:
        """Queue a copy on the current stream."""
        return pinned.to(device, non_blocking=True)

    def record_event(self, device: torch.device) -> Any:
        """An event after the work that is queued on the current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event

    def wait(self, event: Any, device: torch.device) -> None:
        """Have the current stream wait for an event."""
        torch.cuda.current_stream(device).wait_event(event)

    def record_use(self, memory: Tensor, device: torch.device) -> None:
        """Tell the allocator that the current stream reads this memory."""
        memory.record_stream(torch.cuda.current_stream(device))


STREAMS = Streams()  # a test puts a recorder in its place


def upload(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors on ``device``, for use on the current stream; what is on a device already stays as it is.

    For tensors that are read at once. Those that are kept are a :class:`DeviceCopy`.
    """
    if not STREAMS.is_asynchronous(device) or torch.compiler.is_compiling():
        return [x if x.device == device else x.to(device) for x in tensors]
    return _upload(tensors, device)[0]


class DeviceCopy(Generic[T]):
    """Something made of tensors on a device, which were copied there once and serve all of its streams.

    Under CUDA graph capture there is nothing to wait for: a copy was made before the capture began
    (making one under capture raises), and has ended, since ``torch.cuda.graph`` and
    ``make_graphed_callables`` synchronise the device before they capture. A program that calls
    ``capture_begin`` itself has to do so too. The graph does not keep the memory: its owner keeps the plan.

    >>> DeviceCopy([torch.ones(2)], torch.device("cpu"), torch.sum).on_current_stream()
    tensor(2.)
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device, make: Callable[..., T]) -> None:
        """make: from the tensors on the device to what :meth:`on_current_stream` returns.

        Also a first use under inference_mode makes tensors that autograd may save: a later one may train.
        """
        self._memory: Tensor | None = None
        self._streams: set[int] = set()  # those that may read it
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
        """The value, for work that is queued on the current stream from now on. Call this at each use."""
        if self._memory is not None and STREAMS.current(self._device) not in self._streams:
            self._admit_current_stream()
        return self._value

    def _admit_current_stream(self) -> None:
        assert self._memory is not None
        with self._lock:
            stream = STREAMS.current(self._device)
            if stream in self._streams or STREAMS.is_capturing(self._device):
                return
            STREAMS.wait(self._event, self._device)
            STREAMS.record_use(self._memory, self._device)
            self._streams.add(stream)  # last: other threads with this stream go ahead from here on


def _upload(tensors: Sequence[Tensor], device: torch.device) -> tuple[list[Tensor], Tensor | None]:
    """The tensors on the device, and the memory that those share which were copied there, if any were."""
    on_host = [x for x in tensors if x.device.type == "cpu"]
    if not on_host:
        return list(tensors), None
    if STREAMS.is_capturing(device):
        raise RuntimeError(
            f"tensors on the CPU cannot be copied to {device} while a CUDA graph is captured. Make the same "
            "call once before the capture, with the same plan or mask and the same shapes. What is copied at "
            f"every call has to be on {device} before: a 0-d tensor on the CPU that a score_mod captures; or "
            "is called outside the graph: shard, unshard"
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
    """The bytes from ``start`` on as a tensor of the type and shape of ``like``."""
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)
