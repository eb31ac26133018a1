"""The route in Gluon: barriers and asynchronous products that no interpreter runs; answers against float64.

Without a GPU the same tests run by loops, which shows that the tests are correct.
"""

import fcntl
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tritoncp
from tests.gpu.support import BF16, BLOCK, FP16, MASKS, ON_GPU, N, block_mask, documents, qkv, run, same
from tests.gpu.support import check as compare
from tests.kernels.support.harness import QKV, Results, over_ranks
from tritoncp import Mask, causal, full_mask, sliding_window
from tritoncp.kernels.tile_rules import architecture, widest_route

LONG = 4096 if ON_GPU else 2 * BLOCK
ROUTE = {"ROUTE": "gluon"} if ON_GPU else {}
REPEATS = 25 if ON_GPU else 1
HERE = ON_GPU and widest_route(architecture(torch.device("cuda")), "gluon") > 0
ENDS = {"causal": causal(), "window": sliding_window(2 * BLOCK + 30, 7), "documents": documents(LONG)}


def attempt() -> None:
    """Run steps of every kind, which may hang."""
    for dim in (64, 128):
        for name in ("full", "causal", "window", "documents"):
            run(qkv(dim=dim, heads=4, kv_heads=2), MASKS[name](), passes=1, **ROUTE)
            torch.cuda.synchronize()


@pytest.fixture(scope="module", autouse=True)
def it_ends() -> None:
    """Run the Gluon kernel once in a separate process, for all workers of a run: a barrier that is never
    completed would hang the device, and with it all tests."""
    if not HERE:
        return
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    with open(Path(tempfile.gettempdir(), f"tritoncp-gluon-{run}"), "a+") as notes:
        fcntl.flock(notes, fcntl.LOCK_EX)
        notes.seek(0)
        if not (outcome := notes.read()):
            command = [sys.executable, "-c", "from tests.gpu.test_gluon import attempt; attempt()"]
            try:
                subprocess.run(command, check=True, timeout=100, cwd=Path(__file__).parents[2])
                outcome = "ends"
            except subprocess.SubprocessError as error:
                outcome = repr(error)
            notes.write(outcome)
    assert outcome == "ends"


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Turn a fallback to loops into an error on devices with the route; request no route on others."""
    if not HERE:
        yield
        return
    from tritoncp.kernels.routes import forward_gluon

    launched, launch = [], forward_gluon.launch
    monkeypatch.setattr(
        forward_gluon, "launch", lambda *args, **step: launched.append(args) or launch(*args, **step)
    )
    warnings.filterwarnings("error", message="ROUTE=")
    yield
    assert launched


def check(x: QKV, mask: Mask, **options: Any) -> Results:
    """The forward pass against float64."""
    return compare(x, mask, passes=1, **ROUTE, **options)


def alternating(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """Each row of blocks has several full runs and no masked one."""
    return (q // BLOCK + kv // BLOCK) % 2 == 0


def by_row_and_head(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q + 8 * b >= kv + BLOCK * h


GROUPED = {"heads": 4, "kv_heads": 2, "batch": 2}  # and a last tile that reaches past the end of the tensor
ANSWERS = [  # sizes of q, k and v, and the mask of n tokens
    *((GROUPED | {"dim": dim}, lambda n, name=name: MASKS[name]())
      for dim in (64, 128) for name in ("full", "causal", "window", "documents", "prefix")),
    *(({"n": 4 * BLOCK, "dim": dim, "v_dim": v_dim, "dtype": dtype}, lambda n: block_mask(causal(), n))
      for dim, v_dim in ((64, 128), (128, 64), (128, 128)) for dtype in (BF16, FP16)),
    *(({"n": n, "dim": 128}, mask)  # no, one or two full tiles; a second warp group without a row
      for n in (1, BLOCK // 2, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK - 1)
      for mask in (lambda n: full_mask(n, n, block=BLOCK), lambda n: block_mask(causal(), n))),
    ({"n": 6 * BLOCK, "dim": 64}, lambda n: block_mask(alternating, n)),
    ({"batch": 2, "dim": 128}, lambda n: block_mask(by_row_and_head, n, 2, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "mask_of"), ANSWERS)
def test_answers(sizes, mask_of):
    check(qkv(**sizes), mask_of(sizes.get("n", N)))


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("tile", [64, 128] if ON_GPU else [64])
def test_tiles(tile, stages):
    options = {"fwd_BLOCK_N": tile, "fwd_num_stages": stages} if ON_GPU else {}
    check(qkv(n=5 * BLOCK, heads=4, dim=128), block_mask(causal(), 5 * BLOCK), **options)


def test_rows_that_see_nothing():
    """Results are zeros and -inf, and no barrier waits for absent tiles."""
    n = 4 * BLOCK
    gap = block_mask(lambda b, h, q, kv: (q >= kv) & ((q < 40) | (q >= 3 * BLOCK)), n)
    got = check(qkv(n=n, dim=64), gap)
    assert bool((got.out[:, :, 40 : 3 * BLOCK] == 0).all())


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", ENDS)
def test_long_rows_give_the_same_bits_every_time(name, dim):
    """No race between copies, groups and turns; and the results agree with the loop kernel up to rounding."""
    x, mask = qkv(n=LONG, heads=8, kv_heads=2, dim=dim), block_mask(ENDS[name], LONG)
    first, loops = run(x, mask, passes=1, **ROUTE), run(x, mask, passes=1)
    for got, want, near in zip(first[:3], loops[:3], (1e-2, 1e-4, 1e-4)):
        torch.testing.assert_close(got, want, atol=near, rtol=near)
    for _ in range(REPEATS):
        same(run(x, mask, passes=1, **ROUTE), first)


@pytest.mark.parametrize("schedule", ["allgather", "ring", "fetch"])
def test_shards_and_steps(schedule):
    """Blocks in any order of slots, with (acc, m, l) passed from step to step."""
    n = (8 if ON_GPU else 4) * BLOCK
    x, mask = qkv(n=n, dim=128), block_mask(causal(), n)
    plan = tritoncp.make_plan(mask, world_size=2, schedule=schedule)
    got = over_ranks(x, plan, start=None, **ROUTE)
    compare(x, mask, got=got)
