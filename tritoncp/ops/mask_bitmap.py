"""Bitmaps for a mask_mod that cannot be translated to Triton: its values in the masked blocks of some ranks.

Torch evaluates the mask_mod once in these blocks; a mask_mod that only indexes tensors takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tritoncp.masks.classification.classify import masked_blocks
from tritoncp.planning.plan import Plan


def tabulate(plan: Plan, ranks: Sequence[int], batch: int, heads: int) -> Callable[..., Tensor]:
    """Evaluate a mask_mod in the masked blocks of a plan's ``ranks``, for ``batch`` rows and ``heads`` query
    heads. Returns a mask_mod that looks these values up; its values in other blocks are arbitrary."""
    mask, first_row, q_block, kv_block = plan.mask, plan.first_row, plan.mask.q_block, plan.mask.kv_block
    B = max(mask.B, batch if mask.reads[0] else 1)
    H = max(mask.H, heads if mask.reads[1] else 1)
    blocks = masked_blocks(mask.runs.expand(B, H))  # [n, 4]: b, h, row, col
    owned = _owned_blocks(plan, ranks)  # [Bp, rows]
    owned = owned if len(owned) == B else owned.any(0, keepdim=True)
    blocks = blocks[owned[blocks[:, 0] % len(owned), blocks[:, 2]]]
    needed = torch.zeros(owned.shape[1], dtype=torch.bool)
    needed[blocks[:, 2]] = True
    rows = (needed.cumsum(0) - 1).int()  # the row of ``ids`` for each query block
    ids = torch.full((B, H, max(1, int(needed.sum())), mask.runs.shape[3]), -1, dtype=torch.int32)
    ids[blocks[:, 0], blocks[:, 1], rows[blocks[:, 2]], blocks[:, 3]] = torch.arange(len(blocks)).int()
    chunks = mask.evaluate(blocks + torch.tensor([first_row, 0, 0, 0]))
    parts = [_pack_bits(visible) for _, visible in chunks]
    no_blocks = torch.zeros(1, q_block, -(-kv_block // 8), dtype=torch.uint8)
    bits = torch.cat(parts) if parts else no_blocks  # by ``ids``: [blocks, q_block, ceil(kv_block / 8)]
    each_batch, each_head = B > 1, H > 1

    def look_up(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        batch, head = b - first_row if each_batch else 0, h if each_head else 0
        block = ids[batch, head, rows[q_idx // q_block], kv_idx // kv_block]
        column = kv_idx % kv_block
        byte = bits[block, q_idx % q_block, column // 8].to(torch.int32)
        return (byte >> (column % 8)) & 1 != 0

    return look_up


def _owned_blocks(plan: Plan, ranks: Sequence[int]) -> Tensor:
    """Return which query blocks have a token on one of these ranks: bool [Bp, q blocks]."""
    mask = plan.mask
    owned = torch.zeros(plan.q.slots[0].shape[0], mask.runs.shape[2] + 1, dtype=torch.bool)
    for rank in ranks:
        slots = plan.q.slots[rank]
        row = torch.where(slots[..., 2] > 0, slots[..., 1] // mask.q_block, mask.runs.shape[2])
        owned.scatter_(1, row.long(), torch.ones_like(row, dtype=torch.bool))
    return owned[:, :-1]


def _pack_bits(visible: Tensor) -> Tensor:
    """Pack bool [n, q_block, kv_block] into uint8 [n, q_block, ceil(kv_block / 8)], lowest bit first."""
    visible = torch.nn.functional.pad(visible, (0, -visible.shape[2] % 8)).unflatten(2, (-1, 8))
    return (visible * (1 << torch.arange(8, dtype=torch.uint8))).sum(3, dtype=torch.uint8)
