"""Lists of selected keys as kernels read them, made on the device of the selection without a wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tritoncp.selection.selection import Selection
from tritoncp.selection.visible import VisiblePairs

PAIRS = 1 << 24  # most pairs of queries and keys that are looked up at a time
KEYS_OF_TILE = 32  # of the transposed lists


class KeyLists(NamedTuple):
    """The keys of a step's buffer that each row of a selection sees.

    keys:  int32 [B, Hs, rows, width], rows of the buffer, visible ones first
    counts: int32 [B, Hs, rows], number of visible ones
    shown: uint8 [B, Hs, rows, query_block, width], whether a query sees a key; None with one query a row
    """

    keys: Tensor
    counts: Tensor
    shown: Tensor | None


class RowLists(NamedTuple):
    """The rows of a selection that see any of the KEYS_OF_TILE keys of a tile of the step's buffer.

    ptr:  int32 [B, Hs, tiles + 1], first entry of each tile
    rows: int32 [B, Hs, entries], ascending in each tile
    bits: int32 [B, Hs, entries, query_block], a bit for each key of the tile that the query sees
    """

    ptr: Tensor
    rows: Tensor
    bits: Tensor


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
    selection: Selection, first: int, indices: Tensor, positions: Tensor, places: Tensor
) -> ChosenKeys:
    """Look up rows of a selection, from row ``first`` on.

    indices: int [n, k] of these rows; positions: int64 [S_local] of queries, -1 for padding; places: row of
    the buffer of each position, -1 where it is not in the buffer, [kv_len]
    """
    height, block = selection.query_block, selection.block_size
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


def key_lists(
    selection: Selection, pairs: VisiblePairs, positions: Tensor, places: Tensor, batch: int, heads: range,
    num_heads: int,
) -> KeyLists:  # fmt: skip
    """Make the lists of a step for ``batch`` rows.

    selection: with unique indices; positions: int64 [1 or B, S_local]; places: of :func:`rows_of_positions`,
    on the device; heads: query heads of the layer that the lists are for, ``num_heads``: of the layer
    """
    indices, height = selection.indices, selection.query_block
    shares = num_heads if pairs.reads_heads else indices.shape[1]
    first, last = heads.start * shares // num_heads, (heads.stop - 1) * shares // num_heads
    rows, width = indices.shape[2], indices.shape[3] * selection.block_size
    shape, device = (batch, last + 1 - first, rows), indices.device
    keys = torch.empty(*shape, width, dtype=torch.int32, device=device)
    count = torch.empty(shape, dtype=torch.int32, device=device)
    shown = None
    if height > 1:
        shown = torch.empty(*shape, height, width, dtype=torch.uint8, device=device)
    step = max(1, PAIRS // max(1, width * height))
    for b, share, at in _pieces(batch, range(first, last + 1), rows, step):
        part = indices[b % len(indices), share * indices.shape[1] // shares, at]
        chosen = chosen_keys(
            selection, at.start, part, positions[b % len(positions)], places[b % len(places)]
        )
        head = torch.tensor([share * num_heads // shares], device=device)
        visible = pairs(b, head, chosen.q_idx, chosen.kv_idx) & chosen.present
        visible = visible[:, 0]  # [n, height, width]
        seen = visible.any(1)
        order = seen.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
        keys[b, share - first, at] = chosen.keys.gather(1, order).int()
        count[b, share - first, at] = seen.sum(1).int()
        if shown is not None:
            shown[b, share - first, at] = visible.gather(2, order[:, None].expand_as(visible)).byte()
    return KeyLists(keys, count, shown)


def _pieces(batch: int, shares: range, rows: int, step: int) -> Iterator[tuple[int, int, slice]]:
    for b in range(batch):
        for share in shares:
            for first in range(0, rows, step):
                yield b, share, slice(first, min(rows, first + step))


def row_lists(lists: KeyLists, num_keys: int) -> RowLists:
    """Transpose the lists of a step, for a buffer of ``num_keys`` rows.

    >>> lists = KeyLists(torch.tensor([[[[0, 33], [1, 0]]]]).int(), torch.tensor([[[2, 1]]]).int(), None)
    >>> ptr, rows, bits = row_lists(lists, 64)
    >>> ptr.tolist(), rows[0, 0, :3].tolist(), bits[0, 0, :3, 0].tolist()
    ([[[0, 2, 3]]], [0, 1, 0], [1, 2, 2])
    """
    batch, shares, rows, width = lists.keys.shape
    device, tiles = lists.keys.device, -(-num_keys // KEYS_OF_TILE)
    height = 1 if lists.shown is None else lists.shown.shape[3]
    ptr = torch.empty(batch, shares, tiles + 1, dtype=torch.int32, device=device)
    of_entry = torch.empty(batch, shares, rows * width, dtype=torch.int32, device=device)
    bits = torch.zeros(batch, shares, rows * width, height, dtype=torch.int32, device=device)
    row = torch.arange(rows, device=device)[:, None]
    for b in range(batch):
        for share in range(shares):
            key, count = lists.keys[b, share], lists.counts[b, share]
            is_key = torch.arange(width, device=device) < count[:, None]
            number = torch.where(is_key, key // KEYS_OF_TILE * rows + row, tiles * rows).flatten()
            ordered, order = number.sort(stable=True)
            starts = torch.ones_like(ordered, dtype=torch.bool)
            starts[1:] = ordered[1:] != ordered[:-1]
            entry = starts.cumsum(0) - 1
            value = (torch.ones_like(key) << key % KEYS_OF_TILE).masked_fill(~is_key, 0).flatten()[order]
            values = value[:, None]
            if lists.shown is not None:
                seen = lists.shown[b, share].transpose(1, 2).reshape(-1, height)[order]  # [entries, height]
                values = values * seen
            bits[b, share].index_add_(0, entry, values.int())  # each bit once: a sum of bits is their union
            found = torch.full_like(ordered, tiles * rows).scatter_(0, entry, ordered)
            of_entry[b, share] = (found % max(1, rows)).int()
            edges = torch.arange(tiles + 1, device=device) * rows
            ptr[b, share] = torch.searchsorted(found, edges).int()
    return RowLists(ptr, of_entry, bits)
