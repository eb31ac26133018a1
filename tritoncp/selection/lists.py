"""Lists of selected keys as kernels read them, made on the device of the selection without a wait for it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tritoncp.kernels.selected.attention import SelectedLists
from tritoncp.kernels.selected.gradients import KeyOrder
from tritoncp.planning.selected_rows import SelectedRows
from tritoncp.selection.lookup import ChosenKeys, chosen_keys
from tritoncp.selection.visible import VisiblePairs

PAIRS = 1 << 24  # most pairs of queries and keys that are looked up at a time, or those of MULTIPLE rows
MULTIPLE = 16  # rows: a part of the queries begins at an aligned address


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
    step = max(MULTIPLE, PAIRS // max(1, width) // MULTIPLE * MULTIPLE)
    for b, share, at in _pieces(batch, own, indices.shape[2], step):
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


def key_order(lists: SelectedLists, num_keys: int, rows: int) -> KeyOrder:
    """Order the entries of the lists of each chunk of ``rows`` rows by their keys, for a buffer of
    ``num_keys`` rows. No loop runs over batch rows, heads or chunks.

    >>> keys, count = torch.tensor([[[[0, 3], [1, 0]]]]).int(), torch.tensor([[[2, 2]]]).int()
    >>> order = key_order(SelectedLists(keys, count, None, 0, 2, 2), 4, 2)
    >>> order.ptr.tolist(), order.slots.tolist()
    ([[[[0, 2, 3, 3, 4]]]], [[[[0, 3, 2, 1]]]])
    """
    batch, shares, all_rows, width = lists.keys.shape
    device, chunks = lists.keys.device, max(1, -(-all_rows // rows))
    is_key = torch.arange(width, device=device) < lists.count[..., None]
    listed = lists.keys.new_full((batch, shares, chunks * rows, width), num_keys)
    listed[:, :, :all_rows] = lists.keys.masked_fill(~is_key, num_keys)
    keys, order = listed.view(batch, shares, chunks, rows * width).sort(stable=True)
    at = torch.arange(rows * width, dtype=torch.int32, device=device)
    slots = torch.empty_like(keys).scatter_(-1, order, at.expand_as(order))
    edges = torch.arange(num_keys + 1, dtype=torch.int32, device=device)
    edges = edges.expand(batch, shares, chunks, -1).contiguous()
    ptr = torch.searchsorted(keys, edges, out_int32=True)
    return KeyOrder(slots, ptr, 0 if batch == 1 else shares, chunks, rows, rows * width, num_keys)
