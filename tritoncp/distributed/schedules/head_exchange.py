"""Exchange of sequence shards for head shards among the ranks of a row, and back.

Each rank of a row sends its tokens' part of every head to the rank that computes this head, and receives its
own heads of all of the row's tokens.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from tritoncp.core.bounded_cache import BoundedCache, OwnedState
from tritoncp.distributed.collectives import AllToAll, Schedule, Wait
from tritoncp.distributed.schedules.buffers import laid_out_as
from tritoncp.planning import traffic
from tritoncp.planning.plan import Plan

T = TypeVar("T")

_WARNED: set[tuple[int, int]] = set()


@dataclass(frozen=True, eq=False)
class Side:
    """The queries, or the keys and values, that the ranks of a row exchange.

    heads: heads of each rank of the row
    rows:  tokens of each rank, padding included
    """

    heads: list[range]
    rows: int

    @functools.cached_property
    def counts(self) -> list[int]:
        """Number of heads of each rank of the row."""
        return list(map(len, self.heads))

    @functools.cached_property
    def shared(self) -> bool:
        """Whether several ranks of the row have the same head."""
        return traffic.share(self.heads)


# A tensor by sequence is [B, H, S, D]: all heads of this rank's tokens. By heads it is [B, this rank's heads,
# degree * rows, D]: all tokens of the row.
Field = tuple[Tensor, Side]  # a tensor of either form
Returned = tuple[Tensor, Side, Tensor]  # a tensor by heads, its side, and one with the layout by sequence


@dataclass(frozen=True, eq=False)
class MessageLayout:
    """The layout of one message of an exchange. It carries tensors with equally many tokens and channels, as
    [tokens, B, heads, channels] for each rank.

    indices:     indices of its tensors in the exchange
    sides:       the side of each tensor, which has its heads
    own_counts:  number of this rank's heads of each tensor
    degree:      ranks of the row
    rows:        tokens of a rank, padding included; batch, channels: B and D of the tensors
    token_sizes: elements of this rank's tokens, for each rank of the world: the heads of that rank
    head_sizes:  elements of this rank's heads, for each rank of the world: the tokens of that rank
    """

    indices: list[int]
    sides: list[Side]
    own_counts: list[int]
    degree: int
    rows: int
    batch: int
    channels: int
    token_sizes: list[int]
    head_sizes: list[int]

    @functools.cached_property
    def is_even(self) -> bool:
        """Whether the ranks of the row have equally many heads of each tensor, and no head twice."""
        return all(not side.shared and len(set(side.counts)) == 1 for side in self.sides)

    def by_tokens(self, flat: Tensor) -> Sequence[Tensor]:
        """Split a flat message of this rank's heads by tensors: views [B, heads, degree * rows, D]."""
        view = flat.view(self.degree * self.rows, self.batch, sum(self.own_counts), self.channels)
        return view.permute(1, 2, 0, 3).split_with_sizes(self.own_counts, 1)


@dataclass(frozen=True, eq=False)
class HeadExchange:
    """The exchange of sequence for heads within a row, for one call.

    Tokens come first in a message: the received parts of all ranks of a row are one tensor, in which kernels
    find their tiles without another copy, and the output of kernels is a message without one.

    plan:     the rows as ranks: each holds the tokens of its ranks, one after the other
    rank, degree: this rank's place in its row, and the row's length
    world:    number of all ranks
    q, kv:    query heads of each rank of a row, and the KV heads that these read
    group:    Hq // Hkv
    """

    plan: Plan
    rank: int
    degree: int
    world: int
    q: Side
    kv: Side
    group: int
    _messages: BoundedCache[Any, list[MessageLayout]] = field(
        default_factory=lambda: BoundedCache(MAX_EXCHANGES)
    )

    @classmethod
    def of(cls, plan: Plan, q: Tensor, k: Tensor) -> HeadExchange:
        """Return the exchange of a call, kept with the plan for calls with equally many heads."""
        exchanges, heads = _EXCHANGES.of(plan.derived), (q.shape[1], k.shape[1])
        key = plan.rank, plan.schedule, plan.degree, *heads
        return exchanges.get(key) or exchanges.put(key, cls._build(plan, *heads))

    @classmethod
    def _build(cls, plan: Plan, heads: int, kv_heads: int) -> HeadExchange:
        """Cut the heads of a layer among the ranks of this rank's row."""
        degree = plan.degree_for(heads)
        if degree < plan.world_size and not plan.degree:
            _warn_uneven_heads(heads, plan.world_size, degree)
        q_heads, kv_parts = traffic.trade(heads, kv_heads, degree)
        sides = Side(q_heads, plan.q.s_max), Side(kv_parts, plan.kv.s_max)
        rows = plan.rows(degree, heads)
        return cls(rows, plan.rank % degree, degree, plan.world_size, *sides, heads // kv_heads)

    def messages(self, fields: Sequence[Field | Returned]) -> list[MessageLayout]:
        """Return the layouts of the messages that carry these tensors."""
        batch, kinds = fields[0][0].shape[0], tuple([(side, x.shape[3], x.dtype) for x, side, *_ in fields])
        messages = self._messages.get((batch, kinds))
        return messages or self._messages.put((batch, kinds), self._build_messages(batch, kinds))

    def _build_messages(
        self, batch: int, kinds: tuple[tuple[Side, int, torch.dtype], ...]
    ) -> list[MessageLayout]:
        """Group tensors, each (side, channels, dtype), that can share a message."""
        groups: dict[Any, list[int]] = {}
        for index, (side, channels, dtype) in enumerate(kinds):
            groups.setdefault((side.rows, channels, dtype), []).append(index)
        messages = []
        for (rows, channels, _), indices in groups.items():
            sides = [kinds[index][0] for index in indices]
            chunk_sizes = [
                sum(counts) * rows * batch * channels for counts in zip(*(side.counts for side in sides))
            ]
            token_sizes = self._spread_row(chunk_sizes)
            head_sizes = self._spread_row([chunk_sizes[self.rank]] * self.degree)
            own_counts = [side.counts[self.rank] for side in sides]
            messages.append(
                MessageLayout(
                    indices, sides, own_counts, self.degree, rows, batch, channels, token_sizes, head_sizes
                )
            )
        return messages

    def to_heads(self, *fields: Field) -> Schedule[list[Tensor]]:
        """Exchange tensors by sequence [B, H, S, D] for tensors by heads [B, heads, degree * rows, D]."""
        flights = []
        tensors = [x for x, _ in fields]
        for message in (messages := self.messages(fields)):
            xs = [tensors[index] for index in message.indices]
            flights.append((yield AllToAll(self._pack(message, xs), message.token_sizes, message.head_sizes)))
        for message, flight in zip(messages, flights, strict=True):
            for index, x in zip(message.indices, message.by_tokens((yield Wait(flight))), strict=True):
                tensors[index] = x
        return tensors

    def _pack(self, message: MessageLayout, xs: list[Tensor]) -> Tensor:
        """Copy tensors by sequence [B, H, S, D] into a flat message, one rank of the row after the other."""
        first, *_ = xs
        sent = first.new_empty(sum(message.token_sizes))
        if any(x.shape[2] < message.rows for x in xs):
            sent.zero_()
        for part, heads, _ in self._part_pairs(message, sent, xs):
            part.copy_(heads)
        return sent

    def to_sequence(self, *fields: Returned) -> Schedule[list[Tensor]]:
        """Exchange tensors by heads for tensors by sequence. Heads of several ranks are summed in rank
        order."""
        flights = []
        for message in (messages := self.messages(fields)):
            first, *rest = xs = [fields[index][0] for index in message.indices]
            if not rest:
                sent = _flat(first.permute(2, 0, 1, 3))
            else:
                sent = first.new_empty(sum(message.head_sizes))
                for target, source in zip(message.by_tokens(sent), xs, strict=True):
                    target.copy_(source)
            flights.append((yield AllToAll(sent, message.head_sizes, message.token_sizes)))
        results = [laid_out_as(like, x.shape[3], x.dtype) for x, _, like in fields]
        for message, flight in zip(messages, flights, strict=True):
            self._unpack(message, (yield Wait(flight)), [results[index] for index in message.indices])
        return results

    def _unpack(self, message: MessageLayout, received: Tensor, xs: list[Tensor]) -> None:
        """Copy a received message into tensors by sequence [B, H, S, D]; sum heads that ranks share."""
        for x, side in zip(xs, message.sides, strict=True):
            if side.shared:
                x.zero_()
        for part, heads, side in self._part_pairs(message, received, xs):
            heads.add_(part) if side.shared else heads.copy_(part)

    def _part_pairs(
        self, message: MessageLayout, flat: Tensor, xs: list[Tensor]
    ) -> Iterator[tuple[Tensor, Tensor, Side]]:
        """Pair the parts of a flat message of this rank's tokens with their places in tensors [B, H, S, D].
        Yields (view of the message, view of the tensor, side): of each tensor and rank, or for all ranks at
        once where their heads are even."""
        sides, counts = message.sides, message.own_counts
        if message.is_even:
            ranks = flat.view(self.degree, message.rows, message.batch, sum(counts), message.channels)
            for x, side, part in zip(xs, sides, ranks.split(counts, 3), strict=True):
                heads = x.unflatten(1, (self.degree, len(side.heads[0])))
                yield part[:, : x.shape[2]], heads.permute(1, 3, 0, 2, 4), side
            return
        sizes = message.token_sizes[self._first_rank : self._first_rank + self.degree]
        for rank, chunk in enumerate(flat.split_with_sizes(sizes)):
            counts = [side.counts[rank] for side in sides]
            view = chunk.view(message.rows, message.batch, sum(counts), message.channels)
            for x, side, part in zip(xs, sides, view.split(counts, 2), strict=True):
                heads = x[:, side.heads[rank].start : side.heads[rank].stop]
                yield part[: x.shape[2]], heads.permute(2, 0, 1, 3), side

    @property
    def _first_rank(self) -> int:
        """World rank of the first rank in this rank's row."""
        return self.plan.rank * self.degree

    def _spread_row(self, counts: list[int]) -> list[int]:
        """Extend counts of the row's ranks to all ranks of the world, with zeros."""
        return [0] * self._first_rank + counts + [0] * (self.world - self._first_rank - self.degree)

    def run_between_rows(self, schedule: Schedule[T]) -> Schedule[T]:
        """Run a schedule of rows between the ranks at the same place in each row."""
        answer: Any = None
        while True:
            try:
                request = schedule.send(answer)
            except StopIteration as stop:
                return stop.value
            if isinstance(request, AllToAll):
                sends, recvs = map(self._spread_column, (request.sends, request.recvs))
                request = AllToAll(request.x, sends, recvs, request.target)
            answer = yield request

    def _spread_column(self, counts: Sequence[int]) -> list[int]:
        """Extend counts of rows to all ranks of the world: to those at this rank's place, with zeros."""
        spread = [0] * self.world
        spread[self.rank :: self.degree] = counts
        return spread


MAX_EXCHANGES = 64  # of one plan, and layouts of messages of one exchange
_EXCHANGES: OwnedState[BoundedCache[Any, HeadExchange]] = OwnedState(lambda: BoundedCache(MAX_EXCHANGES))


def _flat(x: Tensor) -> Tensor:
    """Flatten x into contiguous memory; ``reshape`` alone may return a view with gaps, which process groups
    refuse."""
    return x.reshape(-1).contiguous()


def _warn_uneven_heads(heads: int, world: int, degree: int) -> None:
    """Warn once that fewer ranks than the world's exchange heads."""
    if (heads, world) not in _WARNED:
        _WARNED.add((heads, world))
        warnings.warn(
            f"{heads} heads cannot be divided among {world} ranks: rows of {degree} ranks exchange heads, "
            f"and another schedule brings keys to the {world // degree} rows",
            stacklevel=2,
        )
