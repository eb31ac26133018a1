"""Tests of the lists of selected keys that kernels read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tritoncp.kernels.selected.attention import SelectedLists
from tritoncp.selection.key_gradients import LEAST_ROWS, ROWS_OF_KEY, rows_of_chunk
from tritoncp.selection.lists import key_order


def draw(batch: int, heads: int, rows: int, width: int, num_keys: int) -> SelectedLists:
    """Draw lists of keys, where entries past the count are anything."""
    g = torch.Generator().manual_seed(rows + width)
    keys = torch.rand(batch, heads, rows, num_keys, generator=g).topk(width, -1).indices.int()
    count = torch.randint(width + 1, (batch, heads, rows), generator=g).int()
    return SelectedLists(keys, count, None, 0 if batch == 1 else heads * rows, rows, width)


def entries_of_chunk(keys: Tensor, count: Tensor, first: int) -> list[tuple[int, int, int]]:
    """Return (key, row, place in the row) of each entry of a list, ascending."""
    return sorted(
        (int(keys[row, at]), first + row, at) for row in range(len(keys)) for at in range(int(count[row]))
    )


@pytest.mark.parametrize(("batch", "heads", "rows", "width", "chunk"), [
    (1, 1, 40, 3, 48), (2, 3, 40, 5, 16), (1, 2, 32, 4, 16), (2, 1, 0, 4, 16), (1, 1, 5, 0, 16),
])  # fmt: skip
def test_entries_of_a_chunk_lie_in_the_order_of_keys_then_rows(
    batch: int, heads: int, rows: int, width: int, chunk: int
) -> None:
    lists = draw(batch, heads, rows, width, 9)
    order = key_order(lists, 9, chunk)
    assert order.chunks == max(1, -(-rows // chunk)) and order.entries == chunk * width
    for b, h, i in torch.cartesian_prod(*map(torch.arange, (batch, heads, order.chunks))).tolist():
        part = slice(i * chunk, (i + 1) * chunk)
        entries = entries_of_chunk(lists.keys[b, h, part], lists.count[b, h, part], i * chunk)
        slots = order.slots[b, h, i].view(chunk, width)
        found = [int(slots[row - i * chunk, at]) for _, row, at in entries]
        assert found == list(range(len(entries)))
        number = torch.tensor([key for key, _, _ in entries], dtype=torch.long).bincount(minlength=9)
        assert torch.equal(order.ptr[b, h, i].diff().long(), number) and int(order.ptr[b, h, i, 0]) == 0


class Count(TorchDispatchMode):
    """Counts the operations of torch."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.total += 1
        return func(*args, **(kwargs or {}))


def test_the_number_of_operations_depends_on_no_size() -> None:
    totals = set()
    for batch, heads, rows, chunk in ((2, 1, 20, 16), (8, 1, 20, 16), (2, 6, 70, 16), (9, 7, 70, 48)):
        lists = draw(batch, heads, rows, 3, 9)
        with Count() as count:
            key_order(lists, 9, chunk)
        totals.add(count.total)
    assert len(totals) == 1


@pytest.mark.parametrize("num_keys", [100, 1 << 14, 1 << 20])
@pytest.mark.parametrize("width", [1, 64, 2048])
def test_partial_sums_take_memory_of_the_order_of_the_keys(width: int, num_keys: int) -> None:
    """However many rows select keys; a chunk has at least 16 of them."""
    for rows in (1, 1000, 1 << 20):
        chunk = rows_of_chunk(rows, width, num_keys, 1)
        most = max(LEAST_ROWS, ROWS_OF_KEY * num_keys, 16 * width)
        assert chunk % 16 == 0 and 0 < chunk * width <= most
        assert chunk >= rows or 2 * chunk * width > min(most, LEAST_ROWS)
