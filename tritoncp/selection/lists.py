"""Lists of selected keys as kernels read them, made on the device of the selection without a wait for it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tritoncp.kernels.selected import KEYS_OF_TILE, SelectedLists, TransposedLists
from tritoncp.planning.selected_rows import SelectedRows
from tritoncp.selection.lookup import ChosenKeys, chosen_keys
from tritoncp.selection.visible import VisiblePairs

PAIRS = 1 << 24  # most pairs of queries and keys that are looked up at a time


def visible_keys(
    selected: SelectedRows, pairs: VisiblePairs, places: Tensor, batch: int, heads: range
) -> Iterator[tuple[tuple[int, int, slice], ChosenKeys, Tensor]]:
    """Yield (batch row, head of the lists and rows of the selection), their keys, and which of these each
    query sees, bool [n, query_block, width].

    places: of :func:`tritoncp.selection.lookup.rows_of_positions`, on the device; heads: query heads of the
    layer that the lists are for
    """
    indices, positions, num_heads = selected.indices, selected.positions, selected.num_heads
    own = list_heads(selected, pairs, heads)
    shares = num_heads if pairs.reads_heads else selected.shares
    width = indices.shape[3] * selected.block_size * selected.query_block
    for b, share, at in _pieces(batch, own, indices.shape[2], max(1, PAIRS // max(1, width))):
        first = share * num_heads // shares  # a query head of this list
        part = indices[b % len(indices), selected.share_of(first) - selected.first_share, at]
        chosen = chosen_keys(selected, at.start, part, positions[b % len(positions)], places[b % len(places)])
        head = torch.full((1,), first, device=indices.device)
        visible = pairs(b, head, chosen.q_idx, chosen.kv_idx) & chosen.present
        yield (b, share - own.start, at), chosen, visible[:, 0]


def list_heads(selected: SelectedRows, pairs: VisiblePairs, heads: range) -> range:
    """Return the heads of the lists for query heads of the layer: a list for each query head if the mask
    differs between them, else for each head of the selection."""
    return heads if pairs.reads_heads else selected.shares_of(heads)


def key_lists(
    selected: SelectedRows, pairs: VisiblePairs, places: Tensor, batch: int, heads: range
) -> SelectedLists:
    """Make the lists of a step for ``batch`` rows. Arguments are as in :func:`visible_keys`."""
    indices, height = selected.indices, selected.query_block
    rows, width = indices.shape[2], indices.shape[3] * selected.block_size
    shape, device = (batch, len(list_heads(selected, pairs, heads)), rows), indices.device
    keys = torch.empty(*shape, width, dtype=torch.int32, device=device)
    count = torch.empty(shape, dtype=torch.int32, device=device)
    shown = None
    if height > 1:
        shown = torch.empty(*shape, height, width, dtype=torch.uint8, device=device)
    for (b, share, at), chosen, visible in visible_keys(selected, pairs, places, batch, heads):
        seen = visible.any(1)
        order = seen.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
        keys[b, share, at] = chosen.keys.gather(1, order).int()
        count[b, share, at] = seen.sum(1).int()
        if shown is not None:
            shown[b, share, at] = visible.gather(2, order[:, None].expand_as(visible)).byte()
    return SelectedLists(keys, count, shown, 0 if batch == 1 else shape[1] * rows, rows, width)


def _pieces(batch: int, shares: range, rows: int, step: int) -> Iterator[tuple[int, int, slice]]:
    for b in range(batch):
        for share in shares:
            for first in range(0, rows, step):
                yield b, share, slice(first, min(rows, first + step))


def row_lists(lists: SelectedLists, num_keys: int) -> TransposedLists:
    """Transpose the lists of a step, for a buffer of ``num_keys`` rows.

    >>> keys, count = torch.tensor([[[[0, 33], [1, 0]]]]).int(), torch.tensor([[[2, 1]]]).int()
    >>> lists = row_lists(SelectedLists(keys, count, None, 0, 2, 2), 64)
    >>> lists.ptr.tolist(), lists.rows[0, 0, :3].tolist(), lists.bits[0, 0, :3, 0].tolist()
    ([[[0, 2, 2, 3, 3]]], [0, 1, 0], [1, 2, 2])
    """
    size = KEYS_OF_TILE.value
    batch, shares, rows, width = lists.keys.shape
    device, tiles = lists.keys.device, -(-num_keys // size)
    height = 1 if lists.shown is None else lists.shown.shape[3]
    ptr = torch.empty(batch, shares, tiles + 1, dtype=torch.int32, device=device)
    of_entry = torch.empty(batch, shares, rows * width, dtype=torch.int32, device=device)
    bits = torch.zeros(batch, shares, rows * width, height, dtype=torch.int32, device=device)
    row = torch.arange(rows, device=device)[:, None]
    for b in range(batch):
        for share in range(shares):
            key, count = lists.keys[b, share].long(), lists.count[b, share]
            is_key = torch.arange(width, device=device) < count[:, None]
            number = torch.where(is_key, key // size * rows + row, tiles * rows).flatten()
            ordered, order = number.sort(stable=True)
            starts = torch.ones_like(ordered, dtype=torch.bool)
            starts[1:] = ordered[1:] != ordered[:-1]
            entry = starts.cumsum(0) - 1
            value = (torch.ones_like(key) << key % size).masked_fill(~is_key, 0).flatten()[order]
            values = value[:, None]
            if lists.shown is not None:
                seen = lists.shown[b, share].transpose(1, 2).reshape(-1, height)[order]  # [entries, height]
                values = values * seen
            bits[b, share].index_add_(0, entry, values.int())  # each bit once: a sum of bits is their union
            found = torch.full_like(ordered, tiles * rows).scatter_(0, entry, ordered)
            of_entry[b, share] = (found % max(1, rows)).int()
            edges = torch.arange(tiles + 1, device=device) * rows
            ptr[b, share] = torch.searchsorted(found, edges).int()
    stride = 0 if batch == 1 else shares
    return TransposedLists(ptr, of_entry, bits, stride, tiles, rows * width)
