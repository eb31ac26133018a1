"""The switch between interpreted kernels, executed ones and a GPU: ``pytest --device``."""

from __future__ import annotations

import pytest

from tests.command_process import python

CALLS = ("tests/kernels", "tests/compiled", "tests/test_extremes.py", "tests/gpu")
OF_INPUTS = """
import torch
from tests.device import DEVICE, ON_GPU
from tests.kernels.support.harness import cotangents, qkv
torch.set_default_device(DEVICE)
x = qkv(8)
assert ON_GPU and {t.device.type for t in (*x, *cotangents(x))} == {DEVICE.type} == {"meta"}
"""


def test_another_device_than_the_cpu_has_the_tests_of_calls_and_its_own() -> None:
    """Nothing but the executor, the interpreter and the CPU engine is left out."""
    done = python("-m", "pytest", "-n0", "--device", "meta", "--collect-only", "-q", "-m", "", *CALLS)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    names = [line for line in done.stdout.splitlines() if "::" in line]
    files = {name.partition("::")[0] for name in names}
    assert {f"tests/gpu/test_{name}.py" for name in ("copies", "uploads", "overlap")} < files
    assert {f"tests/compiled/test_{name}.py" for name in ("calls", "gluon", "selected_keys")} < files
    assert {f"tests/kernels/test_{name}.py" for name in ("backward", "cases", "forward", "smoke")} < files
    assert not files & {"tests/compiled/test_nightly.py", "tests/kernels/test_tile_rules.py"}
    assert not any(name.endswith("[cpu]") or "[cpu-" in name for name in names)


@pytest.mark.long
def test_inputs_lie_on_the_device() -> None:
    done = python("-c", OF_INPUTS, TRITONCP_TESTS_DEVICE="meta")
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_a_missing_gpu_is_named() -> None:
    words = ("-m", "pytest", "-n0", "--device", "cuda", "--collect-only", "tests/gpu")
    done = python(*words, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 4 and "--device cuda: torch finds no GPU here" in done.stderr
