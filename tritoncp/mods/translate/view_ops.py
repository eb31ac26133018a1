"""Rules of views and gathers of captured tensors: from arguments of aten nodes to index maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from tritoncp.mods.translate.index_maps import (
    broadcast,
    dim_sizes,
    element_at,
    gather,
    remap,
    reshape,
    shift,
    wrap,
)
from tritoncp.mods.translate.symbolic import Block, Lazy, Scalar, Value, fixed_dim, weak_scalar


def op_name(op: Any) -> str:
    """Return the name of an aten operation without its overload, and without the underscore of in-place
    ones."""
    name = getattr(getattr(op, "overloadpacket", None), "__name__", str(op))
    return name if name.startswith("__") else name.removesuffix("_")


def _index(block: Block, node: fx.Node, inputs: list[Any], result: Tensor) -> Value:
    return gather(block, inputs[0], inputs[1])


def _select(block: Block, node: fx.Node, inputs: list[Any], result: Tensor) -> Value:
    source, dim, index = inputs[0], int(node.args[1]) % len(inputs[0].shape), node.args[2]  # type: ignore
    place = wrap(block, source.shape[dim], weak_scalar(index))  # type: ignore[arg-type]
    shape = source.shape[:dim] + source.shape[dim + 1 :]
    return remap(source, shape, lambda r: (*r[:dim], place, *r[dim:]))


def _slice(block: Block, node: fx.Node, inputs: list[Any], result: Tensor) -> Value:
    source = inputs[0]
    arguments: list[Any] = [*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :]]
    dim = int(arguments[0]) % len(source.shape)
    start, _, step = slice(*arguments[1:]).indices(source.shape[dim].size)
    if result.shape[dim] == source.shape[dim].size:
        return source
    shape = (*source.shape[:dim], fixed_dim(result.shape[dim]), *source.shape[dim + 1 :])
    return remap(source, shape, lambda r: (*r[:dim], shift(block, r[dim], start, step), *r[dim + 1 :]))


def _permute(block: Block, node: fx.Node, inputs: list[Any], result: Tensor) -> Value:
    source = inputs[0]
    order = [int(d) % len(source.shape) for d in node.args[1]]  # type: ignore
    inverse = [order.index(i) for i in range(len(order))]
    return remap(source, tuple(source.shape[i] for i in order), lambda r: tuple(r[i] for i in inverse))


def _expand(block: Block, node: fx.Node, inputs: list[Any], result: Tensor) -> Value:
    source, rank = inputs[0], result.ndim
    shape = broadcast(list(result.shape), [source])
    return (
        Lazy(shape, result.dtype, lambda r: element_at(source, r, rank), getattr(source, "fill", None))
        if rank
        else source
    )


def _view(block: Block, node: fx.Node, inputs: list[Any], result: Tensor) -> Value:
    source = inputs[0]
    if isinstance(source, Scalar):
        return (
            source
            if not result.ndim
            else Lazy(tuple(map(fixed_dim, result.shape)), source.dtype, lambda _: source)
        )
    old, new = dim_sizes(source.shape), list(result.shape)
    source_dims = iter(dim for dim in source.shape if dim.size != 1)
    same_order = [s for s in old if s != 1] == [s for s in new if s != 1]
    shape = tuple(fixed_dim(s) if s == 1 or not same_order else next(source_dims) for s in new)
    return remap(source, shape, lambda r: reshape(block, r, new, old))


VIEWS: dict[str, Callable[..., Value]] = {
    "index": _index,
    "_unsafe_index": _index,
    "select": _select,
    "slice": _slice,
    "permute": _permute,
    "expand": _expand,
    "view": _view,
    "_unsafe_view": _view,
    "unsqueeze": _view,
    "squeeze": _view,
}
