"""The gate: verdict on a comparison, with reasons, as JSON and as a comment on a pull request."""

from __future__ import annotations

import csv
import fnmatch
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

from tritoncp.perf.dashboard.compare import HEAD, Comparison, lines, summary, verdict
from tritoncp.perf.dashboard.suites import SUITE_HEAD, suite_lines
from tritoncp.perf.exit_codes import BAD_INPUT, FINE, NOTHING_MEASURED, REGRESSION

VERDICTS = {
    FINE: "pass",
    REGRESSION: "regression",
    BAD_INPUT: "bad input",
    NOTHING_MEASURED: "nothing compared",
}
FIRST_RUN = "first run"
MAX_COMMENT = 60_000  # characters; GitHub refuses comments of more than 65,536


class Reason(NamedTuple):
    """A reason for a failed gate. kind: slower, failed, missing, required, or nothing compared; case: with
    its device if there are several"""

    kind: str
    case: str
    text: str


class Gate(NamedTuple):
    """A comparison, the gate's options, and its result.

    limit:     max fraction by which a case may be slower; None: no limit
    exit_code: exit code of `tritoncp perf compare`
    first_run: why there is nothing to compare with yet, "" if there is
    """

    comparison: Comparison
    limit: float | None
    reasons: list[Reason]
    exit_code: int
    first_run: str = ""

    @property
    def summary(self) -> str:
        return self.first_run or summary(self.comparison, self.limit)

    def as_json(self) -> dict[str, Any]:
        word = FIRST_RUN if self.first_run and self.exit_code == FINE else VERDICTS[self.exit_code]
        rows = [{**row._asdict(), "verdict": verdict(row, self.limit)} for row in self.comparison.rows]
        return {
            **describe(word, self.exit_code, self.reasons),
            "fail_over": self.limit,
            **self.comparison._asdict(),
            "rows": rows,
            "suites": [suite._asdict() for suite in self.comparison.suites],
            "geomean": self.comparison.geomean,
        }

    def as_csv(self) -> str:
        """Format the rows as CSV with a header: the figures of the JSON, an empty cell for an unknown one."""
        file = io.StringIO()
        names = ("case", "series", "before", "after", "ratio", "low", "high", "verdict")
        writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.as_json()["rows"])
        return file.getvalue()

    def markdown(self) -> str:
        """Format a comment: the summary, the reasons, and the table, folded if the gate passes. The end of a
        comment that GitHub would refuse is left out."""
        failed = self.exit_code != FINE
        title = f"{'❌' if failed else '🆕' if self.first_run else '✅'} **tritoncp perf**: {self.summary}\n"
        reasons = [f"- {_code(reason.case)}: {reason.text}" for reason in self.reasons]
        whys = [
            f"- {_code(self.comparison.label(row))}: {_code(row.why)}"
            for row in self.comparison.rows
            if row.why
        ]
        opened = " open" if failed else ""
        head = f"<details{opened}><summary>every case, worst first</summary>\n"
        table = [f"| {' | '.join(HEAD)} |", "|---|--:|--:|--:|--:|---|"]
        for case, *cells in lines(self.comparison, self.limit):
            table.append(f"| {_code(case)} | {' | '.join(cells)} |")
        suites = [f"| {' | '.join(SUITE_HEAD)} |", "|---|--:|--:|--:|--:|---|"]
        for name, *cells in suite_lines(self.comparison.suites):
            suites.append(f"| {_code(name)} | {' | '.join(cells)} |")
        parts = [title, *reasons, *([""] if reasons else [])]
        if len(self.comparison.rows) > 1:
            parts += [*suites, ""]
        if not self.first_run:
            parts += [head, *table, *(["", *whys] if whys else []), "\n</details>\n"]
        text = "\n".join(parts)
        return text if len(text) < MAX_COMMENT else f"{text[:MAX_COMMENT]} …\n\n</details>\n"


def describe(word: str, exit_code: int, reasons: Sequence[Reason]) -> dict[str, Any]:
    """Return the head of the JSON: the verdict, the exit code and the reasons."""
    return {"verdict": word, "exit_code": exit_code, "reasons": [reason._asdict() for reason in reasons]}


def judge(
    comparison: Comparison,
    limit: float | None,
    allow_missing: bool = False,
    required: Sequence[str] = (),
    first_run: str = "",
) -> Gate:
    """Judge a comparison. required: patterns of cases that need a time after, even if other cases may be
    missing; first_run: why nothing needs to be compared"""
    reasons = [*_row_reasons(comparison, limit), *_absence_reasons(comparison, allow_missing, required)]
    code = REGRESSION if reasons else FINE
    fails = all(row.before is None and row.after is None for row in comparison.rows)
    if not first_run and (not comparison.rows or (fails and not reasons)):
        why = "every case fails on both sides" if comparison.rows else "the sides have no case in common"
        code, reasons = NOTHING_MEASURED, [Reason("nothing compared", "", why)]
    return Gate(comparison, limit, reasons, code, first_run)


def _row_reasons(comparison: Comparison, limit: float | None) -> list[Reason]:
    reasons = []
    for row in comparison.rows:
        if row.broken:
            reasons.append(Reason("failed", comparison.label(row), "fails, and did not before"))
        elif row.regressed(limit) and row.ratio is not None and limit is not None:
            percent = f"{100 * (row.ratio - 1):.1f} % slower, {100 * limit:g} % is allowed"
            reasons.append(Reason("slower", comparison.label(row), percent))
    return reasons


def _absence_reasons(comparison: Comparison, allow_missing: bool, required: Sequence[str]) -> list[Reason]:
    def fits(case: str, pattern: str) -> bool:
        return any(fnmatch.fnmatchcase(case, text) for text in (pattern, f"{pattern} on *"))

    def is_required(case: str) -> bool:
        return any(fits(case, pattern) for pattern in required)

    reasons = [
        Reason("missing", case, "measured before and not after")
        for case in comparison.missing
        if not allow_missing or is_required(case)
    ]
    timed = [comparison.label(row) for row in comparison.rows if row.after is not None] + comparison.new
    text = "required, and no such case has a time after"
    unmet = [pattern for pattern in required if not any(fits(case, pattern) for case in timed)]
    return reasons + [Reason("required", pattern, text) for pattern in unmet]


def _code(text: str) -> str:
    """Format text as code in a cell of a Markdown table.

    >>> _code("a`b|c\\n</details>")
    "`a'b/c </details>`"
    """
    return f"`{' '.join(text.replace('`', chr(39)).replace('|', '/').split())}`"
