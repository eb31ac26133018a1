"""Program order: the tile and the heads of each program of a launch, the heaviest tiles first.

A GPU starts programs in the order of their ids, as many at a time as fit. If heads followed one another, the
heaviest tiles of the last head would start late, and nearly all multiprocessors would wait for them. So heads
vary fastest within a *section*, which has as many KV heads as have room for their streamed tensors in the L2
cache. Within a section, tiles with more work start first (the longest-processing-time rule: Graham, "Bounds
on multiprocessing timing anomalies", 1969). A closed-form window needs no table: later queries see more keys,
and earlier keys are seen by more queries.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tritoncp.core.opaque_integers import opaque
from tritoncp.kernels.opaque_integers import integer

# Bytes of streamed tensors that stay in the L2 cache beside other data: about two thirds of it. For gfx942 it
# is the 256 MiB cache behind the L2 caches of the dies.
L2_BYTES = {"sm_80": 26 << 20, "sm_90": 32 << 20, "sm_100": 84 << 20, "gfx942": 170 << 20}
DEFAULT_L2_BYTES = 32 << 20
# Programs of one head that start together read the same tiles at about the same time: of 132
# multiprocessors, 16 share each of 8 KV heads. Heads beyond the L2 cache then take about 6 % of the memory's
# bandwidth: a forward tile of 128 rows does 128 FLOP for a byte of K and V, and 600 TFLOP/s / 128 / 16 is 0.3
# of 4.8 TB/s.
SHARED_HEADS = 8


MAX_TILES = MAX_HEADS = 65_535  # max size of the grid's second dimension
MAX_BATCH = 65_535  # max size of its third dimension


class ProgramOrder(NamedTuple):
    """The order of a launch's programs.

    slots:    int32 [B or 1, slots], the slots of the programs' side by descending work; None: by position
    stride_b: of slots, 0 if all batch rows share one order
    heads:    number of programs of a section that differ only in their heads, in a grid of (tiles * heads,
              sections, B); None: the grid is (heads, tiles, B), which needs no division
    """

    slots: Any
    stride_b: Any
    heads: Any


class Program(NamedTuple):
    """The indices of a program: tile, head (as its launch counts them) and part of the tile's keys."""

    i_tile: Any
    i_head: Any
    i_split: Any


@triton.jit
def locate_program(order, i_b, splits, TILES: tl.constexpr, LAST_FIRST: tl.constexpr):
    """The tile and head of this program.

    splits: programs that share the keys of a tile, or None
    TILES: tiles of a slot
    LAST_FIRST: without a table, begin with the last tile
    """
    if order.heads is None:
        i_head = tl.program_id(0)
        i_tile = tl.program_id(1)
        n_tiles = tl.num_programs(1)
    else:
        heads = integer(order.heads)
        i_head = tl.program_id(1) * heads + tl.program_id(0) % heads
        i_tile = tl.program_id(0) // heads
        n_tiles = tl.num_programs(0) // heads
    i_split = 0
    if splits is not None:
        i_split = i_tile % splits
        i_tile = i_tile // splits
        n_tiles = n_tiles // splits
    if order.slots is not None:
        i_slot = tl.load(order.slots + i_b * integer(order.stride_b) + i_tile // TILES)
        i_tile = i_slot * TILES + i_tile % TILES
    elif LAST_FIRST:
        i_tile = n_tiles - 1 - i_tile
    return Program(i_tile, i_head, i_split)


def section_heads(kv_heads: int, head_bytes: int, arch: str) -> int:
    """Return the number of KV heads of a section: the max divisor of ``kv_heads`` that is at most
    SHARED_HEADS, or whose streamed tensors, ``head_bytes`` for each KV head, fit the L2 cache.

    >>> [section_heads(heads, 16384 * (128 + 128) * 2, "sm_90") for heads in (8, 32, 7)]
    [8, 8, 7]
    """
    cache = L2_BYTES.get(arch, DEFAULT_L2_BYTES)
    divisors = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0]
    return max(n for n in divisors if n <= SHARED_HEADS or n * head_bytes <= cache)


def check_grid(programs: int, heads: int, batch: int) -> tuple[int, int, int]:
    """Return a grid with heads or tiles in its second dimension and batch rows in its third. Raises
    ValueError for more than a GPU can launch: only the first dimension takes more than 65,535 programs."""
    if batch > MAX_BATCH:
        raise ValueError(f"query has {batch} batch rows, and a GPU launches {MAX_BATCH}; call with fewer")
    if heads > MAX_HEADS:
        raise ValueError(f"query has {heads} heads, and a GPU launches {MAX_HEADS}; call with fewer")
    return programs, heads, batch


def arrange_programs(
    slots: Tensor | None, tiles: int, heads: int, section: int, batch: int, *, has_sections: bool = False
) -> tuple[ProgramOrder, tuple[int, int, int]]:
    """Make the kernel argument and the grid of a launch.

    slots: a step's table, or None; tiles, heads: of each batch row; section: programs of a section that
    differ only in their heads, a divisor of ``heads``; has_sections: whether other lengths have several
    sections, so that the same kernel serves this one. Raises the ValueError of :func:`check_grid`.
    """
    stride = opaque(0 if slots is None or slots.shape[0] == 1 else slots.stride(0))
    if section == heads and tiles <= MAX_TILES and not has_sections:
        return ProgramOrder(slots, stride, None), check_grid(heads, tiles, batch)
    return ProgramOrder(slots, stride, opaque(section)), check_grid(tiles * section, heads // section, batch)
