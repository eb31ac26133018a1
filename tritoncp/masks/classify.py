"""Which blocks a mask_mod fills, found without looking at every pair.

A tile as large as the mask is bounded (`bounds`), cut into quarters where that leaves it undecided, and so on
down to single blocks; of those a few pairs, then smaller tiles are asked about, until both a visible and a
hidden pair is known, or everything. The work follows the mask's edges instead of its area. A mask_mod that
cannot be bounded is asked about every pair, a few million at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tritoncp.core.tracing import vmapped
from tritoncp.core.upload import upload
from tritoncp.masks.block_runs import ABSENT, Kind, Runs, ramps
from tritoncp.masks.closed_forms import MaskFn
from tritoncp.masks.tile_bounds import Bounds

Ask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# (b [n], h [n], q [n, i], kv [n, j]) -> bool [n, i, j]: a mask_mod about pairs. int64, all on the CPU

PAIRS = 1 << 22  # evaluated at a time: an int64 intermediate of a mask_mod is 32 MiB
_TILES = 1 << 16  # bounded at a time
_BLOCKS = 1 << 11  # looked into at a time
_FIRST = 1 << 6  # of these first, where one row can end the search
_LOOSE = 1 << 21  # runs kept before touching ones are joined
_SMALL = 16  # a tile of at most so many rows and columns is asked about pair by pair
_TRIED = 64  # tiles that are cut to see whether that decides anything,
_HOPELESS = 0.9  # and the share still undecided from which on it does not
_PROBES = 4  # of a block's rows and columns, to find out cheaply that it is masked


class Grid(NamedTuple):
    """The geometry of a mask's blocks."""

    q_len: int
    kv_len: int
    q_block: int
    kv_block: int

    @property
    def rows(self) -> int:
        return -(-self.q_len // self.q_block)

    @property
    def cols(self) -> int:
        return -(-self.kv_len // self.kv_block)

    def cut(self, tiles: Tensor) -> Tensor:
        """Which tiles, in blocks, hold a block that q_len or kv_len cuts."""
        last_row = (tiles[:, 3] == self.rows) & bool(self.q_len % self.q_block)
        return last_row | ((tiles[:, 5] == self.cols) & bool(self.kv_len % self.kv_block))

    def tokens(self, tiles: Tensor) -> Tensor:
        """Tiles in blocks as tiles in tokens."""
        scaled = tiles.clone()
        scaled[:, 2:4] = (tiles[:, 2:4] * self.q_block).clamp(max=self.q_len)
        scaled[:, 4:6] = (tiles[:, 4:6] * self.kv_block).clamp(max=self.kv_len)
        return scaled


def ask_torch(mask_mod: MaskFn, device: str | torch.device) -> Ask:
    """mask_mod as torch's own builder calls it, on `device`."""
    vmap = vmapped(mask_mod, (None, None, None, 0), (None, None, 0, None), (0, 0, 0, 0))

    def ask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        with torch.no_grad():
            visible = vmap(*upload((b, h, q, kv), torch.device(device))).cpu()
        if visible.ndim != 3:
            raise TypeError(f"a mask_mod must return one bool, got a tensor of {visible.ndim - 3} dimensions")
        if visible.dtype != torch.bool:
            raise TypeError(f"a mask_mod must return bool, got {visible.dtype}: compare, or call .bool()")
        return visible

    return ask


@dataclass(frozen=True)
class Question:
    """A mask_mod with two ways to evaluate it: bounds over a tile, and values pair by pair.

    Tiles are int64 [n, 6 or more]: b, h, first and end row, first and end column, and the caller's columns.
    """

    ask: Ask
    bounds: Bounds | None

    @classmethod
    def about(cls, mask_mod: MaskFn, device: str | torch.device = "cpu", ask: Ask | None = None) -> Question:
        return cls(ask or ask_torch(mask_mod, device), Bounds.of(mask_mod, device))

    @property
    def reads(self) -> tuple[bool, bool]:
        """Whether the answer can depend on b, on h."""
        return (True, True) if self.bounds is None else self.bounds.reads

    def decide(self, tiles: Tensor) -> tuple[Tensor, Tensor]:
        """Of tiles in tokens: (whether some pair may be visible, whether every pair surely is)."""
        if self.bounds is None:
            unsure = torch.ones(len(tiles), dtype=torch.bool)
            return unsure, ~unsure
        return self.bounds(*tiles[:, :6].unbind(1))

    def small(self, tiles: Tensor, left: Tensor) -> Tensor:
        """Which tiles of those left undecided it is no use to cut further: small ones, and all of them where
        cutting some of them decides next to nothing."""
        if self.bounds is None or not bool(left.any()):
            return left
        some, every = self.decide(_quarters(tiles[left][:: -(-int(left.sum()) // _TRIED)]))
        if int((some & ~every).sum()) > _HOPELESS * len(some):
            return left
        return left & ((tiles[:, 3] - tiles[:, 2]).maximum(tiles[:, 5] - tiles[:, 4]) <= _SMALL)

    def answers(self, tiles: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield tiles in tokens, a bounded number of pairs at a time, and their values of `seen`."""
        for part in tiles.split(max(1, PAIRS // _area(tiles))) if len(tiles) else ():
            yield part, self.seen(part)

    def seen(self, tiles: Tensor) -> Tensor:
        """bool [n, i, j] of tiles in tokens; one shorter than the longest repeats its last row or column."""
        sides = [
            torch.minimum(lo[:, None] + torch.arange(int((hi - lo).max())), hi[:, None] - 1)
            for lo, hi in ((tiles[:, 2], tiles[:, 3]), (tiles[:, 4], tiles[:, 5]))
        ]
        return self.at(tiles, *sides)

    def at(self, tiles: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """bool [n, i, j]: the answers at q [n, i] x kv [n, j] of each tile's batch row and head."""
        step = max(1, PAIRS // (q.shape[1] * kv.shape[1]))
        given = (tiles[:, 0], tiles[:, 1], q, kv)
        return torch.cat([self.ask(*part) for part in zip(*(t.split(step) for t in given), strict=True)])


def find_runs(
    question: Question, B: int, H: int, grid: Grid, progress: Callable[[float], object] = lambda done: None
) -> Runs:
    """The blocks of a mask, classified as torch does: FULL if every pair of a whole block is visible,
    MASKED if some are, in runs. progress: told the share of the mask that is done."""
    reads = question.reads
    b, h = (size if read else 1 for size, read in zip((B, H), reads, strict=True))
    found = _Found((b, h, grid.rows), grid.cols)
    total = b * h * grid.rows * grid.cols

    def visit(tiles: Tensor) -> Tensor:
        some, every = question.decide(grid.tokens(tiles))
        size = (tiles[:, 3] - tiles[:, 2]) * (tiles[:, 5] - tiles[:, 4])
        full = every & ~grid.cut(tiles)
        left = some & ~full
        found.add(tiles[full], torch.tensor(int(Kind.FULL)).expand(int(full.sum())))
        for blocks in tiles[left & (size == 1)].split(_BLOCKS):
            found.add(blocks, _kinds(question, blocks, grid))
        left &= size > 1
        found.area += int(size[~left].sum())
        progress(found.area / total)
        return left

    if total:
        nil = torch.zeros(1, dtype=torch.int64)
        question.ask(
            nil, nil, nil[:, None], nil[:, None]
        )  # a mod that reads its index out of the graph raises
        batch, head = torch.arange(b).repeat_interleave(h), torch.arange(h).repeat(b)
        edges = torch.tensor([0, grid.rows, 0, grid.cols]).expand(b * h, 4)
        _descend(torch.cat([batch[:, None], head[:, None], edges], 1), visit)
    return found.runs().expand(B, H)


def find_intervals(question: Question, runs: Runs, grid: Grid) -> tuple[Tensor, Tensor] | None:
    """Return the interval of keys that each row sees within its masked blocks: int32 (lo, hi), each
    [B, H, q_len]; None unless every row sees all keys of one interval there."""
    B, H, _, _ = runs.shape
    b, h = (size if read else 1 for size, read in zip((B, H), question.reads, strict=True))
    if runs.part(b, h).expand(B, H) == runs:
        runs = runs.part(b, h)
    extents = _Extents(runs, grid)
    masked = masked_blocks(runs)
    for blocks in (masked[:_FIRST], *masked[_FIRST:].split(_BLOCKS)):
        tiles = torch.stack([*blocks[:, :3].unbind(1), blocks[:, 2] + 1, blocks[:, 3], blocks[:, 3] + 1], 1)
        if not extents.add(question, tiles):
            return None
    found = extents.interval()
    return found and (found[0].expand(B, H, -1), found[1].expand(B, H, -1))


def masked_blocks(runs: Runs) -> Tensor:
    """int64 [n, 4]: (b, h, row, col) of every MASKED block."""
    _, h, r, _ = runs.shape
    row, start, end, _ = (t[runs.runs[:, 2] == Kind.MASKED] for t in runs._flat())
    length = end - start
    row = row.repeat_interleave(length)
    return torch.stack([row // (h * r), row // r % h, row % r, ramps(start, length)], 1)


class _Found:
    """Runs found so far, in any order."""

    def __init__(self, shape: tuple[int, int, int], cols: int) -> None:
        self.shape, self.cols, self.area = shape, cols, 0
        self.loose: list[tuple[Tensor, ...]] = []  # (row, start, end, kind)
        self.count = 0

    def add(self, tiles: Tensor, kind: Tensor) -> None:
        """tiles in blocks; kind: int64 [n] of Kind or ABSENT."""
        tiles, kind = tiles[kind != ABSENT], kind[kind != ABSENT]
        _, heads, rows = self.shape
        height = tiles[:, 3] - tiles[:, 2]
        row = ramps((tiles[:, 0] * heads + tiles[:, 1]) * rows + tiles[:, 2], height)
        self.loose.append((row, *(t.repeat_interleave(height) for t in (tiles[:, 4], tiles[:, 5], kind))))
        self.count += len(row)
        if self.count > _LOOSE:
            self.loose = [self.runs()._flat()]
            self.count = len(self.loose[0][0])

    def runs(self) -> Runs:
        nothing = (torch.zeros(0, dtype=torch.int64),) * 4
        return Runs._pack(
            self.shape, self.cols, *(torch.cat(p) for p in zip(nothing, *self.loose, strict=True))
        )


def _descend(tiles: Tensor, visit: Callable[[Tensor], Tensor]) -> None:
    """Visit tiles, and the quarters of those for which the visit says True; never many at once."""
    stack = [tiles]
    while stack:
        tiles = stack.pop()
        if len(tiles) > _TILES:
            stack += tiles.split(_TILES)
        elif len(tiles):
            stack.append(_quarters(tiles[visit(tiles)]))


def _quarters(tiles: Tensor) -> Tensor:
    """Cut each tile in up to four at multiples of a power of two, for which tables of minima are exact."""
    q0, q1, k0, k1 = tiles[:, 2:6].unbind(1)
    q, k = ((lo, lo + _half(hi - lo), hi) for lo, hi in ((q0, q1), (k0, k1)))
    parts = []
    for top, bottom in ((q[0], q[1]), (q[1], q[2])):
        for left, right in ((k[0], k[1]), (k[1], k[2])):
            sides = torch.stack([top, bottom, left, right], 1)
            parts.append(torch.cat([tiles[:, :2], sides, tiles[:, 6:]], 1))
    found = torch.stack(parts, 1).flatten(0, 1)
    return found[(found[:, 2] < found[:, 3]) & (found[:, 4] < found[:, 5])]


def _half(size: Tensor) -> Tensor:
    """The largest power of two below size, 1 of 1."""
    return (1 << (torch.frexp((size - 1).double()).exponent.long() - 1).clamp(min=0)).clamp(min=1)


def _kinds(question: Question, blocks: Tensor, grid: Grid) -> Tensor:
    """int64 [n] of Kind or ABSENT of single blocks."""
    yes = torch.zeros(len(blocks), dtype=torch.bool)  # a visible pair is known
    no = grid.cut(blocks)  # a hidden one; past the edge all are
    tiles = grid.tokens(blocks)

    def learn(index: Tensor, seen: Tensor) -> None:
        yes[index[seen.flatten(1).any(1)]] = True
        no[index[~seen.flatten(1).all(1)]] = True

    def visit(tiles: Tensor) -> Tensor:
        index = tiles[:, 6]
        some, every = question.decide(tiles)
        yes[index[every]] = True
        no[index[~some]] = True
        left = some & ~every & ~(yes & no)[index]
        ask = question.small(tiles, left)
        for part, seen in question.answers(tiles[ask]):
            learn(part[:, 6], seen)
        return left & ~ask

    if len(blocks):
        share = torch.arange(_PROBES) / max(1, _PROBES - 1)
        q, kv = (
            (lo[:, None] + ((hi - lo - 1)[:, None] * share).long())
            for lo, hi in (tiles[:, 2:4].T, tiles[:, 4:6].T)
        )
        learn(torch.arange(len(blocks)), question.at(tiles, q, kv))
        numbered = torch.cat([tiles, torch.arange(len(tiles))[:, None]], 1)
        _descend(numbered[~(yes & no)], visit)
    return torch.where(yes, torch.where(no, int(Kind.MASKED), int(Kind.FULL)), ABSENT)


def _area(tiles: Tensor) -> int:
    """Pairs of a tile as tall as the tallest and as wide as the widest."""
    return int((tiles[:, 3] - tiles[:, 2]).max()) * int((tiles[:, 5] - tiles[:, 4]).max())


class _Extents:
    """First, last and number of visible keys of each row within masked blocks, gathered block by block."""

    def __init__(self, runs: Runs, grid: Grid) -> None:
        self.runs, self.grid = runs, grid
        shape = (*runs.shape[:3], grid.q_block)
        self.lo = torch.full(shape, grid.kv_len, dtype=torch.int32)
        self.hi = torch.zeros(shape, dtype=torch.int32)
        self.count = torch.zeros(shape, dtype=torch.int32)

    def add(self, question: Question, blocks: Tensor) -> bool:
        """False if some row sees more than one interval already inside one of these blocks."""
        height = self.grid.q_block
        lo = torch.full((len(blocks) * height,), self.grid.kv_len, dtype=torch.int32)
        hi, count = torch.zeros_like(lo), torch.zeros_like(lo)

        def learn(row: Tensor, start: Tensor, end: Tensor, seen: Tensor) -> None:
            lo.scatter_reduce_(0, row, start.int(), "amin")
            hi.scatter_reduce_(0, row, end.int(), "amax")
            count.index_add_(0, row, seen.int())

        def visit(tiles: Tensor) -> Tensor:
            some, every = question.decide(tiles)
            left = some & ~every
            tall = tiles[every]
            size = tall[:, 3] - tall[:, 2]
            start, end = (t.repeat_interleave(size) for t in (tall[:, 4], tall[:, 5]))
            learn(ramps(tall[:, 6] + tall[:, 2], size), start, end, end - start)
            ask = question.small(tiles, left)
            for part, seen in question.answers(tiles[ask]):
                learn(*_rows_seen(part, seen))
            return left & ~ask

        first = (
            torch.arange(len(blocks)) * height - blocks[:, 2] * height
        )  # of a token's row in lo, hi, count
        _descend(torch.cat([self.grid.tokens(blocks), first[:, None]], 1), visit)
        lo, hi, count = (t.view(-1, height) for t in (lo, hi, count))
        _, heads, rows, _ = self.runs.shape
        row = ((blocks[:, 0] * heads + blocks[:, 1]) * rows + blocks[:, 2])[:, None].expand(-1, height)
        self.lo.view(-1, height).scatter_reduce_(0, row, lo, "amin")
        self.hi.view(-1, height).scatter_reduce_(0, row, hi, "amax")
        self.count.view(-1, height).scatter_add_(0, row, count)
        return not bool(((count > 0) & (hi - lo != count)).any())

    def interval(self) -> tuple[Tensor, Tensor] | None:
        """(lo, hi) if every row sees all of [lo, hi) that lies in masked blocks, else None."""
        height, width = self.grid.q_block, self.grid.kv_block
        lo, hi, missing = (t.view(-1, height) for t in (self.lo, self.hi, -self.count))
        row, start, end, _ = (t[self.runs.runs[:, 2] == Kind.MASKED] for t in self.runs._flat())
        for r, s, e in zip(
            *(t.split(max(1, PAIRS // height)) for t in (row, start * width, end * width)), strict=True
        ):
            overlap = (hi[r].minimum(e[:, None]) - lo[r].maximum(s[:, None])).clamp(min=0)
            missing.index_add_(0, r, overlap.int())
        if bool(missing.any()):
            return None
        b, h = self.runs.shape[:2]
        found = torch.where(self.hi > 0, self.lo, 0), self.hi
        lo, hi = (t.view(b, h, -1)[..., : self.grid.q_len].contiguous() for t in found)
        return lo, hi


def _rows_seen(tiles: Tensor, seen: Tensor) -> tuple[Tensor, ...]:
    """(row, first key, end, number) of the rows of tiles [n, 7] that see something. seen: [n, i, j]."""
    i, j = (torch.arange(size) for size in seen.shape[1:])
    seen = seen & (tiles[:, 2, None] + i < tiles[:, 3, None])[:, :, None]
    seen &= (tiles[:, 4, None] + j < tiles[:, 5, None])[:, None, :]
    tile, row = seen.any(2).nonzero(as_tuple=True)
    seen = seen[tile, row]
    left = tiles[tile, 4]
    place = (j + 1).int()
    start = left + seen.shape[1] - (seen * place.flip(0)).amax(1)
    return tiles[tile, 6] + tiles[tile, 2] + row, start, left + (seen * place).amax(1), seen.sum(1)
