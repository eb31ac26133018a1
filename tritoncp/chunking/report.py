"""The report of chunking a graph, as numbers and as a table, and ChunkingError."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch._logging import trace_structured
from torch.fx import Graph, Node

from tritoncp.core.caller import user_frame
from tritoncp.planning.parts import chunk_size


class ChunkingError(ValueError):
    """Raised for a graph or a size that cannot be cut into chunks. The graph is unchanged."""


NO_ROWS = (
    "has no rows to concatenate, since a sum or mean over a chunk is not that of all tokens: return a value "
    "for each token, an auxiliary loss as [B, S], and reduce it outside of the region"
)


def describe_node(node: Node, users: bool = False) -> str:
    """Format a node for errors: its name, op, the user's source line and, on request, users.

    >>> import torch
    >>> describe_node(torch.fx.Graph().placeholder("x"))
    'node x (x)'
    """
    text = f"node {node.name} ({node.target})"
    trace = node.meta.get("stack_trace") or ""
    # Lines of ^ and ~ mark the columns of the line above.
    if lines := [line.strip() for line in (user_frame(trace) or trace).splitlines() if line.strip(" ^~")]:
        text += f", traced at {'; '.join(lines[-2:])}"
    if users:
        text += f", used by {', '.join(f'{user.name} ({user.target})' for user in node.users) or 'none'}"
    return text


def readable(graph: Graph, name: str) -> str:
    """Return a graph as Python code, and log it to torch's structured trace under a name."""
    code = graph.python_code("self", verbose=True).src
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"tritoncp_chunk_{name}", "encoding": "string"},
        payload_fn=lambda: code,
    )
    return code


@dataclass
class Report:
    """Statistics of a graph that :func:`tritoncp.chunking.chunk` cut.

    regions: paths of the regions that were cut; rows: the size that was cut, None if the graph has no hint
    live_outs: numbers of joined values, by kind: "cat", "sum" (gradients) and "chain" (new values of inputs)
    keys: how many chunks of keys each chunk of queries reads, if attention was cut by sequence
    exchanges: number of attention passes whose chunks share one exchange of keys between ranks
    nodes_before, nodes_after: numbers of nodes
    before, after: the graph as Python code with shapes, also in torch's structured trace (TORCH_TRACE)

    >>> print(Report("seq", 3, 9, ("layers.0",), {"cat": 2, "sum": 0}, (3, 3, 3), 2, 9, 30))
    chunks              3 by seq of 3 of 9 rows
    regions             layers.0
    chunks of keys      3, 3, 3 (the first waits for all)
    keys between ranks  one exchange for all chunks, in 2 passes
    values joined       2 cat
    nodes               9 before, 30 after
    >>> print(Report("batch", 3, 8, ("layers.0", "layers.1"), keys=(1, 2)))
    chunks          3 by batch of 3 of 8 rows, the last of 2
    regions         layers.0, layers.1
    chunks of keys  1, 2
    values joined   none
    nodes           0 before, 0 after
    """

    dim: str
    chunks: int
    rows: int | None = None
    regions: tuple[str, ...] = ()
    live_outs: dict[str, int] = field(default_factory=dict)
    keys: tuple[int, ...] = ()
    exchanges: int = 0
    nodes_before: int = 0
    nodes_after: int = 0
    before: str = field(default="", repr=False)
    after: str = field(default="", repr=False)

    @property
    def waits_for_all_keys(self) -> bool:
        """Whether the first chunk of queries needs the keys of all chunks, by the mask or for a shared
        exchange."""
        return bool(self.keys) and self.keys[0] == self.chunks

    def __str__(self) -> str:
        rows = ""
        if self.rows is not None:
            size = chunk_size(self.rows, self.chunks, f"{self.rows} rows")
            rest = self.rows - size * (self.chunks - 1)
            rows = f" of {size} of {self.rows} rows" + f", the last of {rest}" * (rest < size)
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.live_outs.items() if count) or "none"
        lines = [("chunks", f"{self.chunks} by {self.dim}{rows}"), ("regions", ", ".join(self.regions))]
        if self.keys:
            waits = " (the first waits for all)" if self.waits_for_all_keys else ""
            lines.append(("chunks of keys", f"{', '.join(map(str, self.keys))}{waits}"))
        if self.exchanges:
            lines.append(("keys between ranks", f"one exchange for all chunks, in {self.exchanges} passes"))
        lines += [
            ("values joined", kinds),
            ("nodes", f"{self.nodes_before} before, {self.nodes_after} after"),
        ]
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)
