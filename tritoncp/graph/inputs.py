"""Mask_mods and score_mods as inputs of a compiled graph: structure as text, captures as arguments.

Dynamo traces :func:`flatten_callable`, which reads a function's closure and objects by a layout
(:mod:`.layouts`), so that captured tensors become inputs of the graph, and captured numbers symbols once they
have changed. Inside an op, which gets the values, :func:`rebuild` makes the function again.
"""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from tritoncp.core import handles
from tritoncp.core.dynamo_boundary import constant_result
from tritoncp.graph import layouts
from tritoncp.graph.constants import constant_of, make_function, register_constant, register_mod
from tritoncp.graph.layouts import MADE_INSIDE, Layout, Uncapturable
from tritoncp.masks.closed_forms import document_of
from tritoncp.masks.mask import Mask
from tritoncp.masks.mask_mod import MaskMod
from tritoncp.masks.traced_mask import TracedMask
from tritoncp.mods import Mod
from tritoncp.mods.captures import MAKERS, take_apart
from tritoncp.mods.recording import refuse_captured_dtensor
from tritoncp.planning.plan import Plan


def flatten_callable(thing: Any, tensors: list[Tensor], ints: list[int]) -> str:
    """Split a mod or mask into its structure, returned as text, and its captures, appended to ``tensors`` and
    ``ints`` (floats to ``tensors``, as 0-d float64).

    Raises Uncapturable for objects that cannot be part of a graph.
    """
    return _flatten(thing, tensors, ints, is_called=True)


def is_symbol(thing: Any) -> bool:
    """Return whether a value is a number that differs between runs of the graph."""
    if not torch.compiler.is_dynamo_compiling():
        return isinstance(thing, torch.SymInt | torch.SymFloat)
    from torch._dynamo.comptime import comptime

    from tritoncp.graph import variables

    answer = False
    comptime(variables.set_is_symbol)  # sets ``answer``
    return answer


def _flatten(thing: Any, tensors: list[Tensor], ints: list[int], is_called: bool = False) -> str:
    """Flatten an object by its type. is_called: the object is the mod, so that only state that its call reads
    counts."""
    if isinstance(thing, Tensor):
        refuse_captured_dtensor(thing)
        tensors.append(thing)
        return '"t"'
    if thing is None or isinstance(thing, bool | str | torch.dtype | torch.device):
        return f'["is",{_constant(thing)}]'
    if isinstance(thing, int):
        ints.append(thing)
        return '"i"'
    if isinstance(thing, float):
        tensors.append(torch.ones((), dtype=torch.float64, device="cpu") * thing)
        return '"f"'
    if isinstance(thing, Plan | Mask | TracedMask):
        tensors.append(_handle(thing))
        return '"h"'
    container = None if isinstance(thing, types.MethodType) else take_apart(thing)
    if container is not None:
        kind, constant, values = container
        is_partial = kind == "partial"
        texts = [_flatten(x, tensors, ints, is_partial and i == 0) for i, x in enumerate(values)]
        return f'["{kind}",{_constant(constant)},[{",".join(texts)}]]'
    if isinstance(thing, Mod):
        parts = [*thing.tensors, *thing.numbers]
        return f'["mod",{_mod(thing.digest)},{_flatten_all(parts, tensors, ints)}]'
    if isinstance(thing, MaskMod):
        make, arguments = thing.as_call()
        return f'["call",{_constant(make)},{_flatten_all(arguments, tensors, ints)}]'
    if isinstance(thing, BlockMask):
        values = [getattr(thing, name) for name in _BLOCK_MASK_FIELDS]
        return f'["blocks",{_constant(BlockMask)},{_flatten_all(values, tensors, ints)}]'
    layout, inner = _callable_layout(thing, is_called)
    if layout[0] == "inside":
        return f'["function",{_quoted(layout[1])},{_flatten_all(inner, tensors, ints)}]'
    return _flatten_parts(thing, layout, tensors, ints)


_BLOCK_MASK_FIELDS = (  # the arguments of BlockMask.from_kv_blocks
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "BLOCK_SIZE", "mask_mod",
    "seq_lengths",
)  # fmt: skip


def _flatten_all(things: Any, tensors: list[Tensor], ints: list[int]) -> str:
    return "[" + ",".join([_flatten(thing, tensors, ints) for thing in things]) + "]"


def _flatten_parts(thing: Any, layout: Layout, tensors: list[Tensor], ints: list[int]) -> str:
    """Flatten an object by its layout."""
    kind = layout[0]
    if kind == "refuse":
        raise Uncapturable(layout[1])
    if kind == "value":
        return _flatten(thing, tensors, ints)
    if kind == "unset":
        return f'["is",{_quoted(layout[1])}]'
    if kind == "is":
        _guard_identity(thing)
        return f'["is",{_quoted(layout[1])}]'
    texts = []
    for place, name, part in layout[3]:
        if place == "absent" and hasattr(thing, name):
            raise Uncapturable(f"this mask_mod or score_mod reads {name!r}, which was {MADE_INSIDE}")
        value = None if part[0] == "unset" else _part_of(thing, place, name)
        texts.append(_flatten_parts(value, part, tensors, ints))
    return f'["{layout[1]}",{_quoted(layout[2])},[{",".join(texts)}]]'


def _part_of(thing: Any, place: str, name: Any) -> Any:
    """Return a part of an object. (Dynamo cannot catch the ValueError of an empty cell.)"""
    if place == "item":
        return thing[name]
    if place == "attribute":
        return getattr(thing, name)
    if place == "cell":
        return thing.__closure__[name].cell_contents
    return thing.__defaults__[name] if place == "default" else thing.__kwdefaults__[name]


def _handle(thing: Plan | Mask | TracedMask) -> Tensor:
    """Return the handle of a plan or mask. Raises Uncapturable if the compiled function made it."""
    if thing.handle is None:
        raise Uncapturable(f"this {type(thing).__name__} was {MADE_INSIDE}")
    return thing.handle


def _callable_layout(thing: Any, is_called: bool) -> tuple[Layout, tuple[Any, ...]]:
    """Return (layout of an object, its parts if it is a function made in the graph)."""
    if not torch.compiler.is_dynamo_compiling():
        return layouts.callable_layout(thing, is_called), ()
    from torch._dynamo.comptime import comptime

    from tritoncp.graph import variables

    layout: Layout = ()
    parts: tuple[Any, ...] = ()
    comptime(variables.set_layout)  # sets these two variables
    return layout, parts


def _guard_identity(thing: Any) -> None:
    """Add a guard, so that the graph is reused only for the same object."""
    if torch.compiler.is_dynamo_compiling():
        from torch._dynamo.comptime import comptime

        from tritoncp.graph import variables

        comptime(variables.guard_identity)


@constant_result
def _constant(thing: Any) -> str:
    return json.dumps(register_constant((type(thing), thing), thing))


@constant_result
def _mod(digest: str) -> str:
    return json.dumps(register_mod(digest))


@constant_result
def _quoted(name: str) -> str:
    return json.dumps(name)


def rebuild(structure: str, tensors: Iterable[Tensor], ints: Iterable[int]) -> Any:
    """Rebuild an object from its structure (:func:`flatten_callable`) and the captures of this call. If the
    captures are iterators, only this object's are consumed.

    >>> tensors, ints = [], []
    >>> text = flatten_callable(lambda b, h, q_idx, kv_idx, w=3: q_idx - kv_idx < w, tensors, ints)
    >>> rebuild(text, tensors, [5])(0, 0, 9, 5)
    True
    """
    return _rebuild(_parsed(structure), iter(tensors), iter(ints))


@functools.lru_cache(maxsize=256)
def _parsed(structure: str) -> Any:
    return json.loads(structure)


def _rebuild(node: Any, tensors: Iterator[Tensor], ints: Iterator[int]) -> Any:
    """Rebuild one node of a structure from the next ``tensors`` and ``ints``."""
    if isinstance(node, str):
        return next(ints) if node == "i" else _LEAVES[node](next(tensors))
    kind, name, *parts = node
    if kind == "is":
        return constant_of(name)
    return _MAKERS[kind](constant_of(name), [_rebuild(part, tensors, ints) for part in parts[0]])


def _make_mod(structure: Mod, parts: list[Any]) -> Mod:
    count = sum(isinstance(part, Tensor) for part in parts)
    return structure.with_captures(parts[:count], parts[count:])


def _call(kind: Any, parts: list[Any]) -> Any:
    """Make a closed form, named tuple or method. Raises TypeError for an object that a saved program may not
    call."""
    is_class = isinstance(kind, type) and issubclass(kind, MaskMod | tuple | types.MethodType)
    if not is_class and kind is not document_of:
        raise TypeError(f"a graph names {kind!r} as the class of a mask; it was not made by tritoncp")
    return kind(*parts)


_LEAVES = {"t": lambda tensor: tensor, "f": Tensor.item, "h": handles.object_of}
_MAKERS: dict[str, Callable[[Any, list[Any]], Any]] = {
    **MAKERS,
    "call": _call,
    "function": make_function,
    "object": layouts.stand_in,
    "mod": _make_mod,
    "blocks": lambda kind, parts: kind.from_kv_blocks(*parts, compute_q_blocks=False),
}
