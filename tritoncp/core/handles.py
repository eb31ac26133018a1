"""Handles: tensors that stand for Python objects in ops and compiled graphs, whose arguments are tensors.

A handle is a 0-d int64 tensor on the CPU. Its value is an input of the graph, not a constant, so that a graph
compiled for one object is reused for others of its kind.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tritoncp.core.host_copy import normal_tensors

_HELD: dict[int, tuple[Any, StorageWeakRef]] = {}
_NUMBERS = itertools.count()
_LOCK = threading.Lock()  # for _HELD


def handle_of(thing: Any) -> Tensor:
    """Make a handle of an object. It keeps the object alive as long as the handle's memory is alive, for
    example in a saved graph; the object itself must not refer to the handle.

    >>> plan = object()
    >>> object_of(handle_of(plan)) is plan
    True
    """
    number = next(_NUMBERS)
    with normal_tensors():  # autograd may save the handle
        handle = torch.tensor(number, device="cpu")
    with _LOCK:
        expired = [_HELD.pop(name) for name in [n for n, (_, memory) in _HELD.items() if memory.expired()]]
        _HELD[number] = thing, StorageWeakRef(handle.untyped_storage())
    del expired  # after the lock is released, since these objects may free others
    return handle


def object_of(handle: Tensor) -> Any:
    """Return the object of a handle."""
    return _HELD[int(handle)][0]
