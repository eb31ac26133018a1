"""Order of the nodes in a chunked graph: each after its inputs, and in a region chunk after chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from tritoncp.chunking import attention
from tritoncp.chunking.analysis import Cut
from tritoncp.chunking.regions import is_backward
from tritoncp.chunking.report import ChunkingError, describe_node

# A step of the rewritten graph, (node, c): chunk c's copy of the node; KEEP: the node itself; JOIN: the
# joined value of its chunks. For an attention whose chunks share an exchange of keys, SEND is that exchange,
# and RETURN the one of their gradients.
Step = tuple[Node, int]
KEEP, JOIN, SEND, RETURN = -1, -2, -3, -4


class StepGraph:
    """The steps of the rewritten graph, and the steps that each one reads.

    steps: in order: each after the steps that it reads; in a region chunk after chunk, the backward pass from
    the last chunk to the first
    """

    def __init__(self, cut: Cut, keys: attention.Keys) -> None:
        self.cut, self.keys = cut, keys
        self.steps: list[Step] = []
        self._done: set[Step] = set()
        self._place()

    def inputs(self, step: Step) -> list[Step]:
        """Return the steps that a step reads."""
        node, c = step
        if c == JOIN:
            chunks = range(self.cut.sizes.chunks)
            return [(node, i) for i in chunks] if self.cut.joined[node] != "chain" else [(node, chunks[-1])]
        if c == KEEP:
            return [self.whole(x) for x in node.all_input_nodes]
        if c in (SEND, RETURN):
            return self._inputs_of_exchange(step)
        if attention.is_attention(node):
            whole = [self.whole(x) for x in attention.whole_inputs(node)]
            if self.keys.are_shared(node):
                whole.append((node, SEND))
            return whole + [self.chunk_of(x, i) for x, i in self.keys.inputs(node, c)]
        if (item := attention.item_of(node)) and self.sums_keys(item):
            if self.keys.are_shared(item[0]):
                return [(item[0], RETURN)]
            return [(item[0], reader) for reader in self.keys.readers(item[0], c)]
        read_whole = attention.whole_inputs(node)
        return [self.whole(x) if x in read_whole else self.chunk_of(x, c) for x in node.all_input_nodes]

    def _inputs_of_exchange(self, step: Step) -> list[Step]:
        node, kind = step
        chunks = range(self.cut.sizes.chunks)
        inputs = [self.chunk_of(x, i) for x in attention.keys_of(node) for i in chunks]
        inputs += [self.whole(x) for x in attention.whole_inputs(node)]
        return inputs if kind == SEND else inputs + [(node, i) for i in reversed(chunks)]

    def sums_keys(self, item: tuple[Node, int]) -> bool:
        """Return whether a result of attention's backward op is dk or dv of keys that are cut."""
        return item[1] in (1, 2) and self.keys.are_cut(item[0])

    def whole(self, x: Node) -> Step:
        """Return the step of a node's whole value."""
        if self.cut.source is not None and self.cut.is_whole_size(x):
            return self.cut.source, KEEP
        return (x, JOIN) if x in self.cut.joined else (x, KEEP)

    def chunk_of(self, x: Node, c: int) -> Step:
        """Return the step of chunk c of a node's value: the whole's, if the chunk is a view of it or
        shared."""
        if x in self.cut.copied:
            return x, c
        if x in self.cut.chained and c > 0:
            return self.cut.chained[x], c - 1
        return self.whole(x)

    def _place(self) -> None:
        pending: list[Node] = []
        group: Any = None
        is_forward = True
        if self.cut.source is not None:
            self._add((self.cut.source, KEEP))
        for node in self.cut.graph.nodes:
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
                self._add((node, KEEP))
        self._place_chunks(pending, group)

    def _join_forward(self) -> None:
        """Add the joins of forward values and all sizes before the backward pass: partitioners assign all
        nodes up to the last one without a backward mark to the forward pass."""
        for node in self.cut.graph.nodes:
            if node in self.cut.copied and self.cut.is_pure_size(node):
                for c in range(self.cut.sizes.chunks):
                    self._add((node, c))
        for node in self.cut.joined:
            if not is_backward(node):
                self._add((node, JOIN))

    def _place_chunks(self, nodes: Sequence[Node], group: Any) -> None:
        numbers = range(self.cut.sizes.chunks)
        for c in reversed(numbers) if group and group[1] else numbers:
            for node in nodes:
                self._add((node, c))

    def _add(self, step: Step) -> None:
        """Add a step after all steps that it reads. Raises ChunkingError for a cycle."""
        path, active = [step], {step}
        while path:
            top = path[-1]
            missing = [x for x in self.inputs(top) if x not in self._done]
            if not missing:
                path.pop()
                active.discard(top)
                if top not in self._done:
                    self._done.add(top)
                    self.steps.append(top)
                continue
            if missing[0] in active:
                raise ChunkingError(
                    f"{describe_node(missing[0][0], users=True)}: a chunk needs a value of a later chunk, "
                    "and that needs this chunk's update of an input: move the update out of the region"
                )
            path.append(missing[0])
            active.add(missing[0])
