"""The Triton engine for keys that are selected at run time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tritoncp.core.bounded_cache import BoundedCache
from tritoncp.core.opaque_integers import opaque
from tritoncp.kernels.engine import TritonEngine
from tritoncp.kernels.launch import Launch, State
from tritoncp.kernels.opaque_integers import opaque_fields
from tritoncp.kernels.operands import NO_FUNCTION
from tritoncp.kernels.program_order import check_grid
from tritoncp.kernels.scores import Origin
from tritoncp.kernels.selected.attention import (
    PairRule,
    Places,
    QueryTiling,
    SelectedLists,
    TransposedLists,
    selected_dkdv_kernel,
    selected_dq_kernel,
    selected_forward_kernel,
)
from tritoncp.kernels.selected.gradients import KeyOrder, partial_dkdv_kernel
from tritoncp.kernels.tile_rules import (
    Config,
    architecture,
    copies,
    pieces,
    selected,
    selected_partial,
    selected_rows,
    widest_piece,
)
from tritoncp.kernels.tile_runs import Interval
from tritoncp.kernels.tiles import channels, copyable, descriptors, view
from tritoncp.planning.selected_rows import SelectedRows
from tritoncp.planning.step_tables import BackwardStep, ForwardStep, PreparedStep, Tables
from tritoncp.selection.block_lists import block_kinds, block_lists, block_rows, rows_of_tiles
from tritoncp.selection.key_gradients import KeyGradients, rows_of_chunk, sums_launch
from tritoncp.selection.lists import key_lists, key_order
from tritoncp.selection.lookup import rows_of_positions
from tritoncp.selection.visible import VisiblePairs

FULL_ROWS = 64  # of a tile of dK/dV, which several rows of the selection fill
MAX_ROWS = 128  # of a tile: query heads times the queries that share a row of the selection


WIDEST_TILE = 64  # keys of a tile


@dataclass(frozen=True)
class StepLists:
    """The lists of one step, for the query heads of its tensors.

    keys:     the selected keys, or blocks of keys, of each row
    places:   positions of queries and of the buffer's rows, on the device
    num_keys: rows of the buffer
    kv_len:   keys of the sequence
    block:    keys of a selected block, 1 for keys alone
    rule:     which pairs the mask shows in a block, None for keys
    is_even:  whether all rows of a tile of a block are present
    whole:    whether a tile of a block is whole in the buffer, or absent, or ends with the tensor
    """

    keys: SelectedLists
    places: Places
    num_keys: int
    kv_len: int
    block: int = 1
    rule: PairRule | None = None
    is_even: bool = False
    whole: bool = False
    _rows: list[TransposedLists] = field(default_factory=list)
    _orders: dict[int, KeyOrder] = field(default_factory=dict)

    def tile(self, limit: int) -> int:
        """Keys of a tile, which divide those of a block."""
        return limit if self.block == 1 else min(limit, self.block & -self.block)

    def rows(self) -> TransposedLists:
        """Return the transposed lists of blocks, made at the first call."""
        if not self._rows:
            self._rows.append(block_rows(self.keys, -(-self.kv_len // self.block)))
        return self._rows[0]

    def order(self, rows: int) -> KeyOrder:
        """Return the order of single keys in chunks of ``rows`` rows, made at the first call."""
        if rows not in self._orders:
            self._orders[rows] = key_order(self.keys, self.num_keys, rows)
        return self._orders[rows]


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
        tiling = self._tiling("forward", lists, step)
        flags = {"LOAD_STATE": step.load_state, "STORE_STATE": step.store_state}
        return self._launch(selected_forward_kernel, tensors | {"state": state}, lists, flags, *tiling)

    def dq(self, step: BackwardStep, dq: Tensor, *, add: bool = False) -> PreparedStep:
        """Prepare dQ of one step, and the gradients of score_mod's captures."""
        lists = self._lists(step.q, step.k, step.tables)
        flags, tiling = (
            {"ADD": add, "score_grad": self.base.mods.score_grad},
            self._tiling("dq", lists, step),
        )
        return self._launch(selected_dq_kernel, _inputs(step) | {"dq": dq}, lists, flags, *tiling)

    def dkdv(
        self, step: BackwardStep, dk: Tensor, dv: Tensor, dq: Tensor, *, add: bool = False, split: int = 1
    ) -> PreparedStep:
        """Prepare dK and dV of one step."""
        lists = self._lists(step.q, step.k, step.tables)
        if lists.block == 1:
            return self._key_gradients(step, lists, dk, dv, add)
        tensors, q, k = _inputs(step) | {"dk": dk, "dv": dv}, step.q, step.k
        (tiling, config), mods = self._tiling("dkdv", lists, step), self.base.mods
        entries = config.BLOCK_M // (tiling.heads * tiling.piece)
        args = {
            "lists": opaque_fields(lists.rows()),
            "ENTRIES": entries,
            "score_grad": mods.score_back,
            "ADD": add,
        }
        grid = -(-lists.kv_len // config.BLOCK_N), k.shape[1], q.shape[0]
        return self._launch(selected_dkdv_kernel, tensors, lists, args, tiling, config, grid)

    def _key_gradients(
        self, step: BackwardStep, lists: StepLists, dk: Tensor, dv: Tensor, add: bool
    ) -> KeyGradients:
        """Prepare dK and dV of single keys."""
        tiling, config = self._tiling("partial", lists, step)
        heads, kv_heads = step.q.shape[1], step.k.shape[1]
        own = min(_share_of(lists.keys, step.q), heads // kv_heads)  # query heads of a partial sum
        order = lists.order(self._chunk(lists, step))
        args = {
            "order": opaque_fields(order),
            "first": 0,
            "OWN": own,
            "score_grad": self.base.mods.score_back,
        }
        tensors = _inputs(step) | {"dk_parts": None, "dv_parts": None}
        rows, width = lists.keys.keys.shape[2:]
        grid = order.rows * -(-width // config.BLOCK_N), heads // own, step.q.shape[0]
        partial = self._launch(partial_dkdv_kernel, tensors, lists, args, tiling, config, grid)
        sums = sums_launch(dk, dv, order, lists.places, heads // own, add)
        return KeyGradients(partial, sums, order, dk, dv, rows, step.lse.dtype)

    def _chunk(self, lists: StepLists, step: BackwardStep) -> int:
        """Return the rows of the selection in a chunk. Sizes are those of the layer: the bits of dk and dv do
        not depend on the exchange of heads."""
        selected, (rows, width) = self.selected, lists.keys.keys.shape[2:]
        shares = selected.num_heads if self._lists_each_head else selected.shares
        parts = selected.group // min(selected.num_heads // shares, selected.group)
        kv_heads = selected.num_heads // selected.group
        return rows_of_chunk(rows, width * parts, lists.num_keys, kv_heads * step.q.shape[0])

    def _tiling(
        self, kind: str, lists: StepLists, step: ForwardStep | BackwardStep
    ) -> tuple[QueryTiling, Config]:
        """Choose the query heads and queries of a tile, and its keys. The shape of a tile is that of a tensor
        with all heads of the layer: the bits of a row do not depend on the exchange of heads."""
        q, k, rows = step.q, step.k, self.selected
        arch, dim = self.base.arch or architecture(q.device), max(q.shape[3], step.v.shape[3])
        most = selected_rows(arch, dim, q.dtype)
        queries = rows.query_block
        parts = -(-queries // most)
        piece = -(-queries // parts)
        shares = rows.num_heads if self._lists_each_head else rows.shares
        whole = heads_of_tile(min(rows.num_heads // shares, rows.group), piece, most)
        own = min(_share_of(lists.keys, q), q.shape[1] // k.shape[1])
        heads = max(n for n in range(1, whole + 1) if own % n == 0)
        filled = whole * piece if kind != "dkdv" else max(whole * piece, min(FULL_ROWS, most))
        if kind == "partial":
            config = selected_partial(arch, filled, lists.keys.width, dim, q.dtype)
        else:
            config = selected(kind, arch, filled, dim, q.dtype)
        return QueryTiling(heads, queries, piece, parts), replace(config, BLOCK_N=lists.tile(config.BLOCK_N))

    def _launch(
        self, kernel: Any, tensors: dict[str, Any], lists: StepLists, args: dict[str, Any],
        tiling: QueryTiling, config: Config, grid: Sequence[int] | None = None,
    ) -> Launch:  # fmt: skip
        """Prepare a launch. grid: of programs; None: one for each tile of queries"""
        q, k, v = (tensors[name] for name in "qkv")
        if grid is None:
            grid = lists.keys.keys.shape[2] * tiling.parts, q.shape[1] // tiling.heads, q.shape[0]
        by_keys = kernel in (selected_dkdv_kernel, partial_dkdv_kernel)
        arch = self.base.arch or architecture(q.device)
        widest = 128 if by_keys else widest_piece(arch, max(q.shape[3], v.shape[3]), config)
        values = {name: _argument(x) for name, x in tensors.items()} | {
            "lists": opaque_fields(lists.keys, "stride_b", "stride_h"),
            "places": opaque_fields(lists.places),
            "rule": lists.rule,
            "score_mod": self.base.mods.score,
            "origin": Origin(opaque(self.base.first_row), opaque(self.base.first_head)),
            "SCALE": self.base.scale,
            "GROUP": q.shape[1] // k.shape[1],
            "SHARE": _share_of(lists.keys, q),
            "FIRST": 0,  # of the lists, which begin with the tensors' first head
            "TILING": tiling,
            "BLOCK_M": config.BLOCK_M,
            "BLOCK_N": config.BLOCK_N,
            "BLOCK": lists.block,
            "EVEN": lists.is_even,
            "QK": channels(q.shape[3], widest),
            "VO": channels(v.shape[3], widest),
            "PRECISION": self.base.options.get("PRECISION", "ieee"),
        }
        values |= self._descriptors(lists, k, v, config.BLOCK_N, widest) | args
        in_order = [values[name] for name in kernel.arg_names]
        return Launch(kernel, check_grid(*grid), in_order, config, [])

    def _lists(self, q: Tensor, k: Tensor, tables: Tables) -> StepLists:
        """Return the lists of a step, made once for its two backward passes and for heads that share them."""
        heads = range(self.base.first_head, self.base.first_head + q.shape[1])
        own = heads if self._lists_each_head else self.selected.shares_of(heads)
        key = tables, own, q.shape[0]
        if (found := self.lists.get(key)) is not None:
            return found
        kv_len = self.pairs.mask.kv_len
        places = rows_of_positions(tables.kv_slots, kv_len)
        if self.selected.block_size > 1:
            return self.lists.put(key, self._block_lists(q, k, tables, places, own))
        lists = key_lists(self.selected, self.pairs, places, q.shape[0], heads)
        where = places_of(self.selected, places, q, k)
        return self.lists.put(key, StepLists(lists, where, k.shape[2], kv_len))

    @property
    def _lists_each_head(self) -> bool:
        """Whether each query head has lists of its own: single keys are listed if the mask shows them, blocks
        if a block of the mask does."""
        return self.pairs.reads_heads if self.selected.block_size == 1 else self.pairs.mask.H > 1

    def _block_lists(self, q: Tensor, k: Tensor, tables: Tables, places: Tensor, own: range) -> StepLists:
        """Make the lists of blocks of a step. own: heads of the lists, of the layer or of the selection"""
        mask, selected, size = self.pairs.mask, self.selected, self.selected.block_size
        kinds = block_kinds(self.pairs.kinds, mask.kv_block, size, mask.kv_len)
        absent = -mask.kv_len % size
        padded = torch.nn.functional.pad(places, (0, absent), value=-1)
        held = (padded >= 0).unflatten(1, (-1, size)).any(2)
        kinds = kinds[:, own.start : own.stop] if mask.H > 1 else kinds
        of_list = [(selected.share_of(i) if mask.H > 1 else i) - selected.first_share for i in own]
        indices = torch.cat([selected.indices[:, i : i + 1] for i in of_list], 1)
        lists = block_lists(indices, selected, kinds, mask.q_block, held)
        tile, rows = min(WIDEST_TILE, size & -size), k.shape[2]
        rule, queries = self._rule(tables, tile), selected.positions.int()
        is_dense = tables.dense_kv and tables.kv_first == 0 and tables.kv_rows == mask.kv_len
        is_whole = tables.kv_ends == "block" and mask.kv_block % tile == 0
        where = Places(queries, _batch_stride(queries), None, 0, q.shape[2], rows, None, None, 0)
        if is_dense:
            where = where._replace(num_keys=mask.kv_len)
            return StepLists(lists, where, rows, mask.kv_len, size, rule, not absent, rows == mask.kv_len)
        table = rows_of_tiles(padded, tile) if is_whole else padded.int()
        where = where._replace(**{"tiles" if is_whole else "rows": table}, rows_stride=_batch_stride(table))
        return StepLists(lists, where, rows, mask.kv_len, size, rule, False, is_whole)

    def _rule(self, tables: Tables, tile: int) -> PairRule:
        """Return which pairs the mask shows, for a kernel. tile: keys of a tile"""
        mask, kinds = self.pairs.mask, self.pairs.kinds
        interval, window, mod = None, None, NO_FUNCTION
        if tables.window:
            window = tuple([side if side is None else opaque(side) for side in tables.window])
        elif tables.mask == "interval":
            lo, hi = tables.lo, tables.hi
            assert lo is not None and hi is not None
            interval = opaque_fields(
                Interval(lo, hi, _batch_stride(lo), lo.stride(1) if lo.shape[1] > 1 else 0)
            )
        elif tables.mask == "mod":
            mod = self.base.mods.mask
        strides = _batch_stride(kinds), kinds.stride(1) if kinds.shape[1] > 1 else 0
        aligned = None if mask.kv_block % tile else 1
        sizes = kinds.shape[3], mask.q_block, mask.kv_block
        by_kind = None if window else kinds
        rule = PairRule(by_kind, *strides, *sizes, aligned, interval, window, mod)
        return opaque_fields(rule, "stride_b", "stride_h", "columns")

    def _descriptors(
        self, lists: StepLists, k: Tensor, v: Tensor, tile: int, widest: int
    ) -> dict[str, TensorDescriptor | None]:
        """Return the descriptors of the tiles of keys and values, where tiles of blocks can be copied so."""
        made: dict[str, TensorDescriptor | None] = {}
        for name, x in (("k", k), ("v", v)):
            arch = self.base.arch or architecture(k.device)
            copied = lists.whole and copies(arch) and copyable(k) and copyable(v) and k.element_size() <= 2
            of_x = descriptors(x, tile, pieces(x.shape[3], widest)[:2]) if copied else [None, None]
            made |= {f"{name}_desc{piece}": desc for piece, desc in enumerate(of_x)}
        return made


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


def _batch_stride(x: Tensor) -> int:
    """Return the stride of batch rows, 0 if one serves all."""
    return x.stride(0) if len(x) > 1 else 0


def heads_of_tile(heads: int, queries: int, rows: int) -> int:
    """Return how many of the query heads that share keys lie in a tile of ``rows`` rows: a divisor of
    ``heads``."""
    fitting = (n for n in range(1, heads + 1) if heads % n == 0 and n * queries <= rows)
    return max(fitting, default=1)


def places_of(selected: SelectedRows, places: Tensor, q: Tensor, k: Tensor) -> Places:
    """Return the positions of the rows of a step's tensors. places: of :func:`rows_of_positions`"""
    queries, keys = selected.positions.int(), _positions_of_rows(places, k.shape[2]).int()
    strides = _batch_stride(queries), _batch_stride(keys)
    return Places(queries, strides[0], keys, strides[1], q.shape[2], k.shape[2], None, None, 0)


def _positions_of_rows(places: Tensor, rows: int) -> Tensor:
    """Return the position of each row of a buffer, -1 for padding: int64 [Bp, rows]. places: of
    :func:`rows_of_positions`"""
    found = places.new_full((len(places), rows + 1), -1)
    index = torch.where(places < 0, rows, places)
    found.scatter_(1, index, torch.arange(places.shape[1], device=places.device).expand_as(places))
    return found[:, :rows]
