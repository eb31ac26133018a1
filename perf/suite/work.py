"""The useful work of a case, counted exactly: floating-point operations, memory bytes, wire bytes.

Only visible pairs count, and each tensor once. Additional work of a kernel (masked halves of tiles, repeated
reads of K, scores that a second backward kernel recomputes) shows as distance to the bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tritoncp.core.tracing import Mod, vmapped
from tritoncp.masks.block_runs import Kind
from tritoncp.masks.mask import Mask
from tritoncp.planning.plan import Plan

_CHUNK = 1 << 22  # pairs whose mask_mod is evaluated at a time


@dataclass(frozen=True)
class Shape:
    """Sizes of a call: batch rows, query and key heads, head dims of keys and values, bytes per element."""

    batch: int
    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    itemsize: int = 2


@dataclass(frozen=True)
class Work:
    """Useful work of a rank. flops: multiplications and additions of visible pairs; hbm: bytes read and
    written once; wire: bytes that the rank sends."""

    flops: int
    hbm: int
    wire: int

    def bound_ms(self, flops_per_s: float, bytes_per_s: float) -> float:
        """Return the least time on a device with these rates, in milliseconds.

        >>> Work(flops=10**12, hbm=10**9, wire=0).bound_ms(1e15, 4e12)
        1.0
        """
        return 1e3 * max(self.flops / flops_per_s, self.hbm / bytes_per_s)


def visible(mask: Mask, batch: int = 1, heads: int = 1) -> Tensor:
    """Count the keys that each query sees: int64 [B, H, q_len], B and H those of the mask or of the call.

    >>> from tritoncp.masks import causal, create_block_mask
    >>> visible(create_block_mask(causal(), 1, 1, 5, 5, BLOCK_SIZE=2)).tolist()
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
        _count_masked_runs(mask.mask_mod, mask, h, row, start, end, counts)
    return counts.view(b, h, -1)[..., : mask.q_len]


def of_plan(plan: Plan, shape: Shape, direction: str) -> Work:
    """Compute one rank's work in one pass, "forward" or "backward" (counted as five matrix products)."""
    forward = direction == "forward"
    counts = visible(plan.mask, shape.batch, shape.heads)
    positions = plan.positions  # [Bp, S_local]
    per_row = counts.expand(max(len(counts), len(positions)), -1, -1)
    at = positions.clamp(min=0)[:, None].expand(len(per_row), per_row.shape[1], -1)
    local = per_row.gather(2, at) * plan.valid[:, None]
    pairs = int(local.sum()) * (shape.batch // local.shape[0]) * (shape.heads // local.shape[1])
    d, e = shape.dim, shape.v_dim
    flops = 2 * pairs * (d + e if forward else 3 * d + 2 * e)
    send = {"batch": shape.batch, "kv_heads": shape.kv_heads, "head_dim": d, "v_head_dim": e}
    forward_bytes = plan.bytes_sent(**send, itemsize=shape.itemsize, backward=False)
    total_bytes = plan.bytes_sent(**send, itemsize=shape.itemsize, backward=True)
    return Work(
        flops, _hbm_bytes(plan, shape, forward), forward_bytes if forward else total_bytes - forward_bytes
    )


def _hbm_bytes(plan: Plan, shape: Shape, forward: bool) -> int:
    """Count the bytes of every tensor once; of K and V the blocks that some local query sees."""
    d, e, size = shape.dim, shape.v_dim, shape.itemsize
    valid = int(plan.valid.sum()) * (shape.batch // plan.valid.shape[0])
    q_rows, kv_rows = valid * shape.heads, _count_kv_rows(plan, shape)
    if forward:
        return q_rows * ((d + e) * size + 4) + kv_rows * (d + e) * size
    grad = size if plan.world_size == 1 else 4
    return q_rows * (2 * (d + e) * size + 4) + kv_rows * (d + e) * (size + grad)


def _count_kv_rows(plan: Plan, shape: Shape) -> int:
    """Count the key rows, over batch and key heads, in blocks that some query of this rank sees."""
    tables = plan.tables("cpu", shape.batch, shape.heads)
    touched = tables.col_ptr[..., 2] > tables.col_ptr[..., 0]  # [Bm, Hm, KV slots]
    if touched.shape[1] > 1:
        touched = touched.unflatten(1, (shape.kv_heads, -1)).any(2)
    rows = touched * tables.kv_slots[:, None, :, 2].to(torch.int64)
    return int(rows.sum()) * (shape.batch // rows.shape[0]) * (shape.kv_heads // rows.shape[1])


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
    mod: Mod, mask: Mask, heads: int, row: Tensor, start: Tensor, end: Tensor, counts: Tensor
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
        visible_pairs = (
            predicate(r // (heads * rows), r // rows % heads, *index) & (kv < mask.kv_len)[:, None, :]
        )
        counts.index_add_(0, r, visible_pairs.sum(2))
