"""Specialised warps: every answer against float64, since compilers have miscompiled such loops (triton#8311,
fla#988).  Also in a fresh thread, without the user's settings."""

import itertools
import math
import threading
import warnings
from typing import Any

import pytest
import torch

import tritoncp
from tests.gpu.support import (
    BF16,
    BLOCK,
    FP16,
    ON_GPU,
    QKV,
    SCORES,
    N,
    Score,
    block_mask,
    check_forward,
    close,
    equal,
    forward,
    oracle,
    peer,
    qkv,
)
from tests.gpu.support import check as whole
from tritoncp.kernels import forward_specialised
from tritoncp.kernels.tile_rules import architecture, merges, specialises
from tritoncp.masks import Mask, and_masks, causal, document, full_mask, sliding_window

LONG = 4096 if ON_GPU else 3 * BLOCK
SHORT = (4 if ON_GPU else 3) * BLOCK
ROUTE = {"ROUTE": "specialised"}
MERGES = ON_GPU and merges(architecture(torch.device("cuda")))
# Where one loop takes all blocks, it takes all masks, and scores are one product.
MASKS = ("full", "causal", "documents", *(("window", "dilated") if MERGES else ()))
TWO_PIECES = () if MERGES else (80, 192)


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Use the route for short rows too; a fallback to loops is an error where the device has the route."""
    monkeypatch.setattr(forward_specialised, "STATE_SHARE", math.inf)
    if not ON_GPU or specialises(architecture(torch.device("cuda"))):
        warnings.filterwarnings("error", message="ROUTE=")


def check(x: QKV, mask: Mask, score: Score = SCORES["none"], **options: Any) -> None:
    check_forward(x, mask, score, **ROUTE, **options)


def two_runs(b, h, q, kv):
    return (kv < BLOCK + 2) | (kv >= BLOCK + 5)


@pytest.mark.parametrize(
    ("name", "dim"),
    [*itertools.product(MASKS, (64, 128)), *(("documents", dim) for dim in TWO_PIECES)],
)
def test_answers(name, dim):
    """Cases: tiles of one or two pieces of channels, grouped heads, lengths between multiples of a tile."""
    n = (10 if ON_GPU else 4) * BLOCK - 24
    mods = {"causal": causal(), "documents": and_masks(causal(), document(lengths=[21, n - 21]))}
    mods |= {"window": sliding_window(200, 10), "dilated": lambda b, h, q, kv: (q - kv) % 3 == 0}
    mask = block_mask(mods[name], n) if name in mods else full_mask(n, n, block=BLOCK)
    check(qkv(n=n, dim=dim, heads=4, kv_heads=2, batch=2), mask)


@pytest.mark.parametrize(("runs", "dtype"), [(0, BF16), (1, FP16), (2, BF16)])
def test_whole_blocks(runs, dtype):
    """Cases: no masked launch; one full run a row; two."""
    mods = {1: causal(), 2: two_runs}
    mask = block_mask(mods[runs], SHORT) if runs else full_mask(SHORT, SHORT, block=BLOCK)
    check(qkv(n=SHORT, dim=128, dtype=dtype), mask)


@pytest.mark.parametrize("tiles", [{"fwd_BLOCK_N": 64, "fwd_num_stages": 3}, {"fwd_num_stages": 2}])
@pytest.mark.parametrize("dim", [64, 128])
def test_tiles(dim, tiles):
    """Options of the forward pass apply to both launches."""
    if dim == 128 and "fwd_BLOCK_N" not in tiles:
        tiles = {"fwd_BLOCK_N": 32}
    check(qkv(n=SHORT, dim=dim, heads=4), block_mask(causal(), SHORT), **tiles)


@pytest.mark.parametrize("score", ["softcap", "alibi"])
def test_scores_that_only_compute(score):
    check(qkv(n=SHORT, heads=4, dim=128), block_mask(causal(), SHORT), SCORES[score])


def test_views_of_one_projection():
    x = qkv(n=SHORT, heads=2, kv_heads=2, dim=128)
    joint = torch.stack([t.transpose(1, 2) for t in x[:3]], 2)
    q, k, v = (joint[:, :, i].transpose(1, 2) for i in range(3))
    check(x._replace(q=q, k=k, v=v), block_mask(causal(), SHORT))


def test_long_rows_give_the_same_bits_every_time():
    """Repeated runs have equal bits, and agree with the other route up to rounding."""
    x, mask = qkv(n=LONG, heads=8, kv_heads=2, dim=128), block_mask(causal(), LONG)
    first, loops = forward(x, mask, **ROUTE), forward(x, mask)
    for a, b, tolerance in zip(first, loops, (1e-2, 1e-4, 1e-4)):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=1e-2)
    for _ in range(50 if ON_GPU else 1):
        equal(forward(x, mask, **ROUTE), first)


def test_steps_of_a_ring():
    """Blocks in any order of slots, with (acc, m, l) passed from step to step."""
    n = (8 if ON_GPU else 4) * BLOCK
    x, mask = qkv(n=n, dim=128), block_mask(causal(), n)
    world = tritoncp.simulate(2)
    plan = tritoncp.make_plan(mask, world_size=2, schedule="ring")
    shards = [world.shard(t, plan, dim=2) for t in x[:3]]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ROUTE=.*no full blocks")
        outs = world.flex_attention(*shards, plan, enable_gqa=True, kernel_options=ROUTE)
    close("out", world.unshard(outs, plan, dim=2), oracle(x, mask).out, peer(x, mask).out)


def test_gradients_go_on_from_there():
    """The backward pass reads this route's out and lse."""
    whole(qkv(n=SHORT, dim=128), block_mask(causal(), SHORT), **ROUTE)


def test_a_fresh_thread():
    """The thread has no allocator for descriptors made by kernels; the launch sets one and removes it."""
    x, mask = qkv(n=SHORT, dim=128), block_mask(causal(), SHORT)
    got = []
    thread = threading.Thread(target=lambda: got.append(forward(x, mask, **ROUTE)))
    thread.start()
    thread.join()
    equal(got[0], forward(x, mask, **ROUTE))


def test_tables_of_batch_rows_and_heads():
    mask = block_mask(lambda b, h, q, kv: q + 8 * b >= kv + BLOCK * h, N, 2, 2)
    check(qkv(batch=2, dim=128), mask)


def test_rows_that_see_nothing():
    def mod(b, h, q, kv):
        return (q >= kv) & ((q < BLOCK) | (q >= 2 * BLOCK))

    check(qkv(n=SHORT, dim=128), block_mask(mod, SHORT))
