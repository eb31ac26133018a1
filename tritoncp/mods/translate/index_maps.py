"""Index maps: gathers, slices and reshapes of symbolic tensors.

A view of a `Lazy` maps an index of the result to an index of the source.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from tritoncp.mods.translate.integer_ranges import IntegerRange
from tritoncp.mods.translate.symbolic import (
    Block,
    Dim,
    Index,
    Indices,
    Lazy,
    Scalar,
    Sparse,
    as_flag,
    as_rep,
    constant,
    fixed_dim,
)

# Max elements of one reduction, or of the gradient of one short tensor. A dot product of learned rows and its
# gradient compile for sm_90 in 4 s for 16 elements, 19 s for 64, 117 s for 128 (tiles of 32 x 32).
MAX_UNROLLED = 64
ZERO = Index(constant(0, torch.int64), None)


class TooLong(NotImplementedError):
    """Raised if more than MAX_UNROLLED elements would be computed for each pair of query and key."""

    remedy = (
        "A product of rows, as q_rope[i] @ k_rope[j]: fold it into q and k, that is, concatenate "
        "q_rope / scale to q and k_rope to k along the head dimension, which gives the same scores and is "
        "much faster; or unroll it into parts, or pass a @triton.jit function: see Mod.from_triton. "
        "A reduction that depends on no index: compute it once outside, and capture it."
    )

    def __init__(self, size: int) -> None:
        super().__init__(
            f"it would compute {size} elements for each pair of query and key; the limit is {MAX_UNROLLED}"
        )


def check_length(size: int) -> None:
    """Raise TooLong for more than MAX_UNROLLED elements."""
    if size > MAX_UNROLLED:
        raise TooLong(size)


def constant_index(position: int, valid: str | None = None) -> Index:
    """Return a constant Index."""
    return Index(constant(position, torch.int64), valid)


def variable_index(name: str, axes: frozenset[str], valid: str | None, rep: str = "int64") -> Index:
    """Return the Index of a variable in the emitted source."""
    return Index(Scalar(name, torch.int64, rep, IntegerRange(0, 2**63 - 1), None, axes), valid)


def element_at(value: Scalar | Lazy, indices: Indices, out_rank: int) -> Scalar:
    """Return the element at `indices` of a value broadcast to `out_rank` dimensions."""
    if isinstance(value, Scalar):
        return value
    own = indices[out_rank - len(value.shape) :]
    return value.at(
        tuple(ZERO if dim.size == 1 else index for dim, index in zip(value.shape, own, strict=True))
    )


def broadcast(shape: Sequence[int], values: Sequence[Scalar | Lazy | Sparse]) -> tuple[Dim, ...]:
    """Return the dimensions of a broadcast result, with the names that operands of that size have."""
    dims = [fixed_dim(size) for size in shape]
    for value in values:
        own = () if isinstance(value, Scalar) else value.shape
        for i, dim in enumerate(own, start=len(shape) - len(own)):
            if dim.size == shape[i] and dims[i].text.isdigit():
                dims[i] = dim
    return tuple(dims)


def wrap(block: Block, dim: Dim, index: Scalar) -> Index:
    """Convert a user's index into a dimension: a negative one counts from the end, with a bounds check."""
    if index.const is not None and dim.text.isdigit():
        return constant_index(int(index.const) % dim.size if -dim.size <= index.const < dim.size else 0)
    assert index.range is not None, "an index is an integer"
    text = index.text if index.const is None else str(int(index.const))
    if index.range.lo >= 0:
        return Index(index, f"({as_flag(f'{text} < {dim.text}', index.axes)})")
    name = block.name(f"wrap({text}, {dim.text})", "wrapped")
    check = as_flag(f"inside({name}, {dim.text})", index.axes)
    return variable_index(name, index.axes, check, "index")


def gather(block: Block, source: Lazy, indices: Sequence[Scalar | Lazy | None]) -> Scalar | Lazy:
    """Index ``source[i0, :, i1, ...]`` by integer tensors of any shape, like torch's advanced indexing."""
    operands = {dim: index for dim, index in enumerate(indices) if index is not None}
    index_shape = _common_shape(list(operands.values()))
    first = min(operands, default=0)
    adjacent = list(operands) == list(range(first, first + len(operands)))
    lead = first if adjacent else 0  # torch puts the dimensions of separate indices first
    shape = tuple(dim for i, dim in enumerate(source.shape) if i not in operands)
    shape = shape[:lead] + index_shape + shape[lead:]

    def place(result: Indices) -> Scalar:
        inner = result[lead : lead + len(index_shape)]
        rest = iter(result[:lead] + result[lead + len(index_shape) :])
        full: list[Index] = [ZERO if i in operands else next(rest) for i in range(len(source.shape))]
        for i, index in operands.items():
            full[i] = wrap(block, source.shape[i], element_at(index, inner, len(index_shape)))
        return source.at(tuple(full))

    return Lazy(shape, source.dtype, place, source.fill) if shape else place(())


def _common_shape(values: Sequence[Scalar | Lazy]) -> tuple[Dim, ...]:
    shapes = [[dim.size for dim in value.shape] if isinstance(value, Lazy) else [] for value in values]
    return broadcast(torch.broadcast_shapes(*shapes), values) if shapes else ()


def shift(block: Block, index: Index, start: int, step: int) -> Index:
    """Return start + index * step."""
    if (start, step) == (0, 1):
        return index
    if index.at.const is not None:
        return constant_index(start + step * int(index.at.const), index.valid)
    text = as_rep(index.at, "int64")
    text = text if step == 1 else f"{text} * {step}"
    text = block.name(text if not start else f"{start} + {text}", "moved")
    return variable_index(text, index.at.axes, index.valid)


def reshape(block: Block, indices: Indices, old: Sequence[int], new: Sequence[int]) -> Indices:
    """Convert the index of an element for a contiguous tensor from shape `old` to shape `new`.

    Each part of the result has the bounds checks of all `indices`, since a later view may drop the other
    parts.
    """
    if [s for s in old if s != 1] == [s for s in new if s != 1]:
        rest = iter(index for index, size in zip(indices, old, strict=True) if size != 1)
        return tuple(ZERO if size == 1 else next(rest) for size in new)
    terms, axes, valid = [], frozenset[str](), [i.valid for i in indices if i.valid]
    for i, index in enumerate(indices):
        stride = math.prod(old[i + 1 :])
        axes |= index.at.axes
        if index.at.const != 0:
            terms.append(f"{as_rep(index.at, 'int64')} * {stride}")
    flat = block.name(" + ".join(terms) if terms else "tl.full((), 0, tl.int64)", "flat")
    out, check = [], " & ".join(dict.fromkeys(valid)) or None
    for i, size in enumerate(new):
        stride = math.prod(new[i + 1 :])
        text = f"{flat} // {stride}" if i == 0 else f"({flat} // {stride}) % {size}"
        name = block.name(text, "unravelled")
        out.append(variable_index(name, axes, check))
    return tuple(out)


def element_address(block: Block, base: str, indices: Indices) -> tuple[str, str]:
    """Return the source of (pointer to an element, its bounds checks or "").

    Terms that are uniform over the tile are added first, as one 64-bit sum for all elements.
    """
    tile_terms, element_terms = list[str](), list[str]()
    for i, index in enumerate(indices):
        if index.at.const != 0:
            terms = element_terms if index.at.axes else tile_terms
            terms.append(f"{as_rep(index.at, 'int64')} * {base}_strides[{i}]")
    if tile_terms and element_terms:
        base = block.name(" + ".join([base, *tile_terms]), f"{base}_tile")
        tile_terms = []
    checks = list(dict.fromkeys(index.valid for index in indices if index.valid))
    valid = " & ".join(checks)
    if " & " in valid:
        valid = block.name(valid, "in_range")
    elif valid.startswith("("):
        valid = valid[1:-1]
    return " + ".join([base, *tile_terms, *element_terms]), valid


def dim_sizes(shape: Sequence[Dim]) -> list[int]:
    return [dim.size for dim in shape]


def remap(value: Lazy, shape: tuple[Dim, ...], source_index: Callable[[Indices], Indices]) -> Scalar | Lazy:
    """Return a view of a Lazy: `source_index` maps an index of the result to an index of the source."""
    if not shape:
        return value.at(source_index(()))
    return Lazy(shape, value.dtype, lambda result: value.at(source_index(result)), value.fill)
