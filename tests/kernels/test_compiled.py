"""Kernels as they are compiled for GPUs: a sample of calls, each architecture in a separate process.

Triton decides when it is imported whether it interprets.
"""

import pytest

from tests.command_process import python

ARCHS = ("sm_80", "sm_90", "sm_100")
FIRST = "sm_90"  # of the three it has the max number of kinds of instructions


def run_compiled(arch: str, *words: str) -> None:
    """Run tests in a separate process, with kernels that are compiled for ``arch``."""
    result = python("-m", "pytest", "-q", "-n0", "--compiled", arch, *words)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("arch", "which"),
    [
        *(pytest.param(arch, "not long", marks=pytest.mark.long) for arch in ARCHS),
        pytest.param(FIRST, "long", marks=pytest.mark.long),
        *(pytest.param(arch, "long", marks=pytest.mark.nightly) for arch in ARCHS if arch != FIRST),
    ],
)
def test_calls_run_on_compiled_code(arch: str, which: str) -> None:
    run_compiled(arch, "tests/compiled", "tests/executor/compiled", "-m", f"{which} and not nightly")


@pytest.mark.nightly
@pytest.mark.interpreted
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("what", ["tests/compiled tests/executor/compiled -m nightly", "tests/kernels"])
def test_all_kernels_run_on_compiled_code(arch: str, what: str) -> None:
    """Every shipped kernel, drawn calls, and every test of kernels."""
    run_compiled(arch, *what.split())
