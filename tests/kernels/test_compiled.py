"""Kernels as they are compiled for GPUs: a sample of calls, each architecture in a process of its own, since Triton
decides when it is imported whether it interprets."""

import sys
from pathlib import Path

import pytest

from tests.command_process import run_command

ROOT = Path(__file__).parents[2]


@pytest.mark.interpreted
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_calls_run_on_compiled_code(arch: str) -> None:
    run_command(sys.executable, "-m", "pytest", "-q", "-n0", "--compiled", arch, "tests/compiled", cwd=ROOT)
