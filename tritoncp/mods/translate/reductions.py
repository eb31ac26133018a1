"""Concatenations and reductions of short tensors, unrolled into operations on their elements.

A kernel computes a score_mod for every pair of query and key, and tiles have no axis to reduce over. So
`(a[i] * b[j]).sum()` with rows of 64 elements becomes 64 products and 63 additions. MAX_UNROLLED limits the
number of elements.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from tritoncp.mods.translate.index_maps import check_length, constant_index, shift
from tritoncp.mods.translate.pointwise_ops import BINARY, COMPARE, where
from tritoncp.mods.translate.symbolic import (
    Block,
    Indices,
    Lazy,
    Scalar,
    Value,
    as_flag,
    as_rep,
    constant,
    fixed_dim,
)

Fold = Callable[[Block, torch.dtype, list[Scalar]], Scalar]


# -- reductions ------------------------------------------------------------------------------------------


def _fold(name: str, dtype: torch.dtype | None = None) -> Fold:
    """Make a fold by a binary operation from the first to the last element, in ``dtype`` or the result's
    dtype; half precisions in float32, as in torch."""

    def fold(block: Block, result: torch.dtype, elements: list[Scalar]) -> Scalar:
        wide = torch.float32 if result.itemsize == 2 and result.is_floating_point else dtype or result
        values = (block.convert(e, wide) for e in elements)
        return block.convert(functools.reduce(lambda a, b: BINARY[name](block, wide, a, b), values), result)

    return fold


_FOLDS: dict[str, Fold] = {
    "sum": _fold("add"),
    "prod": _fold("mul"),
    "amax": _fold("maximum"),
    "amin": _fold("minimum"),
    "any": _fold("bitwise_or", torch.bool),
    "all": _fold("bitwise_and", torch.bool),
}


def _reduction_rule(fold: Fold) -> Callable[..., Value]:
    """Make the rule of a reduction. It raises TooLong for more than MAX_UNROLLED elements."""

    def rule(block: Block, node: fx.Node, inputs: list[Any], result: Tensor) -> Value:
        source, (dims, keep) = inputs[0], _dims_and_keep(node)
        shape = () if isinstance(source, Scalar) else source.shape
        reduced = {int(d) % max(len(shape), 1) for d in dims} or set(range(len(shape)))
        sizes = [shape[d].size for d in sorted(reduced) if d < len(shape)]
        check_length(math.prod(sizes))
        if math.prod(sizes) == 0:
            raise NotImplementedError("a reduction of no elements")

        def at(outer: Indices) -> Scalar:
            if isinstance(source, Scalar):
                return fold(block, result.dtype, [source])
            rest = (index for i, index in enumerate(outer) if not (keep and i in reduced))
            template = [None if i in reduced else next(rest) for i in range(len(shape))]
            elements = []
            for place in itertools.product(*map(range, sizes)):
                numbers = map(constant_index, place)
                elements.append(source.at(tuple(next(numbers) if i is None else i for i in template)))
            return fold(block, result.dtype, elements)

        remaining = [(i, dim) for i, dim in enumerate(shape) if keep or i not in reduced]
        dims_left = tuple(fixed_dim(1) if i in reduced else dim for i, dim in remaining)
        return Lazy(dims_left, result.dtype, functools.cache(at)) if dims_left else at(())

    return rule


def _dims_and_keep(node: fx.Node) -> tuple[list[int], bool]:
    """Return the arguments (`dim` or prims' `dims`, `keepdim`) of a reduction; [] for all dimensions."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    arguments = dict(zip(names, node.args)) | node.kwargs
    dims: Any = arguments.get("dim", arguments.get("dims"))
    return [dims] if isinstance(dims, int) else list(dims or ()), bool(arguments.get("keepdim", False))


# -- concatenations ---------------------------------------------------------------------------


def _cat(block: Block, node: fx.Node, inputs: list[Any], result: Tensor) -> Value:
    dim = _dim(node, result.ndim)
    check_length(len(inputs[0]))
    parts = [part for part in inputs[0] if len(part.shape) == result.ndim]  # torch skips empty 1-d tensors
    starts = list(itertools.accumulate((part.shape[dim].size for part in parts), initial=0))
    total = fixed_dim(result.shape[dim])
    shape = tuple(total if i == dim else d for i, d in enumerate(parts[0].shape))

    def element(part: Lazy, start: int, indices: Indices) -> Scalar:
        index = shift(block, indices[dim], -start, 1)
        if index.at.const is None:
            place = as_rep(index.at, "int64")
            check = as_flag(f"inside({place}, {part.shape[dim].size})", index.at.axes)
            index = index._replace(valid=" & ".join(filter(None, [index.valid, check])))
        return block.convert(part.at((*indices[:dim], index, *indices[dim + 1 :])), result.dtype)

    def at(indices: Indices) -> Scalar:
        index = indices[dim].at
        ranges = [r for r in zip(parts, starts) if r[0].shape[dim].size]
        if index.const is not None:
            part, start = next((p, s) for p, s in reversed(ranges) if s <= int(index.const))
            return element(part, start, indices)
        chosen = element(*ranges[0], indices)
        for part, start in ranges[1:]:
            reached = COMPARE["ge"](block, torch.int64, index, constant(start, torch.int64))
            chosen = where(block, result.dtype, reached, element(part, start, indices), chosen)
        return chosen

    return Lazy(shape, result.dtype, functools.cache(at))


def _dim(node: fx.Node, rank: int) -> int:
    dim: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return int(dim) % rank


SHORT_TENSORS: dict[str, Callable[..., Any]] = {
    **{name: _reduction_rule(fold) for name, fold in _FOLDS.items()},
    "cat": _cat,
}
