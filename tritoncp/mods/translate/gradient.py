"""Operations on the gradient of a captured tensor, which is zero but at a few indices.

Such a gradient is a `Sparse`. Backward graphs are linear in it: a scatter makes one, and products with dense
factors, sums and reshapes map its entries. An operation whose result would be dense is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import fx

from tritoncp.mods.translate.index_maps import (
    MAX_UNROLLED,
    ZERO,
    as_dense,
    as_sparse,
    broadcast,
    collapse,
    dim_sizes,
    element_at,
    reshape,
    scatter,
    shift,
    wrap,
)
from tritoncp.mods.translate.pointwise_ops import BINARY, UNARY, where
from tritoncp.mods.translate.symbolic import Block, Dim, Entry, Scalar, Sparse, Value, fixed_dim, weak_scalar
from tritoncp.mods.translate.view_ops import permutation


class GradientScope(NamedTuple):
    """The values that gradient operations need besides their operands.

    block: takes the emitted lines
    captures: the dimensions of each captured tensor that needs a gradient
    """

    block: Block
    captures: tuple[tuple[Dim, ...], ...]


MAKERS = frozenset(["zeros_and_scatter", "select_backward", "slice_backward", "index_put"])  # of a Sparse


def has_sparse(inputs: Sequence[Any]) -> bool:
    """Whether an operand, or an item of a list of operands, is the gradient of a tensor with dimensions."""
    return any(isinstance(i, Sparse) for i in _flatten(inputs))


def is_short(inputs: Sequence[Any]) -> bool:
    """Whether every Sparse among the operands may be written out element by element."""
    shapes = [dim_sizes(i.shape) for i in _flatten(inputs) if isinstance(i, Sparse)]
    return all(math.prod(shape) <= MAX_UNROLLED for shape in shapes)


def _flatten(inputs: Sequence[Any]) -> list[Any]:
    """Operands and items of lists of operands; a Scalar, which is a tuple too, is an operand."""
    lists = [i if type(i) in (list, tuple) else [i] for i in inputs]
    return [item for items in lists for item in items]


def make_dense(block: Block, inputs: Sequence[Any]) -> list[Any]:
    """The operands with each Sparse as a Lazy."""

    def convert(value: Any) -> Any:
        if type(value) in (list, tuple):
            return make_dense(block, value)
        return as_dense(block, value, BINARY["add"], where) if isinstance(value, Sparse) else value

    return [convert(value) for value in inputs]


def emit_operation(scope: GradientScope, node: fx.Node, name: str, inputs: list[Any]) -> Value:
    """Emit the operation `name` on gradients of captured tensors.

    Raises NotImplementedError where its result would be dense.
    """
    rule = RULES.get(name)
    if rule is None:
        raise NotImplementedError("it would make a dense gradient of a whole captured tensor")
    value = rule(scope, node, inputs)
    return collapse(value, scope.block, BINARY["add"]) if isinstance(value, Sparse) else value


def _result_dims(node: fx.Node, *like: Value) -> tuple[Dim, ...]:
    return broadcast(list(node.meta["val"].shape), like)


def _map_indices(value: Sparse, shape: tuple[Dim, ...], change: Callable[[Any], Any]) -> Sparse:
    return Sparse(shape, value.dtype, tuple(Entry(tuple(change(e.indices)), e.value) for e in value.entries))


# -- scatters --------------------------------------------------------------------------------------------


def _zeros_and_scatter(scope: GradientScope, node: fx.Node, inputs: list[Any]) -> Sparse:
    indices = inputs[1]
    return _scatter(scope, node, indices, inputs[2])


def _index_put(scope: GradientScope, node: fx.Node, inputs: list[Any]) -> Sparse:
    base = as_sparse(inputs[0])
    if base.entries:
        raise NotImplementedError("an edit of a tensor that is not zero")
    indices = inputs[1]
    return _scatter(scope, node, indices, inputs[2])


def _scatter(scope: GradientScope, node: fx.Node, indices: Sequence[Any], values: Any) -> Sparse:
    if not all(i is None or isinstance(i, Scalar) for i in indices):
        raise NotImplementedError("a gradient through an index that is itself a whole tensor")
    shape = _read_dims(scope, node.meta["val"].shape)
    return scatter(scope.block, shape, indices, as_sparse(values))


def _read_dims(scope: GradientScope, shape: Sequence[int]) -> tuple[Dim, ...]:
    """The dimensions of a gradient, read from captured tensors with the same sizes if there are any.

    Any source that gives the traced size at run time is right; that of a capture fits other sizes too.
    """
    by_size: dict[int, Dim] = {}
    for dims in scope.captures:
        if shape and dim_sizes(dims[-len(shape) :]) == list(shape):
            return dims[-len(shape) :]
        by_size = {dim.size: dim for dim in dims} | by_size
    return tuple(by_size.get(size, fixed_dim(size)) for size in shape)


def _select_backward(scope: GradientScope, node: fx.Node, inputs: list[Any]) -> Sparse:
    shape = _read_dims(scope, node.meta["val"].shape)
    dim, index = int(node.args[2]) % len(shape), node.args[3]  # type: ignore
    place = wrap(scope.block, shape[dim], weak_scalar(index))  # type: ignore[arg-type]
    return _map_indices(as_sparse(inputs[0]), shape, lambda i: (*i[:dim], place, *i[dim:]))


def _slice_backward(scope: GradientScope, node: fx.Node, inputs: list[Any]) -> Sparse:
    shape = _result_dims(node)
    dim, start, end, step = node.args[2:6]
    dim = int(dim) % len(shape)  # type: ignore[arg-type]
    begin = slice(start, end, step).indices(shape[dim].size)[0]

    def move(i: Any) -> Any:
        return (*i[:dim], shift(scope.block, i[dim], begin, int(step)), *i[dim + 1 :])  # type: ignore[arg-type]

    return _map_indices(as_sparse(inputs[0]), shape, move)


# -- linear operations -----------------------------------------------------------------------------------


def _add(scope: GradientScope, node: fx.Node, inputs: list[Any]) -> Sparse:
    a, b = as_sparse(inputs[0]), as_sparse(inputs[1])
    if dim_sizes(a.shape) != dim_sizes(b.shape) or node.kwargs.get("alpha", 1) != 1:
        raise NotImplementedError("a sum of gradients of different shapes")
    return Sparse(a.shape, node.meta["val"].dtype, a.entries + b.entries)


def _sub(scope: GradientScope, node: fx.Node, inputs: list[Any]) -> Sparse:
    b = _map_values(
        scope, node, as_sparse(inputs[1]), lambda value, _: UNARY["neg"](scope.block, value.dtype, value)
    )
    return _add(scope, node, [inputs[0], b])


def _map_values(
    scope: GradientScope, node: fx.Node, value: Sparse, change: Callable[[Scalar, Any], Scalar]
) -> Sparse:
    dtype = node.meta["val"].dtype
    entries = tuple(Entry(e.indices, change(e.value, e.indices)) for e in value.entries)
    return Sparse(value.shape, dtype, entries)


def _check_shape(node: fx.Node, value: Sparse) -> None:
    if list(node.meta["val"].shape) != dim_sizes(value.shape):
        raise NotImplementedError("it would make a dense gradient of a whole captured tensor")


def _factor_rule(name: str) -> Callable[..., Sparse]:
    """The rule of a product with, or a division by, a dense value, which is read at each entry's index."""

    def rule(scope: GradientScope, node: fx.Node, inputs: list[Any]) -> Sparse:
        a, b = inputs[:2]
        if not isinstance(a, Sparse):
            if name != "mul":
                raise NotImplementedError("division by a gradient")
            a, b = b, a
        if isinstance(b, Sparse) or node.kwargs.get("rounding_mode"):
            raise NotImplementedError("a gradient of a gradient")
        _check_shape(node, a)
        rank, dtype = len(a.shape), node.meta["val"].dtype
        return _map_values(
            scope, node, a, lambda v, i: BINARY[name](scope.block, dtype, v, element_at(b, i, rank))
        )

    return rule


def _where(scope: GradientScope, node: fx.Node, inputs: list[Any]) -> Sparse:
    condition, a, b = inputs
    zero = weak_scalar(0)
    value = as_sparse(a) if isinstance(a, Sparse) else as_sparse(b)
    other = b if isinstance(a, Sparse) else a
    if isinstance(condition, Sparse) or isinstance(other, Sparse) or _constant_of(other) != 0:
        raise NotImplementedError("it would make a dense gradient of a whole captured tensor")
    _check_shape(node, value)
    rank, dtype = len(value.shape), node.meta["val"].dtype

    def select(v: Scalar, i: Any) -> Scalar:
        pair = (v, zero) if isinstance(a, Sparse) else (zero, v)
        return where(scope.block, dtype, element_at(condition, i, rank), *pair)

    return _map_values(scope, node, value, select)


def _masked_fill(scope: GradientScope, node: fx.Node, inputs: list[Any]) -> Sparse:
    value, condition, fill = inputs
    return _where(scope, node, [condition, fill, value])


def _constant_of(value: Any) -> Any:
    return value.const if isinstance(value, Scalar) else value.fill


def _neg(scope: GradientScope, node: fx.Node, inputs: list[Any]) -> Sparse:
    return _map_values(scope, node, inputs[0], lambda v, _: UNARY["neg"](scope.block, v.dtype, v))


def _to_copy(scope: GradientScope, node: fx.Node, inputs: list[Any]) -> Sparse:
    dtype = node.meta["val"].dtype
    return _map_values(scope, node, inputs[0], lambda v, _: scope.block.convert(v, dtype))


# -- shapes ----------------------------------------------------------------------------------------------


def _sum(scope: GradientScope, node: fx.Node, inputs: list[Any]) -> Sparse:
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


def _view(scope: GradientScope, node: fx.Node, inputs: list[Any]) -> Sparse:
    value, new = inputs[0], list(node.meta["val"].shape)
    shape = _result_dims(node)
    return _map_indices(value, shape, lambda i: reshape(scope.block, i, dim_sizes(value.shape), new))


def _permute(scope: GradientScope, node: fx.Node, inputs: list[Any]) -> Sparse:
    value = inputs[0]
    order = permutation(node, len(value.shape))
    return _map_indices(value, tuple(value.shape[i] for i in order), lambda i: (i[d] for d in order))


def _expand(scope: GradientScope, node: fx.Node, inputs: list[Any]) -> Sparse:
    _check_shape(node, inputs[0])
    return inputs[0]


def _identity(scope: GradientScope, node: fx.Node, inputs: list[Any]) -> Sparse:
    return inputs[0]


RULES: dict[str, Callable[..., Any]] = {
    "zeros_and_scatter": _zeros_and_scatter,
    "index_put": _index_put,
    "select_backward": _select_backward,
    "slice_backward": _slice_backward,
    "add": _add,
    "sub": _sub,
    "mul": _factor_rule("mul"),
    "div": _factor_rule("div"),
    "where": _where,
    "masked_fill": _masked_fill,
    "neg": _neg,
    "_to_copy": _to_copy,
    "convert_element_type": _to_copy,
    "sum": _sum,
    "permute": _permute,
    "transpose": _permute,
    "t": _permute,
    "expand": _expand,
} | dict.fromkeys(("view", "_unsafe_view", "reshape", "squeeze", "unsqueeze"), _view) | dict.fromkeys(
    ("clone", "detach", "alias", "contiguous"), _identity
)  # fmt: skip
