"""Few rows against many keys: heads packed into tiles, keys shared by programs, by the rule and by option."""

import math

import pytest
import torch

import tritoncp
from tests.gpu.support import (
    BF16,
    BLOCK,
    DEVICE,
    FP16,
    FP32,
    ON_GPU,
    SCORES,
    N,
    check,
    check_forward,
    close,
    documents,
    equal,
    forward,
    oracle,
    peer,
    qkv,
)
from tritoncp.kernels.engine import TritonEngine
from tritoncp.kernels.operands import Mods
from tritoncp.masks.closed_forms import sliding_window
from tritoncp.masks.mask import Mask, create_block_mask, full_mask

KEYS = 8 * N if ON_GPU else N
ROWS = 16 if ON_GPU else 5


def table(b, h, q, kv):
    return (kv < KEYS // 3) | ((q + kv + h) % 3 == 0)


def mask_of(name: str, rows: int) -> Mask:
    if name == "full":
        return full_mask(rows, KEYS, block=BLOCK)
    mods = {
        "last rows of a causal mask": sliding_window(-1, KEYS - rows),
        "window": sliding_window(3, KEYS // 2),
        "documents": lambda b, h, q, kv: documents(KEYS)(b, h, q + KEYS - rows, kv),
        "mask_mod": table,
        "empty rows": lambda b, h, q, kv: (q % 5 != 2) & (kv % 7 < 3),
    }
    return create_block_mask(mods[name], 1, 1, rows, KEYS, DEVICE, BLOCK)


MASKS = ["full", "last rows of a causal mask", "window", "documents", "mask_mod", "empty rows"]


@pytest.mark.parametrize("rows", [1, ROWS, 4 * ROWS])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask, rows):
    check_forward(qkv(n=rows, kv=KEYS, heads=8, kv_heads=2, dim=128), mask_of(mask, rows))


CALLS = [  # tensors, mask
    *(
        ({"heads": q, "kv_heads": kv, "batch": 2}, "documents")
        for q, kv in ((2, 2), (14, 2), (71 if ON_GPU else 18, 1))
    ),
    *(
        ({"heads": 4, "dim": dim, "dtype": dtype}, "mask_mod")
        for dim, dtype in ((64, FP16), (80, BF16), (128, FP32), (256, BF16))
    ),
]


@pytest.mark.parametrize(("tensors", "mask"), CALLS, ids=str)
def test_groups_dims_and_dtypes(tensors, mask):
    check_forward(qkv(n=ROWS, kv=KEYS, **tensors), mask_of(mask, ROWS))


@pytest.mark.parametrize("score", ["softcap", "alibi", "relative"])
def test_scores(score):
    chosen = SCORES[score]
    x, mask = qkv(n=ROWS, kv=KEYS, heads=8, kv_heads=2), mask_of("documents", ROWS)
    check_forward(x, mask, chosen, chosen.captured(8))


def test_the_backward_pass_goes_on_from_there():
    check(qkv(n=ROWS, kv=KEYS, heads=4, kv_heads=1), mask_of("documents", ROWS))


@pytest.mark.parametrize(
    ("split", "pack", "tma"), [(1, True, True), (2, False, True), (7, True, False), (64, True, True)]
)
def test_options_change_speed_only(split, pack, tma):
    x, mask = qkv(n=ROWS, kv=KEYS, heads=4, kv_heads=1, dim=128), mask_of("last rows of a causal mask", ROWS)
    options = {"SPLIT_KV": split, "PACK_GQA": pack, "USE_TMA": tma}
    first = check_forward(x, mask, **options)
    for _ in range(50 if ON_GPU else 1):
        equal(forward(x, mask, **options), first)


def test_any_number_of_rows_may_be_shared():
    """PACK_GQA and SPLIT_KV as options, also with rows that fill many tiles."""
    whole = create_block_mask(sliding_window(-1, 0), 1, 1, N, N, DEVICE, BLOCK)
    check_forward(qkv(heads=4, kv_heads=2), whole, SPLIT_KV=3, PACK_GQA=True)


def test_the_rule_packs_and_splits():
    """On a device with many multiprocessors one row of four heads is one tile, and many programs share it."""
    x = qkv(n=1, kv=KEYS, heads=4, kv_heads=1, dim=128)
    tables = tritoncp.make_plan(full_mask(1, KEYS, block=BLOCK)).tables(DEVICE, 1, 4)
    out, lse = torch.empty_like(x.q), torch.empty(1, 4, 1, device=DEVICE)
    launch = TritonEngine(Mods(), 128**-0.5).forward(*x[:3], tables, out=out, lse=lse)
    args = launch.parts[0].args
    assert (args["PACK"], (args["splits"] or 1) > 1) == ((4, True) if ON_GPU else (1, False))
    launch()
    assert bool(out.isfinite().all() and (lse > -math.inf).all())


def test_over_ranks():
    """Steps of a ring, with (acc, m, l) as input and output."""
    mask = create_block_mask(sliding_window(-1, KEYS - 4 * ROWS), 1, 1, 4 * ROWS, KEYS, DEVICE, BLOCK)
    x, world = qkv(n=4 * ROWS, kv=KEYS, heads=4, kv_heads=2), tritoncp.simulate(2)
    want, other = oracle(x, mask), peer(x, mask)
    for schedule in ("ring", "fetch"):
        plan = world.make_plan(mask, schedule=schedule)
        shards = [world.shard(t, plan, dim=2, side=side) for t, side in zip(x[:3], ("q", "kv", "kv"))]
        outs, lses = world.flex_attention(*shards, plan, enable_gqa=True, return_lse=True)
        out, lse = (world.unshard(t, plan, dim=2) for t in (outs, lses))
        close(schedule, out, want.out, other.out)
        torch.testing.assert_close(lse.double(), want.lse, atol=1e-4, rtol=1e-5)
