"""Tests of the lists of selected keys that kernels read."""

from __future__ import annotations

import torch

from tritoncp.kernels.selected.attention import KEYS_OF_TILE, SelectedLists
from tritoncp.selection.lists import row_lists


def test_lists_of_long_sequences_are_transposed_exactly() -> None:
    """Numbers of (tile of keys, row) pairs do not fit in int32."""
    rows, num_keys = 1 << 16, 1 << 21
    g = torch.Generator().manual_seed(0)
    keys = torch.randint(num_keys, (1, 1, rows, 1), generator=g, dtype=torch.int32)
    assert rows * num_keys // KEYS_OF_TILE.value > 2**31
    lists = SelectedLists(keys, torch.ones(1, 1, rows, dtype=torch.int32), None, 0, rows, 1)
    transposed = row_lists(lists, num_keys)
    tiles = keys.flatten() // KEYS_OF_TILE.value
    counts = torch.bincount(tiles, minlength=num_keys // KEYS_OF_TILE.value)
    assert torch.equal(transposed.ptr[0, 0].long().diff(), counts)
    found = transposed.rows[0, 0].long()
    assert torch.equal(tiles[found], tiles.sort().values)
    assert torch.equal(found, tiles.sort(stable=True).indices)
