"""States of tiles of blocks, from vectors of an expression's values: no pair is visible, every pair, or some
pairs of every block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx

from tritoncp.masks.classification.expression import (
    DISTANCE,
    KEY,
    PAIR,
    QUERY,
    Both,
    Either,
    Expression,
    Relation,
)
from tritoncp.masks.classification.interval_arithmetic import OPERAND_RULES, ValueRange
from tritoncp.masks.classification.solve import Vectors
from tritoncp.masks.classification.tile_bounds import Bounds, Pyramid


class TileStates(NamedTuple):
    """What is known of n tiles: bool [n] each.

    some:    a pair may be visible
    every:   all pairs are
    mixed:   in every block of the tile, a pair is visible and another is not
    settled: only predicates of keys are still unknown
    """

    some: Tensor
    every: Tensor
    mixed: Tensor
    settled: Tensor

    def swapped(self) -> TileStates:
        """Return the states of the negated expression."""
        return TileStates(~self.every, ~self.some, self.mixed, self.settled)


class Tiles(NamedTuple):
    """Tiles of blocks, int64 [n] each: n-th batch row and head; ends in blocks, and in tokens."""

    line: Tensor
    b: Tensor
    h: Tensor
    rows: tuple[Tensor, Tensor]
    columns: tuple[Tensor, Tensor]
    queries: tuple[Tensor, Tensor]
    keys: tuple[Tensor, Tensor]


Leaf = Callable[[Tiles], TileStates]


class Counts:
    """Counts True values in ranges of the rows of a bool matrix."""

    def __init__(self, values: Tensor) -> None:
        self._total = torch.nn.functional.pad(values.cumsum(1), (1, 0))

    def in_windows(self, size: int) -> Tensor:
        """Count the True values among the ``size`` places from each place on."""
        return self._total[:, size:] - self._total[:, :-size]

    def __call__(self, line: Tensor, start: Tensor, end: Tensor) -> Tensor:
        """Count the True values of each range, start <= place < end: int64 [n]. A single row serves all
        ranges."""
        line = line if len(self._total) > 1 else torch.zeros_like(line)
        return self._total[line, end] - self._total[line, start]


def tile_states(expression: Expression, vectors: Vectors, blocks: tuple[int, int]) -> Leaf:
    """Return the function that finds the states of tiles. blocks: queries and keys of a block"""
    if isinstance(expression, Both | Either):
        parts = [tile_states(part, vectors, blocks) for part in expression.parts]
        every = isinstance(expression, Both)
        return lambda tiles: _join(every, [part(tiles) for part in parts])
    if isinstance(expression, Relation):
        sides = vectors.sides(expression)
        return _unknown_states if sides is None else _comparison_states(expression.op, *sides)
    if expression.of == PAIR:
        assert isinstance(expression.value, fx.Node)
        bounds = Bounds(vectors.graph, expression.value)
        return lambda tiles: _pair_states(bounds, expression.holds, tiles)
    shown = vectors.shown(expression)
    if expression.of == DISTANCE:
        return _distance_states(shown, vectors.lengths[1], blocks)
    return _side_states(shown, expression.of, blocks)


def _join(every: bool, parts: Sequence[TileStates]) -> TileStates:
    """Join the states of parts into the states of Both, or of Either."""
    if not every:
        return _join(True, [part.swapped() for part in parts]).swapped()
    some, shown, mixed, settled = (torch.stack(x) for x in zip(*parts))
    one_left = (~shown).sum(0) == 1  # all other parts are True for every pair
    return TileStates(some.all(0), shown.all(0), one_left & mixed.any(0), settled.all(0))


def _unknown_states(tiles: Tiles) -> TileStates:
    no = torch.zeros_like(tiles.line, dtype=torch.bool)
    return TileStates(~no, no, no, no)


def _pair_states(bounds: Bounds, holds: bool, tiles: Tiles) -> TileStates:
    some, every = bounds(tiles.b, tiles.h, *tiles.queries, *tiles.keys)
    states = TileStates(some, every, torch.zeros_like(some), every | ~some)
    return states if holds else states.swapped()


def _comparison_states(op: str, query: Tensor, key: Tensor) -> Leaf:
    """Compare the ranges of both sides within a tile."""
    tables = [Pyramid(x, (False, True)) for x in (query, key)]

    def find(tiles: Tiles) -> TileStates:
        ranges = []
        for table, (start, end) in zip(tables, (tiles.queries, tiles.keys)):
            line = tiles.line if table.sizes[0] > 1 else torch.zeros_like(tiles.line)
            places = [ValueRange(line, line, torch.int64), ValueRange(start, end - 1, torch.int64)]
            ranges.append(table(places))
        every, some, _ = OPERAND_RULES[op](torch.bool, *ranges)  # type: ignore[misc]
        return TileStates(some, every, torch.zeros_like(some), every | ~some)

    return find


def _side_states(shown: Tensor, side: int, blocks: tuple[int, int]) -> Leaf:
    """Count the queries, or the keys, of a tile for which a predicate holds."""
    size = blocks[0] if side == QUERY else blocks[1]
    counts = Counts(shown)
    pad = -shown.shape[1] % size
    cut = torch.nn.functional.pad(shown, (0, pad)).unflatten(1, (-1, size))
    in_range = torch.nn.functional.pad(torch.ones_like(shown), (0, pad)).unflatten(1, (-1, size))
    mixed_blocks = Counts(cut.any(2) & (in_range & ~cut).any(2))

    def find(tiles: Tiles) -> TileStates:
        tokens, edges = (tiles.queries, tiles.rows) if side == QUERY else (tiles.keys, tiles.columns)
        if shown.shape[1] == 1:  # a constant
            start, end = torch.zeros_like(tiles.line), torch.ones_like(tiles.line)
            tokens = edges = (start, end)
        number = counts(tiles.line, *tokens)
        some, every = number > 0, number == tokens[1] - tokens[0]
        mixed = mixed_blocks(tiles.line, *edges) == edges[1] - edges[0]
        settled = torch.ones_like(some) if side == KEY else every | ~some
        return TileStates(some, every, mixed, settled)

    return find


def _distance_states(shown: Tensor, keys: int, blocks: tuple[int, int]) -> Leaf:
    """Count the distances within a tile for which a predicate holds. keys: their number"""
    q_block, kv_block = blocks
    size = q_block + kv_block - 1  # distances within a block
    counts = Counts(shown)
    number = counts.in_windows(size)
    mixed_blocks = Counts((number > 0) & (number < size))

    def find(tiles: Tiles) -> TileStates:
        (q0, q1), (k0, k1) = tiles.queries, tiles.keys
        start, end = q0 - k1 + keys, q1 - k0 + keys - 1
        number = counts(tiles.line, start, end)
        some, every = number > 0, number == end - start
        whole = (q1 % q_block == 0) & (k1 % kv_block == 0)  # no block is cut
        first, last = torch.where(whole, start, 0), torch.where(whole, end - size + 1, 0)
        mixed = whole & (mixed_blocks(tiles.line, first, last) == last - first)
        return TileStates(some, every, mixed, every | ~some)

    return find
