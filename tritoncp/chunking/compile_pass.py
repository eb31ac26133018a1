"""Graph chunking as an option of torch.compile."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from tritoncp._version import __version__
from tritoncp.chunking.regions import describe_modules, regions_of
from tritoncp.chunking.report import Report
from tritoncp.chunking.rewrite import chunk
from tritoncp.core.caller import warn_caller
from tritoncp.core.log_lines import area_logger

log = area_logger("chunking")


class Pass(CustomGraphPass):
    """:func:`tritoncp.chunking.chunk` as an inductor pass over joint graphs, with the same arguments.

    ``torch.compile(model, options={"joint_custom_pre_pass": tritoncp.chunking.Pass(dim="seq")})``. A graph
    without a module of the region is not changed; as long as no graph was cut, a warning lists its modules.
    ``reports`` has a report for each graph that was cut, but not for graphs from inductor's cache.
    """

    def __init__(
        self,
        region: str = "layers.*",
        *,
        dim: str,
        chunks: int = 2,
        needs: Tensor | None = None,
        repeat: bool = False,
    ) -> None:
        self.region = region
        self.options: dict[str, Any] = {"dim": dim, "chunks": chunks, "needs": needs, "repeat": repeat}
        self.reports: list[Report] = []

    def __call__(self, graph: Graph) -> None:
        if not regions_of(graph, self.region):
            message = f"region={self.region!r} matches no module of a compiled graph, which is not cut"
            log.info("%s", message)
            if not self.reports:
                warn_caller(f"{message}. {describe_modules(graph)}")
            return
        self.reports.append(chunk(graph, self.region, **self.options))

    def uuid(self) -> tuple[str, ...]:
        """Return the pass's key for inductor's cache of compiled graphs."""
        needs = self.options["needs"]
        options = {**self.options, "needs": needs if needs is None else needs.tolist()}
        return "tritoncp.chunking.Pass", __version__, self.region, repr(options)
