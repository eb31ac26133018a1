"""Order of a graph's nodes that overlaps communication with computation.

List scheduling on the two streams of :mod:`tritoncp.chunking.streams.timeline`: a collective is issued as
soon as its inputs are computed. Of the nodes that are ready to compute, the next is the one whose next
collective has the longest path to the end of the graph.

Ranks that issue collectives in different orders hang. The order depends only on the graph and on predicted
times, which are computed from numbers that are equal on all ranks; ties are broken by the original order.
Hints of symbolic sizes are equal if all ranks trace equal shapes; sizes that depend on data have the same
constant hint everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from tritoncp.chunking.streams.costs import node_costs
from tritoncp.chunking.streams.storages import LiveBytes, Storages, dependencies_of
from tritoncp.chunking.streams.timeline import LEGEND, StreamClock, Timeline, replay
from tritoncp.planning.costs.hardware import Hardware

# Memory limits to try. A schedule exceeds its limit if no ready node fits, so that lower limits may fit
# better.
MEMORY_SHARES = (1.0, 0.96, 0.9, 0.0)


@dataclass(frozen=True)
class Order:
    """The result of :func:`order`: predicted timelines before and after, and the order that was chosen.

    variant: "as written" or "list schedule"
    """

    before: Timeline
    after: Timeline
    variant: str

    def __str__(self) -> str:
        longest = max(self.before.makespan, self.after.makespan)
        before, after = (run.format(makespan=longest) for run in (self.before, self.after))
        return f"as written: {before}\n\n{self.variant}: {after}\n\n{LEGEND}"


class CostedGraph:
    """A graph to be ordered: its nodes in their original order, with costs, storages and indices.

    needs:     nodes that each node depends on
    followers: nodes that depend on each node
    way:       length in seconds of the longest path from the start of each node to the end of the graph
    exchange:  priority of each node, the smallest first: (-way, index) of the next message after it
    """

    def __init__(self, gm: GraphModule, hardware: Hardware) -> None:
        self.nodes, self.costs, self.storages = list(gm.graph.nodes), node_costs(gm, hardware), Storages(gm)
        self.place = {node: at for at, node in enumerate(self.nodes)}
        self.needs = dependencies_of(gm, self.storages)
        self.followers: dict[Node, list[Node]] = {node: [] for node in self.nodes}
        self.way: dict[Node, float] = {}
        self.exchange: dict[Node, tuple[float, ...]] = {}
        for node in self.nodes:
            for other in self.needs[node]:
                self.followers[other].append(node)
        far = (math.inf,)
        for node in reversed(self.nodes):
            behind = self.followers[node]
            self.way[node] = self.costs[node].seconds + max((self.way[x] for x in behind), default=0.0)
            self.exchange[node] = min((self.exchange[x] for x in behind), default=far)
            if self.costs[node].kind == "message":
                self.exchange[node] = -self.way[node], self.place[node]


def order(gm: GraphModule, hardware: Hardware, memory: int | None = None, *, boxed: bool = False) -> Order:
    """Reorder the nodes of a graph in place, so that communication overlaps with computation.

    >>> import torch
    >>> from tritoncp.planning.costs.hardware import NVLINK
    >>> gm = torch.export.export(torch.nn.Linear(4, 4), (torch.ones(8, 4),)).graph_module
    >>> print(str(order(gm, NVLINK)).splitlines()[0])  # doctest: +ELLIPSIS
    as written: ... ms, of which 0 ms of communication exposed; ...

    The predicted time never grows, unless only a slower order fits in ``memory``.

    Args:
        gm: forward, backward or joint graph.
        hardware: rates of the GPU and the interconnect, a :class:`tritoncp.planning.costs.hardware.Hardware`.
        memory: max bytes alive, inputs included (``Timeline.peak``); None: unlimited.
        boxed: whether the graph frees its inputs after their last user, see :func:`predict_timeline`.

    Returns:
        An :class:`Order` with the predicted timelines before and after.

    Raises:
        ValueError: if no order fits in ``memory``; the graph is not changed.
    """
    graph = CostedGraph(gm, hardware)
    limits = [None] if memory is None else [int(share * memory) for share in MEMORY_SHARES]
    orders = [graph.nodes, *(ListSchedule(graph, limit, boxed).nodes() for limit in limits)]
    runs = [replay(nodes, graph.costs, graph.storages, boxed) for nodes in orders]
    fitting = [at for at, run in enumerate(runs) if memory is None or run.peak <= memory]
    if not fitting:
        least = min(run.peak for run in runs)
        raise ValueError(
            f"memory={memory}: the graph needs {runs[0].peak} bytes in its present order, and at least "
            f"{least} in all others that were tried; pass memory={least} or more"
        )
    best = min(fitting, key=lambda at: (_rounded(runs[at].makespan), runs[at].peak))
    _reorder(gm, orders[best])
    return Order(runs[0], runs[best], "list schedule" if best else "as written")


def _rounded(seconds: float) -> float:
    """Round a time to nine digits: the last digits depend on the order of summation."""
    return float(f"{seconds:.9g}")


def _reorder(gm: GraphModule, nodes: list[Node]) -> None:
    """Reorder the nodes of a graph in place, with the output last."""
    *inner, output = nodes
    for node in inner:
        output.prepend(node)
    gm.graph.lint()
    gm.recompile()


class ListSchedule:
    """One pass of list scheduling.

    The priority of a node is the path length of its next exchange. If it were the path length of the node,
    chunks would advance in lockstep, and no message would overlap with another chunk's computation. Now all
    nodes before one exchange tie, and the chunks run one after another.

    memory: limit of live bytes; nodes that exceed it are issued only if all ready nodes do. 0: minimise live
        bytes
    """

    def __init__(self, graph: CostedGraph, memory: int | None, boxed: bool) -> None:
        self.graph, self.memory = graph, memory
        self.clock = StreamClock(graph.costs, graph.storages)
        self.bytes = LiveBytes(graph.storages, boxed)
        self.missing = {node: len(needs) for node, needs in graph.needs.items()}
        self.ready: dict[Node, None] = {}
        self.order: list[Node] = []

    def nodes(self) -> list[Node]:
        """Return all nodes in their new order."""
        self.ready = {node: None for node, count in self.missing.items() if not count}
        while self.ready:
            node = self._choose(list(self.ready))
            del self.ready[node]
            self._run(node)
        return self.order

    def _run(self, node: Node) -> None:
        self.order.append(node)
        self.clock.run(node)
        self.bytes.run(node)
        for other in self.graph.followers[node]:
            self.missing[other] -= 1
            if not self.missing[other]:
                self.ready[other] = None

    def _is_free(self, node: Node) -> bool:
        """Return whether a node takes neither time nor memory."""
        return self.graph.costs[node].kind == "nothing" and not self.graph.storages.new_bytes[node]

    def _choose(self, nodes: list[Node]) -> Node:
        costs, way, place = self.graph.costs, self.graph.way, self.graph.place
        if free := [node for node in nodes if self._is_free(node)]:
            return min(free, key=place.__getitem__)
        if self.memory is not None:
            fitting = [node for node in nodes if self.bytes.during(node) <= self.memory]
            if not fitting:
                alive = self.bytes
                return min(nodes, key=lambda node: (alive.after(node), alive.during(node), place[node]))
            nodes = fitting
        messages = [node for node in nodes if costs[node].kind == "message"]
        if messages:
            return min(messages, key=lambda node: (-way[node], place[node]))
        starts = {node: self.clock.start_of(node) for node in nodes}
        first = min(starts.values())
        now = [node for node in nodes if starts[node] <= first]
        waits = [node for node in now if costs[node].kind == "wait"]
        return min(waits or now, key=lambda node: (self.graph.exchange[node], place[node]))
