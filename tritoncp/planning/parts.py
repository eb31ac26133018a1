"""Chunks of a plan: placements of one chunk of each rank's rows, and the chunks of keys that its queries
see."""

from __future__ import annotations

import torch
from torch import Tensor

from tritoncp.masks.mask import Mask
from tritoncp.masks.runs.block_runs import ABSENT, Kind
from tritoncp.planning.placement import Placement, sort_by_position
from tritoncp.planning.step_tables import slot_runs


def chunk_size(rows: int, count: int, name: str) -> int:
    """Return the number of rows of a chunk; the last of ``count`` chunks has the rest. Raises
    ValueError if the last one would be empty.

    >>> chunk_size(62, 4, "62 rows")  # 16, 16, 16 and 14
    16
    """
    size = -(-rows // count)
    if 0 < rows <= (count - 1) * size:
        raise ValueError(
            f"{name} in {count} chunks of {size} leave none for the last; cut {-(-rows // size)} chunks"
        )
    return size


def chunk_range(rows: int, index: int, count: int, name: str) -> range:
    """Return the rows of one of ``count`` chunks. Raises the errors of :func:`chunk_size`.

    >>> chunk_range(62, 3, 4, "62 rows")
    range(48, 62)
    """
    size = chunk_size(rows, count, name)
    return range(index * size, min((index + 1) * size, rows))


def chunk_rows(placement: Placement, index: int, count: int, side: str) -> list[range]:
    """Return each rank's rows of one of ``count`` chunks."""
    return [chunk_range(length, index, count, f"{length} rows of {side}") for length in placement.lengths]


def rows_of_placement(placement: Placement, rows: list[range]) -> Placement:
    """Return the placement of a range of each rank's rows; the first row of the range becomes row 0.

    >>> from tritoncp.planning.placement import natural
    >>> part = rows_of_placement(natural([8], 4), [range(2, 6)])
    >>> part.slots[0].tolist(), part.positions(0).tolist()
    ([[[0, 2, 2], [2, 4, 2]]], [[2, 3, 4, 5]])
    """
    return placement.part(tuple(map(_cut_slots, placement.slots, rows)), tuple(map(len, rows)))


def _cut_slots(slots: Tensor, rows: range) -> Tensor:
    """Cut slots [Bp, n, 3] to a range of rows of the buffer, whose first becomes row 0."""
    row, position, tokens = slots.unbind(-1)
    start = row.clamp(min=rows.start)
    count = ((row + tokens).clamp(max=rows.stop) - start).clamp(min=0)
    cut = torch.stack([start - rows.start, position + start - row, count], -1)
    cut = torch.where(count[..., None] > 0, cut, 0)
    return cut[:, (count > 0).any(0)].contiguous()


def check_part(index: int, count: int, keys: int | None) -> None:
    """Check the arguments of :meth:`tritoncp.Plan.part`."""
    if not 0 <= index < count:
        raise ValueError(f"index={index} of {count} chunks; pass 0 to {count - 1}")
    if keys is not None and not 0 < keys <= count:
        raise ValueError(f"keys={keys}; pass a number of chunks from 1 to {count}, or None for all")


def check_keys(needs: Tensor, index: int, keys: int) -> None:
    """Raise ValueError if the queries of a chunk see keys after the first ``keys`` chunks."""
    last = int(needs[index].nonzero().max()) if needs[index].any() else -1
    if last >= keys:
        raise ValueError(
            f"keys={keys} chunks, but queries of chunk {index} see keys of chunk {last}; pass "
            f"keys={last + 1} or None. In a compiled graph whose mask has changed: cut the graph "
            "again, or pass needs= of all its masks"
        )


def needed_chunks(mask: Mask, q: Placement, kv: Placement, count: int, first_row: int = 0) -> Tensor:
    """Return which of ``count`` chunks of keys the queries of each chunk see, on any rank: bool [count,
    count]. Blocks cut by the end of a chunk are evaluated; if a mask has one list of blocks for batch rows or
    heads that may differ, cut blocks count as visible. first_row: b of the mask's first batch row.

    >>> from tritoncp import causal, create_block_mask, make_plan
    >>> make_plan(create_block_mask(causal(), 1, 1, 512, 512)).needs(2).tolist()
    [[True, False], [True, True]]
    """
    needs = torch.zeros(count, count, dtype=torch.bool)
    pieces = [_labelled_slots(placement, count, side) for placement, side in ((q, "queries"), (kv, "keys"))]
    (q_slots, q_chunk), (kv_slots, kv_chunk) = pieces
    kinds = slot_runs(mask, q_slots, kv_slots).to_kinds()  # [B, H, queries, keys]
    pairs = (kinds != ABSENT).nonzero()  # (b, head, query slot, key slot)
    b, _, i, j = pairs.T
    is_cut = q_slots[b % len(q_slots), i, 2] < mask.q_block
    is_cut |= kv_slots[b % len(kv_slots), j, 2] < mask.kv_block
    unsure = is_cut & (kinds[tuple(pairs.T)] == Kind.MASKED)
    is_listed_once = (mask.reads[0] and mask.B == 1) or (mask.reads[1] and mask.H == 1)
    if mask.mask_mod is not None and bool(unsure.any()) and not is_listed_once:
        visible = ~unsure
        visible[unsure] = _sees_any_key(mask, pairs[unsure], q_slots, kv_slots, first_row)
        b, _, i, j = pairs[visible].T
    needs[q_chunk[b % len(q_chunk), i], kv_chunk[b % len(kv_chunk), j]] = True
    return needs


def _labelled_slots(placement: Placement, count: int, side: str) -> tuple[Tensor, Tensor]:
    """Return the slots of all ranks, cut at the chunks of each rank's rows and sorted by position, int32 [Bp,
    n, 3], and the chunk of each, int64 [Bp, n]."""
    parts = []
    for index in range(count):
        rows = chunk_rows(placement, index, count, side)
        slots = torch.cat(list(map(_cut_slots, placement.slots, rows)), 1)
        parts.append(torch.nn.functional.pad(slots, (0, 1), value=index))
    labelled = sort_by_position(torch.cat(parts, 1))
    return labelled[..., :3], labelled[..., 3].long()


def _sees_any_key(mask: Mask, pairs: Tensor, q_slots: Tensor, kv_slots: Tensor, first_row: int) -> Tensor:
    """Return for each pair (b, h, query slot, key slot) of masked blocks whether a query sees a key."""
    b, h, i, j = pairs.unbind(1)
    q, kv = (slots[b % len(slots), at].long() for slots, at in ((q_slots, i), (kv_slots, j)))
    numbers = b % mask.B + first_row, h % mask.H, q[:, 1] // mask.q_block, kv[:, 1] // mask.kv_block
    row, column = _inside(q, mask.q_block)[:, :, None], _inside(kv, mask.kv_block)[:, None, :]
    sees = torch.zeros(0, dtype=torch.bool)
    assert mask.mask_mod is not None
    for chunk, visible in mask.evaluate(torch.stack(numbers, 1)):
        own = slice(len(sees), len(sees) + len(chunk))
        sees = torch.cat([sees, (visible & row[own] & column[own]).flatten(1).any(1)])
    return sees


def _inside(slots: Tensor, block: int) -> Tensor:
    """Return which rows of its block each slot [n, 3] covers: bool [n, block]."""
    first = (slots[:, 1] % block)[:, None]
    at = torch.arange(block)
    return (at >= first) & (at < first + slots[:, 2:])
