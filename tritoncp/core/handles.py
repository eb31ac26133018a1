"""Handles: tensors that represent Python objects in ops and compiled graphs, whose arguments are tensors.

A handle is a 0-d int64 tensor on the CPU. Its value is an input of the graph, not a constant, so that a graph
compiled for one object is reused for others of its kind. The value alone names the object, so that a copy of
a handle names it too: a clone, a copy on another device or on disk. Every process numbers its objects from a
random start, so that a handle in a saved program names no object of the process that loads it.
"""

from __future__ import annotations

import itertools
import os
import secrets
import weakref
from typing import Any

import torch
from torch import Tensor

from tritoncp.core.bounded_cache import BoundedCache
from tritoncp.core.host_copy import has_saved_tensor_hooks, normal_tensors

_SPAN = 1 << 62  # modulus of the numbers of all processes
_STEP = 0x1E3779B97F4A7C15  # odd, so that no number comes twice; large: a sum with a handle names no object
_STARTS: list[int] = []  # of this process, and before it of the processes that it was forked from
_MOST = 1 << 40  # objects of a process
_NUMBERS: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
# Objects by number, while something keeps them: objects named by `stand_for`, and by `handle_of`.
_KNOWN: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_NAMED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
# What keeps the objects of `handle_of`: memory of their handles, by id of a reference to it.
_HELD: dict[int, tuple[weakref.ref[Any], Any]] = {}
# Objects whose handles saved-tensor hooks may copy: nothing tells when the last copy is gone.
_KEPT: BoundedCache[int, Any] = BoundedCache(64, lambda thing: getattr(thing, "nbytes", 0), 1 << 30)


class _Box:
    """Holds an object that cannot be referred to weakly."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing


def _start() -> None:
    _STARTS.append(secrets.randbelow(_SPAN))


_COUNT = itertools.count()
_start()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start)


def new_number() -> int:
    """Return a number that no other object has, in this process or in any other."""
    return (_STARTS[-1] + next(_COUNT) * _STEP) % _SPAN


def is_own(number: int) -> bool:
    """Return whether a number is of this process, or of one that it was forked from."""
    return any((number - start) * pow(_STEP, -1, _SPAN) % _SPAN < _MOST for start in _STARTS)


def handle_of(thing: Any) -> Tensor:
    """Make a handle of an object. It keeps the object alive as long as the handle's memory is alive, for
    example in a saved graph; the object itself must not refer to the handle.

    >>> plan = lambda: None
    >>> object_of(handle_of(plan).clone()) is plan
    True
    """
    thing = _Box(thing) if isinstance(thing, tuple) else thing
    number = _NUMBERS.get(thing)
    if number is None:
        number = _NUMBERS[thing] = new_number()
    named = _NAMED.setdefault(number, thing)  # an equal object
    with normal_tensors():  # autograd may save the handle
        handle = torch.tensor(number, device="cpu")
    memory = weakref.ref(handle.untyped_storage(), _let_go)  # torch keeps it as long as the memory
    _HELD[id(memory)] = memory, (thing, named)
    if has_saved_tensor_hooks():
        _KEPT.put(number, thing)
    return handle


def _let_go(memory: weakref.ref[Any]) -> None:
    _HELD.pop(id(memory), None)


def stand_for(thing: Any, handle: Tensor | None) -> None:
    """Make a handle name another object, which refers to the handle, while that object is alive."""
    assert handle is not None
    number = int(handle)
    _KNOWN[number], _NUMBERS[thing] = thing, number


def object_of(handle: Tensor) -> Any:
    """Return the object of a handle. Raises RuntimeError for a handle of another process, and for one whose
    object was freed."""
    number = int(handle)
    thing = _KNOWN.get(number)
    if thing is None and (thing := _NAMED.get(number)) is None:
        raise RuntimeError(_describe_unknown(number))
    return thing.thing if type(thing) is _Box else thing


def _describe_unknown(number: int) -> str:
    if is_own(number):
        return (
            "the mask or plan of a traced or compiled program was freed: keep it as long as the program may "
            f"run (under saved-tensor hooks the last {_KEPT.size} are kept)"
        )
    return (
        "a program that was exported, compiled or traced in another process refers to a mask or plan of that "
        "process, which this one does not have: pass the mask as an argument of the program, not as an "
        "attribute, a global or a captured variable, or make the program again in this process"
    )
