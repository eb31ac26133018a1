"""Classification of a mask_mod's blocks as absent, masked or full, without evaluating every pair.

A tile as large as the mask is bounded (`tile_bounds`), cut into quarters if that leaves it undecided, and so
on down to single blocks. In an undecided block a few pairs are evaluated, then all, unless a visible and a
hidden one is among the few. The work is proportional to the mask's edges, not its area. A mask_mod that
cannot be bounded is evaluated at every pair, a few million at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
_BLOCKS = 1 << 11  # single blocks evaluated at a time
_UNMERGED_RUNS = 1 << 21  # runs collected before adjacent ones are merged
_MASKED_BLOCKS = 512  # whose intervals are evaluated at a time, about
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
        """Return which tiles, in blocks, contain a block that the end of the queries or keys cuts: bool
        [n]."""
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


def evaluate_blocks(evaluate: PairEvaluator, blocks: Tensor, grid: Grid) -> Iterator[tuple[Tensor, Tensor]]:
    """Evaluate a mask_mod in every pair of some blocks, PAIRS at a time.

    blocks: int64 [n, 4], (b, h, row, col). Yields (chunk of blocks, visible pairs, bool [n, q_block,
    kv_block]). The mask_mod is never called past q_len or kv_len; pairs there are invisible.
    """
    q_in, kv_in = torch.arange(grid.q_block), torch.arange(grid.kv_block)
    for chunk in blocks.split(max(1, PAIRS // (grid.q_block * grid.kv_block))) if len(blocks) else ():
        b, h, row, col = chunk.unbind(1)
        q, kv = row[:, None] * grid.q_block + q_in, col[:, None] * grid.kv_block + kv_in
        visible = evaluate(b, h, q.clamp(max=grid.q_len - 1), kv.clamp(max=grid.kv_len - 1))
        q_inside, kv_inside = q < grid.q_len, kv < grid.kv_len
        if not bool(q_inside.all() & kv_inside.all()):
            visible = visible & q_inside[:, :, None] & kv_inside[:, None, :]
        yield chunk, visible


def find_runs(
    mask_mod: MaskFn, device: str | torch.device, B: int, H: int, grid: Grid
) -> tuple[Runs, tuple[bool, bool]]:
    """Classify the blocks of a mask as torch does: FULL if every pair of a whole block is visible, MASKED if
    only some are. Return also whether the mask_mod may depend on b, and on h.

    device: of the mask_mod's tensors
    """
    evaluate, bounds = torch_evaluator(mask_mod, device), Bounds.of(mask_mod, device)
    reads = (True, True) if bounds is None else bounds.reads
    b, h = (size if read else 1 for size, read in zip((B, H), reads, strict=True))
    collector = _RunCollector((b, h, grid.rows), grid.cols)

    def visit(tiles: Tensor) -> Tensor:
        some, every = torch.ones(len(tiles), dtype=torch.bool), torch.zeros(len(tiles), dtype=torch.bool)
        if bounds is not None:
            some, every = bounds(*grid.to_tokens(tiles).unbind(1))
        size = (tiles[:, 3] - tiles[:, 2]) * (tiles[:, 5] - tiles[:, 4])
        full = every & ~grid.has_ragged_block(tiles)
        undecided = some & ~full
        collector.add(tiles[full], torch.tensor(int(Kind.FULL)).expand(int(full.sum())))
        for blocks in tiles[undecided & (size == 1)].split(_BLOCKS):
            collector.add(blocks, _kinds(evaluate, blocks, grid))
        return undecided & (size > 1)

    if b * h * grid.rows * grid.cols:
        zero = torch.zeros(1, dtype=torch.int64)
        evaluate(zero, zero, zero[:, None], zero[:, None])  # raises the errors of the mask_mod at once
        batch, head = torch.arange(b).repeat_interleave(h), torch.arange(h).repeat(b)
        edges = torch.tensor([0, grid.rows, 0, grid.cols]).expand(b * h, 4)
        _descend(torch.cat([batch[:, None], head[:, None], edges], 1), visit)
    return collector.runs().expand(B, H), reads


def find_intervals(
    evaluate: PairEvaluator, reads: tuple[bool, bool], runs: Runs, grid: Grid
) -> tuple[Tensor, Tensor] | None:
    """Return each row's interval of visible keys in its masked blocks: int32 (lo, hi), each [B, H, q_len].

    None unless every row sees exactly the keys of one interval there. reads: whether the mask_mod may depend
    on b, on h
    """
    B, H, rows, _ = runs.shape
    b, h = (size if read else 1 for size, read in zip((B, H), reads, strict=True))
    shared = runs.select(slice(b), slice(h))
    if shared.expand(B, H) == runs:
        runs = shared
    parts = [torch.zeros(2, *runs.shape[:2], 0, dtype=torch.int32)]
    step = max(1, _MASKED_BLOCKS // max(1, int(runs.counts()[0].sum((0, 1)).max()) if rows else 1))
    for first in range(0, rows, step):  # rows of blocks, so that one row can end the search
        part = _intervals_of_rows(
            evaluate, runs.take(torch.arange(first, min(rows, first + step))[None]), first, grid
        )
        if part is None:
            return None
        parts.append(part)
    lo, hi = torch.cat(parts, 3)[..., : grid.q_len].expand(-1, B, H, -1)
    return lo, hi


def _intervals_of_rows(evaluate: PairEvaluator, runs: Runs, first: int, grid: Grid) -> Tensor | None:
    """Return lo and hi of :func:`find_intervals` of the rows of blocks from ``first`` on, which are all rows
    of ``runs``: int32 [2, B, H, tokens]."""
    b, h, rows, _ = runs.shape
    blocks = masked_blocks(runs)
    line = ((blocks[:, 0] * h + blocks[:, 1]) * rows + blocks[:, 2])[:, None].expand(-1, grid.q_block)
    left = (blocks[:, 3:] * grid.kv_block).int()
    lo = torch.full((b * h * rows, grid.q_block), grid.kv_len, dtype=torch.int32)
    hi, missing = torch.zeros_like(lo), torch.zeros_like(lo)
    # torch's maximum of int16 is eight times as slow as that of int32
    number = torch.arange(1, grid.kv_block + 1, dtype=torch.uint8 if grid.kv_block < 256 else torch.int32)
    done = 0
    for chunk, visible in evaluate_blocks(evaluate, blocks + torch.tensor([0, 0, first, 0]), grid):
        own = slice(done, done := done + len(chunk))
        end = (visible * number).amax(2).int()
        start = torch.where(
            end > 0, left[own] + grid.kv_block - (visible * number.flip(0)).amax(2), grid.kv_len
        )
        lo.scatter_reduce_(0, line[own], start, "amin")
        hi.scatter_reduce_(0, line[own], torch.where(end > 0, left[own] + end, 0), "amax")
        missing.scatter_add_(0, line[own], -visible.sum(2, dtype=torch.int32))
    overlap = hi.gather(0, line).minimum(left + grid.kv_block) - lo.gather(0, line).maximum(left)
    missing.scatter_add_(0, line, overlap.clamp(min=0))
    bounds = torch.stack([lo.minimum(hi), hi])  # an empty row is (0, 0)
    return None if bool(missing.any()) else bounds.view(2, b, h, rows * grid.q_block)


def masked_blocks(runs: Runs) -> Tensor:
    """List every MASKED block as (b, h, row, col): int64 [n, 4]."""
    _, h, r, _ = runs.shape
    *flat, kind = runs._flat()
    row, start, end = (t[kind == Kind.MASKED] for t in flat)
    length = end - start
    row = row.repeat_interleave(length)
    return torch.stack([row // (h * r), row // r % h, row % r, ramps(start, length)], 1)


class _RunCollector:
    """Collects classified tiles in any order and merges them into Runs."""

    def __init__(self, shape: tuple[int, int, int], cols: int) -> None:
        self.shape, self.cols = shape, cols
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
            parts.append(torch.cat([tiles[:, :2], sides], 1))
    quarters = torch.stack(parts, 1).flatten(0, 1)
    return quarters[(quarters[:, 2] < quarters[:, 3]) & (quarters[:, 4] < quarters[:, 5])]


def _half(size: Tensor) -> Tensor:
    """Return the largest power of two below each size; 1 for size 1."""
    return (1 << (torch.frexp((size - 1).double()).exponent.long() - 1).clamp(min=0)).clamp(min=1)


def _kinds(evaluate: PairEvaluator, blocks: Tensor, grid: Grid) -> Tensor:
    """Classify single blocks, given as tiles in blocks: int64 [n] of Kind or ABSENT."""
    if not len(blocks):
        return blocks[:, 0]
    tiles, fraction = grid.to_tokens(blocks), torch.arange(_PROBES) / max(1, _PROBES - 1)
    q, kv = (
        (lo[:, None] + ((hi - lo - 1)[:, None] * fraction).long())
        for lo, hi in (tiles[:, 2:4].T, tiles[:, 4:6].T)
    )
    visible = evaluate(tiles[:, 0], tiles[:, 1], q, kv).flatten(1)
    has_visible = visible.any(1)
    has_hidden = ~visible.all(1) | grid.has_ragged_block(blocks)  # pairs past the end are hidden
    unsure = (~(has_visible & has_hidden)).nonzero()[:, 0]
    done = 0
    for chunk, visible in evaluate_blocks(evaluate, blocks[unsure][:, [0, 1, 2, 4]], grid):
        own = unsure[done : (done := done + len(chunk))]
        has_visible[own] |= visible.flatten(1).any(1)
        has_hidden[own] |= ~visible.flatten(1).all(1)
    return torch.where(has_visible, torch.where(has_hidden, int(Kind.MASKED), int(Kind.FULL)), ABSENT)
