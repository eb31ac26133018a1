"""The pass that cuts regions of a joint graph into chunks."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from tritoncp.chunking import attention_nodes, shared_attention, torch_attention
from tritoncp.chunking.analysis import Cut
from tritoncp.chunking.regions import is_backward, is_recomputed
from tritoncp.chunking.report import ChunkingError, Report, describe_node, readable
from tritoncp.chunking.sizes import Symbols, expression
from tritoncp.chunking.step_graph import JOIN, KEEP, RETURN, SEND, StepGraph
from tritoncp.core.log_lines import area_logger
from tritoncp.graph.handle_ops import batch_rows_op, part_op

log = area_logger("chunking")
aten = torch.ops.aten


def chunk(
    gm: GraphModule | Graph,
    region: str = "layers.*",
    *,
    dim: str,
    chunks: int = 2,
    needs: Tensor | None = None,
    repeat: bool = False,
) -> Report:
    """Cut the modules of a joint graph that ``region`` names into chunks of the batch or the sequence.

    >>> import torch
    >>> class Model(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    ...     def forward(self, x):
    ...         return self.layers(x)
    >>> x, sizes = torch.randn(2, 9, 4), ({1: torch.export.Dim("seq")},)
    >>> gm = torch.export.export(Model(), (x,), dynamic_shapes=sizes).graph_module
    >>> report = chunk(gm, "layers.*", dim="seq", chunks=3)
    >>> report.chunks, report.live_outs
    (3, {'cat': 1})

    Results equal those of :class:`tritoncp.chunking.Eager`, except that gradients of parameters are summed
    over chunks before they are cast back or reduced between ranks.

    Args:
        gm: joint graph of AOTAutograd or forward graph, whose nodes have ``nn_module_stack``. It is edited.
        region: paths of modules, with * for any name; "" for the whole graph.
        dim: what is cut, "batch" or "seq". Its size is a symbol (:func:`tritoncp.chunking.mark`).
        chunks: number of chunks, at least 2.
        needs: ``plan.needs(chunks)`` of every mask that the graph will run with; None: of the masks that the
            graph shows, and all keys for others.
        repeat: let each chunk exchange the keys of its attention between ranks again. Without it, chunks of
            the sequence share one exchange per pass under the schedules "allgather" and "fetch", for a
            tritoncp.Plan that the graph shows; other attention between ranks raises ChunkingError.

    Returns:
        A :class:`Report` of what was cut.

    Raises:
        ChunkingError: a ValueError, for a graph that cannot be cut; the graph is not changed.
    """
    graph = gm if isinstance(gm, Graph) else gm.graph
    if dim not in ("batch", "seq") or chunks < 2:
        raise ChunkingError(f'dim={dim!r}, chunks={chunks}: pass dim="batch" or "seq", and 2 chunks or more')
    cut = Cut(graph, region, dim, chunks, repeat)
    keys = attention_nodes.Keys(cut, needs)
    report = _report(cut, keys)
    report.before = readable(graph, "before")
    Rewrite(cut, keys).run()
    report.after = readable(graph, "after")
    owner = graph.owning_module
    if isinstance(owner, GraphModule) and owner.graph is graph:
        owner.recompile()
    report.nodes_after = len(graph.nodes)
    return report


def _report(cut: Cut, keys: attention_nodes.Keys) -> Report:
    calls = [node for node in cut.inside if attention_nodes.is_attention(node) and keys.are_cut(node)]
    return Report(
        dim=cut.dim,
        chunks=cut.sizes.chunks,
        rows=cut.sizes.rows,
        regions=tuple(dict.fromkeys(cut.inside.values())),
        live_outs=dict(Counter(cut.joined.values())),
        keys=max((keys.counts(node) for node in calls), default=()),
        exchanges=sum(map(keys.are_shared, calls)),
        nodes_before=len(cut.graph.nodes),
    )


class Rewrite(StepGraph):
    """Edits a graph. If an error is raised, the added nodes are removed again."""

    def __init__(self, cut: Cut, keys: attention_nodes.Keys) -> None:
        super().__init__(cut)
        self.keys = keys
        self.links: list[tuple[Node, Any, Any]] = []  # nodes that stay, and their new arguments
        self.fresh: list[Symbols] = [{} for _ in range(self.sizes.chunks)]

    def run(self) -> None:
        """Add the nodes of all steps, connect the nodes that stay to them, and remove the originals."""
        try:
            self.source = self._find_source()
            self.add_steps()
        except Exception:
            for node in reversed(self.added):
                self.graph.erase_node(node)
            raise
        self.sizes.assert_sizes(self.fresh)
        for node, args, kwargs in self.links:
            node.args, node.kwargs = args, kwargs
        for node in self.order:
            if node.op not in ("placeholder", "output"):
                self.output.prepend(node)
        self.compute_strides()
        remaining = set(self.order)
        for node in reversed(list(self.graph.nodes)):
            if node not in remaining and node.op not in ("placeholder", "output"):
                self.graph.erase_node(node)
        self._remove_unused_nodes()
        self.graph.lint()

    def make(self, node: Node, c: int) -> Node:
        makers: dict[int, Callable[[Node], Node]] = {
            KEEP: self._keep,
            JOIN: self._join,
            SEND: partial(shared_attention.send, self),
            RETURN: partial(shared_attention.return_gradients, self),
        }
        return makers[c](node) if c in makers else self._copy(node, c)

    def _keep(self, node: Node) -> Node:
        args, kwargs = map_arg((node.args, node.kwargs), self.whole_node)
        self.links.append((node, self._add_chunks(node, args), kwargs))
        self.order.append(node)
        return node

    def _remove_unused_nodes(self) -> None:
        """Remove the added sizes, items of splits and sums that no node reads."""
        sizes = operator.floordiv, operator.mul, operator.add, operator.sub
        unused = operator.getitem, *sizes, aten.add.Tensor
        for node in reversed(self.added):
            if not node.users and node.target in unused:
                self.graph.erase_node(node)

    def _find_source(self) -> Node:
        """Return an input that is the whole size, or a new node that reads the size from an input's shape."""
        for x in self.graph.find_nodes(op="placeholder"):
            value: Any = x.meta.get("val")
            if self.cut.is_whole_size(x):
                return x
            for d, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
                if expression(size) == self.sizes.whole:
                    source = self.add_call(aten.sym_size.int, (x, d))
                    self.values[source, KEEP] = source
                    return source
        raise ChunkingError("no input has a dimension of exactly the size that is cut")

    def _join(self, node: Node) -> Node:
        """Join the chunks of a node into one value."""
        chunks, value, stage = range(self.sizes.chunks), node.meta["val"], self.stage_of(node)
        kind = self.cut.joined[node]
        log.debug("%s: %s", describe_node(node), kind)
        if kind == "chain":
            return self.value(node, chunks[-1])
        if kind == "sum":
            return self.add_up([self.value(node, c) for c in reversed(chunks)], value, stage)
        dim = self.cut.cut_dim(node)
        return self.concatenate([self.value(node, c) for c in chunks], dim, value, stage)

    def _add_chunks(self, node: Node, args: Any) -> Any:
        """Return the arguments of a node. A sum of gradients is computed chunk by chunk, in the order in
        which autograd adds the gradients of modules that run once per chunk."""
        gradient: Any = node.args[1] if node.target is aten.add.Tensor else None
        if self.cut.joined.get(gradient) != "sum":
            return args
        *first, last = [self.value(gradient, c) for c in reversed(range(self.sizes.chunks))]
        return self.add_up([args[0], *first], node.meta["val"], self.stage_of(node)), last

    def _copy(self, node: Node, c: int) -> Node:
        """Add a chunk's copy of a node."""
        if (
            (item := attention_nodes.item_of(node)) and item[1] in (1, 2) and self.keys.are_cut(item[0])
        ):  # dk or dv
            return self._sum_key_gradients(node, *item, c)
        target: Any = node.target
        args: Any
        kwargs: Any = {}
        if attention_nodes.is_attention(node) and self.keys.are_shared(node):
            target, args = shared_attention.part_call(self, node, c)
        elif attention_nodes.is_attention(node):
            args = self._attention_arguments(node, c)
        elif torch_attention.is_torch_attention(node):
            args = torch_attention.chunk_arguments(self, node, c)
        else:
            args, kwargs = map_arg((node.args, node.kwargs), lambda x: self.chunk_node(x, c))
        copy = self.add_node(node.op, target, args, kwargs)
        copy.meta = dict(node.meta)
        copy.meta.pop("eager_input_vals", None)
        self.sizes.bind(copy, self.fresh[c])
        copy.meta["val"] = self._value(node, c)
        self._mark(copy, node, c)
        return copy

    def _mark(self, copy: Node, node: Node, c: int) -> None:
        mark = {"tritoncp_chunk": (self.cut.region_of(node), c)}
        copy.meta["custom"] = {**(node.meta.get("custom") or {}), **mark}

    def _value(self, node: Node, c: int) -> Any:
        """Return the value of a chunk's copy, for its metadata."""
        own = self.sizes.cut(node.meta.get("val"), range(c, c + 1), self.fresh[c])
        if node.target is not attention_nodes.backward_op:
            return own
        dq, dk, dv, *rest = own
        if self.keys.are_shared(node):
            dk, dv = shared_attention.gradient_values(self, node)
        elif self.keys.are_cut(node):
            dk, dv = (self.sizes.cut(x, range(self.keys.counts(node)[c])) for x in node.meta["val"][1:3])
        return [dq, dk, dv, *rest]

    def _attention_arguments(self, node: Node, c: int) -> tuple[Any, ...]:
        at = attention_nodes.places(node)
        args: list[Any] = list(node.args)
        for place, arg in enumerate(args):
            if place == at["captures"]:
                args[place] = attention_nodes.chunk_captures(
                    node, self.whole_node, lambda x: self.chunk_node(x, c)
                )
            elif place == at["plan"]:
                args[place] = self._part(node, c)
            elif place in (at["k"], at["v"]) and self.keys.are_cut(node):
                args[place] = self.first_keys(arg, self.keys.counts(node)[c], node)
            else:
                args[place] = map_arg(
                    arg, self.whole_node if place == at["ints"] else lambda x: self.chunk_node(x, c)
                )
        return tuple(args)

    def _part(self, node: Node, c: int) -> Node:
        """Return the handle of the plan of a chunk. Queries that are not cut, for example of a memory, get
        the handle of the whole plan; their gradients are sums over chunks."""
        handle, q = attention_nodes.argument(node, "plan"), attention_nodes.argument(node, "q")
        if not self.cut.carries(q):
            return self.whole_node(handle)
        target: Any = part_op
        args: tuple[Any, ...]
        if self.cut.dim == "batch":
            factor = self.cut.factor(q, 0)
            target, args = batch_rows_op, (self.first_row(c, factor), self.rows(c, factor))
        else:
            count = self.keys.counts(node)[c] if self.keys.are_cut(node) else self.sizes.chunks
            args = c, self.sizes.chunks, None if count == self.sizes.chunks else count
        stage = {
            name: value for name, value in handle.meta.items() if name in ("partitioner_tag", "recompute")
        }
        call = target, (self.whole_node(handle), *args), stage
        return self.once(("part", handle, *args), lambda: self.add_call(*call))

    def first_keys(self, x: Node, count: int, node: Node) -> Node:
        """Return the first chunks of keys or values, concatenated. The backward pass concatenates them again,
        so that only the chunks are saved for it, or nothing in a checkpoint that recomputes them."""
        if count == self.sizes.chunks and x not in self.cut.copied:
            return self.whole_node(x)
        stage = self.stage_of(node)
        if is_recomputed(x) and not is_backward(node):
            stage |= {name: x.meta[name] for name in ("recompute", "ac_graph_id") if name in x.meta}
        pieces = [self.chunk_node(x, c) for c in range(count)]
        key = "keys", x, count, is_backward(node)
        cut = self.sizes.cut(x.meta["val"], range(count))
        return self.once(key, lambda: self.concatenate(pieces, 2, cut, stage))

    def _sum_key_gradients(self, node: Node, call: Node, item: int, c: int) -> Node:
        """Sum the gradient of a chunk of keys or values over the chunks of queries that read it."""
        stage = self.stage_of(node)
        value = self.sizes.cut(call.meta["val"][item], range(c, c + 1))
        if self.keys.are_shared(call):
            terms = [shared_attention.landed_chunks(self, call, item)[c]]
        else:
            terms = [self._key_gradients(call, item, r, stage)[c] for r in self.keys.readers(call, c)]
        if len(terms) > 1:
            total = self.without_channel(terms, value, stage, lambda xs, x: self.add_up(xs, x, stage))
        else:
            total = self.make_dense(terms[0], 2, value, stage)
        self._mark(total, node, c)
        return total

    def _key_gradients(self, call: Node, item: int, reader: int, stage: dict[str, Any]) -> list[Node]:
        """Return the gradients of the chunks of keys or values that a chunk of queries read."""
        count = self.keys.counts(call)[reader]

        def split() -> list[Node]:
            gradient = self.add_call(operator.getitem, (self.value(call, reader), item), stage)
            return [gradient] if count == 1 else self.split(gradient, 2, 1, count, stage)

        return self.once(("gradients", call, reader, item), split)
