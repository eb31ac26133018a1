"""One attention step of the CPU engine: packed rows, tiles for each group of heads, and visible pairs of
tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tritoncp.core.bounded_cache import BoundedCache
from tritoncp.cpu.packing import Packing, gather
from tritoncp.cpu.tiles import (
    KeyRanges,
    PackedTile,
    Range,
    SlotRow,
    TileBatch,
    batches_of,
    slot_rows,
    tiles_of,
)
from tritoncp.mods.tracing import vmapped
from tritoncp.planning.step_tables import Tables


@dataclass(frozen=True, eq=False)
class HeadGroup:
    """Query heads with equal tiles.

    heads, kv_heads: slices of the step's tensors
    lo, hi:          row intervals of packed rows, int64 [T], or None
    batches:         the tiles
    """

    heads: slice
    kv_heads: slice
    lo: Tensor | None
    hi: Tensor | None
    batches: tuple[TileBatch, ...]


@dataclass(frozen=True, eq=False)
class Step:
    """A step's tables converted to tiles, for tensors of one shape.

    mask: the mask_mod, if masked tiles call it
    """

    q: Packing
    kv: Packing
    window: tuple[int | None, ...] | None
    first_row: int
    first_head: int
    mask: Callable[..., Tensor] | None
    groups: tuple[HeadGroup, ...] = ()

    @classmethod
    def of(
        cls, tables: Tables, q: Tensor, k: Tensor, mask: Callable[..., Tensor] | None, first_row: int,
        first_head: int, flash: bool, steps: BoundedCache[Any, Step],
    ) -> Step:  # fmt: skip
        """Return the step for tensors with the shapes of q and k, from the cache ``steps`` if it is there.
        flash: whether torch's flash kernel computes it"""
        key = tables, q.shape[:3], k.shape[:3], first_row, first_head, flash
        if (step := steps.get(key)) is None:
            packings = (
                Packing.of(tables.q_slots, q.shape[0], q.shape[2]),
                Packing.of(tables.kv_slots, q.shape[0], k.shape[2]),
            )
            step = cls(*packings, tables.window, first_row, first_head, None)
            step = steps.put(key, replace(step, groups=tuple(_head_groups(step, tables, q, k, flash))))
        return replace(step, mask=mask) if tables.mask == "mod" else step

    @property
    def hides(self) -> bool:
        """Return whether any tile may hide pairs."""
        return any(batch.kind != "full" for group in self.groups for batch in group.batches)

    def indices(self, group: HeadGroup, batch: TileBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the global indices of tiles, which broadcast: b [n, 1, 1, 1], h [1, H, 1, 1], q_idx
        [n, 1, height, 1], kv_idx [n, 1, 1, width]."""
        rows = gather(self.q.positions[None, :, None], batch.rows, batch.height)
        keys = gather(self.kv.positions[None, :, None], batch.cols, batch.width).mT
        heads = torch.arange(group.heads.start, group.heads.stop) + self.first_head
        b = torch.tensor([tile.batch for tile in batch.tiles]) + self.first_row
        return b[:, None, None, None], heads[None, :, None, None], rows, keys

    def visible(self, group: HeadGroup, batch: TileBatch) -> Tensor | None:
        """Return the visible pairs of tiles: bool [n, 1 or H, height, width]; None if their kind tells."""
        if batch.kind != "masked":
            return None
        count = len(batch.tiles)
        if count > 1 and self.window is not None and self._equally_far(batch):
            pairs = self.visible(group, batch.take([0]))
            return None if pairs is None else pairs.expand(count, -1, -1, -1)
        b, h, rows, keys = self.indices(group, batch)
        if self.mask is not None:
            levels = (None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, 0, 0)
            numbers = b.flatten(), h.flatten(), rows.flatten(1), keys.flatten(1)
            pairs = vmapped(self.mask, *levels)(*numbers)
            pairs = pairs[:, :1] if pairs.stride(1) == 0 else pairs
        elif self.window is not None:
            left, right = self.window
            gap = rows - keys
            pairs = torch.ones_like(gap, dtype=torch.bool) if left is None else gap <= left
            pairs = pairs if right is None else pairs & (gap >= -right)
        else:
            assert group.lo is not None and group.hi is not None
            lo, hi = (gather(x[None, :, None], batch.rows, batch.height) for x in (group.lo, group.hi))
            pairs = (keys >= lo) & (keys < hi)
        return pairs

    def decides(self, group: HeadGroup, slots: Sequence[SlotRow], keys: Range) -> bool:
        """Return whether the window or intervals decide all pairs of these slots and keys. (Intervals of a
        mask_mod are valid only in masked blocks.)"""
        if self.window is not None:
            return True
        if group.lo is None or group.hi is None:
            return False
        for slot in slots:
            lo, hi = group.lo[slice(*slot.rows)], group.hi[slice(*slot.rows)]
            for part in slot.full:
                first, last = self.kv.positions[slice(*part)].aminmax()
                if not bool(((lo <= first) & (last < hi)).all()):
                    return False
            for part in slot.unlisted(keys):
                first, last = self.kv.positions[slice(*part)].aminmax()
                if not bool(((last < lo) | (hi <= first) | (hi <= lo)).all()):
                    return False
        return True

    def key_ranges(self, group: HeadGroup, b: int) -> KeyRanges | None:
        """Return the keys that the window or intervals show to each row of a batch row; None without these,
        or if packed keys are not in the order of their positions."""
        top, bottom = self.q.edges[b][0], self.q.edges[b][-1]
        first, last = self.kv.edges[b][0], self.kv.edges[b][-1]
        rows, keys = self.q.positions[top:bottom], self.kv.positions[first:last]
        if not bool((keys[1:] > keys[:-1]).all()):
            return None
        if self.window is not None:
            left, right = self.window
            begin = torch.zeros_like(rows) if left is None else rows - left
            end = torch.full_like(rows, torch.iinfo(rows.dtype).max) if right is None else rows + right + 1
        elif group.lo is not None and group.hi is not None:
            begin, end = group.lo[top:bottom].contiguous(), group.hi[top:bottom].contiguous()
        else:
            return None
        return KeyRanges(top, *(first + torch.searchsorted(keys, bound) for bound in (begin, end)))

    def _equally_far(self, batch: TileBatch) -> bool:
        """Return whether key position minus row position is the same in all tiles."""
        distance = self.q.positions[batch.rows] - self.kv.positions[batch.cols]
        return bool((distance == distance[0]).all())


def _head_groups(step: Step, tables: Tables, q: Tensor, k: Tensor, flash: bool) -> list[HeadGroup]:
    """Make the head groups of a step with their tiles: one group, unless the mask differs between heads."""
    batch, heads = q.shape[:2]
    per_group = heads // k.shape[1]
    differs = any(x is not None and x.shape[1] > 1 for x in (tables.row_ptr, tables.lo))
    runs = tables.row_runs.tolist()
    cuts = range(heads) if differs else range(1)
    groups = []
    for head in cuts:
        part = slice(head, head + 1) if differs else slice(0, heads)
        kv_part = slice(head // per_group, head // per_group + 1) if differs else slice(0, k.shape[1])
        lo, hi = (_packed_bounds(step.q, x, head + step.first_head, batch) for x in (tables.lo, tables.hi))
        group = HeadGroup(part, kv_part, lo, hi, ())
        tiles: list[PackedTile] = []
        for b in range(batch):
            ptr = _select_head(tables.row_ptr, b, head + step.first_head)
            slots = slot_rows(ptr, runs, step.q.edges[b], step.kv.edges[b])
            ranges = step.key_ranges(group, b) if flash else None
            tiles += tiles_of(slots, b, flash, partial(step.decides, group), ranges)
        groups.append(replace(group, batches=tuple(batches_of(tiles))))
    return groups


def _select_head(x: Tensor, b: int, head: int) -> Tensor:
    """Return the entry of a table [1 or B, 1 or H, ...] for a batch row and a query head of the layer."""
    return x[b if x.shape[0] > 1 else 0, head if x.shape[1] > 1 else 0]


def _packed_bounds(packing: Packing, bounds: Tensor | None, head: int, batch: int) -> Tensor | None:
    """Return one bound of a head's row intervals, in packed rows."""
    if bounds is None:
        return None
    parts: list[Any] = [bounds.new_zeros(0)]
    for b, rows in enumerate(packing.rows):
        own = _select_head(bounds, b, head)
        parts.append(own if rows is None else own[rows])
    return torch.cat(parts).long()
