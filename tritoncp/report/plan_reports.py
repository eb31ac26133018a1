"""The reports that the methods of a Plan return."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tritoncp.planning.costs.hardware import Hardware
from tritoncp.planning.costs.layer import Shape
from tritoncp.planning.costs.message_bytes import bytes_sent
from tritoncp.planning.plan import Plan
from tritoncp.report.drawing import draw_figure
from tritoncp.report.facts import PlanFacts
from tritoncp.report.text import format_costs, format_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class PlanReports:
    """The :class:`tritoncp.planning.plan.Reports` of this package."""

    def count_bytes_sent(self, plan: Plan, backward: bool, shape: dict[str, int]) -> int:
        of_forward, of_backward = bytes_sent(plan, Shape.of_layer(plan, **shape))
        return int((of_forward + of_backward * backward)[plan.rank])

    def explain(self, plan: Plan, hardware: Hardware | None, shape: dict[str, int]) -> str:
        reason = f" ({plan.reason})" if plan.reason else ""
        choice = f"order {plan.balancer}, schedule {plan.schedule}{reason}"
        return "\n".join([*format_costs(PlanFacts.of(plan, hardware, **shape)), choice])

    def metrics(self, plan: Plan, hardware: Hardware | None, shape: dict[str, int]) -> dict[str, float]:
        return PlanFacts.of(plan, hardware, **shape).metrics

    def plot(
        self, plan: Plan, path: str | Path | None, hardware: Hardware | None, shape: dict[str, int]
    ) -> Figure:
        return draw_figure(PlanFacts.of(plan, hardware, **shape), path)

    def text(self, plan: Plan) -> str:
        return format_text(PlanFacts.of(plan))
