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
    KEYS_OF_TILE,
    Places,
    SelectedLists,
    TransposedLists,
    selected_dkdv_kernel,
    selected_dq_kernel,
    selected_forward_kernel,
)
from tritoncp.kernels.tile_rules import Config
from tritoncp.kernels.tiles import channels, view
from tritoncp.planning.selected_rows import SelectedRows
from tritoncp.planning.step_tables import BackwardStep, ForwardStep, PreparedStep, Tables
from tritoncp.selection.lists import key_lists, list_heads, row_lists
from tritoncp.selection.lookup import rows_of_positions
from tritoncp.selection.visible import VisiblePairs

FULL_ROWS = 64  # of a tile of dK/dV, which several rows of the selection fill
MAX_ROWS = 128  # of a tile: query heads times the queries that share a row of the selection


@dataclass(frozen=True)
class StepLists:
    """The lists of one step, for the query heads of its tensors.

    places: positions of queries and of the buffer's rows, on the device
    num_keys: rows of the buffer
    """

    keys: SelectedLists
    places: Places
    num_keys: int
    _rows: list[TransposedLists] = field(default_factory=list)

    def rows(self) -> TransposedLists:
        """Return the transposed lists, made at the first call."""
        if not self._rows:
            self._rows.append(row_lists(self.keys, self.num_keys))
        return self._rows[0]


@dataclass(frozen=True)
class SelectedTritonEngine:
    """The Triton engine of a call with selected keys.

    base:     the engine of the call without the selection: scale, mods, captures, first row and head
    selected: what the queries select
    pairs:    whether the mask shows a pair
    """

    base: TritonEngine
    selected: SelectedRows
    pairs: VisiblePairs
    lists: BoundedCache[Any, StepLists] = field(default_factory=lambda: BoundedCache(2))
    fused: bool = field(default=False, init=False)
    v_head_dim: None = field(default=None, init=False)

    def from_head(self, first: int) -> SelectedTritonEngine:
        """Copy the engine for tensors that begin with another query head of the layer."""
        return replace(self, base=self.base.from_head(first))

    def with_selected(self, selected: SelectedRows) -> SelectedTritonEngine:
        """Copy the engine for other queries of the call."""
        return replace(self, selected=selected, lists=BoundedCache(2))

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
        heads, most = self._heads_of_tile(lists.keys, q, k)
        block = max(FULL_ROWS, triton.next_power_of_2(most * self.selected.query_block))
        entries = block // (heads * self.selected.query_block)
        args = {"lists": lists.rows(), "HEADS": heads, "ENTRIES": entries, "BLOCK_M": block}
        grid = -(-k.shape[2] // KEYS_OF_TILE.value), k.shape[1], q.shape[0]
        flags = {"ADD": add, "score_grad": mods.score_back}
        return self._launch(selected_dkdv_kernel, tensors, lists, flags | args, grid)

    def _launch(
        self, kernel: Any, tensors: dict[str, Any], lists: StepLists, args: dict[str, Any],
        grid: Sequence[int] | None = None,
    ) -> Launch:  # fmt: skip
        """Prepare a launch. grid: of programs; None: one for each row of the selection and tile of heads"""
        q, k, v = (tensors[name] for name in "qkv")
        keys, queries, group = lists.keys.keys, self.selected.query_block, q.shape[1] // k.shape[1]
        heads, most = self._heads_of_tile(lists.keys, q, k)
        if grid is None:
            grid = keys.shape[2], q.shape[1] // heads, q.shape[0]
        config = Config(max(16, triton.next_power_of_2(most * queries)), 64 if k.shape[3] <= 128 else 32)
        values = {name: _argument(x) for name, x in tensors.items()} | {
            "lists": lists.keys,
            "places": lists.places,
            "score_mod": self.base.mods.score,
            "origin": Origin(self.base.first_row, self.base.first_head),
            "SCALE": self.base.scale,
            "GROUP": group,
            "SHARE": _share_of(lists.keys, q),
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

    def _heads_of_tile(self, lists: SelectedLists, q: Tensor, k: Tensor) -> tuple[int, int]:
        """Return how many query heads of a tensor lie in one tile, and how many if the tensor has all heads
        of the layer: the shape of tiles, and so the bits of a row, do not depend on the exchange of heads."""
        rows, queries = self.selected, self.selected.query_block
        shares = rows.num_heads if self.pairs.reads_heads else rows.shares
        whole = heads_of_tile(min(rows.num_heads // shares, rows.group), queries)
        own = min(_share_of(lists, q), q.shape[1] // k.shape[1])
        return max(n for n in range(1, whole + 1) if own % n == 0), whole

    def _lists(self, q: Tensor, k: Tensor, tables: Tables) -> StepLists:
        """Return the lists of a step, made once for its two backward passes and for heads that share them."""
        heads = range(self.base.first_head, self.base.first_head + q.shape[1])
        key = tables, list_heads(self.selected, self.pairs, heads), q.shape[0]
        if (found := self.lists.get(key)) is not None:
            return found
        places = rows_of_positions(tables.kv_slots, self.pairs.mask.kv_len)
        lists = key_lists(self.selected, self.pairs, places, q.shape[0], heads)
        where = places_of(self.selected, places, q, k)
        return self.lists.put(key, StepLists(lists, where, k.shape[2]))


def _inputs(step: BackwardStep) -> dict[str, Any]:
    tensors = step._asdict()
    del tensors["tables"]
    return tensors


def _argument(x: Any) -> Any:
    """Return a tensor, State or None as a kernel's argument."""
    return State._make(map(view, x)) if isinstance(x, State) else view(x)


def _share_of(lists: SelectedLists, q: Tensor) -> int:
    """Return how many query heads of a tensor share a list."""
    count: int = q.shape[1] // lists.keys.shape[1]
    return count


def heads_of_tile(heads: int, queries: int) -> int:
    """Return how many of the query heads that share keys lie in one tile: a divisor of ``heads``."""
    fitting = (n for n in range(1, heads + 1) if heads % n == 0 and n * queries <= MAX_ROWS)
    return max(fitting, default=1)


def places_of(selected: SelectedRows, places: Tensor, q: Tensor, k: Tensor) -> Places:
    """Return the positions of the rows of a step's tensors. places: of :func:`rows_of_positions`"""
    queries, keys = selected.positions.int(), _positions_of_rows(places, k.shape[2]).int()
    strides = (x.shape[1] * (len(x) > 1) for x in (queries, keys))
    return Places(queries, next(strides), keys, next(strides), q.shape[2], k.shape[2])


def _positions_of_rows(places: Tensor, rows: int) -> Tensor:
    """Return the position of each row of a buffer, -1 for padding: int64 [Bp, rows]. places: of
    :func:`rows_of_positions`"""
    found = places.new_full((len(places), rows + 1), -1)
    index = torch.where(places < 0, rows, places)
    found.scatter_(1, index, torch.arange(places.shape[1], device=places.device).expand_as(places))
    return found[:, :rows]
