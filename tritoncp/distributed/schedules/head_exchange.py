"""Exchange of sequence shards for head shards among the ranks of a row, and back.

Each rank of a row sends its tokens of a head to the rank that computes that head, and receives all tokens of
the row for the heads that it computes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from tritoncp.core.log_lines import area_logger, log_decision
from tritoncp.distributed.collectives import AllToAll, Requests
from tritoncp.distributed.schedules.buffers import laid_out_as
from tritoncp.planning.costs import traffic
from tritoncp.planning.plan import Plan

T = TypeVar("T")
messages_log = area_logger("messages")


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

    @functools.cached_property
    def sharers(self) -> int:
        """Number of neighbouring ranks that have the same heads, if all ranks have equally many heads and
        share them with equally many ranks; else 0."""
        ranks, count, sharers = len(self.heads), self.counts[0], self.heads.count(self.heads[0])
        starts = [rank // sharers * count for rank in range(ranks)]
        is_even = self.heads == [range(start, start + count) for start in starts]
        return sharers if is_even and ranks % sharers == 0 else 0


# A tensor by sequence is [B, H, S, D]: all heads of this rank's tokens. By heads it is [B, this rank's heads,
# degree * rows, D]: all tokens of the row.
Field = tuple[Tensor, Side]  # a tensor by sequence or by heads
Returned = tuple[Tensor, Side, Tensor]  # a tensor by heads, its side, and one with the layout by sequence


@dataclass(frozen=True, eq=False)
class HeadExchange:
    """The exchange of sequence for heads within a row, for one call.

    Tokens come first in a message, so that nothing is copied: kernels read the received parts of all ranks of
    a row as one tensor, and their output is the next message.

    plan:     the plan between rows: each row counts as a rank, with the tokens of its ranks one after the
              other
    rank, degree: this rank's place in its row, and the row's length
    world:    number of all ranks
    q, kv:    query heads of each rank of a row, and the KV heads that they read
    group:    Hq // Hkv
    """

    plan: Plan
    rank: int
    degree: int
    world: int
    q: Side
    kv: Side
    group: int

    @classmethod
    def of(cls, plan: Plan, q: Tensor, k: Tensor) -> HeadExchange:
        """Return the exchange of a call. The plan keeps it for calls with the same numbers of heads."""
        heads = q.shape[1], k.shape[1]
        key = "exchange", plan.rank, plan.schedule, plan.degree, *heads
        return plan.keep(key, lambda: cls._build(plan, *heads))

    @classmethod
    def _build(cls, plan: Plan, heads: int, kv_heads: int) -> HeadExchange:
        """Divide the heads of a layer among the ranks of this rank's row."""
        degree = plan.degree_for(heads)
        if degree < plan.world_size and not plan.degree:
            log_decision(
                messages_log, "%d heads do not divide among %d ranks: rows of %d ranks exchange heads",
                heads, plan.world_size, degree,
            )  # fmt: skip
        q_heads, kv_parts = traffic.trade(heads, kv_heads, degree)
        sides = Side(q_heads, plan.q.s_max), Side(kv_parts, plan.kv.s_max)
        rows = plan.rows(degree, heads)
        return cls(rows, plan.rank % degree, degree, plan.world_size, *sides, heads // kv_heads)

    def to_heads(self, *fields: Field) -> Requests[list[Tensor]]:
        """Exchange tensors by sequence [B, H, S, D] for tensors by heads [B, heads, degree * rows, D]."""
        flights, results = [], []
        for x, side in fields:
            tokens, heads = self._sizes(side, len(x))
            flights.append((yield AllToAll(self._pack(x, side), tokens, heads)))
        for (x, side), flight in zip(fields, flights, strict=True):
            received = yield flight
            shape = self.degree * side.rows, len(x), side.counts[self.rank], x.shape[3]
            results.append(received.view(shape).permute(1, 2, 0, 3))
        return results

    def _sizes(self, side: Side, batch: int) -> tuple[list[int], list[int]]:
        """Count, for each rank of the world, the rows [D] of a message with this rank's tokens for that
        rank's heads, and with that rank's tokens for this rank's heads."""
        sizes = [count * side.rows * batch for count in side.counts]
        return self._spread_row(sizes), self._spread_row([sizes[self.rank]] * self.degree)

    def _pack(self, x: Tensor, side: Side) -> Tensor:
        """Copy a tensor by sequence into a message, one rank of the row after the other."""
        sent = x.new_empty(sum(side.counts) * side.rows * len(x), x.shape[3])
        if x.shape[2] < side.rows:
            sent.zero_()
        for part, heads in self._part_pairs(side, sent, x):
            part.copy_(heads)
        return sent

    def to_sequence(self, *fields: Returned) -> Requests[list[Tensor]]:
        """Exchange tensors by heads for tensors by sequence."""
        flights, results = [], []
        for x, side, _ in fields:
            tokens, heads = self._sizes(side, len(x))
            # ``reshape`` alone may return a view with gaps, which process groups refuse.
            sent = x.permute(2, 0, 1, 3).reshape(sum(heads), x.shape[3]).contiguous()
            flights.append((yield AllToAll(sent, heads, tokens)))
        del sent
        for (x, side, like), flight in zip(fields, flights, strict=True):
            received = yield flight
            results.append(self._unpack(received, side, laid_out_as(like, x.shape[3], x.dtype)))
        return results

    def _unpack(self, received: Tensor, side: Side, x: Tensor) -> Tensor:
        """Copy a message into a tensor by sequence; sum heads of several ranks in rank order."""
        if side.shared:
            x.zero_()
        for part, heads in self._part_pairs(side, received, x):
            heads.add_(part) if side.shared else heads.copy_(part)
        return x

    def _part_pairs(self, side: Side, message: Tensor, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pair the parts of a message of this rank's tokens with their places in a tensor [B, H, S, D]: for
        each rank, or at once for all ranks whose heads differ. Ranks that share heads follow in their order.
        """
        batch, _, tokens, channels = x.shape
        if sharers := side.sharers:
            groups, count = self.degree // sharers, side.counts[0]
            parts = message.view(groups, sharers, side.rows, batch, count, channels)[:, :, :tokens]
            places = x.unflatten(1, (groups, count)).permute(1, 3, 0, 2, 4)
            for part in parts.unbind(1):
                yield part, places
            return
        sizes = [count * side.rows * batch for count in side.counts]
        for heads, part in zip(side.heads, message.split(sizes), strict=True):
            view = part.view(side.rows, batch, len(heads), channels)
            yield view[:tokens], x[:, heads.start : heads.stop].permute(2, 0, 1, 3)

    @property
    def _first_rank(self) -> int:
        """World rank of the first rank in this rank's row."""
        return self.plan.rank * self.degree

    def _spread_row(self, counts: list[int]) -> list[int]:
        """Extend counts of the row's ranks to all ranks of the world, with zeros."""
        return [0] * self._first_rank + counts + [0] * (self.world - self._first_rank - self.degree)

    def run_between_rows(self, schedule: Requests[T]) -> Requests[T]:
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
        """Extend counts per row to all ranks of the world: zero for ranks at another place of their row."""
        spread = [0] * self.world
        spread[self.rank :: self.degree] = counts
        return spread
