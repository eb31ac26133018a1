"""Look-ups of selected keys: their positions, and their rows in the buffer of a step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tritoncp.planning.selected_rows import SelectedRows


class ChosenKeys(NamedTuple):
    """Some rows of a selection, each of ``height`` queries, with their keys.

    q_idx, kv_idx: int64 [n, height], [n, width], positions in the sequence, 0 for absent ones
    keys:          int64 [n, width], rows of the buffer, 0 for absent keys
    present:       bool [n, 1, height, width], whether query and key exist
    """

    q_idx: Tensor
    kv_idx: Tensor
    keys: Tensor
    present: Tensor


def chosen_keys(
    selected: SelectedRows, first: int, indices: Tensor, positions: Tensor, places: Tensor
) -> ChosenKeys:
    """Look up rows of a selection, from row ``first`` on.

    indices: int [n, k] of these rows; positions: int64 [S_local] of queries, -1 for padding; places: row of
    the buffer of each position, -1 where it is not in the buffer, [kv_len]
    """
    height, block = selected.query_block, selected.block_size
    padded = torch.nn.functional.pad(positions, (0, -len(positions) % height), value=-1)
    q_idx = padded[first * height : (first + len(indices)) * height].view(-1, height)
    kv_idx = indices[..., None].long() * block + torch.arange(block, device=indices.device)
    kv_idx = kv_idx.masked_fill((indices < 0)[..., None], -1).flatten(1)
    kv_idx = kv_idx.masked_fill(kv_idx >= len(places), -1)  # also what is past the sequence, unchecked
    keys = torch.where(kv_idx < 0, -1, places[kv_idx.clamp(min=0)])
    present = (q_idx >= 0)[:, None, :, None] & (keys >= 0)[:, None, None, :]
    return ChosenKeys(q_idx.clamp(min=0), kv_idx.clamp(min=0), keys.clamp(min=0), present)


def rows_of_positions(slots: Tensor, kv_len: int) -> Tensor:
    """Return the row of a buffer that holds each global position, -1 where it is not in the buffer: int64
    [Bp, kv_len], on the device of the slots.

    slots: int [Bp, n, 3] of (row in buffer, global position, tokens), by ascending position

    >>> rows_of_positions(torch.tensor([[[2, 0, 1], [0, 4, 2]]]), 6).tolist()
    [[2, -1, -1, -1, 0, 1]]
    """
    batch, count, _ = slots.shape
    at = torch.arange(kv_len, device=slots.device).expand(batch, -1).contiguous()
    if not count:
        return torch.full_like(at, -1)
    row, position, tokens = slots.to(torch.int64).unbind(-1)
    start = torch.where(tokens > 0, position, kv_len)  # empty slots are last
    slot = torch.searchsorted(start.contiguous(), at, right=True) - 1
    index = slot.clamp(min=0)
    offset = at - position.gather(1, index)
    is_inside = (slot >= 0) & (offset < tokens.gather(1, index))
    return torch.where(is_inside, row.gather(1, index) + offset, -1)
