"""Exact numbers of visible keys, from runs of blocks, row intervals and, in masked blocks, the mask_mod."""

from __future__ import annotations

import torch
from torch import Tensor

from tritoncp.core.host_copy import on_host
from tritoncp.core.tracing import Mod, vmapped
from tritoncp.masks.block_runs import Kind
from tritoncp.masks.mask import Mask

_CHUNK = 1 << 22  # pairs whose mask_mod is evaluated at a time


@on_host
def count_visible_keys(
    mask: Mask, batch: int = 1, heads: int = 1, first_row: int = 0, evaluate: Mod | None = None
) -> Tensor:
    """Count the keys that each query sees: int64 [B, H, q_len], B and H those of the mask or of the call.

    first_row: b of the mask's first batch row. evaluate: the mask_mod to call on CPU indices, if the mask's
    captures tensors of another device.

    >>> from tritoncp.masks import causal, create_block_mask
    >>> count_visible_keys(create_block_mask(causal(), 1, 1, 5, 5, BLOCK_SIZE=2)).tolist()
    [[[1, 2, 3, 4, 5]]]
    """
    interval = mask.interval_for(batch, heads)
    grow = interval is None and mask.mask_mod is not None  # the mask_mod may read b and h
    runs = mask.runs.expand(batch, heads) if grow else mask.runs
    b, h, rows, _ = runs.shape
    row, start, end, kind = _flatten_runs(runs.ptr, runs.runs)
    start, end = start * mask.kv_block, (end * mask.kv_block).clamp(max=mask.kv_len)
    masked = kind == Kind.MASKED
    whole = torch.zeros(b * h * rows, dtype=torch.int64)
    whole.index_add_(0, row[~masked], (end - start)[~masked])
    counts = whole[:, None].repeat(1, mask.q_block)  # [b * h * rows, q_block]
    row, start, end = row[masked], start[masked], end[masked]
    if mask.mask_mod is None:
        counts.index_add_(0, row, (end - start)[:, None].expand(-1, mask.q_block))
    elif interval is not None:
        lo, hi = (_split_by_block(bound, b, h, rows, mask.q_block)[row] for bound in interval)
        overlap = hi.minimum(end[:, None]) - lo.maximum(start[:, None])
        counts.index_add_(0, row, overlap.clamp(min=0))
    else:
        predicate = evaluate or mask.mask_mod
        _count_masked_runs(predicate, mask, h, row, start, end, counts, first_row)
    return counts.view(b, h, -1)[..., : mask.q_len]


def _flatten_runs(ptr: Tensor, runs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """List every run of every row as int64 (row, start, end, kind); rows counted over batch and heads."""
    first, last = ptr[..., 0].reshape(-1).long(), ptr[..., 2].reshape(-1).long()
    length = last - first
    row = torch.arange(len(length)).repeat_interleave(length)
    at = (first - (length.cumsum(0) - length)).repeat_interleave(length) + torch.arange(len(row))
    start, end, kind = runs[at].long().unbind(1)
    return row, start, end, kind


def _split_by_block(bound: Tensor, b: int, h: int, rows: int, q_block: int) -> Tensor:
    """Reshape a row bound [B, H, q_len] to int64 [b * h * rows, q_block]; rows past q_len see no key."""
    short = rows * q_block - bound.shape[2]
    padded = torch.nn.functional.pad(bound.long(), (0, short))
    return padded.expand(b, h, -1).reshape(-1, q_block)


def _count_masked_runs(
    mod: Mod, mask: Mask, heads: int, row: Tensor, start: Tensor, end: Tensor, counts: Tensor, first_row: int
) -> None:
    """Evaluate the mask_mod on masked runs, a block at a time, and add the visible keys of each row."""
    predicate = vmapped(mod, (None, None, None, 0), (None, None, 0, None), (0, 0, 0, 0))
    rows = mask.runs.shape[2]
    blocks = -(-(end - start) // mask.kv_block)
    step = torch.arange(int(blocks.sum())) - (blocks.cumsum(0) - blocks).repeat_interleave(blocks)
    row, kv_begin = row.repeat_interleave(blocks), start.repeat_interleave(blocks) + step * mask.kv_block
    size = max(1, _CHUNK // (mask.q_block * mask.kv_block))
    for r, first in zip(row.split(size), kv_begin.split(size)):
        q = (r % rows * mask.q_block)[:, None] + torch.arange(mask.q_block)
        kv = first[:, None] + torch.arange(mask.kv_block)
        index = q.clamp(max=mask.q_len - 1), kv.clamp(max=mask.kv_len - 1)
        visible_pairs = predicate(r // (heads * rows) + first_row, r // rows % heads, *index)
        visible_pairs = visible_pairs & (kv < mask.kv_len)[:, None, :]
        counts.index_add_(0, r, visible_pairs.sum(2))
