"""Search of all orders of a small graph, for the fastest one within a memory limit."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch.fx import Node

from tritoncp.chunking.streams.costs import Cost, Kind
from tritoncp.chunking.streams.storages import LiveBytes, Storages
from tritoncp.chunking.streams.timeline import Clock

SMALL = 10  # nodes, besides inputs and output, up to which all orders are compared


def is_small(nodes: list[Node]) -> bool:
    """Whether a graph has few enough nodes to compare all orders."""
    return sum(node.op not in ("placeholder", "output") for node in nodes) <= SMALL


class Search:
    """A depth-first search over the orders of a graph. States that the same nodes lead to at the same times
    are visited once.

    needs:  nodes that each node follows
    way:    seconds from the start of each node to the end of the graph, by the longest way
    memory: most bytes alive, None for any number
    """

    def __init__(
        self,
        nodes: list[Node],
        costs: dict[Node, Cost],
        storages: Storages,
        needs: dict[Node, list[Node]],
        way: Callable[[Node], float],
        memory: int | None,
        boxed: bool,
    ) -> None:
        self.nodes, self.costs, self.storages = nodes, costs, storages
        self.needs, self.way, self.memory, self.boxed = needs, way, memory, boxed
        self.best: list[Node] | None = None
        self.makespan = float("inf")
        self.visited: set[object] = set()

    def run(self) -> list[Node] | None:
        """Return the fastest order within the memory, None if there is none."""
        self._extend([], Clock(self.costs, self.storages), LiveBytes(self.storages, self.boxed))
        return self.best

    def _extend(self, order: list[Node], clock: Clock, live: LiveBytes) -> None:
        if len(order) == len(self.nodes):
            makespan = max(clock.compute, clock.communication)
            if makespan < self.makespan:
                self.best, self.makespan = list(order), makespan
            return
        done = set(order)
        left = [node for node in self.nodes if node not in done]
        if self._bound(left, clock) >= self.makespan:
            return
        state = frozenset(left), clock.compute, clock.communication, frozenset(clock.pending.items())
        if state in self.visited:
            return
        self.visited.add(state)
        for node in left:
            if all(other in done for other in self.needs[node]):
                next_clock, next_live = self._copies(clock, live)
                next_clock.run(node)
                next_live.run(node)
                if self.memory is None or next_live.peak <= self.memory:
                    self._extend([*order, node], next_clock, next_live)

    @staticmethod
    def _copies(clock: Clock, live: LiveBytes) -> tuple[Clock, LiveBytes]:
        clock, live = copy.copy(clock), copy.copy(live)
        clock.pending, live.users = dict(clock.pending), list(live.users)
        return clock, live

    def _bound(self, left: list[Node], clock: Clock) -> float:
        """Return a time before which no order of the nodes left ends."""
        messages = sum(self.costs[node].seconds for node in left if self.costs[node].kind is Kind.MESSAGE)
        total = sum(self.costs[node].seconds for node in left)
        way = max(self.way(node) for node in left)
        return max(clock.compute + total - messages, clock.communication + messages, clock.compute + way)
