"""The summary of `make gpu`: a page on the screen, and summary.json."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text
from tritoncp.perf.console import make_console
from tritoncp.perf.records.history import OURS, Point, files, parse_lines, read

from tritoncp.core.checked_json import read_json


def collect(
    out: Path, device: str, began: datetime.datetime, parts: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Collect the results of a run as plain values.

    parts:      part, outcome ("done", "failed", "not run"), seconds, and why of each part
    check:      whether all cases of `tritoncp check` are right, and the wrong ones
    figures:    milliseconds and TFLOP/s of each contender of each case, or why there are none
    worst:      cases by their speedup over the goal, worst first; then those without a goal, by their speedup
                over the best baseline
    left_out:   cases that were not measured for lack of time
    """
    start = began.isoformat(timespec="seconds")
    points = [point for point in read(out).points if point.time >= start]
    # Cases split over ranks are left out: their baseline is the same case unsplit, which should be faster.
    alone = [point for point in points if "ranks" not in point.tags]
    rated = {point.case: (not point.goal, point.worst) for point in alone if point.worst is not None}
    measured_names = {point.case for point in points}
    return {
        "device": device,
        "time": start,
        "parts": [*parts],
        "check": check_of(out / "check.json"),
        "ceilings": next((point.ceilings for point in reversed(points) if point.ceilings), {}),
        "environment": points[-1].env if points else {},
        "figures": [row for point in points for row in figures(point)],
        "worst": [
            {"case": case, "ratio": round(ratio, 3)}
            for case, (_, ratio) in sorted(rated.items(), key=lambda item: item[1])
        ],
        "left_out": sorted({case for case in cases_left_out(out, began) if case not in measured_names}),
    }


def cases_left_out(out: Path, began: datetime.datetime) -> list[str]:
    """Read the names of cases that had no time, from the files that this run has written to."""
    paths = [path for path in files([out]) if path.stat().st_mtime >= began.timestamp()]
    lines = [line for path in paths for _, line in parse_lines(path) if not isinstance(line, str)]
    return [str(line.get("case", "")) for line in lines if line["kind"] == "left out"]


def figures(point: Point) -> list[dict[str, Any]]:
    """Make a row for each contender of a case."""
    names = ("ms", "tflops", "rank_ms", "why")
    return [
        {"case": point.case, "contender": name, **{key: row[key] for key in names if key in row}}
        for name, row in point.contenders.items()
    ]


def check_of(path: Path) -> dict[str, Any]:
    """Read the result of `tritoncp check --json`: whether all cases are right, the cases that are wrong or
    failed, how many did not run, facts of the machine."""
    try:
        report = read_json(path)
        failing = [case for case in report["cases"] if not case["right"]]
        wrong = [case for case in failing if not str(case.get("why", "")).startswith("not run")]
        numbers = {"cases": len(report["cases"]), "not_run": len(failing) - len(wrong)}
        return {"right": bool(report["right"]), "wrong": wrong, **numbers, "facts": report["facts"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        return {"right": False, "wrong": [], "why": f"no result: {type(error).__name__}: {error}"}


def show(summary: Mapping[str, Any]) -> None:
    """Print the page."""
    screen = make_console()
    looks: dict[str, Any] = {"box": None, "padding": (0, 2, 0, 0), "title_justify": "left"}
    table = Table("part", "outcome", "seconds", "why", title=f"make gpu on {summary['device']}", **looks)
    for part in summary["parts"]:
        table.add_row(part["part"], part["outcome"], f"{part['seconds']:.0f}", Text(part["why"]))
    screen.print(table)
    screen.print(_figures_table(summary["figures"], Table(title="ms (TFLOP/s)", **looks)))
    for line in lines(summary):
        screen.print(line, markup=False, highlight=False)


def _figures_table(rows: Sequence[Mapping[str, Any]], table: Table) -> Table:
    """Fill a table with a row for each case and a column for each contender."""
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        cells.setdefault(row["case"], {})[row["contender"]] = _format_cell(row)
    names = list(dict.fromkeys(row["contender"] for row in rows))
    table.add_column("case", no_wrap=True)
    for name in names:
        table.add_column(Text(name.removeprefix(f"{OURS} ")), overflow="fold")
    for case, by_name in cells.items():
        table.add_row(Text(case), *(by_name.get(name, "–") for name in names))
    return table


def _format_cell(row: Mapping[str, Any]) -> str:
    """
    >>> [_format_cell(row) for row in ({"ms": 1.23456, "tflops": 400.4}, {"why": "wrong: x"}, {"why": "x"})]
    ['1.235 (400)', 'wrong', 'none']
    """
    if "ms" in row:
        return f"{row['ms']:.4g}" + (f" ({row['tflops']:.0f})" if "tflops" in row else "")
    return "wrong" if row.get("why", "").startswith("wrong") else "none"


def lines(summary: Mapping[str, Any]) -> list[str]:
    """Format the facts that the tables do not show: wrong answers, ceilings, the worst cases, cases without
    time."""
    rows = []
    check = summary["check"]
    if any(part["part"] == "check" for part in summary["parts"]):
        rows.append(
            f"check: {'everything is right' if check['right'] else check.get('why') or _format_tally(check)}"
        )
    rows += [f"  {_format_case(case)}" for case in check["wrong"]]
    rows += [
        f"{row['case']}: {row['contender']}: {row['why']}"
        for row in summary["figures"]
        if row.get("why", "").startswith("wrong")
    ]
    rows += [
        f"{row['case']}: {row['contender']}: {row['rank_ms']:.4g} ms a rank"
        for row in summary["figures"]
        if "rank_ms" in row
    ]
    if summary["ceilings"]:
        rows.append("ceilings: " + ", ".join(f"{name} {x:g}" for name, x in summary["ceilings"].items()))
    if summary["worst"]:
        worst = ", ".join(f"{row['case']} {row['ratio']:.2f}" for row in summary["worst"][:3])
        rows.append(f"lost most (time of the baseline over ours, over the goal): {worst}")
    if summary["left_out"]:
        rows.append(f"no time for: {', '.join(summary['left_out'])}")
    return rows


def _format_tally(check: Mapping[str, Any]) -> str:
    """
    >>> _format_tally({"wrong": [{}], "cases": 120, "not_run": 20})
    '1 of 120 cases wrong, 20 not run'
    """
    return f"{len(check['wrong'])} of {check['cases']} cases wrong, {check['not_run']} not run"


def _format_case(case: Mapping[str, Any]) -> str:
    """Format a wrong case of `tritoncp check`, or the reason why it has no answer.

    >>> case = {"schedule": "ring", "mask": "causal", "dtype": "bfloat16", "pass": "forward"}
    >>> _format_case({**case, "tensor": "out", "error": 0.5, "allowed": 0.01, "rank": 1})
    'ring causal bfloat16 forward: out is off by 0.5, allowed is 0.01 (rank 1)'
    """
    names = " ".join(str(case.get(name, "?")) for name in ("schedule", "mask", "dtype", "pass"))
    if case.get("why"):
        return f"{names}: {case['why']}"
    off = f"{case.get('tensor', '?')} is off by {case.get('error')}, allowed is {case.get('allowed')}"
    return f"{names}: {off} (rank {case.get('rank', '?')})"
