"""Steps of a chunked graph: each is added after its inputs, and regions run chunk after chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.fx import Node

from tritoncp.chunking.added_nodes import AddedNodes
from tritoncp.chunking.analysis import Cut
from tritoncp.chunking.regions import is_backward
from tritoncp.chunking.report import ChunkingError, describe_node

# A step of the rewritten graph, (node, c): chunk c's copy of the node; KEEP: the node itself; JOIN: the
# joined value of its chunks. For an attention whose chunks share an exchange of keys, SEND is that exchange,
# and RETURN the one of their gradients.
Step = tuple[Node, int]
KEEP, JOIN, SEND, RETURN = -1, -2, -3, -4


class StepGraph(AddedNodes):
    """Adds the steps of the rewritten graph, each after the steps that it reads. Regions run chunk after
    chunk, in the backward pass from the last chunk to the first.

    values: the node of each step that was added
    """

    def __init__(self, cut: Cut) -> None:
        super().__init__(cut)
        self.originals = list(cut.graph.nodes)
        self.values: dict[Step, Node] = {}
        self._begun: set[Step] = set()

    def make(self, node: Node, c: int) -> Node:
        """Add the nodes of a step after its inputs; return the node of its value."""
        raise NotImplementedError

    def value(self, node: Node, c: int) -> Node:
        """Return the node of a step; the first call adds it. Raises ChunkingError for a cycle."""
        path = [] if (node, c) in self.values else [node]
        while path:  # a loop, since paths in a chunk may be longer than the interpreter's stack
            inputs = [x for x in path[-1].all_input_nodes if c >= 0 and x in self.cut.copied]
            missing = [x for x in inputs if (x, c) not in self.values]
            if missing:
                path.append(missing[0])
            else:
                self._add(path.pop(), c)
        return self.values[node, c]

    def _add(self, node: Node, c: int) -> None:
        step = node, c
        if step in self._begun and step not in self.values:
            raise ChunkingError(
                f"{describe_node(node, users=True)}: a chunk needs a value of a later chunk, "
                "and that needs this chunk's update of an input: move the update out of the region"
            )
        if step not in self._begun:
            self._begun.add(step)
            self.values[step] = self.make(node, c)

    def whole_node(self, x: Node) -> Node:
        """Return the node of a node's whole value."""
        if self.cut.is_whole_size(x):
            return self.value(self.source, KEEP)
        return self.value(x, JOIN if x in self.cut.joined else KEEP)

    def chunk_node(self, x: Node, c: int) -> Node:
        """Return the node of a chunk of a node's value, or of the whole value if chunks share it."""
        if self.cut.is_whole_size(x):
            return self.rows(c)
        if x in self.cut.copied:
            return self.value(x, c)
        if x in self.cut.chained and c > 0:
            return self.value(self.cut.chained[x], c - 1)
        node = self.whole_node(x)
        if isinstance(x.meta.get("val"), Tensor) and self.cut.carries(x):
            return self._piece(x, node, c)
        return node

    def _piece(self, x: Node, node: Node, c: int) -> Node:
        """Return a chunk of a value that comes from outside of the regions."""
        value, dim = x.meta["val"], self.cut.cut_dim(x)
        factor, stage = self.cut.factor(x, dim), self.stage_of(x)
        pieces = self.once(("pieces", node), lambda: self.split(node, dim, factor, self.sizes.chunks, stage))
        own = self.sizes.cut(value, range(c, c + 1))
        return self.once(("piece", node, c), lambda: self.make_dense(pieces[c], dim, own, stage))

    def add_steps(self) -> None:
        """Add all steps that the graph's results need."""
        pending: list[Node] = []
        group: Any = None
        is_forward = True
        self.value(self.source, KEEP)
        for node in self.originals:
            if node.op == "call_function" and self.cut.is_whole_size(node):
                continue  # all nodes read the source
            if is_forward and node.op == "call_function" and is_backward(node):
                self._place_chunks(pending, group)
                pending, is_forward = [], False
                self._join_forward()
            if node in self.cut.copied:
                if node not in self.cut.inside:
                    continue
                here = self.cut.inside[node], is_backward(node)
                if here != group:
                    self._place_chunks(pending, group)
                    pending, group = [], here
                pending.append(node)
            elif node not in self.cut.inside or not self.cut.is_pure_size(node):
                if any(x in self.cut.joined for x in node.all_input_nodes):
                    self._place_chunks(pending, group)
                    pending = []
                self.value(node, KEEP)
        self._place_chunks(pending, group)

    def _join_forward(self) -> None:
        """Add the joins of forward values and all sizes before the backward pass, since partitioners assign
        all nodes up to the last one without a backward mark to the forward pass."""
        for node in self.originals:
            if node in self.cut.copied and self.cut.is_pure_size(node):
                for c in range(self.cut.sizes.chunks):
                    self.value(node, c)
        for node in self.cut.joined:
            if not is_backward(node):
                self.value(node, JOIN)

    def _place_chunks(self, nodes: Sequence[Node], group: Any) -> None:
        numbers = range(self.cut.sizes.chunks)
        for c in reversed(numbers) if group and group[1] else numbers:
            for node in nodes:
                self.value(node, c)
