"""Specialised warps: every answer against float64, for wrong results are known of such loops (triton#8311,
fla#988).  A fresh thread has none of the user's settings."""

import math
import threading
import warnings

import pytest
import torch

import tritoncp
from tests.gpu.support import (
    BF16,
    BLOCK,
    FP16,
    ON_GPU,
    SCORES,
    N,
    block_mask,
    check,
    qkv,
    run,
    same,
)
from tritoncp.kernels import engine
from tritoncp.kernels.configs import architecture, specialises
from tritoncp.masks import and_masks, causal, document, full_mask

LONG = 4096 if ON_GPU else 3 * BLOCK
SHORT = (4 if ON_GPU else 3) * BLOCK
ROUTE = {"ROUTE": "specialised"}


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """However short the rows; going by loops is an error where the device has the route."""
    monkeypatch.setattr(engine, "STATE_SHARE", math.inf)
    if not ON_GPU or specialises(architecture(torch.device("cuda"))):
        warnings.filterwarnings("error", message="ROUTE=")


def two_runs(b, h, q, kv):
    return (kv < BLOCK + 2) | (kv >= BLOCK + 5)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192])
@pytest.mark.parametrize("name", ["full", "causal", "documents"])
def test_answers(name, dim):
    """Tiles of one piece of channels and of two; grouped heads; a ragged end."""
    n = (10 if ON_GPU else 4) * BLOCK - 24
    mods = {"causal": causal(), "documents": and_masks(causal(), document(lengths=[21, n - 21]))}
    mask = block_mask(mods[name], n) if name in mods else full_mask(n, n, block=BLOCK)
    check(qkv(n=n, dim=dim, heads=4, kv_heads=2, batch=2), mask, **ROUTE)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("runs", [0, 1, 2])
def test_whole_blocks(runs, dtype):
    """Without a masked launch; with one full run a row; with two."""
    mods = {1: causal(), 2: two_runs}
    mask = block_mask(mods[runs], SHORT) if runs else full_mask(SHORT, SHORT, block=BLOCK)
    check(qkv(n=SHORT, dim=128, dtype=dtype), mask, **ROUTE)


@pytest.mark.parametrize("tiles", [{}, {"fwd_BLOCK_N": 64, "fwd_num_stages": 3}, {"fwd_num_stages": 2}])
@pytest.mark.parametrize("dim", [64, 128])
def test_tiles(dim, tiles):
    """(Options of the forward pass are those of both launches.)"""
    check(qkv(n=SHORT, dim=dim, heads=4), block_mask(causal(), SHORT), **ROUTE, **tiles)


@pytest.mark.parametrize("score", ["softcap", "alibi"])
def test_scores_that_only_compute(score):
    check(qkv(n=SHORT, heads=4, dim=128), block_mask(causal(), SHORT), SCORES[score], **ROUTE)


def test_views_of_one_projection():
    x = qkv(n=SHORT, heads=2, kv_heads=2, dim=128)
    joint = torch.stack([t.transpose(1, 2) for t in x[:3]], 2)
    views = [joint[:, :, i].transpose(1, 2) for i in range(3)]
    mask = block_mask(causal(), SHORT)
    check(x, mask, got=run(x._replace(q=views[0], k=views[1], v=views[2]), mask, **ROUTE))


def test_long_rows_give_the_same_bits_every_time():
    """As near to the other route as rounding allows, and no race."""
    x, mask = qkv(n=LONG, heads=8, kv_heads=2, dim=128), block_mask(causal(), LONG)
    first, loops = run(x, mask, **ROUTE), run(x, mask)
    torch.testing.assert_close(first.out, loops.out, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(first.lse, loops.lse, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(first.max_scores, loops.max_scores, atol=1e-4, rtol=1e-5)
    for _ in range(25 if ON_GPU else 1):
        same(run(x, mask, **ROUTE), first)


def test_steps_of_a_ring():
    """State from step to step, slots in any order."""
    n = (8 if ON_GPU else 4) * BLOCK
    x, mask = qkv(n=n, dim=128), block_mask(causal(), n)
    world = tritoncp.simulate(2)
    plan = tritoncp.make_plan(mask, world_size=2, schedule="ring")
    shards = [world.shard(t, plan, dim=2) for t in x[:3]]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ROUTE=.*no full blocks")
        outs = world.flex_attention(*shards, plan, enable_gqa=True, kernel_options=ROUTE)
    whole = run(x, mask)
    check(x, mask, got=whole._replace(out=world.unshard(outs, plan, dim=2)))


def test_a_fresh_thread():
    """It has no allocator for descriptors that a kernel makes, and none is left behind."""
    x, mask = qkv(n=SHORT, dim=128), block_mask(causal(), SHORT)
    got = []
    thread = threading.Thread(target=lambda: got.append(run(x, mask, **ROUTE)))
    thread.start()
    thread.join()
    same(got[0], run(x, mask, **ROUTE))


def test_tables_of_batch_rows_and_heads():
    mask = block_mask(lambda b, h, q, kv: q + 8 * b >= kv + BLOCK * h, N, 2, 2)
    check(qkv(batch=2, dim=128), mask, **ROUTE)


def test_rows_that_see_nothing():
    def mod(b, h, q, kv):
        return (q >= kv) & ((q < BLOCK) | (q >= 2 * BLOCK))

    check(qkv(n=SHORT, dim=128), block_mask(mod, SHORT), **ROUTE)
