"""The choice of keys by scores, as the indexers of sparse attention models make it, without a matrix of all
pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tritoncp.selection.visible import VisiblePairs

ROWS = 128  # queries of a tile; shorter tiles are padded, so that the bits of a score do not depend on them
KEYS = 4096  # keys or blocks of a tile, from multiples of this number on, for the same reason
SCORES = 1 << 23  # most products of a tile at a time
LAST_POSITION = 2**31 - 1
POOLS = ("mean", "max")
NONE = torch.iinfo(torch.int64).min

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "silu": torch.nn.functional.silu,
    "identity": lambda x: x,
}


class KeyChoice(NamedTuple):
    """What to choose, and which keys are always chosen.

    top:        number of keys, or blocks, of a query
    block_size: keys of a block; 1 for single keys
    activation: name in ACTIVATIONS, of products of queries and keys
    pool:       "mean": a block has the mean of its keys; "max": the largest score of its visible keys
    own, first, last: whether the key or block of the query itself, how many of the first visible ones, and
                how many of the last visible ones up to the query are always chosen
    """

    top: int
    block_size: int = 1
    activation: str = "relu"
    pool: str = "mean"
    own: bool = False
    first: int = 0
    last: int = 0


def choose(
    query: Tensor, key: Tensor, weights: Tensor | None, choice: KeyChoice, pairs: VisiblePairs,
    positions: Tensor,
) -> Tensor:  # fmt: skip
    """Return the chosen keys or blocks of each query, ascending, -1 first: int32 [B, Hs, rows, top].

    query: [B, Hi, rows, D]; key: [B, 1 or Hi, kv_len, D], of the whole sequence; positions: int64 [1 or B,
    rows], -1 for padding, which chooses nothing. weights: [B, Hi, rows], by which the heads are summed, so
    that Hs is 1; None: each head chooses for itself. Scores are compared as float32; of equal ones the lower
    position is chosen.
    """
    batch, _, rows, _ = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    query, key = query.to(wide), key.to(wide)
    if choice.block_size > 1 and choice.pool == "mean":
        key = _block_means(key, choice.block_size)
    shares = 1 if weights is not None else query.shape[1]
    chosen = torch.full((batch, shares, rows, choice.top), -1, dtype=torch.int32, device=query.device)
    for b in range(batch):
        at = positions[b % len(positions)]
        for first in range(0, rows, ROWS):
            part = slice(first, min(first + ROWS, rows))
            pad = (0, first + ROWS - part.stop)
            tile = _RowTile(
                torch.nn.functional.pad(query[b, :, part], (0, 0, *pad)),
                None if weights is None else torch.nn.functional.pad(weights[b, :, part].to(wide), pad),
                torch.nn.functional.pad(at[part], pad, value=-1),
                choice,
                pairs,
                b,
            )
            chosen[b, :, part] = tile.choose(key[b])[:, : part.stop - first]
    return chosen


def _block_means(key: Tensor, size: int) -> Tensor:
    """Return the mean of the keys of each block: [B, H, blocks, D]; the last block may be short."""
    blocks = -(-key.shape[2] // size)
    padded = torch.nn.functional.pad(key, (0, 0, 0, blocks * size - key.shape[2]))
    counts = torch.full((blocks, 1), float(size), dtype=key.dtype, device=key.device)
    counts[-1:] -= blocks * size - key.shape[2]
    return padded.unflatten(2, (blocks, size)).sum(3) / counts


@dataclass(frozen=True)
class _RowTile:
    """ROWS queries of a batch row. query: [Hi, ROWS, D]; weights: [Hi, ROWS] or None; positions: [ROWS]."""

    query: Tensor
    weights: Tensor | None
    positions: Tensor
    choice: KeyChoice
    pairs: VisiblePairs
    batch: int

    def choose(self, key: Tensor) -> Tensor:
        """Return the chosen ones of each query: int32 [Hs, ROWS, top]. key: [1 or Hi, keys or means, D]"""
        size, kv_len = self.choice.block_size, self.pairs.kv_len
        count = -(-kv_len // size)
        shares = 1 if self.weights is not None else len(self.query)
        best = self.positions.new_full((shares, ROWS, self.choice.top), NONE)
        step = KEYS if size == 1 else max(1, KEYS // size)
        shown_before = self.positions.new_zeros(1, ROWS, 1)
        last = self._last_visible(count, step)
        for start in range(0, count, step):
            numbers = torch.arange(start, min(start + step, count), device=key.device)
            shown = self._visible(numbers)  # [1 or H, ROWS, keys]
            candidates = shown.unflatten(2, (len(numbers), -1)).any(3)
            if self.pairs.device.type == "cpu" and not bool(candidates.any()):
                continue
            scores = self._scores(key, start, len(numbers), shown).to(torch.float32) + 0.0  # -0.0 becomes 0.0
            order = shown_before + candidates.cumsum(2)  # 1 for the first visible one
            scores = torch.where(self._forced(numbers, order, last), torch.inf, scores)
            shown_before = order[..., -1:]
            ranked = torch.where(candidates, _ranks(scores, numbers), NONE)
            best = torch.cat([best, ranked.expand(shares, -1, -1)], 2).topk(self.choice.top, 2).values
        position = LAST_POSITION - (best & 0xFFFFFFFF)
        return torch.where(best == NONE, -1, position).sort(2).values.to(torch.int32)

    def _visible(self, numbers: Tensor) -> Tensor:
        """Return which keys of some keys or blocks are visible: bool [1 or H, ROWS, keys]."""
        size = self.choice.block_size
        keys = (numbers[:, None] * size + torch.arange(size, device=numbers.device)).flatten()
        inside = keys < self.pairs.kv_len
        heads = torch.arange(len(self.query), device=numbers.device)
        rows = self.positions.clamp(min=0)[None]
        shown = self.pairs(self.batch, heads, rows, keys.clamp(max=self.pairs.kv_len - 1)[None])[0]
        return shown & inside & (self.positions >= 0)[:, None]

    def _scores(self, key: Tensor, start: int, count: int, shown: Tensor) -> Tensor:
        """Return the scores of ``count`` keys or blocks from ``start`` on: [Hs, ROWS, count]."""
        size, pooled = self.choice.block_size, self.choice.pool == "max" and self.choice.block_size > 1
        if pooled:
            part = key[:, start * size : (start + count) * size]
            part = torch.nn.functional.pad(part, (0, 0, 0, count * size - part.shape[1]))
        else:
            part = key[:, start : start + count]
        width = part.shape[1]
        fixed = KEYS if size == 1 else max(1, KEYS // size) * (size if pooled else 1)
        part = torch.nn.functional.pad(part, (0, 0, 0, fixed - width))
        act, heads = ACTIVATIONS[self.choice.activation], len(self.query)
        total: Tensor | None = None
        scores = []
        group = max(1, SCORES // (ROWS * fixed))
        for first in range(0, heads, group):
            some = slice(first, first + group)
            products = self.query[some] @ (part if len(part) == 1 else part[some]).mT
            products = act(products)[..., :width]
            if self.weights is None:
                scores.append(products)
                continue
            for product, weight in zip(products, self.weights[some], strict=True):  # in this order, always
                total = product * weight[:, None] if total is None else total + product * weight[:, None]
        every = torch.cat(scores) if total is None else total[None]
        if pooled:
            every = torch.where(shown, every, -torch.inf).unflatten(2, (count, size)).amax(3)
        return every

    def _last_visible(self, count: int, step: int) -> Tensor | None:
        """Return the number of visible candidates up to the query, [1 or H, ROWS, 1], if that is needed."""
        if not self.choice.last:
            return None
        total = self.positions.new_zeros(1, ROWS, 1)
        for start in range(0, count, step):
            numbers = torch.arange(start, min(start + step, count), device=self.positions.device)
            shown = self._visible(numbers).unflatten(2, (len(numbers), -1)).any(3)
            total = total + (shown & self._up_to_query(numbers)).sum(2, keepdim=True)
        return total

    def _up_to_query(self, numbers: Tensor) -> Tensor:
        return numbers <= (self.positions // self.choice.block_size)[:, None]

    def _forced(self, numbers: Tensor, order: Tensor, last: Tensor | None) -> Tensor:
        """Return which ones are always chosen, if they are visible. order: 1 for the first visible one, ...;
        last: the order of the last one up to the query"""
        choice, own = self.choice, self.positions // self.choice.block_size
        forced = order <= choice.first
        if choice.own:
            forced = forced | (numbers == own[:, None])
        if last is not None:
            forced = forced | (self._up_to_query(numbers) & (order > last - choice.last))
        return forced


def _ranks(scores: Tensor, numbers: Tensor) -> Tensor:
    """Return int64 numbers in the order of float32 scores, lower positions first where they are equal."""
    bits = scores.view(torch.int32)
    ascending = bits ^ ((bits >> 31) & LAST_POSITION)  # as integers in the order of the floats
    return (ascending.to(torch.int64) << 32) + (LAST_POSITION - numbers)
