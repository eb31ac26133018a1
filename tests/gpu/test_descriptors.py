"""Tiles copied by tensor descriptor, and the fused backward pass, on a GPU: the interpreter executes
neither as a GPU does."""

import pytest
import torch

from tests.gpu.support import DEVICE, MASKS, N, block_mask, check, qkv, relative, run, same
from tritoncp import causal
from tritoncp.kernels.tile_rules import architecture
from tritoncp.kernels.toolchain import fused_fault

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
    table = torch.randn(2, 33, device=DEVICE)
    check_fused(qkv(), MASKS["documents"](), relative, [table], USE_TMA=tma)


def test_fused_backward_is_right_every_time():
    """Programs add to the same rows at once: sums agree up to rounding, and no addend is lost."""
    x, mask = qkv(n=2 * N, dim=64, heads=4, kv_heads=4), block_mask(causal(), 2 * N)
    check_fused(x, mask)
    want = run(x, mask)
    for _ in range(0 if fused_fault(architecture(torch.device("cuda"))) else 5):
        got = run(x, mask, FUSED_BACKWARD=True)
        torch.testing.assert_close(got.grads[:2], want.grads[:2], atol=2e-2, rtol=2e-2)
