"""ROUTE "gluon": barriers and asynchronous products, which no interpreter runs, against float64. Its kernel
is written for Hopper; other GPUs take the loops, and say so."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tritoncp
from tests.cases import Case, check
from tests.compiled.routes import check_route
from tests.device import DEVICE, LONG, ON_GPU, REPEATS
from tests.kernels.support.harness import MASKS, agree, oracle, qkv, route, run, same

BF16, FP16 = torch.bfloat16, torch.float16
CALL = Case(heads=1, length=150, kv_length=150, dims=(64, 64), dtype=BF16, block=128, loss="forward",
            options={"ROUTE": "gluon"})  # fmt: skip
WHOLE = replace(CALL, mask=("everything", 0))
FIRST = {
    "causal": replace(CALL, group=2, dims=(128, 128)),
    "whole tiles": replace(WHOLE, length=256, kv_length=1024),
    "once around its rings": replace(WHOLE, length=100, kv_length=700),
    "full tiles, then masked ones": replace(CALL, mask=("prefix", 550), length=100, kv_length=600),
    "documents": replace(
        CALL, mask=("causal documents of rows", 6), group=2, batch=2, dims=(128, 128), dtype=FP16
    ),
    "window": replace(CALL, mask=("window", 31), dims=(128, 64), layout="heads inside"),
    "rows without keys": replace(CALL, mask=("hidden rows", 2), dims=(64, 128), sinks=True),
    "ring": replace(CALL, world=2, schedule="ring", balancer="ptrr", length=512, kv_length=512),
}
ROWS = replace(CALL, heads=2, group=2, batch=2, length=400, kv_length=400)
MORE = {
    **{
        f"{name} {dim}": replace(ROWS, mask=(name, number), dims=(dim, dim))
        for dim in (64, 128)
        for name, number in (("everything", 0), ("window", 160), ("documents", 6), ("prefix", 140))
    },
    **{
        f"{dims} {dtype}": replace(CALL, dims=dims, dtype=dtype, length=512, kv_length=512)
        for dims in ((64, 128), (128, 64))
        for dtype in (BF16, FP16)
    },
    **{  # no, one or two full tiles; a second group of warps without a row
        f"{call.mask[0]} of {n}": replace(call, length=n, kv_length=n)
        for n in (1, 64, 128, 129, 256, 383)
        for call in (replace(CALL, dims=(128, 128)), replace(WHOLE, dims=(128, 128)))
    },
    "lists of heads": replace(ROWS, mask=("windows of heads", 49), dims=(128, 128)),
    "lists of rows": replace(ROWS, mask=("causal documents of rows", 6), dims=(128, 128)),
    "rows that see nothing": replace(CALL, mask=("hidden rows", 48), length=512, kv_length=512),
    **{
        f"{tile} keys, {stages} stages": replace(
            CALL, dims=(128, 128), length=640, kv_length=640,
            options=CALL.options | {"fwd_BLOCK_N": tile, "fwd_num_stages": stages},
        )
        for tile in (64, 128)
        for stages in (2, 3)
    },
    # Blocks in any order of slots, and (acc, m, l) passed from step to step.
    **{
        schedule: replace(CALL, dims=(128, 128), length=1024, kv_length=1024, world=2, schedule=schedule,
                          balancer="ptrr")
        for schedule in ("allgather", "ring", "fetch")
    },
}  # fmt: skip


def attempt() -> None:
    """Run steps of every kind, which may hang."""
    torch.set_default_device(DEVICE)
    with route("gluon"):
        for case in FIRST.values():
            check(case)
    torch.cuda.synchronize()


@pytest.fixture(scope="module", autouse=ON_GPU)
def kernels_end() -> None:
    """Run the kernel in a separate process first, once for all workers of a run: a barrier that is never
    completed would hang the device, and with it all tests."""
    run_id = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    with open(Path(tempfile.gettempdir(), f"tritoncp-gluon-{run_id}"), "a+") as notes:
        fcntl.flock(notes, fcntl.LOCK_EX)
        notes.seek(0)
        if not (outcome := notes.read()):
            command = [sys.executable, "-c", "from tests.compiled.test_gluon import attempt; attempt()"]
            try:
                subprocess.run(command, check=True, timeout=100, cwd=Path(__file__).parents[2])
                outcome = "ends"
            except subprocess.SubprocessError as error:
                outcome = repr(error)
            notes.write(outcome)
    assert outcome == "ends"


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.long) for name in FIRST),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in MORE),
    ],
)
def test_gluon_equals_dense_attention(name: str) -> None:
    """Full tiles around the rings before masked ones, masked blocks alone, and full tiles alone."""
    check_route("gluon", {**FIRST, **MORE}[name])


@pytest.mark.nightly
def test_rows_of_several_full_runs_and_no_masked_block() -> None:
    x, n = qkv(6 * 128, heads=2, dim=64, dtype=BF16), 6 * 128
    mask = tritoncp.create_block_mask(lambda b, h, q, kv: (q // 128 + kv // 128) % 2 == 0, 1, 1, n, n)
    with route("gluon"):
        agree(run(x, mask, start=None, ROUTE="gluon"), oracle(x, mask, start=None))


@pytest.mark.nightly
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", ["causal", "window", "intervals"])
def test_long_rows_give_the_same_bits_every_time(name: str, dim: int) -> None:
    """No race between copies, groups and turns; and the results agree with the loop kernel."""
    n = max(LONG, 256)
    x, mask = qkv(n, heads=8, kv_heads=2, dim=dim, dtype=BF16), MASKS[name](n, 128)
    with route("gluon"):
        first = run(x, mask, start=None, ROUTE="gluon")
        agree(first, run(x, mask, start=None))
        for _ in range(REPEATS):
            same(run(x, mask, start=None, ROUTE="gluon"), first)
