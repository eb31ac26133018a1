"""Exact counts of visible keys, from runs of blocks, row intervals and, in masked blocks, the mask_mod."""

from __future__ import annotations

import torch
from torch import Tensor

from tritoncp.core.host_copy import on_host
from tritoncp.masks.classification.classify import masked_blocks
from tritoncp.masks.mask import Mask
from tritoncp.masks.runs.block_runs import Kind


@on_host
def count_visible_keys(mask: Mask, batch: int = 1, heads: int = 1, first_row: int = 0) -> Tensor:
    """Count the keys that each query sees: int64 [B, H, q_len], with B and H of the mask or of the call.

    first_row: the b that the mask_mod gets for the mask's first batch row.

    >>> from tritoncp.masks import causal, create_block_mask
    >>> count_visible_keys(create_block_mask(causal(), 1, 1, 5, 5, BLOCK_SIZE=2)).tolist()
    [[[1, 2, 3, 4, 5]]]
    """
    whole_rows = torch.zeros(1, 1, mask.q_len), torch.full((1, 1, mask.q_len), mask.kv_len)
    interval = whole_rows if mask.mask_mod is None else mask.interval_for(batch, heads)
    grow = interval is None  # the mask_mod may read b and h
    runs = mask.runs.expand(batch, heads) if grow else mask.runs
    b, h, rows, _ = runs.shape
    row, start, end, kind = runs._flat()
    start, end = start * mask.kv_block, (end * mask.kv_block).clamp(max=mask.kv_len)
    masked = kind == Kind.MASKED
    whole = torch.zeros(b * h * rows, dtype=torch.int64)
    whole.index_add_(0, row[~masked], (end - start)[~masked])
    counts = whole[:, None].repeat(1, mask.q_block)  # [b * h * rows, q_block]
    row, start, end = row[masked], start[masked], end[masked]
    if interval is not None:
        end_pad = (0, rows * mask.q_block - mask.q_len)  # rows past q_len see no key
        padded = (torch.nn.functional.pad(bound.long(), end_pad).expand(b, h, -1) for bound in interval)
        lo, hi = (bound.reshape(-1, mask.q_block)[row] for bound in padded)
        overlap = hi.minimum(end[:, None]) - lo.maximum(start[:, None])
        counts.index_add_(0, row, overlap.clamp(min=0))
    else:
        blocks = masked_blocks(runs) + torch.tensor([first_row, 0, 0, 0])
        for chunk, visible in mask.evaluate(blocks):
            batch_row, head, row, _ = chunk.unbind(1)
            counts.index_add_(0, ((batch_row - first_row) * h + head) * rows + row, visible.sum(2))
    return counts.view(b, h, -1)[..., : mask.q_len]
