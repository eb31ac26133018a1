"""Lists of selected blocks of keys as kernels read them, made on the device without a wait for it.

The number of operations depends on no size: no loop runs over rows, heads or batch rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tritoncp.kernels.selected.attention import SelectedLists, TransposedLists
from tritoncp.masks.runs.block_runs import ABSENT, Kind
from tritoncp.planning.selected_rows import SelectedRows


def block_kinds(kinds: Tensor, kv_block: int, block_size: int, kv_len: int) -> Tensor:
    """Return whether each row of blocks of a mask sees the blocks of a selection: uint8 [Bm, Hm, R, blocks]
    of Kind.MASKED, Kind.FULL or ABSENT.

    kinds: uint8 [Bm, Hm, R, C] of the mask's blocks, of ``kv_block`` keys

    >>> kinds = torch.tensor([[[[1, 1, 0, 3, 3]]]])   # full, full, masked, absent, absent
    >>> block_kinds(kinds, 16, 32, 80).tolist()
    [[[[1, 0, 3]]]]
    """
    start = torch.arange(0, kv_len, block_size, device=kinds.device)
    first, last = start // kv_block, ((start + block_size).clamp(max=kv_len) - 1) // kv_block
    whole, seen = (
        torch.nn.functional.pad(x.cumsum(-1, dtype=torch.int32), (1, 0))
        for x in ((kinds == Kind.FULL) | (kinds == Kind.BOUNDED), kinds != ABSENT)
    )
    of_block = [x.index_select(-1, last + 1) - x.index_select(-1, first) for x in (whole, seen)]
    is_whole, is_seen = of_block[0] == last - first + 1, of_block[1] > 0
    kind = torch.where(is_whole, int(Kind.FULL), int(Kind.MASKED))
    return kind.masked_fill(~is_seen, ABSENT).to(torch.uint8)


def block_lists(
    indices: Tensor, selected: SelectedRows, kinds: Tensor, q_block: int, held: Tensor
) -> SelectedLists:
    """Make the lists of a step.

    indices: of the heads of the lists, unique, [1 or B, Hs, rows, n]; other fields of ``selected`` hold
    kinds:   of :func:`block_kinds`, [Bm, Hm, R, blocks]; Hs is a multiple of Hm
    q_block: queries of a row of ``kinds``
    held:    bool [1 or B, blocks], whether the step's buffer holds any key of a block
    """
    height, blocks, positions = selected.query_block, kinds.shape[3], selected.positions
    padded = torch.nn.functional.pad(positions, (0, -positions.shape[1] % height), value=-1)
    q_idx = padded.view(len(padded), 1, -1, height)  # [Bp, 1, rows, height]
    batch = max(len(indices), len(kinds), len(positions), len(held))
    b = torch.arange(batch, device=indices.device)[:, None, None, None]
    h = torch.arange(indices.shape[1], device=indices.device)[None, :, None, None]
    is_block = (indices >= 0) & (indices < blocks)  # also what is past the sequence, unchecked
    block = torch.where(is_block, indices, 0).long()
    row = q_idx.clamp(min=0) // q_block
    places = b % len(kinds), h * kinds.shape[1] // indices.shape[1]
    kind = kinds[(*(x[..., None] for x in places), row[..., None], block[..., None, :])]  # [.., height, n]
    present = (q_idx >= 0)[..., None]
    whole, seen = (present & (kind == Kind.FULL)).all(-2), (present & (kind != ABSENT)).any(-2)
    seen = seen & is_block & held[b % len(held), block]
    kind = torch.where(seen, torch.where(whole, 1, 0), 2).to(torch.uint8)
    order = kind.argsort(dim=-1, stable=True)
    listed = block.expand_as(order).gather(-1, order).int()
    counts = torch.stack([(kind == 0).sum(-1), (kind < 2).sum(-1)], -1).int()
    shares, rows, width = listed.shape[1:]
    return SelectedLists(listed, counts, None, 0 if batch == 1 else shares * rows, rows, width)


def rows_of_tiles(places: Tensor, tile: int) -> Tensor:
    """Return the first row of each tile of positions, which a buffer holds whole or not at all: int32
    [Bp, tiles], -1 if it is absent. places: of :func:`tritoncp.selection.lookup.rows_of_positions`

    >>> rows_of_tiles(torch.tensor([[4, 5, -1, -1]]), 2).tolist()
    [[4, -1]]
    """
    return places[:, ::tile].int().contiguous()


def block_rows(lists: SelectedLists, blocks: int) -> TransposedLists:
    """Transpose the lists of a step, for a sequence of ``blocks`` blocks.

    >>> keys, count = torch.tensor([[[[0, 2], [2, 0]]]]).int(), torch.tensor([[[[0, 2], [1, 1]]]]).int()
    >>> lists = block_rows(SelectedLists(keys, count, None, 0, 2, 2), 3)
    >>> lists.ptr.tolist(), lists.rows[0, 0, :3].tolist()
    ([[[0, 0, 1, 1, 1, 2, 3]]], [0, 1, 0])
    """
    batch, shares, rows, width = lists.keys.shape
    at = torch.arange(width, device=lists.keys.device)
    in_part, visible = (count[..., None] for count in lists.count.unbind(-1))
    list_of = lists.keys.long() * 2 + (at >= in_part)
    row = torch.arange(rows, device=at.device)[:, None]
    entry = torch.where(at < visible, list_of * rows + row, 2 * blocks * rows)
    ordered = entry.view(batch, shares, rows * width).sort(-1).values
    edges = torch.arange(2 * blocks + 1, device=at.device) * rows
    ptr = torch.searchsorted(ordered, edges.expand(batch, shares, -1).contiguous()).int()
    of_entry = (ordered % max(1, rows)).int()
    return TransposedLists(ptr, of_entry, 0 if batch == 1 else shares, blocks, rows * width)
