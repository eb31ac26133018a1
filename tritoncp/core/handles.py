"""Handles: tensors that name Python objects, for ops and compiled graphs, which cannot carry the objects.

A handle is a 0-d int64 tensor on the CPU. Its value is an input of the graph, not a constant of it, so that a
graph made for one object serves every other of its kind.
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
_LOCK = threading.Lock()  # of _HELD


def handle_of(thing: Any) -> Tensor:
    """A new handle. ``thing`` lives as long as anyone holds the handle's memory: a graph saved for backward
    does, and so must not ``thing`` itself.

    >>> plan = object()
    >>> object_of(handle_of(plan)) is plan
    True
    """
    number = next(_NUMBERS)
    with normal_tensors():  # autograd saves it
        handle = torch.tensor(number, device="cpu")
    with _LOCK:
        expired = [_HELD.pop(name) for name in [n for n, (_, memory) in _HELD.items() if memory.expired()]]
        _HELD[number] = thing, StorageWeakRef(handle.untyped_storage())
    del expired  # outside the lock: objects that go may take others with them
    return handle


def object_of(handle: Tensor) -> Any:
    """Return the object that a handle names."""
    return _HELD[int(handle)][0]
