"""User functions as inputs of a compiled graph: structure as text, captures as arguments.

Dynamo traces :func:`flatten_callable`. It reads a function's closure there, so that captured tensors become
inputs of the graph and captured numbers become symbols once they have changed. Inside an op, where real
values arrive, :func:`rebuild` makes the function again. Code and classes stay in this process and are named
by number.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from tritoncp.core import handles
from tritoncp.masks.mask import Mask
from tritoncp.masks.mask_mod import MaskMod
from tritoncp.mods import Mod
from tritoncp.mods.fingerprint import Fingerprint
from tritoncp.mods.mod import structure_of
from tritoncp.planning.plan import Plan

_CONSTANTS: list[Any] = []  # objects that graphs name by number, for the life of the process
_NUMBERS: dict[Any, int] = {}

MADE_INSIDE = "made inside torch.compile; make it outside the compiled function and pass it in"


def flatten_callable(thing: Any, tensors: list[Tensor], ints: list[int]) -> str:
    """Return the structure of a mod or mask, as text that depends on no captured number or tensor contents.
    Captures are appended to ``tensors`` and ``ints``, floats to ``tensors`` as 0-d float64.

    Raises TypeError for objects that a graph cannot carry or that were made inside the compiled function.
    """
    if isinstance(thing, Tensor):
        tensors.append(thing)
        return '"t"'
    if thing is None or isinstance(thing, bool | str | torch.dtype | torch.device):
        return f'["is",{_constant_id(thing)}]'
    if isinstance(thing, int):
        ints.append(thing)
        return '"i"'
    if isinstance(thing, float):
        tensors.append(torch.ones((), dtype=torch.float64, device="cpu") * thing)
        return '"f"'
    if isinstance(thing, Plan | Mask):
        tensors.append(_handle(thing))
        return '"h"'
    if isinstance(thing, tuple | list):
        return f'["{"tuple" if isinstance(thing, tuple) else "list"}",{_flatten_all(thing, tensors, ints)}]'
    if isinstance(thing, functools.partial):
        parts_text = _flatten_all((thing.func, *thing.args, *thing.keywords.values()), tensors, ints)
        return f'["partial",{_constant_id(tuple(thing.keywords))},{parts_text}]'
    if isinstance(thing, types.FunctionType):
        return _flatten_function(thing, tensors, ints)
    if isinstance(thing, Mod):
        parts = [*thing.tensors, *thing.numbers]
        return f'["mod",{_mod_id(thing.digest)},{len(thing.tensors)},{_flatten_all(parts, tensors, ints)}]'
    if isinstance(thing, MaskMod):
        values = [getattr(thing, field.name) for field in dataclasses.fields(thing)]  # type: ignore[arg-type]
        return f'["mask",{_constant_id(type(thing))},{_flatten_all(values, tensors, ints)}]'
    if isinstance(thing, BlockMask):
        parts = [getattr(thing, name) for name in _INDEX]
        fields = (thing.seq_lengths, thing.BLOCK_SIZE, *parts, thing.mask_mod)
        return f'["blocks",{_flatten_all(fields, tensors, ints)}]'
    raise TypeError(
        "inside torch.compile, a mask_mod or score_mod may capture tensors, numbers, functions, and tuples "
        f"and lists of these; this one captures a {type(thing).__name__}. Capture what it needs of that; for "
        "a mask, you can also make a Plan outside the compiled function: tritoncp.make_plan(mask, mesh)"
    )


_INDEX = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


def _flatten_all(things: Any, tensors: list[Tensor], ints: list[int]) -> str:
    return "[" + ",".join([flatten_callable(thing, tensors, ints) for thing in things]) + "]"


def _flatten_function(fn: types.FunctionType, tensors: list[Tensor], ints: list[int]) -> str:
    """Flatten a Python function: the number of its code, its defaults and its closure."""
    try:
        cells = fn.__closure__ or ()
    except AttributeError:
        raise TypeError(f"this mask_mod or score_mod was {MADE_INSIDE}") from None
    parts = (*(fn.__defaults__ or ()), *[cell.cell_contents for cell in cells])
    return f'["fn",{_code_id(fn, fn.__code__)},{_flatten_all(parts, tensors, ints)}]'


def _handle(thing: Plan | Mask) -> Tensor:
    """Return the handle of a plan or mask. Raises TypeError for one made inside the compiled function."""
    if thing.handle is None:
        raise TypeError(f"this {type(thing).__name__} was {MADE_INSIDE}")
    return thing.handle


@torch.compiler.assume_constant_result
def _constant_id(thing: Any) -> int:
    return _register_constant((type(thing), thing), thing)


@torch.compiler.assume_constant_result
def _code_id(fn: types.FunctionType, code: types.CodeType) -> int:
    """Return the number of a function's code. Called once for each graph, with the real function; the graph
    guards that the code is the same."""
    flattened: list[Tensor] = []
    for cell in (*(fn.__defaults__ or ()), *(cell.cell_contents for cell in fn.__closure__ or ())):
        flatten_callable(cell, flattened, [])
    for tensor in Fingerprint(fn).tensors:
        if tensor.requires_grad and not any(tensor is captured for captured in flattened):
            raise TypeError(
                f"{fn.__qualname__} reads a tensor {tuple(tensor.shape)} that requires grad from a global or "
                "an object; inside torch.compile it would get no gradient. Capture it: make the function "
                "inside another one that has the tensor as a local variable"
            )
    if not fn.__defaults__ and not fn.__closure__:
        return _register_constant((code, id(fn.__globals__)), fn)
    defaults = len(fn.__defaults__ or ())
    return _register_constant(
        (code, id(fn.__globals__), defaults), (code, fn.__globals__, fn.__name__, defaults)
    )


@torch.compiler.assume_constant_result
def _mod_id(digest: str) -> int:
    return _register_constant(digest, structure_of(digest))


def _register_constant(key: Any, thing: Any) -> int:
    """Return the number of an object in ``_CONSTANTS``, which keeps it; equal keys share a number."""
    if key not in _NUMBERS:
        _NUMBERS[key] = len(_CONSTANTS)
        _CONSTANTS.append(thing)
    return _NUMBERS[key]


def rebuild(structure: str, tensors: Sequence[Tensor], ints: Sequence[int]) -> Any:
    """Rebuild the object of :func:`flatten_callable`, with the captures of this call.

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
    """Rebuild one node of a structure; its captures are the next of ``tensors`` and ``ints``."""
    if isinstance(node, str):
        return next(ints) if node == "i" else _LEAVES[node](next(tensors))
    kind, *rest = node
    if kind == "is":
        return _CONSTANTS[rest[0]]
    parts = [_rebuild(part, tensors, ints) for part in rest[-1]]
    if kind in ("tuple", "list"):
        return tuple(parts) if kind == "tuple" else parts
    if kind == "partial":
        names = _CONSTANTS[rest[0]]
        fn, *arguments = parts
        split = len(arguments) - len(names)
        return functools.partial(fn, *arguments[:split], **dict(zip(names, arguments[split:], strict=True)))
    if kind == "mask":
        return _CONSTANTS[rest[0]](*parts)
    if kind == "blocks":
        return _block_mask(*parts)
    if kind == "mod":
        return replace(_CONSTANTS[rest[0]], tensors=tuple(parts[: rest[1]]), numbers=tuple(parts[rest[1] :]))
    if not parts:
        return _CONSTANTS[rest[0]]
    code, names, name, defaults = _CONSTANTS[rest[0]]
    cells = tuple(types.CellType(part) for part in parts[defaults:])
    return types.FunctionType(code, names, name, tuple(parts[:defaults]), cells)


def _block_mask(
    lengths: Any, block: Any, count: Tensor, index: Tensor, full: Any, full_index: Any, mod: Any
) -> Any:
    return BlockMask.from_kv_blocks(
        count, index, full, full_index, block, mod, seq_lengths=lengths, compute_q_blocks=False
    )


_LEAVES = {"t": lambda tensor: tensor, "f": Tensor.item, "h": handles.object_of}
