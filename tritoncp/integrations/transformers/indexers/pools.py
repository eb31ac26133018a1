"""Blocks and pools of keys that begin with each document of a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tritoncp.integrations.transformers.indexers.calls import LayerCall
from tritoncp.selection import Selection
from tritoncp.selection.choice import KeyChoice, choose
from tritoncp.selection.visible import VisiblePairs


@dataclass(frozen=True)
class DocumentBlocks:
    """Blocks of keys of each row of a batch, which begin with each document: block i has places size * i to
    size * (i + 1) - 1.

    size:   keys of a block
    tokens: token at each place, -1 after the last one of a document: int64 [B, blocks * size]
    places: place of each token, -1 for padding: int64 [B, S]

    >>> blocks = DocumentBlocks.of(torch.tensor([[0, 0, 0, 1, 1, -1]]), 2)
    >>> blocks.tokens.tolist(), blocks.places.tolist()
    ([[0, 1, 2, -1, 3, 4]], [[0, 1, 2, 4, 5, -1]])
    """

    size: int
    tokens: Tensor
    places: Tensor

    @classmethod
    def of(cls, segments: Tensor, size: int) -> DocumentBlocks:
        """Make the blocks of rows. segments: index of the document of each token, [B, S], -1 for padding"""
        is_token, index = segments >= 0, torch.arange(segments.shape[1], device=segments.device)
        begins = torch.nn.functional.pad(segments.diff(dim=1) != 0, (1, 0), value=True)
        at = index - torch.where(begins, index, 0).cummax(1).values  # position within the document
        number = (is_token & (at % size == 0)).cumsum(1) - 1
        places = torch.where(is_token, number * size + at % size, -1)
        count = (int(number.max()) + 1) * size if number.numel() else 0
        tokens = index.new_full((len(segments), count + 1), -1)  # padding writes to one place more
        tokens.scatter_(1, torch.where(is_token, places, count), index.expand_as(places))
        return cls(size, tokens[:, :-1], places)

    def arrange(self, x: Tensor) -> Tensor:
        """Return x [B, S, ...] at the places of its tokens, 0 elsewhere: [B, blocks * size, ...]."""
        rows = torch.arange(len(x), device=x.device)[:, None]
        arranged = x[rows, self.tokens.expand(len(x), -1).clamp(min=0)]
        empty = (self.tokens < 0).view(*self.tokens.shape, *[1] * (x.ndim - 2))
        return arranged.masked_fill(empty, 0)

    def tokens_of(self, blocks: Tensor) -> Tensor:
        """Return the tokens of chosen blocks [B, H, rows, n], -1 for none: int32 [B, H, rows, n * size]."""
        places = blocks[..., None].long() * self.size + torch.arange(self.size, device=blocks.device)
        table = torch.nn.functional.pad(self.tokens, (0, 1), value=-1)
        index = torch.where(blocks[..., None] < 0, table.shape[1] - 1, places).flatten(1)
        found = table.expand(len(blocks), -1).gather(1, index)
        return found.view(*blocks.shape[:3], -1).int()

    def tail_of(self, positions: Tensor) -> Tensor:
        """Return the tokens of the block of each query up to itself, if it is not complete with it: int32
        [B, rows, size - 1], -1 for none. positions: int64 [B, rows], -1 for padding"""
        places = self.places.expand(len(positions), -1).gather(1, positions.clamp(min=0))
        before = torch.where((positions < 0) | (places < 0), self.size - 1, places % self.size)[..., None]
        offsets = torch.arange(self.size - 1, device=positions.device)
        in_tail = (before < self.size - 1) & (offsets <= before)
        return torch.where(in_tail, positions[..., None] - offsets, -1).int()


@dataclass(frozen=True)
class PlacedPairs(VisiblePairs):
    """Pairs that a causal mask shows within documents, by numbers that stand for tokens.

    segments:      index of the document of each token, int64 [1 or B, S], -1 for padding
    queries, keys: token of each number, -1 for none: int64 [1 or B, numbers]; None for queries: the number
    """

    segments: Tensor | None = None
    queries: Tensor | None = None
    keys: Tensor | None = None

    @property
    def kv_len(self) -> int:
        assert self.keys is not None
        return self.keys.shape[1]

    def __call__(self, b: int, heads: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        assert self.keys is not None and self.segments is not None
        segments = self.segments[b % len(self.segments)]
        if self.queries is not None:
            q_idx = self.queries[b % len(self.queries)][q_idx].clamp(min=0)
        keys = self.keys[b % len(self.keys)][kv_idx]
        of_query, of_key = segments[q_idx], torch.where(keys < 0, -1, segments[keys.clamp(min=0)])
        shown = (keys[:, None] <= q_idx[..., None]) & (of_key[:, None] == of_query[..., None])
        return (shown & (of_key >= 0)[:, None])[:, None]


def choose_blocks(query: Tensor, key: Tensor, choice: KeyChoice, call: LayerCall) -> Selection:
    """Choose blocks that begin with documents, by their best key, for each head, and return their tokens.

    query: [B, H, rows, D]; key: [B, S, D], of the whole sequence
    """
    segments = call.segments(query.device)
    blocks = DocumentBlocks.of(segments, choice.block_size)
    pairs = PlacedPairs(call.mask, None, 0, query.device, segments, blocks.tokens, blocks.tokens)
    positions = call.positions(query.device)
    count = max(len(blocks.places), len(positions))
    places = blocks.places.expand(count, -1).gather(1, positions.clamp(min=0).expand(count, -1))
    places = torch.where(positions < 0, -1, places)
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        chosen = choose(query, blocks.arrange(key)[:, None], None, choice, pairs, places)
    return Selection(blocks.tokens_of(chosen))


def choose_pools(
    query: Tensor, pools: Tensor, weights: Tensor, top: int, call: LayerCall, blocks: DocumentBlocks,
    tail: bool,
) -> Selection:  # fmt: skip
    """Choose complete blocks of visible tokens by their pooled keys, and return their tokens.

    query: [B, H, rows, D]; pools: pooled key of each block, [B, blocks, D]; weights: [B, H, rows]; top:
    number of blocks; tail: whether the tokens of an incomplete last block are chosen too
    """
    ends = blocks.tokens.view(len(blocks.tokens), -1, blocks.size)[..., -1]  # -1 for incomplete ones
    segments, positions = call.segments(query.device), call.positions(query.device)
    pairs = PlacedPairs(call.mask, None, 0, query.device, segments, None, ends)
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        chosen = choose(query, pools[:, None], weights, KeyChoice(top), pairs, positions)
    indices = blocks.tokens_of(chosen)
    if tail and blocks.size > 1:
        count = max(len(blocks.places), len(positions))
        last = blocks.tail_of(positions.expand(count, -1))[:, None].expand(len(query), -1, -1, -1)
        indices = torch.cat([indices, last], 3)
    return Selection(indices)
