"""The default tiles, compiled for GPUs that are not here: matrix instructions, no spills, shared memory."""

import json
import os
import subprocess
import sys
from itertools import product
from typing import Any

import pytest

KIB = 1024
SHARED = {"sm_80": 163 * KIB, "sm_86": 99 * KIB, "sm_90": 227 * KIB, "sm_100": 227 * KIB, "gfx942": 64 * KIB}
MATRIX = {
    "sm_80": "mma.sync",
    "sm_86": "mma.sync",
    "sm_90": "wgmma.mma_async",
    "sm_100": "tcgen05.mma",
    "gfx942": "v_mfma",
}

# What is copied by tensor descriptor; elsewhere pointers are as short, or leave more registers.
COPIED = {
    "sm_90": {*product((64, 128, 256), ("forward",)), *product((64, 128), ("dq",)), (128, "dkdv")},
    "sm_100": {*product((64, 128), ("forward", "dq"))},
}


def compile_for(arch: str, dtype: str, dims: str, variants: str) -> list[dict[str, Any]]:
    """Reports of every launch, from a process in which Triton compiles."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.offline", arch, dtype, dims, variants]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(arch: str, reports: list[dict[str, Any]], *, matrix: bool = True, spill: int = 0) -> None:
    bad = [
        report
        for report in reports
        if report["spilled"] > spill
        or report["shared"] > SHARED[arch]
        or (matrix and report["kernel"] != "delta" and set(report["mma"]) != {instruction(arch, report)})
    ]
    assert reports and not bad


def instruction(arch: str, report: dict[str, Any]) -> str:
    """tcgen05 wants 64 rows a tile; dK/dV above 128 channels has registers for 32 and takes the older one."""
    if arch == "sm_100" and report["kernel"] == "dkdv" and report["dim"] > 128:
        return "mma.sync"
    return MATRIX[arch]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_defaults_fit(arch: str) -> None:
    """Tables, intervals, full blocks, state in and out: every loop of every kernel."""
    reports = compile_for(arch, "bfloat16", "64,128,256", "state")
    asked = product((64, 128, 256), ("forward", "delta", "dq", "dkdv"))
    assert [(report["dim"], report["kernel"]) for report in reports] == list(asked)
    check(arch, reports)
    copied = {(report["dim"], report["kernel"]) for report in reports if report["tma"]}
    assert copied == COPIED.get(arch, set())


@pytest.mark.parametrize("arch", COPIED)
def test_defaults_fit_where_strides_forbid_descriptors(arch: str) -> None:
    reports = compile_for(arch, "bfloat16", "64,128,256", "pointers")
    assert not any(report["tma"] for report in reports)
    check(arch, reports)


@pytest.mark.nightly
@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize("variant", ["state", "documents", "causal", "window", "full", "pointers"])
def test_defaults_fit_every_variant(arch: str, variant: str) -> None:
    check(arch, compile_for(arch, "bfloat16", "64,128,256", variant))


@pytest.mark.nightly
@pytest.mark.parametrize("arch", SHARED)
def test_defaults_fit_odd_dims(arch: str) -> None:
    """Two pieces of channels.  How many registers are left is the tiles' luck: a few may spill."""
    check(arch, compile_for(arch, "float16", "80,96,192", "state,causal"), spill=64)


@pytest.mark.nightly
@pytest.mark.parametrize("arch", SHARED)
def test_what_the_user_adds_may_spill_a_little(arch: str) -> None:
    """A mask_mod's code takes registers of its own; sizes of one are constants to Triton."""
    check(arch, compile_for(arch, "bfloat16", "64,128,256", "mask_mod,single"), spill=128)


@pytest.mark.nightly
@pytest.mark.parametrize("arch", SHARED)
def test_float32_fits_without_matrix_instructions(arch: str) -> None:
    check(arch, compile_for(arch, "float32", "64,128,256", "state,causal"), matrix=False, spill=64)
