"""Benchmarks of the host by pytest-benchmark: masks, plans, Python's part of a call, the CPU engine beside
torch's attention, and the start of Python.

`make bench` runs them and keeps the times in .benchmarks; docs/perf.md says how to compare them.
"""

import subprocess
import sys
from typing import Any

import pytest

from tritoncp.perf.records.history import OURS
from tritoncp.perf.suite import host_cases
from tritoncp.perf.suite.host_cases import CPU_PASSES, HostCase

CASES = [case for case in host_cases.CASES if case.tier != "full"]
RIVALS = {
    "torch": [case for case in CASES if case.which == "mask" and case.problem.seq <= 4096],
    "sdpa-causal": [case for case in CASES if case.which in CPU_PASSES and case.problem.mask == "causal"],
}
CONTENDERS = [*((case, OURS) for case in CASES), *((case, name) for name in RIVALS for case in RIVALS[name])]


@pytest.mark.parametrize(
    ("case", "contender"), [pytest.param(*pair, id=f"{pair[0].name}-{pair[1]}") for pair in CONTENDERS]
)
def test_host_case(benchmark: Any, case: HostCase, contender: str) -> None:
    benchmark.group = case.name
    prepare = host_cases.list_contenders(case)[contender]
    with host_cases.surroundings(case):
        benchmark.pedantic(
            lambda run: run(), setup=lambda: ((prepare(),), {}), rounds=2 * case.rounds, warmup_rounds=1
        )


@pytest.mark.parametrize("statement", ["import torch", "from tritoncp import flex_attention"])
def test_start_of_python(benchmark: Any, statement: str) -> None:
    benchmark.group = "start"
    command = [sys.executable, "-c", statement]
    benchmark.pedantic(subprocess.run, (command,), {"check": True}, rounds=5, warmup_rounds=1)
