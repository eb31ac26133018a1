"""A Mask from torch's BlockMask."""

from __future__ import annotations

from typing import TypeGuard

from torch.nn.attention.flex_attention import BlockMask, noop_mask

from tritoncp.core.host_copy import on_host
from tritoncp.core.records import replace
from tritoncp.masks.mask import Mask, expand_intervals
from tritoncp.masks.mask_mod import MaskMod, dependence_of
from tritoncp.masks.runs.block_lists import bound_ragged_blocks, kinds_from_lists
from tritoncp.masks.runs.block_runs import Kind, Runs

ANY_LENGTH = 1 << 30  # tokens of a block; torch's _LARGE_SPARSE_BLOCK_SIZE


def has_no_lengths(mask: object) -> TypeGuard[BlockMask]:
    """Return whether a mask is torch's BlockMask for any lengths, which torch's attention makes in place of
    None.

    >>> import torch
    >>> from torch.nn.attention.flex_attention import _create_empty_block_mask
    >>> q = torch.empty(1, 1, 300, 16)
    >>> has_no_lengths(_create_empty_block_mask(q, q))
    True
    """
    return isinstance(mask, BlockMask) and tuple(mask.BLOCK_SIZE) == (ANY_LENGTH, ANY_LENGTH)


@on_host
def from_block_mask(bm: BlockMask, lengths: tuple[int, int] | None = None) -> Mask:
    """Return torch's BlockMask as a compact Mask with the same blocks and mask_mod.

    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> bm = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 512, 512, device="cpu")
    >>> from_block_mask(bm).shape, from_block_mask(bm).sparsity() == bm.sparsity()
    ((1, 1, 512, 512), True)

    A mask_mod that is a closed form gives row intervals. Without a mask_mod (noop_mask) partial blocks become
    full ones.

    Args:
        bm: the mask of the whole sequence, not of a shard, on any device; its lists are copied to the host.
        lengths: (Q_LEN, KV_LEN), for a BlockMask that torch made for any lengths; None for all others.

    Returns:
        A :class:`Mask`.

    Raises:
        ValueError: for lists of a slice or with an invalid index; for lengths that are missing or not needed.
    """
    if has_no_lengths(bm) != (lengths is not None):
        given = "any lengths" if lengths is None else bm.seq_lengths
        raise ValueError(
            f"lengths={lengths} for a BlockMask of {given}; pass lengths=(q_len, kv_len) for a mask of any "
            "lengths, and for no other"
        )
    (q_block, kv_block), (q_len, kv_len) = bm.BLOCK_SIZE, lengths or bm.seq_lengths
    if has_no_lengths(bm):  # its only block stands for all blocks
        q_block = kv_block = 128
        kinds = kinds_from_lists(bm, 1, 1).repeat(1, 1, -(-q_len // q_block), -(-kv_len // kv_block))
    else:
        kinds = kinds_from_lists(bm, -(-q_len // q_block), -(-kv_len // kv_block))
    mod = None if bm.mask_mod is noop_mask else bm.mask_mod
    if mod is None:
        kinds[kinds == Kind.MASKED] = int(Kind.FULL)
    runs = Runs.from_kinds(bound_ragged_blocks(kinds, q_len % q_block, kv_len % kv_block))
    del kinds
    reads = (False, False) if mod is None else dependence_of(mod)
    mask = Mask(q_len, kv_len, q_block, kv_block, runs, mod, None, None, reads)
    intervals = mod.intervals(q_len, kv_len) if isinstance(mod, MaskMod) else None
    if not isinstance(mod, MaskMod) or intervals is None:
        return mask
    interval = expand_intervals(mod, (intervals[0][: mask.B], intervals[1][: mask.B]), mask.B, mask.H)
    return replace(mask, interval=interval, tokens=mod.tokens(q_len, kv_len))
