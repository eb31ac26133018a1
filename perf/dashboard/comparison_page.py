"""A comparison of two sides as one page: `tritoncp perf compare BEFORE AFTER --html FILE`."""

from __future__ import annotations

from html import escape

from tritoncp.perf.dashboard import compare
from tritoncp.perf.dashboard.gate import Gate
from tritoncp.perf.dashboard.shell import fill_page, html_table
from tritoncp.perf.exit_codes import FINE

HELP = (
    "Largest loss first. Interval: 95 %, from the differences between the runs of a side; with one run a "
    "side, from its samples, which know nothing of what differs from run to run."
)


def comparison_page(before: str, after: str, result: Gate) -> str:
    """Make the page, as HTML. before, after: the names of the sides."""
    kind, verdict = ("better", "Passes") if result.exit_code == FINE else ("worse", "Does not pass")
    title = f"{after} against {before}"
    notes = [(reason.case, reason.text) for reason in result.reasons]
    notes += [(row.case, row.why) for row in result.comparison.rows if row.why]
    items = [f"<li><code>{escape(case)}</code>: {escape(text)}</li>" for case, text in notes]
    rows = [[*map(escape, cells)] for cells in compare.lines(result.comparison, result.limit)]
    parts = [
        f'<h1>{escape(title)}</h1><p class="{kind}">{verdict}</p><p>{escape(result.summary)}</p>',
        f"<ul>{''.join(items)}</ul>{html_table(compare.HEAD, rows)}<p class='help'>{HELP}</p>",
    ]
    return fill_page(title, "".join(parts))
