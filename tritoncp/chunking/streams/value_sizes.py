"""Sizes of the values of a graph's nodes: symbolic sizes by their hints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental import symbolic_shapes

UNBACKED_SIZE = 8192  # taken for a size that depends on data and has no hint


def hint(size: Any) -> int:
    """Return a size as a number: a symbol by its hint, UNBACKED_SIZE for a symbol without one."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    names = ("optimization_hint", "size_hint")  # the second before torch 2.12
    hint_of = next(getattr(symbolic_shapes, name) for name in names if hasattr(symbolic_shapes, name))
    return int(hint_of(size, fallback=UNBACKED_SIZE))


def value_of(node: Node) -> Any:
    """Return the fake value of a node, None for a node without one."""
    return node.meta.get("val")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Iterate over the tensors of a node's value, nested sequences included."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def elements(x: Tensor) -> int:
    """Count the elements of a tensor by hints."""
    count = 1
    for size in x.shape:
        count *= hint(size)
    return count


def bytes_read(value: Any) -> int:
    """Count the bytes of the elements of all tensors of a value."""
    return sum(elements(x) * x.dtype.itemsize for x in tensors_in(value))


def storage_bytes(x: Tensor) -> int:
    """Count the bytes between the first and the last element of a tensor: those of its storage, if the tensor
    is not a view."""
    if not elements(x):
        return 0
    if x.layout != torch.strided:
        return elements(x) * x.dtype.itemsize
    last = sum((hint(size) - 1) * hint(stride) for size, stride in zip(x.shape, x.stride()))
    return (last + 1) * x.dtype.itemsize


def on_meta(value: Any) -> Any:
    """Return a value with each tensor as a meta tensor of hinted sizes and each symbol as a number: formulas
    of FLOPs compare sizes, which symbols that depend on data forbid."""
    if isinstance(value, Tensor):
        return torch.empty([hint(size) for size in value.shape], dtype=value.dtype, device="meta")
    if isinstance(value, torch.SymInt):
        return hint(value)
    if isinstance(value, list | tuple):
        return type(value)([on_meta(item) for item in value])
    return value
