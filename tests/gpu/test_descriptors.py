"""Tiles copied by tensor descriptor, and the fused backward pass, on a GPU: the interpreter executes
neither as a GPU does."""

import pytest
import torch

import tritoncp
from tests.gpu.support import BF16, BLOCK, FP16, MASKS, SCORES, N, block_mask, check, qkv, run, same
from tritoncp.kernels.tile_rules import architecture
from tritoncp.kernels.tiles import copyable
from tritoncp.kernels.toolchain import fused_fault
from tritoncp.masks import causal

TILES = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_M1": 64, "BLOCK_N1": 64, "BLOCK_M2": 64, "BLOCK_N2": 64}
TILES |= {"num_warps": 8, "num_stages": 2}


@pytest.mark.parametrize("mask", MASKS)
def test_same_bits_as_by_pointer(mask):
    """Descriptor and pointer copies give the same tiles in the same order, and so the same bits."""
    x, mask_mod = qkv(dim=128), MASKS[mask]()
    copied = run(x, mask_mod, USE_TMA=True, **TILES)
    same(copied, run(x, mask_mod, USE_TMA=False, **TILES))
    for _ in range(3):
        same(run(x, mask_mod, USE_TMA=True, **TILES), copied)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_views_of_one_projection(dtype):
    """q, k and v as they come out of one matrix product: [B, S, 3, H, D], and padded rows in front."""
    x = qkv(heads=2, kv_heads=2, dim=64, dtype=dtype)
    joint = torch.stack([t.transpose(1, 2) for t in x[:3]], 2)
    behind = torch.cat([torch.full_like(joint[:, :8], torch.nan), joint], 1)[:, 8:]
    views = [behind[:, :, i].transpose(1, 2) for i in range(3)]
    assert all(copyable(t) for t in views)
    check(x, MASKS["causal"](), got=run(x._replace(q=views[0], k=views[1], v=views[2]), MASKS["causal"]()))


def test_slots_of_a_gathered_buffer():
    """Coordinates from a table: two ranks' blocks, dealt in zig-zag, in one buffer."""
    x, n = qkv(n=4 * BLOCK, dim=128), 4 * BLOCK
    plan = tritoncp.make_plan(block_mask(causal(), n), world_size=2, schedule="allgather")
    world = tritoncp.simulate(2)
    shards = [world.shard(t, plan, dim=2) for t in x[:3]]
    outs = world.flex_attention(*shards, plan, enable_gqa=True, kernel_options={"USE_TMA": True})
    expected = run(x, block_mask(causal(), n), USE_TMA=True)
    torch.testing.assert_close(world.unshard(outs, plan, dim=2), expected.out, atol=2e-2, rtol=2e-2)


def check_fused(x, mask, *score, **options):
    """Gradients are right; with a Triton that compiles the kernel wrong, the call raises an error."""
    if fused_fault(architecture(torch.device("cuda"))) is None:
        check(x, mask, *score, FUSED_BACKWARD=True, **options)
    else:
        with pytest.raises(ValueError, match="wrong gradients"):
            run(x, mask, *score, FUSED_BACKWARD=True, **options)


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("mask", ["full", "causal", "window", "documents", "dilated", "empty rows"])
def test_fused_backward(mask, dim):
    check_fused(qkv(dim=dim, heads=4, kv_heads=2), MASKS[mask]())


@pytest.mark.parametrize("tma", [False, True])
def test_fused_backward_with_captures(tma):
    score = SCORES["relative"]
    check_fused(qkv(), MASKS["documents"](), score, score.captured(2), USE_TMA=tma)


def test_fused_backward_is_right_every_time():
    """Programs add to the same rows at once: sums agree up to rounding, and no addend is lost."""
    x, mask = qkv(n=2 * N, dim=64, heads=4, kv_heads=4), block_mask(causal(), 2 * N)
    check_fused(x, mask)
    want = run(x, mask)
    for _ in range(0 if fused_fault(architecture(torch.device("cuda"))) else 5):
        got = run(x, mask, FUSED_BACKWARD=True)
        torch.testing.assert_close(got.dq, want.dq, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(got.dk, want.dk, atol=2e-2, rtol=2e-2)
