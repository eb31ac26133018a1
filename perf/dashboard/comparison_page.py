"""A comparison of two sides as one self-contained page: `tritoncp perf compare BEFORE AFTER --html FILE`."""

from __future__ import annotations

from html import escape

from tritoncp.perf.dashboard import compare, shell
from tritoncp.perf.dashboard.gate import Gate
from tritoncp.perf.dashboard.shell import PERCENT, Column
from tritoncp.perf.exit_codes import FINE

CLASSES = {
    "TOO SLOW": "worse",
    "FAILED": "worse",
    "slower": "worse",
    "faster": "better",
    "works now": "better",
}


def comparison_page(before: str, after: str, result: Gate) -> str:
    """Make the page, as HTML. before, after: the names of the sides."""
    rows, limit = result.comparison.rows, result.limit
    cells = compare.lines(result.comparison, limit)
    verdicts = [line[-1] for line in cells]
    marked = '<span class="<%- kind %>"><%- value %></span>'
    failing = '<%= Number.isFinite(value) ? value.toPrecision(4) : "failed" %>'
    columns = {
        "case": Column("Case", [row.case for row in rows], 260),
        "before": Column("Before, ms", [row.before for row in rows], 95, failing),
        "after": Column("After, ms", [row.after for row in rows], 95, failing),
        "change": Column(
            "Change", [None if row.ratio is None else row.ratio - 1 for row in rows], 90, PERCENT
        ),
        "interval": Column("95 % interval", [line[4] for line in cells], 150),
        "runs": Column("Runs", [f"{row.runs[0]}, {row.runs[1]}" for row in rows], 65),
        "verdict": Column("Verdict", verdicts, 130, marked),
        "why": Column("Why", [row.why for row in rows], 200),
        "series": Column("Device", [row.series for row in rows], 240),
    }
    reasons = [
        f"<li><code>{escape(reason.case)}</code>: {escape(reason.text)}</li>"
        for reason in result.reasons
        if reason.kind != "slower"  # they are the first rows
    ]
    title = f"{after} against {before}"
    texts = {
        "title": escape(title),
        "kind": "better" if result.exit_code == FINE else "worse",
        "verdict": "Passes" if result.exit_code == FINE else "Does not pass",
        "summary": escape(compare.summary(result.comparison, limit)),
        "reasons": f"<ul>{''.join(reasons)}</ul>" if reasons else "",
    }
    table = shell.make_table(columns, {"kind": [CLASSES.get(word, "faint") for word in verdicts]})
    return shell.render(title, {"rows": table}, "comparison.html", texts)
