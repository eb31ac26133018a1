"""Tests of the CPU engine's tiles: they cover the listed blocks, each pair once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.draws import few
from tritoncp.cpu import tiles as tiles_module
from tritoncp.cpu.tiles import (
    TRIANGLE_ROWS,
    KeyRanges,
    PackedTile,
    Range,
    SlotRow,
    TileBatch,
    batches_of,
    tiles_of,
)

KEYS = 2048


def _undecided(slots: Sequence[SlotRow], keys: tuple[int, int]) -> bool:
    return False


@st.composite
def slot_tables(draw: st.DrawFn) -> list[SlotRow]:
    """Slots of 128 rows with a few ranges of full keys and of masked keys. Some neighbours are equal, and
    some rows are in no slot."""
    slots: list[SlotRow] = []
    row = 0
    for _ in range(draw(st.integers(1, 12))):
        row += 128 * draw(st.integers(0, 5)) // 5
        if slots and draw(st.booleans()):
            full, masked = slots[-1].full, slots[-1].masked
        else:
            size = draw(st.integers(0, 3))
            cuts = sorted(draw(st.sets(st.integers(0, KEYS // 64), min_size=2 * size, max_size=2 * size)))
            ranges = [(64 * a, 64 * b) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]
            hidden = draw(st.integers(0, size))
            full, masked = sorted(ranges[hidden:]), sorted(ranges[:hidden])
        slots.append(SlotRow((row, row + 128), full, masked))
        row += 128
    return slots


def counts(tiles: list[PackedTile], rows: int) -> Tensor:
    """Count the tiles of each pair."""
    table = torch.zeros(rows, KEYS, dtype=torch.int32)
    for tile in tiles:
        table[tile.row : tile.row + tile.height, tile.col : tile.col + tile.width] += 1
    return table


def document_slots(lengths: Sequence[int], skipped: int = 0) -> tuple[list[SlotRow], KeyRanges]:
    """Return slots of 128 rows of packed causal documents, and the keys of each row. The documents' keys lie
    after ``skipped`` keys of an earlier part of the first document."""
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    begin = (starts + skipped)[ids]
    begin[ids == 0] = 0
    end = torch.arange(len(ids)) + skipped + 1
    slots = []
    for row in range(0, len(ids), 128):
        rows = slice(row, min(row + 128, len(ids)))
        first, last = int(begin[rows].min()), int(end[rows].max())
        full = int(begin[rows].max()), int(end[rows].min()) // 64 * 64
        masked = [(first, last)] if full[0] >= full[1] else [(first, full[0]), (full[1], last)]
        slots.append(
            SlotRow((row, rows.stop), [full] if full[0] < full[1] else [], [x for x in masked if x[0] < x[1]])
        )
    return slots, KeyRanges(0, begin, end)


@given(
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=6),
    skipped=st.integers(0, 256),
)
def test_tiles_of_documents_cover_their_pairs_once(lengths: list[int], skipped: int) -> None:
    slots, ranges = document_slots(lengths, skipped)
    rows, keys = sum(lengths), torch.arange(sum(lengths) + skipped)
    table = torch.zeros(rows, len(keys), dtype=torch.int32)
    visible = (keys >= ranges.begin[:, None]) & (keys < ranges.end[:, None])
    tiles = tiles_of(slots, 0, True, lambda *_: True, ranges)
    for tile in tiles:
        part = torch.ones(tile.height, tile.width, dtype=torch.int32)
        place = slice(tile.row, tile.row + tile.height), slice(tile.col, tile.col + tile.width)
        if tile.kind == "masked":
            part *= visible[place]
        table[place] += part.tril() if tile.kind == "causal" else part
    torch.testing.assert_close(table, visible.int(), rtol=0, atol=0)
    assert [t.height for t in tiles if t.kind == "causal"] == [n for n in lengths if n >= TRIANGLE_ROWS]


@pytest.mark.parametrize("lengths", [[4096], [1000, 128, 2000, 968], [133] * 30])
def test_long_documents_hide_no_pair_by_a_mask(lengths: list[int]) -> None:
    """Each document is one tile, so that no mask is made and no results are merged."""
    tiles = tiles_of(*document_slots(lengths)[:1], 0, True, lambda *_: True, document_slots(lengths)[1])
    assert [(tile.kind, tile.height) for tile in tiles] == [("causal", length) for length in lengths]


def test_the_work_to_find_triangles_is_proportional_to_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot is looked at once for each document that it holds rows of."""
    looked_at: list[Sequence[Range]] = []
    intersect = tiles_module._intersect

    def counted(left: Sequence[Range], right: Sequence[Range]) -> list[Range]:
        looked_at.append(left)
        return intersect(left, right)

    monkeypatch.setattr(tiles_module, "_intersect", counted)
    slots, ranges = document_slots([133] * 40)
    assert len(tiles_of(slots, 0, True, lambda *_: True, ranges)) == 40
    assert len(looked_at) == len(slots) + 39  # each of the other documents begins inside a slot


def test_triangles_that_row_intervals_do_not_decide_stay_masked() -> None:
    slots, ranges = document_slots([1024])
    assert "causal" not in {tile.kind for tile in tiles_of(slots, 0, True, _undecided, ranges)}


def listed(slots: list[SlotRow], kind: str) -> Tensor:
    """Return which pairs the slots list as full, or as masked."""
    table = torch.zeros(slots[-1].rows[1], KEYS, dtype=torch.int32)
    for slot in slots:
        for first, last in getattr(slot, kind):
            table[slice(*slot.rows), first:last] = 1
    return table


@given(slots=slot_tables(), flash=st.booleans())
def test_tiles_cover_each_listed_pair_once_and_no_other_pair(slots: list[SlotRow], flash: bool) -> None:
    tiles = tiles_of(slots, 0, flash, _undecided)
    for kind in ("full", "masked"):
        pairs = listed(slots, kind)
        of_kind = [tile for tile in tiles if tile.kind == kind]
        torch.testing.assert_close(counts(of_kind, len(pairs)), pairs, rtol=0, atol=0)


@given(slots=slot_tables(), flash=st.booleans())
def test_tiles_of_a_batch_are_equal_and_have_no_row_in_common(slots: list[SlotRow], flash: bool) -> None:
    tiles = tiles_of(slots, 0, flash, _undecided)
    batches = batches_of(tiles)
    assert sorted(tile for batch in batches for tile in batch.tiles) == sorted(tiles)
    for batch in batches:
        assert {(tile.kind, tile.height, tile.width) for tile in batch.tiles} == {
            (batch.kind, batch.height, batch.width)
        }
        assert all(a.row + a.height <= b.row for a, b in pairwise(batch.tiles))


@few()
@given(slots=slot_tables(), count=st.integers(1, 4), height=st.integers(1, 300))
def test_parts_of_batches_cover_the_same_pairs(slots: list[SlotRow], count: int, height: int) -> None:
    tiles = tiles_of(slots, 0, True, _undecided)
    parts = [
        piece
        for batch in batches_of(tiles)
        for part in batch.split(count)
        for piece in part.split_rows(height)
    ]
    assert all(len(part.tiles) <= count and part.height <= height for part in parts)
    rows = slots[-1].rows[1]
    pieces = counts([tile for part in parts for tile in part.tiles], rows)
    torch.testing.assert_close(pieces, counts(tiles, rows), rtol=0, atol=0)


def stairs(*widths: int) -> list[PackedTile]:
    """Return the tiles of slots of 128 rows, each with the first ``width`` keys."""
    slots = [SlotRow((128 * i, 128 * i + 128), [(0, width)], []) for i, width in enumerate(widths)]
    return tiles_of(slots, 0, True, _undecided)


def test_slots_that_list_the_same_keys_are_one_tile() -> None:
    assert stairs(*[640] * 9) == [PackedTile("full", 0, 0, 9 * 128, 0, 640)]


@pytest.mark.parametrize("shared", [128, 1024])
def test_keys_that_rows_share_are_a_tile_if_it_saves_time(shared: int) -> None:
    """1024 rows are enough for torch's largest products, half of them are not."""
    tiles = stairs(*(shared + 128 * i for i in range(8)))
    assert (PackedTile("full", 0, 0, 1024, 0, shared) in tiles) == (shared == 1024)


def test_batches_take_tiles_by_number() -> None:
    a, b, c = (PackedTile("full", 0, 128 * i, 128, 0, 64) for i in range(3))
    assert TileBatch((a, b, c)).take([2, 0]) == TileBatch((c, a))
