"""Pytest plugin that measures which tests run each line of the packages that `make mutants` changes.

In $MUTANTS_FOLDER, files `lines.*` are coverage's, with a context for each test, and `seconds.*` have the
tests that passed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import coverage
import pytest

FOLDER = Path(os.environ["MUTANTS_FOLDER"])
LINES = coverage.Coverage(
    str(FOLDER / "lines"), data_suffix=True, config_file=False, source=["tritoncp", "kernels"], messages=False
)
LINES.start()
SECONDS: dict[str, float] = {}
FAILED: set[str] = set()


def save_in_rank() -> None:
    """Save the lines of a forked rank before it answers or ends: its parent kills it then."""

    def saved(call: Callable[..., Any]) -> Callable[..., Any]:
        def save_and_call(*args: Any) -> Any:
            LINES.save()
            return call(*args)

        return save_and_call

    os._exit = saved(os._exit)
    Connection.send_bytes = saved(Connection.send_bytes)  # type: ignore[method-assign]


os.register_at_fork(after_in_child=save_in_rank)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    LINES.switch_context(item.nodeid)
    result = yield
    LINES.switch_context("")
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    SECONDS[report.nodeid] = SECONDS.get(report.nodeid, 0) + report.duration
    if not report.passed:
        FAILED.add(report.nodeid)


def pytest_sessionfinish() -> None:
    LINES.stop()
    LINES.save()
    passed = {test: seconds for test, seconds in SECONDS.items() if test not in FAILED}
    (FOLDER / f"seconds.{os.getpid()}").write_text(json.dumps(passed))
