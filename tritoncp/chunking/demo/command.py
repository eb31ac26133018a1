"""The command `tritoncp chunk --demo`: a small mixture-of-experts graph, whole and in chunks, on two
streams."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tritoncp.chunking.demo.sample_graphs import Model, cut_model, trace_model
from tritoncp.chunking.report import Report
from tritoncp.chunking.streams.node_order import Order, order
from tritoncp.chunking.streams.timeline import Timeline, simulate
from tritoncp.chunking.streams.timeline_text import format_timelines
from tritoncp.planning.cost import Hardware, hardware_of

SMALL_MODEL = Model(tokens=1024, layers=1, dim=1024, heads=8, experts=32, hidden=704, topk=4)


@dataclass(frozen=True)
class Demo:
    """A graph in chunks beside the whole one, both as written and ordered, and the report of the pass."""

    model: Model
    cut: str
    chunks: int
    report: Report
    whole: Order
    chunked: Order

    @property
    def timelines(self) -> dict[str, Timeline]:
        """The runs before and after: the whole graph as written, and the chunks in their new order."""
        return {
            "before, the whole graph as written": self.whole.before,
            f"after, {self.chunks} chunks by {self.cut}, ordered": self.chunked.after,
        }

    def as_json(self) -> dict[str, Any]:
        """Return the report for JSON."""
        runs = {"whole": self.whole, "chunked": self.chunked}
        return {
            "cut": self.cut,
            "chunks": self.chunks,
            "nodes": {"whole": self.report.nodes_before, "chunked": self.report.nodes_after},
            "hardware": self.whole.before.hardware.name,
            **{
                name: {
                    "as_written": run.before.as_json(),
                    "ordered": run.after.as_json(),
                    "variant": run.variant,
                }
                for name, run in runs.items()
            },
        }

    def __str__(self) -> str:
        model, hardware = self.model, self.whole.before.hardware
        head = (
            f"{model.layers} layer of {model.experts} experts over {model.ranks} ranks, "
            f"{model.batch} x {model.tokens} tokens a rank, forward and backward, cut by "
            f"tritoncp.chunking.chunk: {self.cut}.\n"
            f"Predicted for {hardware.name} ({hardware.source}); nothing was timed on a GPU."
        )
        rows = [
            f"{name:<20}{run.makespan * 1e3:>9.3f}{run.exposed * 1e3:>13.3f}{run.peak / 2**20:>12.1f}"
            for graph, result in (("whole", self.whole), ("chunks", self.chunked))
            for name, run in ((f"{graph}, as written", result.before), (f"{graph}, ordered", result.after))
        ]
        title = f"{'graph':<20}{'ms':>9}{'exposed, ms':>13}{'peak, MiB':>12}"
        return "\n\n".join(
            [head, str(self.report), "\n".join([title, *rows]), format_timelines(self.timelines)]
        )


def balanced_hardware(model: Model, share: float = 1 / 3) -> Hardware:
    """Return the assumed hardware with the bandwidth at which messages take ``share`` of the computation."""
    hardware = replace(hardware_of(model.ranks), latency=0.0)
    whole = simulate(trace_model(model), hardware)
    bandwidth = hardware.bandwidth * whole.communication / (share * whole.compute)
    source = f"{hardware.source}; bandwidth such that messages take {share:.2g} of the computation"
    return replace(hardware, name=f"{hardware.name} as fast as needed", bandwidth=bandwidth, source=source)


def run_demo(cut: str = "sequence", chunks: int = 2, model: Model = SMALL_MODEL) -> Demo:
    """Trace the demo's graph, order it whole and cut by the pass."""
    hardware = balanced_hardware(model)
    chunked, report = cut_model(model, cut, chunks)
    return Demo(model, cut, chunks, report, order(trace_model(model), hardware), order(chunked, hardware))
