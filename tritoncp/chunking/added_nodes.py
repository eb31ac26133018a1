"""Nodes that chunking adds to a graph: sizes of chunks, pieces of values, their concatenation and sum."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._sympy.functions import FloorDiv

from tritoncp.chunking.analysis import Cut
from tritoncp.chunking.sizes import expression

aten = torch.ops.aten


class AddedNodes:
    """Adds nodes to the end of a graph.

    order: nodes of the rewritten graph so far. added: those of them that are new. cache: nodes that several
    steps share, by what they are. dense: nodes whose memory has no gaps, unlike that of the value they stand
    for.
    """

    def __init__(self, cut: Cut) -> None:
        self.cut, self.sizes, self.graph = cut, cut.sizes, cut.graph
        self.output = self.graph.output_node()
        self.order: list[Node] = []
        self.added: list[Node] = []
        self.cache: dict[Any, Any] = {}
        self.dense: set[Node] = set()

    def add_node(self, op: str, target: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Node:
        """Add a node without metadata."""
        with self.graph.inserting_before(self.output):
            node = self.graph.create_node(op, target, args, kwargs)
        self.added.append(node)
        self.order.append(node)
        return node

    def add_call(
        self, target: Any, args: tuple[Any, ...], value: Any, stage: dict[str, Any] | None = None
    ) -> Node:
        """Add a call_function node."""
        node = self.add_node("call_function", target, args)
        node.meta = {**(stage or {}), "val": value}
        return node

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the cached nodes of a key; the first call makes them with ``make``."""
        if key not in self.cache:
            self.cache[key] = make()
        return self.cache[key]

    def rows(self, c: int, factor: int = 1) -> Node:
        """Return the node of the length of chunk c times a factor."""
        if c == self.sizes.chunks - 1:
            whole = self.add_size(operator.mul, self.cut.source, factor)
            return self.add_size(operator.sub, whole, self.first_row(c, factor))
        return self.first_row(1, factor)

    def first_row(self, c: int, factor: int) -> Any:
        """Return the node of the first row of chunk c times a factor; 0 for the first chunk."""
        if c == 0:
            return 0
        unit, count = self.sizes.unit, self.sizes.chunks
        raised = self.add_size(operator.add, self.cut.source, unit * (count - 1))
        part = self.add_size(operator.floordiv, raised, unit * count)
        return self.add_size(operator.mul, part, c * factor * unit)

    def add_size(self, operation: Any, x: Any, y: Any) -> Any:
        """Return the node of an operation on two sizes, each a node or a number; equal ones are one node."""
        if operation is operator.mul and y == 1:
            return x

        def make() -> Node:
            a, b = (n.meta["val"] if isinstance(n, Node) else n for n in (x, y))
            a, b = map(expression, (a, b))
            value = FloorDiv(a, b) if operation is operator.floordiv else operation(a, b)
            return self.add_call(operation, (x, y), self.sizes.symbolic(value))

        return self.once((operation, x, y), make)

    def stage_of(self, node: Node) -> dict[str, Any]:
        """Return the metadata that mark a node as forward or backward."""
        names = ("partitioner_tag", "autograd_backward")
        return {name: node.meta[name] for name in names if name in node.meta}

    def split(self, node: Node, dim: int, factor: int, count: int, stage: dict[str, Any]) -> list[Node]:
        """Split a value of the first ``count`` chunks: views."""
        value = node.meta["val"]
        rows = [self.rows(c, factor) for c in range(count)]
        with self.sizes.fake_mode, self.sizes.env.suppress_guards():
            pieces = [
                value.new_empty_strided(
                    [*value.shape[:dim], size.meta["val"], *value.shape[dim + 1 :]], value.stride()
                )
                for size in rows
            ]
        split = self.add_call(aten.split_with_sizes.default, (node, rows, dim), pieces, stage)
        return [self.add_call(operator.getitem, (split, i), piece, stage) for i, piece in enumerate(pieces)]

    def make_dense(
        self, piece: Node, whole: Tensor, dim: int, value: Tensor, key: Any, stage: dict[str, Any]
    ) -> Node:
        """Copy a piece of a value to contiguous memory, in the memory order of the whole: later views, valid
        for the whole, may be invalid for a piece with gaps."""
        order = self.memory_order(whole)
        if order[0] == dim and 0 not in whole.stride():
            return piece

        def clone(pieces: list[Node], value: Tensor) -> Node:
            order = self.memory_order(whole.squeeze(1) if value.ndim < whole.ndim else whole)
            turned = self.permute(pieces[0], order, stage)
            copy = self.add_dense(aten.clone.default, (turned,), value.permute(order), stage)
            copy.kwargs = {"memory_format": torch.contiguous_format}
            return self.permute(copy, _inverse(order), stage)

        with self.sizes.fake_mode, self.sizes.env.suppress_guards():
            return self.once(key, lambda: self.without_channel([piece], value, stage, clone))

    def without_channel(
        self,
        nodes: list[Node],
        value: Tensor,
        stage: dict[str, Any],
        make: Callable[[list[Node], Tensor], Node],
    ) -> Node:
        """Call ``make`` on nodes of value's shape; for [B, 1, S, D], on views without dimension 1: inductor
        would treat that as channels-last and sort its strides, which fails for unbacked sizes."""
        if value.ndim < 4 or expression(value.shape[1]) != 1:
            return make(nodes, value)
        with self.sizes.fake_mode, self.sizes.env.suppress_guards():
            squeezed = [
                self.add_call(aten.squeeze.dim, (node, 1), node.meta["val"].squeeze(1), stage)
                for node in nodes
            ]
            result = make(squeezed, value.squeeze(1))
        return self.add_call(aten.unsqueeze.default, (result, 1), value, stage)

    def add_dense(self, target: Any, args: tuple[Any, ...], value: Tensor, stage: dict[str, Any]) -> Node:
        """Add a call whose result has the sizes of a value, and no gaps in memory."""
        node, strides = self.add_call(target, args, value, stage), [1]
        for size in reversed(value.shape[1:]):
            strides.insert(0, size * strides[0])
        if any(sympy.expand(expression(a) - expression(b)) != 0 for a, b in zip(strides, value.stride())):
            with self.sizes.fake_mode, self.sizes.env.suppress_guards():
                node.meta["val"] = value.new_empty_strided(value.shape, strides)
            self.dense.add(node)
        return node

    def compute_strides(self) -> None:
        """Compute the metadata of views of dense nodes again. Guards are not suppressed: torch takes what it
        checks then for checked later, too."""
        for node in self.order:
            target: Any = node.target
            source = node.args[0] if node.args else None
            if source not in self.dense or not (
                target is operator.getitem or getattr(target, "is_view", False)
            ):
                continue
            args, kwargs = map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
            with self.sizes.fake_mode:
                node.meta["val"] = target(*args, **kwargs)
            self.dense.add(node)

    def memory_order(self, value: Tensor) -> list[int]:
        """Return a tensor's dimensions from the outermost to the innermost in memory; dimensions of size 1
        and expanded ones keep their places."""
        strides: list[float] = []
        for d in reversed(range(value.ndim)):
            stride = self.sizes.hint(expression(value.stride(d)))
            stride = None if stride == 0 or expression(value.shape[d]) == 1 else stride
            strides.append(float(stride) if stride is not None else (strides[-1] if strides else 1.0))
        strides.reverse()
        return sorted(range(value.ndim), key=lambda d: -strides[d])

    def permute(self, node: Node, order: list[int], stage: dict[str, Any]) -> Node:
        """Permute the dimensions of a value; return the node itself if they are in this order."""
        if order == sorted(order):
            return node
        with self.sizes.fake_mode, self.sizes.env.suppress_guards():
            value = node.meta["val"].permute(order)
        return self.add_call(aten.permute.default, (node, order), value, stage)

    def concatenate(
        self, pieces: list[Node], dim: int, like: Tensor, value: Tensor, stage: dict[str, Any]
    ) -> Node:
        """Concatenate chunks along a dimension, in the memory order of ``like``."""
        if len(pieces) == 1:
            return pieces[0]
        order = self.memory_order(like)
        turned = [self.permute(piece, order, stage) for piece in pieces]
        with self.sizes.fake_mode, self.sizes.env.suppress_guards():
            joined = value.permute(order)
        cat = self.add_dense(aten.cat.default, (turned, order.index(dim)), joined, stage)
        return self.permute(cat, _inverse(order), stage)

    def add_up(self, nodes: list[Node], value: Tensor, stage: dict[str, Any]) -> Node:
        """Add the sum of nodes, from the first to the last."""
        total = nodes[0]
        for node in nodes[1:]:
            total = self.add_call(aten.add.Tensor, (total, node), value, stage)
        return total


def _inverse(order: list[int]) -> list[int]:
    return [order.index(d) for d in range(len(order))]
