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
    """Run :func:`tritoncp.chunking.chunk` as a pass of inductor over joint graphs.

    >>> import torch
    >>> options = {"joint_custom_pre_pass": Pass("layers.*", dim="seq", chunks=4)}
    >>> compiled = torch.compile(torch.nn.Linear(8, 8), options=options)

    A graph without a module of the region is not changed; until a graph was cut, a warning lists its modules.
    ``reports`` has a report for each graph that was cut, but not for graphs from inductor's cache.

    Args:
        region: paths of modules, with * for any name; "" for the whole graph.
        dim: what is cut, "batch" or "seq".
        chunks: number of chunks, at least 2.
        needs: see :func:`tritoncp.chunking.chunk`.
        repeat: see :func:`tritoncp.chunking.chunk`.
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
        """Return the key of this pass in inductor's cache of compiled graphs.

        Returns:
            A tuple of texts: the version of this package, and the arguments.
        """
        needs = self.options["needs"]
        options = {**self.options, "needs": needs if needs is None else needs.tolist()}
        return "tritoncp.chunking.Pass", __version__, self.region, repr(options)
