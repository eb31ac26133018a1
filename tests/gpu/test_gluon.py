"""The route in Gluon: barriers and asynchronous products that no interpreter runs; answers against float64.

Off a GPU the same tests run by loops, which shows that they are sound."""

import warnings

import pytest
import torch

import tritoncp
from tests.gpu.support import (
    BF16,
    BLOCK,
    FP16,
    MASKS,
    ON_GPU,
    N,
    block_mask,
    check,
    documents,
    qkv,
    run,
    same,
)
from tritoncp.kernels.configs import architecture, specialises
from tritoncp.masks import causal, full_mask, sliding_window

LONG = 4096 if ON_GPU else 128
ROUTE = {"ROUTE": "gluon"} if ON_GPU else {}
REPEATS = 25 if ON_GPU else 0
ENDS = {"causal": causal(), "window": sliding_window(2 * BLOCK + 30, 7), "documents": documents(LONG)}


@pytest.fixture(autouse=True)
def always():
    """Going by loops is an error where the device has the route."""
    if ON_GPU and specialises(architecture(torch.device("cuda")), "gluon"):
        warnings.filterwarnings("error", message="ROUTE=")


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", ["full", "causal", "window", "documents", "prefix"])
def test_answers(mask, dim):
    """Grouped heads, batch rows, a last tile that reaches past the end of the tensor."""
    check(qkv(dim=dim, heads=4, kv_heads=2, batch=2), MASKS[mask](), **ROUTE)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("dim", "v_dim"), [(64, 128), (128, 64), (128, 128)])
def test_dims_and_dtypes(dim, v_dim, dtype):
    check(qkv(n=4 * BLOCK, dim=dim, v_dim=v_dim, dtype=dtype), block_mask(causal(), 4 * BLOCK), **ROUTE)


@pytest.mark.parametrize("n", [1, BLOCK // 2, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK - 1])
def test_few_tiles(n):
    """No full tile, one, two; the second group without a row."""
    check(qkv(n=n, dim=128), full_mask(n, n, block=BLOCK), **ROUTE)
    check(qkv(n=n, dim=128), block_mask(causal(), n), **ROUTE)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("tile", [64, 128] if ON_GPU else [64])
def test_tiles(tile, stages):
    options = {"fwd_BLOCK_N": tile, "fwd_num_stages": stages} if ON_GPU else {}
    check(qkv(n=5 * BLOCK, heads=4, dim=128), block_mask(causal(), 5 * BLOCK), **ROUTE, **options)


def test_rows_that_see_nothing():
    """Zeros and -inf, and nothing waits for tiles that do not come."""
    n = 4 * BLOCK
    gap = block_mask(lambda b, h, q, kv: (q >= kv) & ((q < 40) | (q >= 3 * BLOCK)), n)
    got = check(qkv(n=n, dim=64), gap, **ROUTE)
    assert bool((got.out[:, :, 40 : 3 * BLOCK] == 0).all())


def test_blocks_listed_as_full_everywhere():
    """Alternating blocks: several full runs a row, none masked."""
    n = 6 * BLOCK
    check(qkv(n=n, dim=64), block_mask(lambda b, h, q, kv: (q // BLOCK + kv // BLOCK) % 2 == 0, n), **ROUTE)


def test_tables_of_batch_rows_and_heads():
    mask = block_mask(lambda b, h, q, kv: q + 8 * b >= kv + BLOCK * h, N, 2, 2)
    check(qkv(batch=2, dim=128), mask, **ROUTE)


def test_views_of_one_projection():
    x = qkv(n=4 * BLOCK, heads=2, kv_heads=2, dim=128)
    joint = torch.stack([t.transpose(1, 2) for t in x[:3]], 2)
    views = [joint[:, :, i].transpose(1, 2) for i in range(3)]
    mask = block_mask(causal(), 4 * BLOCK)
    check(x, mask, got=run(x._replace(q=views[0], k=views[1], v=views[2]), mask, **ROUTE))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", ENDS)
def test_long_rows_give_the_same_bits_every_time(name, dim):
    """No race between copies, groups and turns; and as near to loops as rounding allows."""
    x, mask = qkv(n=LONG, heads=8, kv_heads=2, dim=dim), block_mask(ENDS[name], LONG)
    first, loops = run(x, mask, **ROUTE), run(x, mask)
    torch.testing.assert_close(first.out, loops.out, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(first.lse, loops.lse, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(first.max_scores, loops.max_scores, atol=1e-4, rtol=1e-5)
    for _ in range(REPEATS):
        same(run(x, mask, **ROUTE), first)


@pytest.mark.parametrize("schedule", ["allgather", "ring", "fetch"])
def test_shards_and_steps(schedule):
    """Slots in any order, state from step to step."""
    n = 8 * BLOCK
    x, mask = qkv(n=n, dim=128), block_mask(causal(), n)
    world = tritoncp.simulate(2)
    plan = tritoncp.make_plan(mask, world_size=2, schedule=schedule)
    shards = [world.shard(t, plan, dim=2) for t in x[:3]]
    outs = world.flex_attention(*shards, plan, enable_gqa=True, kernel_options=ROUTE)
    check(x, mask, got=run(x, mask)._replace(out=world.unshard(outs, plan, dim=2)))
