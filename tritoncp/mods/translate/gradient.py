"""Operations on the gradient of a captured tensor, which is zero except at a few indices (`Sparse`).

Backward graphs are linear in this gradient: a scatter makes it, and products with dense factors, sums and
reshapes map its entries. An operation whose result would be dense raises NotImplementedError.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx

from tritoncp.mods.translate.index_maps import (
    ZERO,
    check_length,
    constant_index,
    dim_sizes,
    element_at,
    reshape,
    shift,
    wrap,
)
from tritoncp.mods.translate.pointwise_ops import BINARY, where
from tritoncp.mods.translate.symbolic import (
    Block,
    Dim,
    GradientEntry,
    Index,
    Indices,
    Lazy,
    Scalar,
    Sparse,
    Value,
    as_rep,
    constant,
    fixed_dim,
    weak_scalar,
)

PointwiseRule = Callable[..., tuple[Callable[..., Scalar], list[Any]]]
MAKERS = frozenset(["select_backward", "slice_backward", "index_put"])  # operations that make a Sparse


def has_sparse(inputs: Sequence[Any]) -> bool:
    """Return whether an operand, or an item of a list of operands, is a Sparse gradient."""
    return any(isinstance(i, Sparse) for i in _flatten(inputs))


def _flatten(inputs: Sequence[Any]) -> list[Any]:
    """Return operands and the items of lists of operands. (A Scalar is a tuple, but one operand.)"""
    lists = [i if type(i) in (list, tuple) else [i] for i in inputs]
    return [item for items in lists for item in items]


def make_dense(block: Block, inputs: Sequence[Any]) -> list[Any]:
    """Replace each Sparse among the operands by a Lazy."""

    def convert(value: Any) -> Any:
        if type(value) in (list, tuple):
            return make_dense(block, value)
        return as_dense(block, value) if isinstance(value, Sparse) else value

    return [convert(value) for value in inputs]


def emit_operation(
    block: Block, pointwise: PointwiseRule, node: fx.Node, name: str, inputs: list[Any]
) -> Value:
    """Emit the operation `name` on gradients of captured tensors.

    Raises NotImplementedError if the result would be dense. pointwise: function that returns the rule of a
    pointwise operation on Scalars, and its operands
    """
    if name in RULES:
        value = RULES[name](block, node, inputs)
    else:
        value = _pointwise(pointwise, node, name, inputs)
    return collapse(block, value) if isinstance(value, Sparse) else value


def _map_indices(value: Sparse, shape: tuple[Dim, ...], change: Callable[[Any], Any]) -> Sparse:
    return Sparse(
        shape, value.dtype, tuple(GradientEntry(tuple(change(e.indices)), e.value) for e in value.entries)
    )


# -- entries -------------------------------------------------------------------------------------------


def collapse(block: Block, value: Sparse) -> Scalar | Sparse:
    """Return the sum of the entries of a 0-d Sparse; a Sparse with dimensions unchanged."""
    if value.shape:
        return value
    values = [entry.value for entry in value.entries] or [constant(0, value.dtype)]
    return functools.reduce(lambda a, b: BINARY["add"](block, value.dtype, a, b), values)


def as_sparse(value: Scalar | Sparse | Lazy) -> Sparse:
    """Convert a gradient to a Sparse: a Scalar to one entry without indices, a dense zero to no entry.

    A short dense gradient gets an entry per element; a longer one raises TooLong.
    """
    if isinstance(value, Scalar):
        return Sparse((), value.dtype, (GradientEntry((), value),))
    if isinstance(value, Lazy):
        if value.fill == 0:
            return Sparse(value.shape, value.dtype, ())
        entries = (GradientEntry(indices, value.at(indices)) for indices in _all_indices(value.shape))
        return Sparse(value.shape, value.dtype, tuple(entries))
    return value


def _all_indices(shape: Sequence[Dim]) -> list[Indices]:
    sizes = dim_sizes(shape)
    check_length(math.prod(sizes))
    return [tuple(map(constant_index, place)) for place in itertools.product(*map(range, sizes))]


def as_dense(block: Block, value: Sparse) -> Lazy:
    """Convert a short Sparse to a Lazy: an element is the sum of the entries at its index."""
    check_length(math.prod(dim_sizes(value.shape)))
    zero = constant(0, value.dtype)

    def at(indices: Indices) -> Scalar:
        total = zero
        for entry in value.entries:
            addend, pairs = entry.value, zip(entry.indices, indices, strict=True)
            different = [(a.at, b.at) for a, b in pairs if a.at != b.at]
            if any(a.const is not None and b.const is not None for a, b in different):
                continue
            for a, b in different:
                equal = block.comparison(f"{as_rep(a, 'int64')} == {as_rep(b, 'int64')}", "equal", a, b)
                addend = where(block, value.dtype, equal, addend, zero)
            total = addend if total is zero else BINARY["add"](block, value.dtype, total, addend)
        return total

    return Lazy(value.shape, value.dtype, functools.cache(at))


# -- scatters --------------------------------------------------------------------------------------------


def _dimensions(node: fx.Node) -> tuple[Dim, ...]:
    """Return the dimensions of a gradient: those of the captured tensor, if it is its gradient."""
    named: tuple[Dim, ...] | None = node.meta.get("dimensions")
    return tuple(map(fixed_dim, node.meta["val"].shape)) if named is None else named


def _index_put(block: Block, node: fx.Node, inputs: list[Any]) -> Sparse:
    """index_put of values into zeros at 0-d indices: the backward of `index_maps.gather`."""
    if as_sparse(inputs[0]).entries:
        raise NotImplementedError("an edit of a tensor that is not zero")
    indices, values = inputs[1], as_sparse(inputs[2])
    if not all(i is None or isinstance(i, Scalar) for i in indices):
        raise NotImplementedError("a gradient through an index that is itself a whole tensor")
    shape = _dimensions(node)
    indices = list(indices) + [None] * (len(shape) - len(indices))
    places = [None if i is None else wrap(block, dim, i) for dim, i in zip(shape, indices, strict=True)]

    def place(entry: Indices) -> Iterator[Index]:
        rest = iter(entry)
        return (next(rest) if index is None else index for index in places)

    return _map_indices(values, shape, place)


def _select_backward(block: Block, node: fx.Node, inputs: list[Any]) -> Sparse:
    shape = _dimensions(node)
    dim, index = int(node.args[2]) % len(shape), node.args[3]  # type: ignore
    place = wrap(block, shape[dim], weak_scalar(index))  # type: ignore[arg-type]
    return _map_indices(as_sparse(inputs[0]), shape, lambda i: (*i[:dim], place, *i[dim:]))


def _slice_backward(block: Block, node: fx.Node, inputs: list[Any]) -> Sparse:
    shape = _dimensions(node)
    dim, start, end, step = node.args[2:6]
    dim = int(dim) % len(shape)  # type: ignore[arg-type]
    begin = slice(start, end, step).indices(shape[dim].size)[0]

    def move(i: Any) -> Any:
        return (*i[:dim], shift(block, i[dim], begin, int(step)), *i[dim + 1 :])  # type: ignore[arg-type]

    return _map_indices(as_sparse(inputs[0]), shape, move)


# -- linear operations -----------------------------------------------------------------------------------


def _add(block: Block, node: fx.Node, inputs: list[Any]) -> Sparse:
    a, b = as_sparse(inputs[0]), as_sparse(inputs[1])
    if dim_sizes(a.shape) != dim_sizes(b.shape) or node.kwargs.get("alpha", 1) != 1:
        raise NotImplementedError("a sum of gradients of different shapes")
    return Sparse(a.shape, node.meta["val"].dtype, a.entries + b.entries)


def _pointwise(pointwise: PointwiseRule, node: fx.Node, name: str, inputs: list[Any]) -> Sparse:
    """Apply an operation to the entries, with the elements of dense operands at the same indices."""
    rule, operands = pointwise(node, name, inputs, node.meta["val"])
    gradients = [i for i, operand in enumerate(operands) if isinstance(operand, Sparse)]
    if len(gradients) != 1 or not _keeps_zero(node, name, operands, gradients[0]):
        raise NotImplementedError("it would make a dense gradient of a whole captured tensor")
    value = operands[gradients[0]]
    _check_shape(node, value)
    if name == "mul":  # emit the gradient as the first factor
        operands.sort(key=lambda operand: operand is not value)

    def element(entry: GradientEntry) -> Scalar:
        dense = (o if o is value else element_at(o, entry.indices, len(value.shape)) for o in operands)
        return rule(*(entry.value if o is value else o for o in dense))

    entries = tuple(GradientEntry(entry.indices, element(entry)) for entry in value.entries)
    return Sparse(value.shape, node.meta["val"].dtype, entries)


def _keeps_zero(node: fx.Node, name: str, operands: list[Any], place: int) -> bool:
    """Return whether an operation is zero wherever the operand at `place` is zero."""
    if name == "where":
        rest = [o for i, o in enumerate(operands) if i not in (0, place)]
        return place != 0 and all((o.const if isinstance(o, Scalar) else o.fill) == 0 for o in rest)
    if name == "div":
        return place == 0 and not node.kwargs.get("rounding_mode")
    return name in ("mul", "neg", "_to_copy", "convert_element_type")


def _check_shape(node: fx.Node, value: Sparse) -> None:
    if list(node.meta["val"].shape) != dim_sizes(value.shape):
        raise NotImplementedError("it would make a dense gradient of a whole captured tensor")


# -- shapes ----------------------------------------------------------------------------------------------


def _sum(block: Block, node: fx.Node, inputs: list[Any]) -> Sparse:
    value = inputs[0]
    rank = len(value.shape)
    dims = node.args[1] if len(node.args) > 1 and node.args[1] else range(rank)
    sum_dims = {int(d) % rank for d in dims}  # type: ignore
    keep = bool(node.args[2]) if len(node.args) > 2 else False
    shape = tuple(
        fixed_dim(1) if i in sum_dims else d for i, d in enumerate(value.shape) if keep or i not in sum_dims
    )

    def move(indices: Any) -> Any:
        return (ZERO if i in sum_dims else x for i, x in enumerate(indices) if keep or i not in sum_dims)

    return _map_indices(value, shape, move)


def _view(block: Block, node: fx.Node, inputs: list[Any]) -> Sparse:
    value = inputs[0]
    shape = tuple(map(fixed_dim, node.meta["val"].shape))
    return _map_indices(value, shape, lambda i: reshape(block, i, dim_sizes(value.shape), dim_sizes(shape)))


def _permute(block: Block, node: fx.Node, inputs: list[Any]) -> Sparse:
    value = inputs[0]
    order = [int(d) % len(value.shape) for d in node.args[1]]  # type: ignore
    return _map_indices(value, tuple(value.shape[i] for i in order), lambda i: (i[d] for d in order))


RULES: dict[str, Callable[..., Any]] = {
    "index_put": _index_put,
    "select_backward": _select_backward,
    "slice_backward": _slice_backward,
    "add": _add,
    "sum": _sum,
    "permute": _permute,
} | dict.fromkeys(("view", "_unsafe_view", "squeeze", "unsqueeze"), _view)
