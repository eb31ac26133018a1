"""Measurements of pytest-benchmark as points of a history."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from tritoncp.perf.records.history import OURS, Point, Series, point_of
from tritoncp.perf.records.schema import check_measurement


def points(report: dict[str, Any]) -> list[Point]:
    """Read a report of `pytest --benchmark-json`: a point for each benchmark.

    A benchmark may describe itself in ``extra_info``: "series" (device, power_limit, clocks), "env" and
    "tags", as perf/suite/bench.py does; else the series is the CPU's, and there is only the test's name.
    Raises KeyError, TypeError, ValueError or AttributeError for other JSON.

    >>> stats = {"median": 0.002, "q1": 0.0019, "q3": 0.0021, "rounds": 9}
    >>> cpu = {"cpu": {"brand_raw": "A CPU"}, "python_version": "3.11"}
    >>> report = {"machine_info": cpu, "commit_info": {"id": "1234", "dirty": False},
    ...           "datetime": "2026-01-01", "benchmarks": [{"fullname": "bench.py::test_x", "stats": stats}]}
    >>> points(report)[0].case, points(report)[0].ms, str(points(report)[0].series)
    ('bench.py::test_x', 2.0, 'A CPU')
    """
    machine, commit = report["machine_info"], report.get("commit_info", {})
    run = hashlib.sha256(json.dumps(report, sort_keys=True).encode()).hexdigest()[:12]
    env = {"python": machine.get("python_version")}
    if commit.get("id"):
        env["commit"] = commit["id"] + "+" * bool(commit.get("dirty"))
    device = machine.get("cpu", {}).get("brand_raw") or machine.get("processor") or "CPU"
    imported = []
    for bench in report["benchmarks"]:
        extra_info = bench.get("extra_info", {})
        series = Series(**extra_info["series"]) if "series" in extra_info else Series(device)
        tags = {"pass": "benchmark", **extra_info.get("tags", {})}
        env_of_bench = env | extra_info.get("env", {})
        contenders = {OURS: _figures(bench["stats"])}
        point = Point(run, report["datetime"], bench["fullname"], series, env_of_bench, contenders, tags)
        check_measurement(point.as_line())
        imported.append(point_of(point.as_line()))
    return imported


def _figures(stats: dict[str, Any]) -> dict[str, Any]:
    """Convert seconds to milliseconds; with samples if the report has them."""
    names = {"ms": "median", "low": "q1", "high": "q3"}
    figures: dict[str, Any] = {name: round(1e3 * stats[column], 6) for name, column in names.items()}
    if stats.get("data"):
        return figures | {"samples": [round(1e3 * x, 6) for x in stats["data"]]}
    return figures | {"n": stats["rounds"]}
