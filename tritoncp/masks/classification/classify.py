"""Classification of a mask_mod's blocks as absent, masked or full, without evaluating every pair.

A tile as large as the mask is bounded (`tile_bounds`), cut into quarters if that leaves it undecided, and so
on down to single blocks. In an undecided block a few pairs are evaluated, then ever smaller tiles bounded,
until a visible and a hidden pair is found, or every pair is decided. The work is proportional to the mask's
edges, not its area. A mask_mod that cannot be bounded is evaluated at every pair, a few million at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tritoncp.core.tracing import vmapped
from tritoncp.core.upload import upload
from tritoncp.masks.block_runs import ABSENT, Kind, Runs, ramps
from tritoncp.masks.classification.tile_bounds import Bounds
from tritoncp.masks.mask_mod import MaskFn

PairEvaluator = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# a mask_mod's values: (b [n], h [n], q [n, i], kv [n, j]), int64, -> bool [n, i, j], all on the CPU

PAIRS = 1 << 22  # pairs evaluated at a time: an int64 intermediate of a mask_mod is 32 MiB
_TILES = 1 << 16  # tiles bounded at a time
_BLOCKS = 1 << 11  # single blocks subdivided at a time
_FIRST_BLOCKS = 1 << 6  # blocks subdivided first in find_intervals, which one row can end
_UNMERGED_RUNS = 1 << 21  # runs collected before adjacent ones are merged
_SMALL = 16  # a tile of at most so many rows and columns is evaluated pair by pair
_SAMPLE = 64  # tiles that are cut to measure how many of their quarters the bounds decide
_MAX_UNDECIDED = 0.9  # fraction of undecided quarters above which tiles are no longer cut
_PROBES = 4  # rows and columns of a block evaluated first


class Grid(NamedTuple):
    """The lengths of a mask and the sizes of its blocks, in tokens."""

    q_len: int
    kv_len: int
    q_block: int
    kv_block: int

    @property
    def rows(self) -> int:
        """Rows of blocks."""
        return -(-self.q_len // self.q_block)

    @property
    def cols(self) -> int:
        """Columns of blocks."""
        return -(-self.kv_len // self.kv_block)

    def has_ragged_block(self, tiles: Tensor) -> Tensor:
        """Which tiles, in blocks, contain a block that the end of the queries or keys cuts: bool [n]."""
        last_row = (tiles[:, 3] == self.rows) & bool(self.q_len % self.q_block)
        return last_row | ((tiles[:, 5] == self.cols) & bool(self.kv_len % self.kv_block))

    def to_tokens(self, tiles: Tensor) -> Tensor:
        """Convert tiles in blocks to tiles in tokens."""
        scaled = tiles.clone()
        scaled[:, 2:4] = (tiles[:, 2:4] * self.q_block).clamp(max=self.q_len)
        scaled[:, 4:6] = (tiles[:, 4:6] * self.kv_block).clamp(max=self.kv_len)
        return scaled


def torch_evaluator(mask_mod: MaskFn, device: str | torch.device) -> PairEvaluator:
    """Return a PairEvaluator of a mask_mod: in torch on ``device``, under vmap as torch's builder does."""
    vmap = vmapped(mask_mod, (None, None, None, 0), (None, None, 0, None), (0, 0, 0, 0))

    def evaluate(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        with torch.no_grad():
            return vmap(*upload((b, h, q, kv), torch.device(device))).cpu()

    return evaluate


@dataclass(frozen=True)
class TileEvaluator:
    """A mask_mod with two ways to evaluate it: bounds over a tile, and values pair by pair.

    Tiles are int64 [n, 6 or more]: b, h, first and end row, first and end column, then columns of the caller.
    """

    evaluate: PairEvaluator
    bounds: Bounds | None

    @classmethod
    def of_mask_mod(
        cls, mask_mod: MaskFn, device: str | torch.device = "cpu", evaluate: PairEvaluator | None = None
    ) -> TileEvaluator:
        """Trace a mask_mod. device: of its tensors. evaluate: None for torch on ``device``."""
        return cls(evaluate or torch_evaluator(mask_mod, device), Bounds.of(mask_mod, device))

    def check(self) -> None:
        """Evaluate the first pair of a mask, which raises the errors of its mask_mod at once."""
        zero = torch.zeros(1, dtype=torch.int64)
        self.evaluate(zero, zero, zero[:, None], zero[:, None])

    @property
    def reads(self) -> tuple[bool, bool]:
        """Whether the mask_mod's result can depend on b, on h."""
        return (True, True) if self.bounds is None else self.bounds.reads

    def bound_tiles(self, tiles: Tensor) -> tuple[Tensor, Tensor]:
        """Return (some, every), bool [n], of tiles in tokens: a pair may be visible, every pair surely is."""
        if self.bounds is None:
            undecided = torch.ones(len(tiles), dtype=torch.bool)
            return undecided, ~undecided
        return self.bounds(*tiles[:, :6].unbind(1))

    def stop_cutting(self, tiles: Tensor, undecided: Tensor) -> Tensor:
        """Which undecided tiles to evaluate pair by pair instead of cutting them: bool [n].

        These are small tiles, and all of them if cutting a sample of them decides next to nothing.
        """
        if self.bounds is None or not bool(undecided.any()):
            return undecided
        some, every = self.bound_tiles(_quarters(tiles[undecided][:: -(-int(undecided.sum()) // _SAMPLE)]))
        if int((some & ~every).sum()) > _MAX_UNDECIDED * len(some):
            return undecided
        return undecided & ((tiles[:, 3] - tiles[:, 2]).maximum(tiles[:, 5] - tiles[:, 4]) <= _SMALL)

    def evaluate_tiles(self, tiles: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (chunk of the tiles, its values, bool [n, i, j]), at most PAIRS pairs at a time.

        A tile smaller than the largest of its chunk repeats its last row and column.
        """
        if not len(tiles):
            return
        height, width = ((tiles[:, end] - tiles[:, end - 1]).max() for end in (3, 5))
        for chunk in tiles.split(max(1, PAIRS // int(height * width))):
            q, kv = (
                torch.minimum(lo[:, None] + torch.arange(int((hi - lo).max())), hi[:, None] - 1)
                for lo, hi in (chunk[:, 2:4].T, chunk[:, 4:6].T)
            )
            yield chunk, self.evaluate_pairs(chunk, q, kv)

    def evaluate_pairs(self, tiles: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """Evaluate q [n, i] x kv [n, j] with each tile's batch row and head: bool [n, i, j]."""
        step = max(1, PAIRS // (q.shape[1] * kv.shape[1]))
        arguments = (tiles[:, 0], tiles[:, 1], q, kv)
        chunks = zip(*(argument.split(step) for argument in arguments), strict=True)
        return torch.cat([self.evaluate(*chunk) for chunk in chunks])


def find_runs(
    evaluator: TileEvaluator,
    B: int,
    H: int,
    grid: Grid,
    progress: Callable[[float], object] = lambda fraction: None,
) -> Runs:
    """Classify the blocks of a mask as torch does: FULL if every pair of a whole block is visible, MASKED if
    some are. progress: called with the fraction of the mask that is classified."""
    reads = evaluator.reads
    b, h = (size if read else 1 for size, read in zip((B, H), reads, strict=True))
    collector = _RunCollector((b, h, grid.rows), grid.cols)
    total = b * h * grid.rows * grid.cols

    def visit(tiles: Tensor) -> Tensor:
        some, every = evaluator.bound_tiles(grid.to_tokens(tiles))
        size = (tiles[:, 3] - tiles[:, 2]) * (tiles[:, 5] - tiles[:, 4])
        full = every & ~grid.has_ragged_block(tiles)
        undecided = some & ~full
        collector.add(tiles[full], torch.tensor(int(Kind.FULL)).expand(int(full.sum())))
        for blocks in tiles[undecided & (size == 1)].split(_BLOCKS):
            collector.add(blocks, _kinds(evaluator, blocks, grid))
        undecided &= size > 1
        collector.area += int(size[~undecided].sum())
        progress(collector.area / total)
        return undecided

    if total:
        evaluator.check()
        batch, head = torch.arange(b).repeat_interleave(h), torch.arange(h).repeat(b)
        edges = torch.tensor([0, grid.rows, 0, grid.cols]).expand(b * h, 4)
        _descend(torch.cat([batch[:, None], head[:, None], edges], 1), visit)
    return collector.runs().expand(B, H)


def find_intervals(evaluator: TileEvaluator, runs: Runs, grid: Grid) -> tuple[Tensor, Tensor] | None:
    """Return each row's interval of visible keys in its masked blocks: int32 (lo, hi), each [B, H, q_len].

    None unless every row sees exactly the keys of one interval there.
    """
    B, H, _, _ = runs.shape
    b, h = (size if read else 1 for size, read in zip((B, H), evaluator.reads, strict=True))
    shared = runs.select(slice(b), slice(h))
    if shared.expand(B, H) == runs:
        runs = shared
    extents, added, next_check = _Extents(runs, grid), 0, _FIRST_BLOCKS
    parts = [torch.zeros(0, 4, dtype=torch.int64)]
    if runs.has_kind(Kind.MASKED):
        evaluator.check()
    for blocks in _masked_bands(runs):
        extents.add(evaluator, blocks)
        parts.append(blocks)
        added += len(blocks)
        if added >= next_check:
            if not extents.are_intervals(torch.cat(parts)):
                return None
            next_check = 2 * added
    if not extents.are_intervals(torch.cat(parts)):
        return None
    b, h, _, _ = runs.shape
    bounds = torch.where(extents.hi > 0, extents.lo, 0), extents.hi
    lo, hi = (t.view(b, h, -1)[..., : grid.q_len].contiguous().expand(B, H, -1) for t in bounds)
    return lo, hi


def masked_blocks(runs: Runs) -> Tensor:
    """List every MASKED block as (b, h, row, col): int64 [n, 4]."""
    _, h, r, _ = runs.shape
    *flat, kind = runs._flat()
    row, start, end = (t[kind == Kind.MASKED] for t in flat)
    length = end - start
    row = row.repeat_interleave(length)
    return torch.stack([row // (h * r), row // r % h, row % r, ramps(start, length)], 1)


def _masked_bands(runs: Runs) -> Iterator[Tensor]:
    """Yield the MASKED blocks as :func:`masked_blocks` lists them, of a few rows at a time: _FIRST_BLOCKS,
    then _BLOCKS of them."""
    count = runs.counts()[0].sum((0, 1))
    band = (count.cumsum(0) - count + _BLOCKS - _FIRST_BLOCKS) // _BLOCKS
    cuts = band.diff().nonzero()[:, 0] + 1
    size = _FIRST_BLOCKS
    for begin, stop in itertools.pairwise([0, *cuts.tolist(), len(count)]):
        blocks = masked_blocks(runs.take(torch.arange(begin, stop)[None]))
        yield from (blocks + torch.tensor([0, 0, begin, 0])).split(size)
        size = _BLOCKS


class _RunCollector:
    """Collects classified tiles in any order and merges them into Runs.

    area: number of blocks classified, which the caller counts.
    """

    def __init__(self, shape: tuple[int, int, int], cols: int) -> None:
        self.shape, self.cols, self.area = shape, cols, 0
        self.unmerged: list[tuple[Tensor, ...]] = []  # (row, start, end, kind)
        self.count = 0

    def add(self, tiles: Tensor, kind: Tensor) -> None:
        """Add n tiles in blocks. kind: int64 [n] of Kind or ABSENT."""
        tiles, kind = tiles[kind != ABSENT], kind[kind != ABSENT]
        _, heads, rows = self.shape
        height = tiles[:, 3] - tiles[:, 2]
        row = ramps((tiles[:, 0] * heads + tiles[:, 1]) * rows + tiles[:, 2], height)
        self.unmerged.append((row, *(t.repeat_interleave(height) for t in (tiles[:, 4], tiles[:, 5], kind))))
        self.count += len(row)
        if self.count > _UNMERGED_RUNS:
            self.unmerged = [self.runs()._flat()]
            self.count = len(self.unmerged[0][0])

    def runs(self) -> Runs:
        """Merge the collected tiles."""
        empty = (torch.zeros(0, dtype=torch.int64),) * 4
        columns = (torch.cat(parts) for parts in zip(empty, *self.unmerged, strict=True))
        return Runs._pack(self.shape, self.cols, *columns)


def _descend(tiles: Tensor, visit: Callable[[Tensor], Tensor]) -> None:
    """Visit tiles, then the quarters of tiles for which ``visit`` returned True; at most _TILES at a time."""
    stack = [tiles]
    while stack:
        tiles = stack.pop()
        if len(tiles) > _TILES:
            stack += tiles.split(_TILES)
        elif len(tiles):
            stack.append(_quarters(tiles[visit(tiles)]))


def _quarters(tiles: Tensor) -> Tensor:
    """Cut each tile into up to four at a power of two from its start, so that sides are powers of two."""
    q0, q1, k0, k1 = tiles[:, 2:6].unbind(1)
    q, k = ((lo, lo + _half(hi - lo), hi) for lo, hi in ((q0, q1), (k0, k1)))
    parts = []
    for top, bottom in ((q[0], q[1]), (q[1], q[2])):
        for left, right in ((k[0], k[1]), (k[1], k[2])):
            sides = torch.stack([top, bottom, left, right], 1)
            parts.append(torch.cat([tiles[:, :2], sides, tiles[:, 6:]], 1))
    quarters = torch.stack(parts, 1).flatten(0, 1)
    return quarters[(quarters[:, 2] < quarters[:, 3]) & (quarters[:, 4] < quarters[:, 5])]


def _half(size: Tensor) -> Tensor:
    """Return the largest power of two below each size; 1 for size 1."""
    return (1 << (torch.frexp((size - 1).double()).exponent.long() - 1).clamp(min=0)).clamp(min=1)


def _kinds(evaluator: TileEvaluator, blocks: Tensor, grid: Grid) -> Tensor:
    """Classify single blocks, given as tiles in blocks: int64 [n] of Kind or ABSENT."""
    has_visible = torch.zeros(len(blocks), dtype=torch.bool)
    has_hidden = grid.has_ragged_block(blocks)  # pairs past the end are hidden
    tiles = grid.to_tokens(blocks)

    def record(index: Tensor, visible: Tensor) -> None:
        has_visible[index[visible.flatten(1).any(1)]] = True
        has_hidden[index[~visible.flatten(1).all(1)]] = True

    def visit(tiles: Tensor) -> Tensor:
        index = tiles[:, 6]
        some, every = evaluator.bound_tiles(tiles)
        has_visible[index[every]] = True
        has_hidden[index[~some]] = True
        undecided = some & ~every & ~(has_visible & has_hidden)[index]
        leaves = evaluator.stop_cutting(tiles, undecided)
        for chunk, visible in evaluator.evaluate_tiles(tiles[leaves]):
            record(chunk[:, 6], visible)
        return undecided & ~leaves

    if len(blocks):
        fraction = torch.arange(_PROBES) / max(1, _PROBES - 1)
        q, kv = (
            (lo[:, None] + ((hi - lo - 1)[:, None] * fraction).long())
            for lo, hi in (tiles[:, 2:4].T, tiles[:, 4:6].T)
        )
        record(torch.arange(len(blocks)), evaluator.evaluate_pairs(tiles, q, kv))
        numbered = torch.cat([tiles, torch.arange(len(tiles))[:, None]], 1)
        _descend(numbered[~(has_visible & has_hidden)], visit)
    return torch.where(has_visible, torch.where(has_hidden, int(Kind.MASKED), int(Kind.FULL)), ABSENT)


class _Extents:
    """First, last and number of visible keys of each query row in masked blocks, accumulated block by block.

    lo, hi, count: int32 [B * H * rows of blocks * q_block]
    """

    def __init__(self, runs: Runs, grid: Grid) -> None:
        self.heads, self.grid = runs.shape[1], grid
        b, h, rows, _ = runs.shape
        self.lo = torch.full((b * h * rows * grid.q_block,), grid.kv_len, dtype=torch.int32)
        self.hi, self.count = torch.zeros_like(self.lo), torch.zeros_like(self.lo)

    def _first_row(self, blocks: Tensor) -> Tensor:
        """Return the place of query 0 of the batch row and head of each block: int64 [n]."""
        return (blocks[:, 0] * self.heads + blocks[:, 1]) * self.grid.rows * self.grid.q_block

    def add(self, evaluator: TileEvaluator, blocks: Tensor) -> None:
        """Add the visible keys of blocks, int64 [n, 4]."""

        def record(row: Tensor, start: Tensor, end: Tensor, num_visible: Tensor) -> None:
            self.lo.scatter_reduce_(0, row, start.int(), "amin")
            self.hi.scatter_reduce_(0, row, end.int(), "amax")
            self.count.index_add_(0, row, num_visible.int())

        def visit(tiles: Tensor) -> Tensor:
            some, every = evaluator.bound_tiles(tiles)
            undecided = some & ~every
            full = tiles[every]
            size = full[:, 3] - full[:, 2]
            start, end = (t.repeat_interleave(size) for t in (full[:, 4], full[:, 5]))
            record(ramps(full[:, 6] + full[:, 2], size), start, end, end - start)
            leaves = evaluator.stop_cutting(tiles, undecided)
            for chunk, visible in evaluator.evaluate_tiles(tiles[leaves]):
                record(*_visible_extents(chunk, visible))
            return undecided & ~leaves

        tiles = torch.stack([*blocks[:, :3].unbind(1), blocks[:, 2] + 1, blocks[:, 3], blocks[:, 3] + 1], 1)
        _descend(torch.cat([self.grid.to_tokens(tiles), self._first_row(blocks)[:, None]], 1), visit)

    def are_intervals(self, blocks: Tensor) -> bool:
        """Whether every row sees all keys between its first and its last one in ``blocks``, which are all
        that were added."""
        height, width = self.grid.q_block, self.grid.kv_block
        missing = -self.count
        for chunk in blocks.split(max(1, PAIRS // height)):
            row = (self._first_row(chunk) + chunk[:, 2] * height)[:, None] + torch.arange(height)
            start = chunk[:, 3:] * width
            overlap = self.hi[row].minimum(start + width) - self.lo[row].maximum(start)
            missing.index_add_(0, row.flatten(), overlap.clamp(min=0).flatten().int())
        return not bool(missing.any())


def _visible_extents(tiles: Tensor, visible: Tensor) -> tuple[Tensor, ...]:
    """Return (row, first visible key, end, number of visible keys) of the rows with visible keys, int64 [m].

    tiles: [n, 7], in tokens; the last column is added to the row. visible: bool [n, i, j] of evaluate_tiles.
    """
    i, j = (torch.arange(size) for size in visible.shape[1:])
    visible = visible & (tiles[:, 2, None] + i < tiles[:, 3, None])[:, :, None]
    visible &= (tiles[:, 4, None] + j < tiles[:, 5, None])[:, None, :]
    tile, row = visible.any(2).nonzero(as_tuple=True)
    visible = visible[tile, row]
    left = tiles[tile, 4]
    rank = (j + 1).int()
    start = left + visible.shape[1] - (visible * rank.flip(0)).amax(1)
    return tiles[tile, 6] + tiles[tile, 2] + row, start, left + (visible * rank).amax(1), visible.sum(1)
