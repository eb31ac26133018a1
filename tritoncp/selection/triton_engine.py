"""The Triton engine for keys that are selected at run time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import triton
from torch import Tensor

from tritoncp.core.bounded_cache import BoundedCache
from tritoncp.kernels.engine import TritonEngine
from tritoncp.kernels.launch import Launch, State
from tritoncp.kernels.program_order import check_grid
from tritoncp.kernels.scores import Origin
from tritoncp.kernels.selected import (
    Places,
    SelectedLists,
    TransposedLists,
    selected_dkdv_kernel,
    selected_dq_kernel,
    selected_forward_kernel,
)
from tritoncp.kernels.tile_rules import Config
from tritoncp.kernels.tiles import channels, view
from tritoncp.planning.step_tables import BackwardStep, ForwardStep, PreparedStep, Tables
from tritoncp.selection.lists import KEYS_OF_TILE, KeyLists, RowLists, key_lists, row_lists, rows_of_positions
from tritoncp.selection.selection import Selection
from tritoncp.selection.visible import VisiblePairs

FULL_ROWS = 64  # of a tile of dK/dV, which several rows of the selection fill
MAX_ROWS = 128  # of a tile: query heads times the queries that share a row of the selection


@dataclass(frozen=True)
class StepLists:
    """The lists of one step, for the query heads of its tensors.

    places: positions of queries and of the buffer's rows, on the device
    num_keys: rows of the buffer
    """

    keys: KeyLists
    places: Places
    num_keys: int
    _rows: list[RowLists] = field(default_factory=list)

    def rows(self) -> RowLists:
        """Return the transposed lists, made at the first call."""
        if not self._rows:
            self._rows.append(row_lists(self.keys, self.num_keys))
        return self._rows[0]


@dataclass(frozen=True)
class SelectedTritonEngine:
    """The Triton engine of a call with selected keys.

    base:      the engine of the call without the selection: scale, mods, captures, first row and head
    selection: with unique indices
    pairs:     whether the mask shows a pair
    num_heads: number of query heads of the layer
    positions: global positions of the queries, int64 [1 or B, S_local], -1 for padding, on the CPU
    """

    base: TritonEngine
    selection: Selection
    pairs: VisiblePairs
    num_heads: int
    positions: Tensor
    lists: BoundedCache[Any, StepLists] = field(default_factory=lambda: BoundedCache(2))
    fused: bool = field(default=False, init=False)
    v_head_dim: None = field(default=None, init=False)

    def from_head(self, first: int) -> SelectedTritonEngine:
        """Copy the engine for tensors that begin with another query head of the layer."""
        return replace(self, base=self.base.from_head(first))

    def delta(self, out: Tensor, dout: Tensor, dlse: Tensor | None, delta: Tensor) -> PreparedStep:
        return self.base.delta(out, dout, dlse, delta)

    def split(self, q: Tensor, k: Tensor, tables: Tables) -> int:
        return 1

    def forward(self, step: ForwardStep) -> PreparedStep:
        """Prepare a forward step."""
        tensors = {name: getattr(step, name) for name in ("q", "k", "v", "out", "lse", "max_scores")}
        state = State(*(step.state or (None, None, None)))
        lists = self._lists(step.q, step.k, step.tables)
        flags = {"LOAD_STATE": step.load_state, "STORE_STATE": step.store_state}
        return self._launch(selected_forward_kernel, tensors | {"state": state}, lists, flags)

    def dq(self, step: BackwardStep, dq: Tensor, *, add: bool = False) -> PreparedStep:
        """Prepare dQ of one step, and the gradients of score_mod's captures."""
        lists, closures = self._lists(step.q, step.k, step.tables), {"score_grad": self.base.mods.score_grad}
        return self._launch(selected_dq_kernel, _inputs(step) | {"dq": dq}, lists, {"ADD": add} | closures)

    def dkdv(
        self, step: BackwardStep, dk: Tensor, dv: Tensor, dq: Tensor, *, add: bool = False, split: int = 1
    ) -> PreparedStep:
        """Prepare dK and dV of one step."""
        lists, mods = self._lists(step.q, step.k, step.tables), self.base.mods
        tensors, q, k = _inputs(step) | {"dk": dk, "dv": dv}, step.q, step.k
        ptr, rows, bits = lists.rows()
        share = _share_of(lists.keys, q)
        heads = _heads_of_tile(min(share, q.shape[1] // k.shape[1]), self.selection.query_block)
        filled = heads * self.selection.query_block
        block = max(FULL_ROWS, triton.next_power_of_2(filled))
        stride = 0 if ptr.shape[0] == 1 else ptr.shape[1]
        transposed = TransposedLists(ptr, rows, bits, stride, ptr.shape[2] - 1, rows.shape[2])
        args = {"lists": transposed, "HEADS": heads, "ENTRIES": block // filled, "BLOCK_M": block}
        grid = -(-k.shape[2] // KEYS_OF_TILE), k.shape[1], q.shape[0]
        flags = {"ADD": add, "score_grad": mods.score_back}
        return self._launch(selected_dkdv_kernel, tensors, lists, flags | args, grid)

    def _launch(
        self, kernel: Any, tensors: dict[str, Any], lists: StepLists, args: dict[str, Any],
        grid: Sequence[int] | None = None,
    ) -> Launch:  # fmt: skip
        """Prepare a launch. grid: of programs; None: one for each row of the selection and tile of heads"""
        q, k, v = (tensors[name] for name in "qkv")
        keys, queries, group = lists.keys, self.selection.query_block, q.shape[1] // k.shape[1]
        share = _share_of(keys, q)
        heads = _heads_of_tile(min(share, group), queries)
        if grid is None:
            grid = keys.keys.shape[2], q.shape[1] // heads, q.shape[0]
        batch, shares, rows, width = keys.keys.shape
        config = Config(max(16, triton.next_power_of_2(heads * queries)), 64 if k.shape[3] <= 128 else 32)
        values = {name: _argument(x) for name, x in tensors.items()} | {
            "lists": SelectedLists(*keys, 0 if batch == 1 else shares * rows, rows, width),
            "places": lists.places,
            "score_mod": self.base.mods.score,
            "origin": Origin(self.base.first_row, self.base.first_head),
            "SCALE": self.base.scale,
            "GROUP": group,
            "SHARE": share,
            "FIRST": 0,  # of the lists, which begin with the tensors' first head
            "HEADS": heads,
            "QUERIES": queries,
            "BLOCK_M": config.BLOCK_M,
            "BLOCK_N": config.BLOCK_N,
            "QK": channels(q.shape[3], 128),
            "VO": channels(v.shape[3], 128),
            "PRECISION": self.base.options.get("PRECISION", "ieee"),
        }
        values |= args
        in_order = [values[name] for name in kernel.arg_names]
        return Launch(kernel, check_grid(*grid), in_order, config, [])

    def _lists(self, q: Tensor, k: Tensor, tables: Tables) -> StepLists:
        """Return the lists of a step, made once for its two backward passes and for heads that share them."""
        shares = self.num_heads if self.pairs.reads_heads else self.selection.indices.shape[1]
        first = self.base.first_head
        heads = range(first, first + q.shape[1])
        part = heads.start * shares // self.num_heads, (heads.stop - 1) * shares // self.num_heads
        key = tables, *part, q.shape[0]
        if (found := self.lists.get(key)) is not None:
            return found
        device, kv_len = q.device, self.pairs.mask.kv_len
        places, positions = rows_of_positions(tables.kv_slots, kv_len), self.positions.to(device)
        lists = key_lists(self.selection, self.pairs, positions, places, q.shape[0], heads, self.num_heads)
        query_positions, key_positions = positions.int(), _positions_of_rows(places, k.shape[2]).int()
        where = Places(
            query_positions,
            query_positions.shape[1] * (len(query_positions) > 1),
            key_positions,
            key_positions.shape[1] * (len(key_positions) > 1),
            q.shape[2],
            k.shape[2],
        )
        return self.lists.put(key, StepLists(lists, where, k.shape[2]))


def _inputs(step: BackwardStep) -> dict[str, Any]:
    tensors = step._asdict()
    del tensors["tables"]
    return tensors


def _argument(x: Any) -> Any:
    """Return a tensor, State or None as a kernel's argument."""
    return State._make(map(view, x)) if isinstance(x, State) else view(x)


def _share_of(lists: KeyLists, q: Tensor) -> int:
    """Return how many query heads of a tensor share a list."""
    return q.shape[1] // lists.keys.shape[1]


def _heads_of_tile(heads: int, queries: int) -> int:
    """Return how many of the query heads that share keys lie in one tile: a divisor of ``heads``."""
    fitting = (n for n in range(1, heads + 1) if heads % n == 0 and n * queries <= MAX_ROWS)
    return max(fitting, default=1)


def _positions_of_rows(places: Tensor, rows: int) -> Tensor:
    """Return the position of each row of a buffer, -1 for padding: int64 [Bp, rows]. places: of
    :func:`rows_of_positions`"""
    found = places.new_full((len(places), rows + 1), -1)
    index = torch.where(places < 0, rows, places)
    found.scatter_(1, index, torch.arange(places.shape[1], device=places.device).expand_as(places))
    return found[:, :rows]
