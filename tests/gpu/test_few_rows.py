"""Few rows against many keys: heads packed into tiles, keys shared by programs, by the rule and by option."""

import math

import pytest
import torch

import tritoncp
from tests.gpu.support import (
    BLOCK,
    DEVICE,
    ON_GPU,
    N,
    check_forward,
    equal,
    forward,
    qkv,
)
from tritoncp.kernels.engine import TritonEngine
from tritoncp.kernels.operands import Mods
from tritoncp.masks.closed_forms import sliding_window
from tritoncp.masks.mask import create_block_mask, full_mask

KEYS = 8 * N if ON_GPU else N
ROWS = 16 if ON_GPU else 5


@pytest.mark.parametrize(
    ("split", "pack", "tma"), [(1, True, True), (2, False, True), (7, True, False), (64, True, True)]
)
def test_options_change_speed_only(split, pack, tma):
    x = qkv(n=ROWS, kv=KEYS, heads=4, kv_heads=1, dim=128)
    mask = create_block_mask(sliding_window(-1, KEYS - ROWS), 1, 1, ROWS, KEYS, DEVICE, BLOCK)
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
