"""Scorecard of reliability: results of the tests marked `bar(number)`, for each row of docs/scorecard.md.

`make scorecard` runs them with this plugin.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "scorecard.md"


def read_bars() -> dict[int, tuple[str, str]]:
    """Read the table of the page: what is tried and what is expected, by the number of the bar.

    >>> read_bars()[3][1]
    'out 0, lse -inf, gradients 0'
    """
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \|$", PAGE.read_text(), re.M)
    return {int(number): (tried, expected) for number, tried, expected in rows}


def bars_of(item: pytest.Item) -> list[int]:
    """Return the numbers of the bars that a test proves."""
    return [number for mark in item.iter_markers("bar") for number in mark.args]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.user_properties += [("bar", number) for number in bars_of(item)]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    seen: dict[int, Counter[str]] = {number: Counter() for number in read_bars()}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            for name, number in report.user_properties:
                if name == "bar":
                    seen[number][outcome] += 1
    terminalreporter.section("scorecard: tried -> expected -> seen")
    for number, (tried, expected) in read_bars().items():
        counts = ", ".join(f"{count} {outcome}" for outcome, count in seen[number].items())
        terminalreporter.write_line(f"{number:2}  {tried} -> {expected} -> {counts or 'no test'}")
