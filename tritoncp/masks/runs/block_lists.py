"""Conversion of dense block kinds, uint8 [B, H, rows, cols], to and from the index lists of torch's
BlockMask."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from tritoncp.core.host_copy import is_remote, refuse_dtensor, to_host
from tritoncp.masks.runs.block_runs import ABSENT, Kind


def bound_ragged_blocks(kinds: Tensor, q_cut: int, kv_cut: int) -> Tensor:
    """Mark full blocks that are cut by the end of the sequence as BOUNDED, in place.

    q_cut, kv_cut: number of tokens in the last row and in the last column of blocks; 0 if it is whole.
    """
    edges = [kinds[:, :, -1:]] * bool(q_cut) + [kinds[..., -1:]] * bool(kv_cut)
    for edge in edges:
        edge[edge == Kind.FULL] = int(Kind.BOUNDED)
    return kinds


def lists_from_blocks(listed: Tensor) -> tuple[Tensor, Tensor]:
    """Return torch's num_blocks int32 [B, H, R] and indices int32 [B, H, R, C] of a bool [B, H, R, C]."""
    b, h, r, c = listed.shape
    num = listed.sum(-1, dtype=torch.int32)
    row, col = listed.view(b * h * r, c).nonzero(as_tuple=True)
    first = num.flatten().cumsum(0) - num.flatten()
    indices = torch.zeros(b * h * r, c, dtype=torch.int32)
    indices[row, torch.arange(len(row)) - first[row]] = col.int()
    return num, indices.view(b, h, r, c)


def index_lists(bm: BlockMask) -> tuple[Tensor, ...]:
    """Return a BlockMask's lists: counts and indices of the partial blocks, then of the full blocks if it has
    a list of them."""
    lists = bm.kv_num_blocks, bm.kv_indices, bm.full_kv_num_blocks, bm.full_kv_indices
    return tuple(x for x in lists if x is not None)


def kinds_from_lists(bm: BlockMask, rows: int, cols: int) -> Tensor:
    """Return the block kinds of a BlockMask's lists, MASKED, FULL or ABSENT: uint8 [B, H, rows, cols].

    Raises ValueError for the lists of a slice, an index past kv_len, or a block listed more than once.
    """
    lists = index_lists(bm)
    parts = to_host(lists) if any(map(is_remote, lists)) else lists
    for part in parts:
        refuse_dtensor(part, "a list of blocks of the BlockMask", "give the lists whole, x.full_tensor()")
    (q_len, _), (q_block, _) = bm.seq_lengths, bm.BLOCK_SIZE
    if parts[0].shape[-1] != rows:
        raise ValueError(
            f"the BlockMask lists {parts[0].shape[-1]} rows of blocks, but its q_len={q_len} has {rows} of "
            f"{q_block}: give the global mask, not a slice of it"
        )
    batch = (1,) * (3 - parts[0].ndim) + tuple(parts[0].shape[:-1])
    marks = torch.zeros(batch[0] * batch[1] * rows, cols, dtype=torch.uint8)
    for mark, num, indices in zip((1, 16)[: len(parts) // 2], parts[::2], parts[1::2], strict=True):
        columns = indices.reshape(len(marks), indices.shape[-1]).long()
        listed = torch.arange(columns.shape[1]) < num.reshape(-1, 1)
        outside = columns[listed & ((columns < 0) | (columns >= cols))]
        if len(outside):
            raise ValueError(f"the BlockMask lists kv block {int(outside[0])}, but kv_len has {cols} blocks")
        marks.scatter_add_(1, columns.masked_fill(~listed, 0), listed.to(torch.uint8) * mark)
    twice = (marks != 0) & (marks != 1) & (marks != 16)
    if bool(twice.any()):
        row, col = (int(i) for i in twice.nonzero()[0])
        raise ValueError(f"the BlockMask lists block (q block {row % rows}, kv block {col}) more than once")
    kinds = torch.full_like(marks, ABSENT)
    kinds[marks == 1] = int(Kind.MASKED)
    kinds[marks == 16] = int(Kind.FULL)
    return kinds.view(*batch, rows, cols)
