"""Text, figures and pictures of plans, for a layer of a model: what `tritoncp plan` shows, and what the
methods of a Plan return."""

from tritoncp.planning.plan import Reports
from tritoncp.report.plan_reports import PlanReports

REPORTS: Reports = PlanReports()
