"""Classification of a mask_mod's blocks as absent, masked or full, without evaluating every pair.

If each row sees a few intervals of keys, the intervals are solved for (`solve`, `row_intervals`). For any
other mask, a tile as large as the mask is bounded (`tile_states`), cut if it stays undecided, and so on down
to single blocks. In an undecided block a few pairs are evaluated first, and all pairs if the few agree. The
work is proportional to the mask's edges, not its area. A mask_mod that cannot be traced is evaluated at every
pair, a few million at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, fx

from tritoncp.core.upload import upload
from tritoncp.masks.classification.expression import Expression, Reader
from tritoncp.masks.classification.progress import bar
from tritoncp.masks.classification.row_intervals import RowIntervals
from tritoncp.masks.classification.solve import Vectors, solve
from tritoncp.masks.classification.tile_bounds import trace
from tritoncp.masks.classification.tile_states import Tiles, TileStates, tile_states
from tritoncp.masks.mask_mod import MaskFn
from tritoncp.masks.runs.block_runs import ABSENT, Kind, Runs, ramps
from tritoncp.masks.runs.transposed_runs import transpose
from tritoncp.mods.tracing import read_batch_and_head, result_of, vmapped

PairEvaluator = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# a mask_mod's values: (b [n], h [n], q [n, i], kv [n, j]), int64, -> bool [n, i, j], all on the CPU

PAIRS = 1 << 22  # pairs evaluated at a time: an int64 intermediate of a mask_mod is 32 MiB
_TILES = 1 << 16  # tiles bounded at a time
_BLOCKS = 1 << 11  # single blocks evaluated at a time
_UNMERGED_TILES = 1 << 21  # tiles that are collected before adjacent ones are merged
_MASKED_BLOCKS = 512  # rows of tokens whose intervals are evaluated at a time, about
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
        """Return which tiles, in blocks, contain a block that is cut by the end of the queries or keys: bool
        [n]."""
        last_row = (tiles[:, 3] == self.rows) & bool(self.q_len % self.q_block)
        return last_row | ((tiles[:, 5] == self.cols) & bool(self.kv_len % self.kv_block))

    def describe(self, tiles: Tensor, heads: int) -> Tiles:
        """Make Tiles of tiles in blocks, int64 [n, 6] of (b, h, first row, end, first column, end). heads:
        number of heads"""
        b, h, r0, r1, c0, c1 = tiles.unbind(1)
        queries = (r0 * self.q_block).clamp(max=self.q_len), (r1 * self.q_block).clamp(max=self.q_len)
        keys = (c0 * self.kv_block).clamp(max=self.kv_len), (c1 * self.kv_block).clamp(max=self.kv_len)
        return Tiles(b * heads + h, b, h, (r0, r1), (c0, c1), queries, keys)


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


class Classification(NamedTuple):
    """The classified blocks of a mask, and the row intervals if it has them.

    runs:     blocks as torch classifies them: FULL if every pair of a whole block is visible, MASKED if some
              are
    reads:    whether it may depend on b, and on h
    solved:   whether ``interval`` is final; if not, pairs have to be evaluated to find it
    interval: (lo, hi), int32 [B, H, q_len] each, if in MASKED blocks a row sees exactly lo <= kv < hi
    """

    runs: Runs
    reads: tuple[bool, bool]
    solved: bool
    interval: tuple[Tensor, Tensor] | None


def classify(mask_mod: MaskFn, device: str | torch.device, B: int, H: int, grid: Grid) -> Classification:
    """Classify the blocks of a mask. device: of the mask_mod's tensors"""
    graph, evaluate = trace(mask_mod, device), torch_evaluator(mask_mod, device)
    reads = (True, True) if graph is None else read_batch_and_head(graph)
    b, h = (size if read else 1 for size, read in zip((B, H), reads, strict=True))
    if b * h * grid.q_len * grid.kv_len:
        zero = torch.zeros(1, dtype=torch.int64)
        evaluate(zero, zero, zero[:, None], zero[:, None])  # raises the errors of the mask_mod at once
    states = keys = None
    if graph is not None and grid.q_len and grid.kv_len:
        expression, vectors = _read(graph, (b, h), grid, device)
        keys = solve(expression, vectors, RowIntervals.all_keys(b * h, grid.q_len, grid.kv_len))
        states = tile_states(expression, vectors, grid[2:]) if keys is None else None
    if keys is None:
        return Classification(find_runs(states, evaluate, b, h, grid).expand(B, H), reads, False, None)
    runs = keys.to_runs(b, grid.q_block, grid.kv_block)
    interval = keys.in_masked_blocks(runs, grid.q_block, grid.kv_block)
    interval = interval and (interval[0].expand(B, H, -1), interval[1].expand(B, H, -1))
    return Classification(runs.expand(B, H), reads, True, interval)


def find_row_intervals(
    mask_mod: MaskFn, device: str | torch.device, B: int, H: int, grid: Grid
) -> RowIntervals | None:
    """Return the intervals of keys that each row sees; None if a row sees many, or if finding them takes
    evaluating pairs. device: of the mask_mod's tensors"""
    graph = trace(mask_mod, device)
    if graph is None or not grid.q_len or not grid.kv_len:
        return None
    expression, vectors = _read(graph, (B, H), grid, device)
    return solve(expression, vectors, RowIntervals.all_keys(B * H, grid.q_len, grid.kv_len))


def _read(
    graph: fx.GraphModule, n: tuple[int, int], grid: Grid, device: str | torch.device
) -> tuple[Expression, Vectors]:
    """Read the expression of a mask_mod and its vectors for n batch rows and heads."""
    reader = Reader(graph)
    expression = reader.read(result_of(graph))
    return expression, Vectors(expression, reader, n, (grid.q_len, grid.kv_len), torch.device(device))


def find_runs(
    states: Callable[[Tiles], TileStates] | None, evaluate: PairEvaluator, B: int, H: int, grid: Grid
) -> Runs:
    """Classify blocks by the states of tiles, and by evaluating pairs.

    It starts with one tile as large as the mask. An undecided tile is cut into columns of blocks if its
    blocks differ only by their keys, else into quarters. states: None if the mask_mod cannot be traced
    """
    collector = _TileCollector((B, H), grid)

    def visit(tiles: Tensor) -> Tensor:
        """Collect the decided tiles; return the parts of the undecided ones."""
        size = (tiles[:, 3] - tiles[:, 2]) * (tiles[:, 5] - tiles[:, 4])
        if states is None:
            some, full = size > 0, size < 0
            masked = settled = full
        else:
            some, every, masked, settled = states(grid.describe(tiles, H))
            full = every & ~grid.has_ragged_block(tiles)
        collector.add(tiles[full], torch.tensor(int(Kind.FULL)).expand(int(full.sum())))
        collector.add(tiles[masked], torch.tensor(int(Kind.MASKED)).expand(int(masked.sum())))
        undecided = some & ~full & ~masked
        done = 0
        for blocks in tiles[undecided & (size == 1)].split(_BLOCKS):
            collector.add(blocks, _kinds(evaluate, blocks, grid))
            done += len(blocks)
            if progress.is_due():
                progress.show(int(size[undecided].sum()) - done + sum(map(_count_blocks, stack)))
        undecided &= size > 1
        settled = settled & (tiles[:, 5] - tiles[:, 4] > 1)
        return torch.cat([_columns(tiles[undecided & settled]), _quarters(tiles[undecided & ~settled])])

    stack: list[Tensor] = []
    total = B * H * grid.rows * grid.cols
    with bar(f"create_block_mask {grid.q_len} x {grid.kv_len}", total) as progress:
        batch, head = torch.arange(B).repeat_interleave(H), torch.arange(H).repeat(B)
        edges = torch.tensor([0, grid.rows, 0, grid.cols]).expand(B * H, 4)
        stack += [torch.cat([batch[:, None], head[:, None], edges], 1)] if total else []
        while stack:
            tiles = stack.pop()
            if len(tiles) > _TILES:
                stack += tiles.split(_TILES)
            elif len(tiles):
                stack.append(visit(tiles))
    return collector.runs()


def find_intervals(
    mask_mod: MaskFn, device: str | torch.device, reads: tuple[bool, bool], runs: Runs, grid: Grid
) -> tuple[Tensor, Tensor] | None:
    """Return each row's interval of visible keys in its masked blocks: int32 (lo, hi), each [B, H, q_len].

    None if some row sees other keys there than one interval. reads: whether the mask_mod may depend on b, and
    on h; device: of its tensors
    """
    B, H, _, _ = runs.shape
    b, h = (size if read else 1 for size, read in zip((B, H), reads, strict=True))
    shared = runs.select(slice(b), slice(h))
    if shared.expand(B, H) == runs:
        runs = shared
    try:
        keys = find_row_intervals(mask_mod, device, b, h, grid)
    except Exception:  # of a mask_mod that indexes past a table's end outside of listed blocks
        keys = None
    if keys is not None:
        interval = keys.expand((b, h), runs.shape[:2]).in_masked_blocks(runs, grid.q_block, grid.kv_block)
    else:
        interval = _evaluate_intervals(torch_evaluator(mask_mod, device), runs, grid)
    return interval and (interval[0].expand(B, H, -1), interval[1].expand(B, H, -1))


def _evaluate_intervals(evaluate: PairEvaluator, runs: Runs, grid: Grid) -> tuple[Tensor, Tensor] | None:
    """Return the intervals of :func:`find_intervals` from every pair of the masked blocks."""
    parts = [torch.zeros(2, *runs.shape[:2], 0, dtype=torch.int32)]
    batch = runs.counts()[0].sum((0, 1)).cumsum(0) // _MASKED_BLOCKS  # for each row of blocks
    ends = batch.unique_consecutive(return_counts=True)[1].cumsum(0).tolist()
    for first, end in zip([0, *ends], ends):  # the search ends at the first row that is not an interval
        part = _intervals_of_rows(evaluate, runs.take(torch.arange(first, end)[None]), first, grid)
        if part is None:
            return None
        parts.append(part)
    lo, hi = torch.cat(parts, 3)[..., : grid.q_len]
    return lo, hi


def _intervals_of_rows(evaluate: PairEvaluator, runs: Runs, first: int, grid: Grid) -> Tensor | None:
    """Return lo and hi of :func:`find_intervals` for the rows of ``runs``, the first of which is row
    ``first`` of the mask: int32 [2, B, H, tokens]."""
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
    """List every MASKED block of a pattern.

    >>> masked_blocks(Runs.from_kinds(torch.tensor([[[[1, 0], [3, 0]]]], dtype=torch.uint8))).tolist()
    [[0, 0, 0, 1], [0, 0, 1, 1]]

    Args:
        runs: blocks of a mask, ``mask.runs``.

    Returns:
        int64 [n, 4], rows (batch row, head, row of blocks, column of blocks).
    """
    _, h, r, _ = runs.shape
    *flat, kind = runs._flat()
    row, start, end = (t[kind == Kind.MASKED] for t in flat)
    length = end - start
    row = row.repeat_interleave(length)
    return torch.stack([row // (h * r), row // r % h, row % r, ramps(start, length)], 1)


class _TileCollector:
    """Collects classified tiles in any order and merges them into Runs, by rows or by columns: by the one
    that the first tiles have fewer of."""

    def __init__(self, lines: tuple[int, int], grid: Grid) -> None:
        self._lines, self._sizes = lines, (grid.rows, grid.cols)
        self._tiles: list[Tensor] = []  # rows of (b, h, first row, end, first column, end, kind)
        self._count = 0
        self._merged: Runs | None = None
        self._by_column: bool | None = None

    def add(self, tiles: Tensor, kind: Tensor) -> None:
        """Add n tiles in blocks. kind: int64 [n] of Kind or ABSENT."""
        listed = kind != ABSENT
        self._tiles.append(torch.cat([tiles, kind[:, None]], 1)[listed].int())
        self._count += len(self._tiles[-1])
        if self._count > _UNMERGED_TILES:
            self._merge()

    def _merge(self) -> None:
        tiles = torch.cat([torch.zeros(0, 7, dtype=torch.int32), *self._tiles]).long()
        b, h, *ends, kind = tiles.unbind(1)
        height, width = ends[1] - ends[0], ends[3] - ends[2]
        if self._by_column is None:
            self._by_column = bool(width.sum() < height.sum())
        if self._by_column:
            ends, height = [*ends[2:], *ends[:2]], width
        lines, places = self._sizes[::-1] if self._by_column else self._sizes
        row = ramps((b * self._lines[1] + h) * lines + ends[0], height)
        columns = [row, *(x.repeat_interleave(height) for x in (ends[2], ends[3], kind))]
        if self._merged is not None:
            columns = [torch.cat(pair) for pair in zip(columns, self._merged._flat())]
        self._merged = Runs._pack((*self._lines, lines), places, *columns)
        self._tiles, self._count = [], 0

    def runs(self) -> Runs:
        """Merge the collected tiles."""
        self._merge()
        assert self._merged is not None
        return transpose(self._merged) if self._by_column else self._merged


def _count_blocks(tiles: Tensor) -> int:
    """Count the blocks of tiles."""
    return int(((tiles[:, 3] - tiles[:, 2]) * (tiles[:, 5] - tiles[:, 4])).sum())


def _columns(tiles: Tensor) -> Tensor:
    """Cut each tile into its columns of blocks."""
    width = tiles[:, 5] - tiles[:, 4]
    columns = tiles.repeat_interleave(width, 0)
    columns[:, 4] = ramps(tiles[:, 4], width)
    columns[:, 5] = columns[:, 4] + 1
    return columns


def _quarters(tiles: Tensor) -> Tensor:
    """Cut each tile into up to four parts whose sides are powers of two, but for the last ones."""
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
    tiles, fraction = grid.describe(blocks, 1), torch.arange(_PROBES) / max(1, _PROBES - 1)
    q, kv = (
        (lo[:, None] + ((hi - lo - 1)[:, None] * fraction).long()) for lo, hi in (tiles.queries, tiles.keys)
    )
    visible = evaluate(tiles.b, tiles.h, q, kv).flatten(1)
    has_visible = visible.any(1)
    has_hidden = ~visible.all(1) | grid.has_ragged_block(blocks)  # pairs past the end are hidden
    unsure = (~(has_visible & has_hidden)).nonzero()[:, 0]
    done = 0
    for chunk, visible in evaluate_blocks(evaluate, blocks[unsure][:, [0, 1, 2, 4]], grid):
        own = unsure[done : (done := done + len(chunk))]
        has_visible[own] |= visible.flatten(1).any(1)
        has_hidden[own] |= ~visible.flatten(1).all(1)
    return torch.where(has_visible, torch.where(has_hidden, int(Kind.MASKED), int(Kind.FULL)), ABSENT)
