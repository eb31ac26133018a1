"""Nodes that chunking adds to a graph: sizes of chunks, pieces of values, their concatenation and sum."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from tritoncp.chunking.analysis import Cut
from tritoncp.chunking.sizes import expression

aten = torch.ops.aten


class AddedNodes:
    """Adds nodes to the end of a graph.

    source: node of the size that is cut
    order:  nodes of the rewritten graph so far
    added:  the new nodes among them
    cache:  nodes that several steps share, by key
    dense:  nodes whose memory has no gaps, in contrast to the value that they replace
    """

    source: Node

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
        self,
        target: Any,
        args: tuple[Any, ...],
        stage: dict[str, Any] | None = None,
        value: Any = None,
        **kwargs: Any,
    ) -> Node:
        """Add a call_function node. value: None, to run the call on fake values"""
        node = self.add_node("call_function", target, args, kwargs)
        node.meta = {**(stage or {}), "val": self.evaluate(node) if value is None else value}
        return node

    def evaluate(self, node: Node, guards: bool = False) -> Any:
        """Run a call on the fake values of its arguments, without guards."""
        target: Any = node.target
        args, kwargs = map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
        with self.sizes.fake_mode, nullcontext() if guards else self.sizes.env.suppress_guards():
            return target(*args, **kwargs)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the cached nodes of a key; the first call makes them with ``make``."""
        if key not in self.cache:
            self.cache[key] = make()
        return self.cache[key]

    def rows(self, c: int, factor: int = 1) -> Node:
        """Return the node of the length of chunk c times a factor."""
        if c == self.sizes.chunks - 1:
            whole = self.add_size(operator.mul, self.source, factor)
            return self.add_size(operator.sub, whole, self.first_row(c, factor))
        return self.first_row(1, factor)

    def first_row(self, c: int, factor: int) -> Any:
        """Return the node of the first row of chunk c times a factor; 0 for the first chunk."""
        if c == 0:
            return 0
        unit, count = self.sizes.unit, self.sizes.chunks
        raised = self.add_size(operator.add, self.source, unit * (count - 1))
        part = self.add_size(operator.floordiv, raised, unit * count)
        return self.add_size(operator.mul, part, c * factor * unit)

    def add_size(self, operation: Any, x: Any, y: Any) -> Any:
        """Return the node of an operation on two sizes, each a node or a number; equal ones are one node."""
        if operation is operator.mul and y == 1:
            return x
        return self.once((operation, x, y), lambda: self.add_call(operation, (x, y)))

    def stage_of(self, node: Node) -> dict[str, Any]:
        """Return the metadata that mark a node as forward or backward."""
        names = ("partitioner_tag", "autograd_backward")
        return {name: node.meta[name] for name in names if name in node.meta}

    def split(self, node: Node, dim: int, factor: int, count: int, stage: dict[str, Any]) -> list[Node]:
        """Split a value of the first ``count`` chunks: views."""
        rows = [self.rows(c, factor) for c in range(count)]
        split = self.add_call(aten.split_with_sizes.default, (node, rows, dim), stage)
        return [self.add_call(operator.getitem, (split, c), stage) for c in range(count)]

    def make_dense(self, piece: Node, dim: int, value: Tensor, stage: dict[str, Any]) -> Node:
        """Copy a piece of a value to contiguous memory, in the memory order of the whole: later views, valid
        for the whole, may be invalid for a piece with gaps.

        value: fake value of the piece, as a view of the whole
        """
        if self.memory_order(value)[0] == dim and 0 not in value.stride():
            return piece

        def clone(pieces: list[Node], value: Tensor) -> Node:
            order = self.memory_order(pieces[0].meta["val"])
            turned = self.permute(pieces[0], order, stage)
            copied = {"memory_format": torch.contiguous_format}
            return self.add_dense(aten.clone.default, (turned,), value, order, stage, **copied)

        return self.without_channel([piece], value, stage, clone)

    def add_dense(
        self,
        target: Any,
        args: tuple[Any, ...],
        value: Tensor,
        order: list[int],
        stage: dict[str, Any],
        **kwargs: Any,
    ) -> Node:
        """Add a call whose result has the sizes of a value, permuted, and no gaps in memory; permute it
        back."""
        with self.sizes.fake_mode, self.sizes.env.suppress_guards():
            turned, strides = value.permute(order), [1]
            for size in reversed(turned.shape[1:]):
                strides.insert(0, size * strides[0])
            pairs = zip(strides, turned.stride())
            has_gaps = any(sympy.expand(expression(a) - expression(b)) != 0 for a, b in pairs)
            if has_gaps:
                turned = turned.new_empty_strided(turned.shape, strides)
        node = self.add_call(target, args, stage, turned, **kwargs)
        if has_gaps:
            self.dense.add(node)
        return self.permute(node, _inverse(order), stage)

    def without_channel(
        self,
        nodes: list[Node],
        value: Tensor,
        stage: dict[str, Any],
        make: Callable[[list[Node], Tensor], Node],
    ) -> Node:
        """Call ``make`` on nodes of value's shape. For [B, 1, S, D] pass views without dimension 1: inductor
        would treat them as channels-last and sort their strides, which fails for unbacked sizes."""
        if value.ndim < 4 or expression(value.shape[1]) != 1:
            return make(nodes, value)
        squeezed = [self.add_call(aten.squeeze.dim, (node, 1), stage) for node in nodes]
        return self.add_call(aten.unsqueeze.default, (make(squeezed, value.squeeze(1)), 1), stage, value)

    def compute_strides(self) -> None:
        """Compute the metadata of views of dense nodes again. Guards are allowed, since these views are the
        user's."""
        for node in self.order:
            source = node.args[0] if node.args else None
            is_view = node.target is operator.getitem or getattr(node.target, "is_view", False)
            if source in self.dense and is_view:
                node.meta["val"] = self.evaluate(node, guards=True)
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
        return node if order == sorted(order) else self.add_call(aten.permute.default, (node, order), stage)

    def concatenate(self, pieces: list[Node], dim: int, value: Tensor, stage: dict[str, Any]) -> Node:
        """Concatenate chunks along a dimension, in the memory order of ``value``."""
        if len(pieces) == 1:
            return pieces[0]
        order = self.memory_order(value)
        turned = [self.permute(piece, order, stage) for piece in pieces]
        return self.add_dense(aten.cat.default, (turned, order.index(dim)), value, order, stage)

    def add_up(self, nodes: list[Node], value: Tensor, stage: dict[str, Any]) -> Node:
        """Add the sum of nodes, from the first to the last. (The sum is not run on fake values: torch cannot
        tell that sizes of a last chunk are not negative.)"""
        total = nodes[0]
        for node in nodes[1:]:
            total = self.add_call(aten.add.Tensor, (total, node), stage, value)
        return total


def _inverse(order: list[int]) -> list[int]:
    return [order.index(d) for d in range(len(order))]
