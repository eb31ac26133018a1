"""Cases of torch's BlockMask tests: tritoncp's masks have torch's blocks, and torch's masks are taken."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, noop_mask, or_masks

import tritoncp
from tests.compat.dense import F32, agree, answer, exact
from tests.compat.torch_mods import MASKS, Dims

pytestmark = pytest.mark.usefixtures("cpu_engine")
LISTS = (
    "kv_num_blocks",
    "kv_indices",
    "full_kv_num_blocks",
    "full_kv_indices",
    "q_num_blocks",
    "q_indices",
    "full_q_num_blocks",
    "full_q_indices",
)


def both(
    mod: Any, B: int | None, H: int | None, q: int, kv: int, size: Any = 128
) -> tuple[BlockMask, BlockMask]:
    """(tritoncp's mask as torch's, torch's own)."""
    own = tritoncp.create_block_mask(mod, B, H, q, kv, BLOCK_SIZE=size)
    return own.to_block_mask(), create_block_mask(mod, B, H, q, kv, device="cpu", BLOCK_SIZE=size)


def same_blocks(got: BlockMask, want: BlockMask) -> None:
    """Assert the same attributes and lists; of an index list, only its counted entries."""
    assert (got.shape, got.BLOCK_SIZE, got.seq_lengths) == (want.shape, want.BLOCK_SIZE, want.seq_lengths)
    assert got.sparsity() == want.sparsity() and got.numel() == want.numel()
    for counts, indices in zip(LISTS[::2], LISTS[1::2]):
        numbers = getattr(want, counts)
        assert torch.equal(getattr(got, counts), numbers), counts
        listed = torch.arange(getattr(want, indices).shape[-1]) < numbers[..., None]
        assert torch.equal(getattr(got, indices)[listed], getattr(want, indices)[listed]), indices
    assert torch.equal(got.to_dense(), want.to_dense())


@pytest.mark.parametrize("size", [32, 64, 128, 256, (32, 64), (64, 32)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_blocks_of_every_mask(name: str, size: int | tuple[int, int]) -> None:
    dims = Dims(2, 2, 200, kv=230)
    same_blocks(*both(MASKS[name](dims), 2, 2, 200, 230, size))


@pytest.mark.parametrize("size", [32, 64, 128, 256, (32, 64), (64, 32)], ids=str)
def test_block_size_changes(size: int | tuple[int, int]) -> None:
    same_blocks(*both(noop_mask, 4, 2, 512, 512, size))


def offset_causal(offset: Tensor) -> Any:
    return lambda b, h, q, kv: q + offset[b] * 128 >= kv


def test_block_mask_attributes() -> None:
    own, torch_mask = both(offset_causal(torch.zeros(8)), 4, 2, 2048, 2048)
    same_blocks(own, torch_mask)
    assert own.sparsity() == 46.875
    by_row, torch_by_row = both(offset_causal(torch.arange(8)), 8, 1, 2048, 2048)
    same_blocks(by_row, torch_by_row)
    assert by_row.sparsity() == 29.1015625


PARTS = {
    "row": 0,
    "row and head": (0, 1),
    "from the end": (-1, -2),
    "slices": (slice(0, 2), slice(1, 2)),
    "rows of blocks": (slice(0, 2), slice(1, 2), torch.tensor([1], dtype=torch.int32)),
    "all, then rows of blocks": (slice(None), slice(None), torch.tensor([0], dtype=torch.int32)),
}


@pytest.mark.parametrize("name", PARTS)
def test_getitem(name: str) -> None:
    own, torch_mask = both(offset_causal(torch.zeros(8)), 4, 2, 512, 512)
    got, want = own[PARTS[name]], torch_mask[PARTS[name]]
    for counts in LISTS[:4:2]:
        assert torch.equal(getattr(got, counts), getattr(want, counts))


def test_block_mask_device_change() -> None:
    own, torch_mask = both(offset_causal(torch.zeros(8)), 1, 1, 512, 512)
    moved = own.to("cpu")
    assert all(getattr(moved, name).is_cpu for name in LISTS[:4])
    same_blocks(moved, torch_mask.to("cpu"))


def test_mask_mod_combiners() -> None:
    def ahead(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q >= kv

    def behind(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q < kv

    window = tritoncp.create_block_mask(
        tritoncp.and_masks(ahead, lambda b, h, q, kv: q - kv <= 512), 1, 1, 2048, 2048
    )
    assert int(window.to_block_mask().kv_num_blocks.sum()) == 28
    assert tritoncp.create_block_mask(tritoncp.and_masks(ahead, behind), 1, 1, 2048, 2048).sparsity() == 100
    whole = tritoncp.create_block_mask(tritoncp.or_masks(ahead, behind), 1, 1, 2048, 2048)
    assert whole.sparsity() == tritoncp.create_block_mask(noop_mask, 1, 1, 2048, 2048).sparsity() == 0
    for combine in (and_masks, or_masks):  # torch's own combiners make mask_mods too
        same_blocks(*both(combine(ahead, lambda b, h, q, kv: q - kv <= 100), 1, 1, 512, 512))


def test_custom_block_mask_generator() -> None:
    """Lists made by hand are taken as they are."""
    count, size, length = 4, 16, 64
    numbers = torch.arange(count)[None, None] + 1
    indices = torch.arange(count).expand(count, count)[None, None]
    by_hand = BlockMask.from_kv_blocks(
        numbers, indices, BLOCK_SIZE=size, mask_mod=lambda b, h, q, kv: q >= kv
    )
    own = tritoncp.create_block_mask(lambda b, h, q, kv: q >= kv, 1, 1, length, length, BLOCK_SIZE=size)
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
    out, lse = tritoncp.flex_attention(*x, mask, return_lse=True)
    start = [torch.randn_like(out), torch.randn_like(lse)]
    agree(answer(out, lse, x, start), exact(x, None, [], seen, start), F32)


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
    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q >= kv

    mask = create_block_mask(mod, None, None, 128, 128, device="cpu", BLOCK_SIZE=32)._adjust(length, length)
    x = [torch.randn(1, 1, length, 16, requires_grad=True) for _ in range(3)]
    out, lse = tritoncp.flex_attention(*x, mask, return_lse=True)
    start = [torch.randn_like(out), torch.randn_like(lse)]
    agree(answer(out, lse, x, start), exact(x, None, [], mod, start), F32)


def test_the_picture_shows_the_blocks() -> None:
    mask = tritoncp.create_block_mask(lambda b, h, q, kv: q >= kv, 1, 1, 2048, 2048)
    lines = mask.draw().splitlines()
    assert lines == ["█" * i + "▒" + "·" * (15 - i) for i in range(16)]
    by_row = tritoncp.create_block_mask(offset_causal(torch.arange(8)), 8, 1, 2048, 2048)
    assert "sparsity=46.88%" in str(mask) and "sparsity=29.10%" in str(by_row)
