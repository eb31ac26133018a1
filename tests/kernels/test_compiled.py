"""Kernels as they are compiled for GPUs: a sample of calls, each architecture in a process of its own.

Triton decides when it is imported whether it interprets.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.interpreted
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("which", ["not long", pytest.param("long", marks=pytest.mark.long)])
def test_calls_run_on_compiled_code(arch: str, which: str) -> None:
    words = [sys.executable, "-m", "pytest", "-q", "-n0", "--compiled", arch, "tests/compiled"]
    words += ["-m", f"{which} and not nightly"]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
