"""Predicted timeline of a graph on two streams, computation and communication, without a device.

Nodes are issued in the graph's order. A collective starts when the computation issued before it is done and
the communication stream is free. The first node that needs its result, usually its wait, blocks computation
until the collective is done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from tritoncp.chunking.streams.costs import NodeCost, node_costs
from tritoncp.chunking.streams.storages import LiveBytes, Storages
from tritoncp.planning.costs.hardware import Hardware

STREAMS = ("compute", "communication")
SIGNS = {"product": "#", "attention": "@", "memory": "-", "message": "=", "wait": " "}
LEGEND = "# products  @ attention  - memory traffic  = messages; digits: the chunk, blank: idle"


@dataclass(frozen=True)
class Span:
    """Start and end of one node on a stream, in seconds from the start of the graph.

    name:  the node's name
    kind:  "product", "attention", "memory", "message", as in :class:`NodeCost`; "wait": computation waits
    chunk: (region, index) of the node's chunk, None for nodes of no chunk
    """

    name: str
    kind: str
    start: float
    end: float
    chunk: tuple[Any, int] | None

    @property
    def stream(self) -> str:
        """The stream: "compute" or "communication"."""
        return STREAMS[self.kind == "message"]

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """The predicted timeline of a graph: spans of both streams in the order of the nodes.

    peak: maximum of live bytes, inputs included
    """

    spans: tuple[Span, ...]
    peak: int

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def compute(self) -> float:
        """Seconds in which the device computes."""
        return sum(span.seconds for span in self.spans if span.kind not in ("message", "wait"))

    @property
    def communication(self) -> float:
        """Seconds in which messages are sent."""
        return sum(span.seconds for span in self.spans if span.kind == "message")

    @property
    def exposed(self) -> float:
        """Seconds of communication that no computation overlaps."""
        return max(0.0, self.makespan - self.compute)

    def __str__(self) -> str:
        return self.format()

    def format(self, width: int = 96, makespan: float | None = None) -> str:
        """Format the timeline as text.

        Args:
            width: number of columns.
            makespan: seconds that the columns represent; None: the makespan of this timeline.

        Returns:
            A line of figures, then for each stream a line of signs for the kinds of its spans, and a line of
            chunk indices.
        """
        scale = (makespan or self.makespan) / width or 1.0
        lines = [
            f"{self.makespan * 1e3:.3g} ms, of which {self.exposed * 1e3:.3g} ms of communication exposed; "
            f"computes {self.compute * 1e3:.3g} ms, sends {self.communication * 1e3:.3g} ms; at most "
            f"{self.peak / 2**20:.4g} MiB live"
        ]
        for stream in STREAMS:
            spans = [span for span in self.spans if span.stream == stream]
            lines.append(f"{stream:>13} |{_columns(spans, scale, width, lambda span: SIGNS[span.kind])}|")
            if any(span.chunk is not None for span in spans):
                lines.append(f"{'chunk':>13} |{_columns(spans, scale, width, _chunk_sign)}|")
        return "\n".join(lines)


def _columns(spans: list[Span], scale: float, width: int, sign_of: Callable[[Span], str]) -> str:
    """Return one sign per column of time: the sign of the spans with the largest share, blank if idle."""
    shares = [Counter({" ": scale}) for _ in range(width)]
    for span in spans:
        for column in range(int(span.start / scale), min(width - 1, int(span.end / scale)) + 1):
            overlap = min(span.end, (column + 1) * scale) - max(span.start, column * scale)
            shares[column][sign_of(span)] += max(0.0, overlap)  # type: ignore[assignment] # a time
            shares[column][" "] -= max(0.0, overlap)  # type: ignore[assignment]
    return "".join(max(share, key=share.__getitem__) for share in shares)


def _chunk_sign(span: Span) -> str:
    if span.kind == "wait":
        return " "
    return "." if span.chunk is None else f"{span.chunk[1] % 10}"


class StreamClock:
    """Clock of both streams while nodes are issued one after another."""

    def __init__(self, costs: dict[Node, NodeCost], storages: Storages) -> None:
        self.costs, self.storages = costs, storages
        self.compute = self.communication = 0.0  # time at which each stream is free
        self.pending: dict[int, float] = {}  # storage that a collective fills -> time of its completion

    def start_of(self, node: Node) -> float:
        """Return the time at which a node would start if it were issued now."""
        kind = self.costs[node].kind
        if kind == "message":
            return max(self.compute, self.communication, self._arrival(node))
        if kind == "nothing":
            return self.compute
        return max(self.compute, self._arrival(node))

    def _arrival(self, node: Node) -> float:
        """Return the time at which all collectives that fill inputs of a node are complete."""
        numbers = [number for arg in node.all_input_nodes for number in self.storages.of[arg]]
        return max((self.pending.get(number, 0.0) for number in numbers), default=0.0)

    def run(self, node: Node) -> tuple[float, float]:
        """Issue a node; return its start and end."""
        start = self.start_of(node)
        end = start + self.costs[node].seconds
        if self.costs[node].kind == "message":
            self.communication = end
            for number in self.storages.of[node]:
                self.pending[number] = end
        else:
            self.compute = end
        return start, end


def predict_timeline(gm: GraphModule, hardware: Hardware, *, boxed: bool = False) -> Timeline:
    """Predict the timeline of a forward, backward or joint graph on two streams.

    >>> import torch
    >>> from tritoncp.planning.costs.hardware import NVLINK
    >>> gm = torch.export.export(torch.nn.Linear(4, 4), (torch.ones(8, 4),)).graph_module
    >>> timeline = predict_timeline(gm, NVLINK)
    >>> timeline.makespan == timeline.compute > 0, timeline.exposed
    (True, 0.0)

    Args:
        gm: a graph whose nodes have fake values (``meta["val"]``); symbolic sizes are replaced by their
            hints.
        hardware: rates of the GPU and the interconnect, a :class:`tritoncp.planning.costs.hardware.Hardware`.
        boxed: whether the graph frees its inputs after their last user, as compiled backward passes do with
            saved tensors; else inputs live to the end.

    Returns:
        A :class:`Timeline`: times in seconds, memory in bytes.
    """
    return replay(list(gm.graph.nodes), node_costs(gm, hardware), Storages(gm), boxed)


def replay(nodes: list[Node], costs: dict[Node, NodeCost], storages: Storages, boxed: bool) -> Timeline:
    """Predict the timeline of nodes in some order, from their costs and storages."""
    clock, memory, spans = StreamClock(costs, storages), LiveBytes(storages, boxed), []
    for node in nodes:
        free, kind, chunk = clock.compute, costs[node].kind, chunk_of(node)
        start, end = clock.run(node)
        memory.run(node)
        if kind != "message" and start > free:
            spans.append(Span(node.name, "wait", free, start, chunk))
        if end > start:
            spans.append(Span(node.name, kind, start, end, chunk))
    return Timeline(tuple(spans), memory.peak)


def chunk_of(node: Node) -> tuple[Any, int] | None:
    """Return (region, index) of a node's chunk, None for nodes of no chunk."""
    custom = node.meta.get("custom")
    return custom.get("tritoncp_chunk") if isinstance(custom, dict) else None
