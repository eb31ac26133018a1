"""Cases of torch's BlockMask tests: tritoncp's masks have torch's blocks, and torch's masks are taken."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, or_masks

import tritoncp
from tests.compat.dense import check
from tests.compat.test_torch_calls import attend_with_lse, causal
from tests.compat.torch_mods import MASKS, Dims
from tests.masks.random_masks import assert_same_lists

pytestmark = pytest.mark.usefixtures("cpu_engine")


def both(
    mod: Any, B: int | None, H: int | None, q: int, kv: int, size: Any = 128
) -> tuple[BlockMask, BlockMask]:
    """(tritoncp's mask as torch's, torch's own)."""
    own = tritoncp.create_block_mask(mod, B, H, q, kv, BLOCK_SIZE=size)
    return own.to_block_mask(), create_block_mask(mod, B, H, q, kv, device="cpu", BLOCK_SIZE=size)


def same_blocks(got: BlockMask, want: BlockMask) -> None:
    """Assert the same attributes and lists."""
    assert (got.shape, got.BLOCK_SIZE, got.seq_lengths) == (want.shape, want.BLOCK_SIZE, want.seq_lengths)
    assert got.sparsity() == want.sparsity() and got.numel() == want.numel()
    assert_same_lists(got, want)
    assert torch.equal(got.to_dense(), want.to_dense())


@pytest.mark.parametrize("size", [32, 128, (64, 32)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_blocks_of_every_mask(name: str, size: int | tuple[int, int]) -> None:
    dims = Dims(2, 2, 200, kv=230)
    same_blocks(*both(MASKS[name](dims), 2, 2, 200, 230, size))


def test_mask_mod_combiners() -> None:
    for combine in (and_masks, or_masks):  # torch's own combiners make mask_mods too
        same_blocks(*both(combine(causal, lambda b, h, q, kv: q - kv <= 100), 1, 1, 512, 512))


def test_custom_block_mask_generator() -> None:
    """Lists made by hand are taken as they are."""
    count, size, length = 4, 16, 64
    numbers = torch.arange(count)[None, None] + 1
    indices = torch.arange(count).expand(count, count)[None, None]
    by_hand = BlockMask.from_kv_blocks(numbers, indices, BLOCK_SIZE=size, mask_mod=causal)
    own = tritoncp.create_block_mask(causal, 1, 1, length, length, BLOCK_SIZE=size)
    assert torch.equal(own.to_block_mask().to_dense(), by_hand.to_dense())
    assert torch.equal(tritoncp.from_block_mask(by_hand).to_dense(), own.to_dense())


@pytest.mark.parametrize("full", [False, True], ids=["masked", "masked and full"])
@pytest.mark.parametrize("q_lists", [False, True], ids=["without q lists", "with q lists"])
def test_from_kv_blocks(full: bool, q_lists: bool, engine: str) -> None:
    def lists(*numbers: int) -> tuple[Tensor, Tensor]:
        padded = [*numbers, *[-1] * (2 - len(numbers))] if full else [*numbers]
        return (
            torch.tensor([[[len(numbers)]]], dtype=torch.int32),
            torch.tensor([[[padded]]], dtype=torch.int32),
        )

    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q + kv) % 3 != 0

    def seen(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return mod(b, h, q, kv) | (kv < 16) if full else mod(b, h, q, kv)

    masked, whole = (lists(1), lists(0)) if full else (lists(0, 1), (None, None))
    mask = BlockMask.from_kv_blocks(*masked, *whole, BLOCK_SIZE=16, mask_mod=mod, compute_q_blocks=q_lists)
    x = [torch.randn(1, 1, n, 16, requires_grad=True) for n in (16, 32, 32)]
    check(functools.partial(attend_with_lse, block_mask=mask), x, mask_mod=seen)


def test_small_block_mask() -> None:
    for numbers in ([2, 42, 18, 21, 4, 2, 7, 1, 1], [57, 21, 16, 8]):
        of = torch.tensor(numbers)
        mod = lambda b, h, q, kv, of=of: (of[q] == of[kv]) & (of[q] != -1) & (of[kv] != -1)  # noqa: E731
        same_blocks(*both(mod, None, None, len(numbers), len(numbers)))


def test_a_partial_with_a_captured_scalar() -> None:
    def near(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, distance: Tensor) -> Tensor:
        return (q - kv).abs() < distance

    mod = functools.partial(near, distance=torch.tensor(70.5))
    same_blocks(*both(mod, None, None, 512, 512))


@pytest.mark.parametrize("length", [64, 70, 100])
def test_a_cropped_mask_is_taken(length: int, engine: str) -> None:
    mask = create_block_mask(causal, None, None, 128, 128, device="cpu", BLOCK_SIZE=32)._adjust(
        length, length
    )
    x = [torch.randn(1, 1, length, 16, requires_grad=True) for _ in range(3)]
    check(functools.partial(attend_with_lse, block_mask=mask), x, mask_mod=causal)
