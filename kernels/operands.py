"""Operands of one attention step: user functions, tensors, tables and tilings as kernel arguments."""

from typing import Any, NamedTuple

import triton
from torch import Tensor

from tritoncp.core.opaque_integers import opaque
from tritoncp.kernels.scores import Closure
from tritoncp.kernels.tile_rules import Config
from tritoncp.kernels.tile_runs import Interval, Rows, SideLayout, Slots, StepTables
from tritoncp.kernels.tiles import Channels, copyable, descriptors

NO_FUNCTION = Closure(None)


class Mods(NamedTuple):
    """User functions as the kernels take them: jit functions with captured values."""

    mask: Closure = NO_FUNCTION
    score: Closure = NO_FUNCTION
    score_grad: Closure = NO_FUNCTION  # also adds gradients of captures to its buffers
    score_back: Closure = NO_FUNCTION  # the same without the gradients of captures
    score_loads: int = 2  # tile dimensions (0 to 2) on which loads from captures depend; 2 if unknown


class Tiling(NamedTuple):
    """Assignment of query rows and keys to the programs of a launch.

    block:  max number of rows of a slot
    pack:   number of query heads that share a KV head and a tile
    splits: number of programs that share the keys of a tile
    """

    config: Config
    block: int
    pack: int = 1
    splits: int = 1

    def count_tiles(self, tables: Any) -> int:
        """Count the tiles of query rows of one head, or of ``pack`` heads."""
        return count_tiles(tables, "q", self.config.BLOCK_M // self.pack, self.block)

    def count_heads(self, q: Tensor, k: Tensor) -> int:
        """Count the programs that the query heads of a tile need."""
        return k.shape[1] * triton.cdiv(q.shape[1] // k.shape[1], self.pack)

    def args(self, tables: Any) -> dict[str, Any]:
        """Kernel arguments that follow from the tiling."""
        config, rows, window = self.config, self.config.BLOCK_M // self.pack, bool(tables.window)
        return {
            "BLOCK_M": config.BLOCK_M,
            "Q_LAYOUT": side_layout(self.block, rows, window, tables.dense_q),
            "KV_LAYOUT": side_layout(tables.kv_block, config.BLOCK_N, window, tables.dense_kv),
            "FLIP": config.FLIP,
            "PACK": self.pack,
            "splits": self.splits if self.splits > 1 else None,
        }


class StreamedTensors(NamedTuple):
    """The tensors whose tiles a kernel loops over.

    ends: where their slots end: "block", "buffer" or "anywhere", as in the tables' ``q_ends`` and ``kv_ends``
    """

    tensors: dict[str, Tensor]
    block: int
    rows: int
    ends: str

    def copyable(self) -> bool:
        """Whether descriptors may copy the tiles. A descriptor cannot mask rows, so a slot that ends inside a
        tile has to end with the tensor."""
        same_end = all(x.shape[2] == self.rows for x in self.tensors.values())
        ends = self.ends == "block" or (self.ends == "buffer" and same_end)
        return ends and all(copyable(x) for x in self.tensors.values())

    def ragged(self, tile: int, window: bool) -> bool:
        """Whether tiles of masked blocks may hold fewer tokens than rows."""
        return bool(self.rows % tile if window else self.ends != "block" or self.block % tile)

    def count_bytes(self) -> int:
        """Count the bytes of one batch row."""
        return sum(x[:1].numel() * x.element_size() for x in self.tensors.values())

    def descriptors(self, tile: int, *dims: Channels) -> list[tuple[str, str, dict[str, Any]]]:
        """The descriptors of all tensors, in the form of Recipe.descriptors. dims: the channels of each"""
        both = zip(self.tensors.items(), dims, strict=True)
        return [entry for (name, x), dim in both for entry in descriptor_entries(name, x, tile, dim)]


def streamed_tensors(tables: Any, tensors: dict[str, Tensor], by_keys: bool) -> StreamedTensors:
    """Select the tensors whose tiles a kernel loops over: q and dout if its programs are tiles of keys,
    else k and v."""
    block, rows, ends = (
        (tables.q_block, tables.q_rows, tables.q_ends)
        if by_keys
        else (tables.kv_block, tables.kv_rows, tables.kv_ends)
    )
    if block % 16:  # it is not a multiple of a tile
        ends = "anywhere"
    elif tables.window:  # tiles are counted from the first row, slots are not read
        ends = "buffer" if rows % block else "block"
    names = ("q", "dout") if by_keys else ("k", "v")
    return StreamedTensors({name: tensors[name] for name in names}, block, rows, ends)


def descriptor_entries(
    name: str, x: Tensor, tile: int, dim: Channels
) -> list[tuple[str, str, dict[str, Any]]]:
    """The descriptors of tiles of x [B, H, S, D], in the form of Recipe.descriptors."""
    numbered = enumerate(descriptors(x, tile, (dim.first, dim.second)))
    return [(f"{name}_desc{piece}", name, vars(desc) | {"base": None}) for piece, desc in numbered if desc]


def count_tiles(tables: Any, side: str, tile: int, block: int | None = None) -> int:
    """Count the tiles of ``tile`` rows in the slots of one side, which are up to ``block`` rows long. If a
    table orders several slots, all have the same number of tiles, so that a program finds its slot by
    division."""
    block = block or (tables.q_block if side == "q" else tables.kv_block)
    slots = tables.q_slots if side == "q" else tables.kv_slots
    dense = tables.dense_q if side == "q" else tables.dense_kv
    if tables.window or (dense and block % tile == 0 and slots.shape[1] == 1):
        return triton.cdiv(tables.q_rows if side == "q" else tables.kv_rows, tile)
    return slots.shape[1] * triton.cdiv(block, tile)


def side_layout(block: int, tile: int, window: bool, dense: bool) -> SideLayout:
    """Cut slots of at most ``block`` rows into tiles. dense: all slots are adjacent, in order."""
    return SideLayout(block, tile, triton.cdiv(block, tile), window or (dense and block % tile == 0))


def step_tables(tables: Any, mask_mod: Closure, by_keys: bool) -> StepTables:
    """Make the kernel argument of a step's tables. by_keys: each program computes a tile of keys, sees the
    window from the other side, and reads runs of Q slots."""
    interval, ptr = Interval(None, None, 0, 0), tables.col_ptr if by_keys else tables.row_ptr
    if tables.window:
        left, right = reversed(tables.window) if by_keys else tables.window
        rows = Rows(None, None, None, None, left, right)
    else:
        runs = tables.col_runs if by_keys else tables.row_runs
        rows = Rows(ptr, _table_stride(ptr, 0), _table_stride(ptr, 1), runs, None, None)
        if tables.mask == "interval":
            interval = Interval(tables.lo, tables.hi, _stride(tables.lo, 0), _stride(tables.lo, 1))
    return StepTables(
        Slots(tables.q_slots, _table_stride(tables.q_slots, 0), tables.q_first, tables.q_rows),
        Slots(tables.kv_slots, _table_stride(tables.kv_slots, 0), tables.kv_first, tables.kv_rows),
        rows,
        interval,
        mask_mod if tables.mask == "mod" else NO_FUNCTION,
    )


def _stride(x: Tensor, dim: int) -> int:
    """The stride of a dimension, 0 if its only entry serves all indices."""
    return x.stride(dim) if x.shape[dim] > 1 else 0


def _table_stride(x: Tensor, dim: int) -> int:
    """The :func:`_stride` of a table, whose size depends on the number of slots and runs; opaque."""
    return opaque(_stride(x, dim))
