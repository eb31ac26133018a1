"""The CPU engine for keys that are selected at run time: gathers the selected keys of a few queries at a
time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tritoncp.cpu.engine import LN2, CpuEngine, Launch
from tritoncp.cpu.pointwise import Scores
from tritoncp.mods.tracing import fresh_dispatch
from tritoncp.planning.selected_rows import SelectedRows
from tritoncp.planning.step_tables import BackwardStep, ForwardStep, Tables
from tritoncp.selection.lookup import chosen_keys, rows_of_positions
from tritoncp.selection.visible import VisiblePairs

GATHERED = 1 << 22  # most elements of keys that a tile gathers


class SelectedTile(NamedTuple):
    """Queries of one batch row, and their selected keys, which ``query_block`` adjacent queries share.

    batch:   batch row of the tensors
    heads, kv_heads: slices of query heads that share their keys, and of KV heads
    rows:    int64 [n, height], rows of the queries in the tensors; the last ones may be past their end
    keys:    int64 [n, width], rows of the keys in the step's buffer, 0 where a key is hidden from all queries
    entries: int64 [n, width], place of the key, or of its block, in its row of the selection
    indices: b [n, 1, 1, 1], h [1, H, 1, 1], q_idx [n, 1, height, 1], kv_idx [n, 1, 1, width], of the whole
             sequence and layer
    visible: bool [n, 1 or H, height, width]
    """

    batch: int
    heads: slice
    kv_heads: slice
    rows: Tensor
    keys: Tensor
    entries: Tensor
    indices: tuple[Tensor, Tensor, Tensor, Tensor]
    visible: Tensor

    def queries(self, x: Tensor) -> Tensor:
        """Gather the tile's rows of x [B, Hq, S, D]: [n, H, height, D]. Rows that see no key are 0: they may
        be padding, which is not initialised."""
        part = x[self.batch, self.heads][:, self.rows.clamp(max=x.shape[2] - 1)].transpose(0, 1)
        return part.masked_fill(~self.visible.any(3)[..., None], 0)

    def key_rows(self, x: Tensor) -> Tensor:
        """Gather the tile's keys of x [B, Hkv, rows, D]: [n, Hkv, width, D]. Keys that no query sees are
        0."""
        part = x[self.batch, self.kv_heads][:, self.keys].transpose(0, 1)
        return part.masked_fill(~self.visible.flatten(1, 2).any(1)[:, None, :, None], 0)

    def add_to_keys(self, x: Tensor, grad: Tensor) -> None:
        """Add gradients of the tile's keys, [n, Hkv, width, D], to x [B, Hkv, rows, D]."""
        target = x[self.batch, self.kv_heads]
        flat = grad.transpose(0, 1).flatten(1, 2).to(x.dtype)
        target.index_add_(1, self.keys.flatten(), flat)


@dataclass(frozen=True)
class SelectedCpuEngine:
    """The CPU engine of a call with selected keys: O(S * n) operations for n keys a query.

    base:     the engine of the call without the selection: scale, mods, captures, first row and head
    selected: what the queries select
    pairs:    whether the mask shows a pair
    """

    base: CpuEngine
    selected: SelectedRows
    pairs: VisiblePairs
    fused: bool = field(default=True, init=False)
    v_head_dim: None = field(default=None, init=False)

    def from_head(self, first: int) -> SelectedCpuEngine:
        """Copy the engine for tensors that begin with another query head of the layer."""
        return replace(self, base=self.base.from_head(first))

    def with_selected(self, selected: SelectedRows) -> SelectedCpuEngine:
        """Copy the engine for other queries of the call."""
        return replace(self, selected=selected)

    def delta(self, out: Tensor, dout: Tensor, dlse: Tensor | None, delta: Tensor) -> Launch:
        return self.base.delta(out, dout, dlse, delta)

    def split(self, q: Tensor, k: Tensor, tables: Tables) -> int:
        return 1

    def dq(self, step: BackwardStep, dq: Tensor, *, add: bool = False) -> Launch:
        return self.base.dq(step, dq, add=add)

    def forward(self, step: ForwardStep) -> Launch:
        """Prepare a forward step."""

        @fresh_dispatch()
        def run() -> None:
            q, dtype = step.q, step.lse.dtype
            acc, m, l, largest = self._initial_sums(step)
            for tile in self._tiles(q, step.k, step.tables):
                scores = self._scores(tile)
                query, key, value = (
                    part.to(dtype) for part in (tile.queries(q), tile.key_rows(step.k), tile.key_rows(step.v))
                )
                out, lse = scores.forward(query, key, value, self.base.captures)
                at = tile.batch, tile.heads, tile.rows  # [H, n, height]
                out, lse = out.transpose(0, 1), lse.transpose(0, 1)
                before, top = m[at], torch.maximum(m[at], lse)
                keep, add = (torch.where(x == -torch.inf, 0, torch.exp(x - top)) for x in (before, lse))
                acc[at] = acc[at] * keep[..., None] + out * add[..., None]
                l[at] = l[at] * keep + add
                m[at] = top
                if step.max_scores is not None:
                    part = scores.largest(query, key, self.base.captures).transpose(0, 1)
                    largest[at] = torch.maximum(largest[at], part)
            acc, m, l, largest = (x[:, :, : q.shape[2]] for x in (acc, m, l, largest))
            if step.max_scores is not None:
                step.max_scores.copy_(largest)
            if step.store_state:
                for into, x in zip(step.state or (), (acc, m / LN2, l), strict=True):
                    into.copy_(x)
                return
            step.out.copy_(acc / torch.where(l == 0, 1, l)[..., None])
            step.lse.copy_(m + l.log())

        return run

    def dkdv(
        self, step: BackwardStep, dk: Tensor, dv: Tensor, dq: Tensor, *, add: bool = False, split: int = 1
    ) -> Launch:
        """Prepare a backward step: compute dk and dv, and add to dq and to the buffers of captures'
        gradients."""

        @fresh_dispatch()
        def run() -> None:
            dtype = step.lse.dtype
            rows = self.selected.indices.shape[2] * self.selected.query_block
            shapes = (*step.q.shape[:2], rows, step.q.shape[3]), step.k.shape, step.v.shape
            totals = [step.lse.new_zeros(shape) for shape in shapes]
            for tile in self._tiles(step.q, step.k, step.tables):
                query, dout = (tile.queries(x).to(dtype) for x in (step.q, step.dout))
                key, value = (tile.key_rows(x).to(dtype) for x in (step.k, step.v))
                lse, delta = (tile.queries(x[..., None])[..., 0] for x in (step.lse, step.delta))
                grads = self._scores(tile).backward(
                    query, key, value, dout, torch.where(lse == -torch.inf, 0, lse), delta, self.base.captures
                )
                totals[0][tile.batch, tile.heads, tile.rows] += grads[0].transpose(0, 1)
                for total, grad in zip(totals[1:], grads[1:3], strict=True):
                    tile.add_to_keys(total, grad)
                for buffer, captured in zip(self.base.grads, grads[3]):
                    buffer += captured
            dq.add_(totals[0][:, :, : dq.shape[2]])
            for into, total in ((dk, totals[1]), (dv, totals[2])):
                if into.stride(0) == 0:  # batch rows share memory, which gets the sum over them
                    into, total = into[0], total.sum(0)
                into.add_(total) if add else into.copy_(total)

        return run

    def _initial_sums(self, step: ForwardStep) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return acc, m (natural log), l and the largest scores, from the step's state if it has one.
        Padding sees no key; behind the last row are those that complete a row of the selection."""
        rows = self.selected.indices.shape[2] * self.selected.query_block
        more, dtype = rows - step.q.shape[2], step.lse.dtype
        empty = step.q.new_full((*step.q.shape[:2], rows), -torch.inf, dtype=dtype)
        acc = empty.new_zeros(*empty.shape, step.out.shape[3])
        if not step.load_state or step.state is None:
            return acc, empty, torch.zeros_like(empty), empty.clone()
        padding = (self.selected.positions < 0)[:, None]

        def loaded(x: Tensor, value: float) -> Tensor:
            return torch.nn.functional.pad(x.masked_fill(padding, value), (0, more), value=value)

        acc[:, :, : step.q.shape[2]] = step.state[0].masked_fill(padding[..., None], 0)
        m, l = loaded(step.state[1], -torch.inf) * LN2, loaded(step.state[2], 0)
        largest = empty if step.max_scores is None else loaded(step.max_scores, -torch.inf)
        return acc, m, l, largest.clone()

    def _scores(self, tile: SelectedTile) -> Scores:
        base = self.base
        return Scores(base.scale, base.score, tile.indices, tile.visible, base.elementwise)

    def _tiles(self, q: Tensor, k: Tensor, tables: Tables) -> Iterator[SelectedTile]:
        """Yield the tiles of a step that have a visible pair. Each query is in one tile for each of its
        heads."""
        places = rows_of_positions(tables.kv_slots, self.pairs.mask.kv_len)
        for batch in range(len(q)):
            for share, heads, kv_heads in self._head_groups(q.shape[1], k.shape[1]):
                chosen = self.selected.indices
                indices = chosen[batch % len(chosen), share - self.selected.first_share].long()
                keys = heads.stop - heads.start, kv_heads.stop - kv_heads.start
                width = max(1, indices.shape[1] * self.selected.block_size * max(keys) * k.shape[3])
                count = max(1, GATHERED // width)
                for first in range(0, len(indices), count):
                    part = indices[first : first + count]
                    tile = self._tile(batch, heads, kv_heads, first, part, places[batch % len(places)])
                    if tile is not None:
                        yield tile

    def _head_groups(self, heads: int, kv_heads: int) -> Iterator[tuple[int, slice, slice]]:
        """Yield (head of the selection, query heads, KV heads) for query heads that share keys."""
        rows, group, first = self.selected, heads // kv_heads, self.base.first_head
        head = 0
        while head < heads:
            share = rows.share_of(first + head)
            stop = min(heads, (share + 1) * rows.num_heads // rows.shares - first)
            yield share, slice(head, stop), slice(head // group, -(-stop // group))
            head = stop

    def _tile(
        self, batch: int, heads: slice, kv_heads: slice, first: int, indices: Tensor, places: Tensor
    ) -> SelectedTile | None:
        """Make the tile of some rows of the selection, from row ``first`` on; None if no pair is visible."""
        height, base = self.selected.query_block, self.base
        positions = self.selected.positions[batch % len(self.selected.positions)]
        chosen = chosen_keys(self.selected, first, indices, positions, places)
        width = int(chosen.present.any(2).sum(2).max()) if len(indices) else 0
        if not width:
            return None
        order = chosen.present[:, 0].any(1).to(torch.uint8).argsort(dim=1, descending=True, stable=True)
        order = order[:, :width]
        keys, kv_idx = chosen.keys.gather(1, order), chosen.kv_idx.gather(1, order)
        present = chosen.present.gather(3, order[:, None, None].expand(-1, 1, height, -1))
        q_idx, head_numbers = chosen.q_idx, torch.arange(heads.start, heads.stop) + base.first_head
        visible = self.pairs(batch, head_numbers, q_idx, kv_idx) & present
        shows = visible.flatten(1).any(1)
        if not bool(shows.any()):
            return None
        rows = torch.arange(first * height, (first + len(indices)) * height).view(-1, height)
        entries = order // self.selected.block_size
        visible, rows, keys, entries, q_idx, kv_idx = (
            x[shows] for x in (visible, rows, keys, entries, q_idx, kv_idx)
        )
        b = torch.full((len(rows), 1, 1, 1), batch + base.first_row)
        indices_of = b, head_numbers[None, :, None, None], q_idx[:, None, :, None], kv_idx[:, None, None, :]
        return SelectedTile(batch, heads, kv_heads, rows, keys, entries, indices_of, visible)


@dataclass(frozen=True, kw_only=True)
class CpuProbabilities(SelectedCpuEngine):
    """A :class:`SelectedCpuEngine` whose forward step adds the probabilities of its keys to ``sums``.

    lse:  [B, Hq, S] of all steps and sinks, natural log
    sums: [B, heads of the selection, S, n], in the order of the selection, in lse's dtype
    """

    lse: Tensor
    sums: Tensor

    def forward(self, step: ForwardStep) -> Launch:
        """Prepare the probabilities of the keys of a step."""

        @fresh_dispatch()
        def run() -> None:
            rows = self.selected.indices.shape[2] * self.selected.query_block
            shape = *self.sums.shape[:2], rows, self.sums.shape[3]
            total = self.sums.new_zeros(shape)
            for tile in self._tiles(step.q, step.k, step.tables):
                query, key = (x.to(total.dtype) for x in (tile.queries(step.q), tile.key_rows(step.k)))
                lse = tile.queries(self.lse[..., None])[..., 0]
                lse = torch.where(lse == -torch.inf, 0, lse)
                found = self._scores(tile).probabilities(query, key, lse, self.base.captures).sum(1)
                share = self.selected.share_of(tile.heads.start + self.base.first_head)
                entries = tile.entries[:, None].expand_as(found)
                by_entry = found.new_zeros(*found.shape[:2], shape[3]).scatter_add_(2, entries, found)
                total[tile.batch, share - self.selected.first_share, tile.rows] += by_entry
            self.sums.add_(total[:, :, : self.sums.shape[2]])

        return run
