"""Ulysses: sequence shards become head shards by an all-to-all, and back (arXiv 2309.14509).

Ranks form rows of ``degree`` neighbours. A row exchanges sequence for heads, so that each of its ranks holds
all of the row's tokens for some query heads and the KV heads these read; another schedule runs between rows.
Heads need not divide: cuts are even to within one query head, and a KV head goes to every rank that reads it.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from tritoncp.distributed.collectives import AllToAll, Schedule, Swap, Wait
from tritoncp.distributed.schedules import local, ring
from tritoncp.distributed.schedules.buffers import laid_out_as
from tritoncp.planning import traffic
from tritoncp.planning.plan import Plan

T = TypeVar("T")

_WARNED: set[tuple[int, int]] = set()


def with_inner(inner: ModuleType) -> SimpleNamespace:
    """Combine Ulysses within rows with the schedule ``inner`` between rows."""
    return SimpleNamespace(forward=partial(forward, inner), backward=partial(backward, inner))


def forward(
    inner: Any, plan: Plan, engine: Any, q: Tensor, k: Tensor, v: Tensor, want_max: bool
) -> Schedule[tuple[Tensor, Tensor, Tensor | None]]:
    """(out [B, Hq, S, E], lse [B, Hq, S], max_scores or None) of this rank's queries."""
    exchange = HeadExchange.of(plan, q, k)
    tensors = yield from exchange.heads((q, exchange.q), (k, exchange.kv), (v, exchange.kv))
    row = local if exchange.plan.world_size == 1 else inner
    inside = row.forward(exchange.plan, HeadSubsetEngine(engine, exchange), *tensors, want_max)
    whole_out, *stats = yield from exchange.between_rows(inside)
    flights = []
    for x in stats if want_max else stats[:1]:
        flights.append((yield exchange.statistic(x)))
    out = laid_out_as(q, v.shape[3])
    yield from exchange.sequence((whole_out, exchange.q, out))
    own = []
    for flight in flights:
        own.append(exchange.own(q, (yield Wait(flight))))
    return out, own[0], own[1] if want_max else None


def backward(
    inner: Any, plan: Plan, engine: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    dout: Tensor, dlse: Tensor | None,
) -> Schedule[tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """(dq, dk, dv) of this rank's shards; gradients of captures go to engine's buffers."""
    exchange = HeadExchange.of(plan, q, k)
    delta = torch.empty_like(lse)
    engine.delta(out, dout, dlse, delta)()
    grads = yield from _by_heads(inner, exchange, engine, q, k, v, dout, lse, delta)
    own = [laid_out_as(x, x.shape[3], grad.dtype) for x, grad in zip((q, k, v), grads, strict=True)]
    yield from exchange.sequence(*zip(grads, (exchange.q, exchange.kv, exchange.kv), own, strict=True))
    return own[0], own[1], own[2]


def _by_heads(
    inner: Any, exchange: HeadExchange, engine: Any, q: Tensor, k: Tensor, v: Tensor, dout: Tensor,
    lse: Tensor, delta: Tensor,
) -> Schedule[tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """(dq, dk, dv) of this rank's heads, all tokens. The received tensors are freed when it returns."""
    stats = [(x[..., None], exchange.q) for x in (lse, delta)]
    tensors = yield from exchange.heads(
        (q, exchange.q), (k, exchange.kv), (v, exchange.kv), (dout, exchange.q), *stats
    )
    *whole_qkv, whole_dout = tensors[:4]
    whole_lse, whole_delta = (x[..., 0].contiguous() for x in tensors[4:])
    alone = ring if exchange.kv.shared else local  # a ring of one leaves dK and dV in float32, to be summed
    row = alone if exchange.plan.world_size == 1 else inner
    heads = HeadSubsetEngine(engine, exchange, whole_delta)
    inside = row.backward(exchange.plan, heads, *whole_qkv, whole_dout, whole_lse, whole_dout, None)
    dq, dk, dv = yield from exchange.between_rows(inside)
    return dq.to(q.dtype), dk, dv


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
        return list(map(len, self.heads))

    @functools.cached_property
    def shared(self) -> bool:
        """Whether several ranks read the same head."""
        return traffic.share(self.heads)

    @functools.cached_property
    def readers(self) -> int:
        """The number of neighbours that read the same heads, where it is the same for all heads; else 0."""
        ranks, n = len(self.heads), len(self.heads[0])
        readers = self.heads.count(self.heads[0])
        groups = [range(i // readers * n, (i // readers + 1) * n) for i in range(ranks)]
        return readers if self.heads == groups and ranks % readers == 0 else 0


Field = tuple[Tensor, Side]  # x [B, H, S, D], or [B, this rank's heads, degree * rows, D]
Returned = tuple[Tensor, Side, Tensor]  # the latter, and room for the former


@dataclass(frozen=True, eq=False)
class Message:
    """One message of an exchange: tensors of equally many tokens and channels, as [tokens, B, heads,
    channels] for each rank.

    places:   indices of its tensors in the exchange
    sides:    the side of each tensor, which has its heads
    mine:     number of this rank's heads of each tensor
    degree:   ranks of the row
    rows:     tokens of a rank, padding included; batch, channels: B and D of the tensors
    counts:   elements for each rank of the world: its heads of this rank's tokens
    own:      elements from each rank of the world: this rank's heads of its tokens
    """

    places: list[int]
    sides: list[Side]
    mine: list[int]
    degree: int
    rows: int
    batch: int
    channels: int
    counts: list[int]
    own: list[int]

    @functools.cached_property
    def readers(self) -> int:
        """The largest number of neighbours that read the same heads; 0 where it varies between a tensor's
        heads."""
        every = [side.readers for side in self.sides]
        return max(every) if all(every) else 0

    def by_ranks(self, x: Tensor, at: int) -> Tensor:
        """View a side's tensor [B, H, S, D] in message order, [degree // readers, readers, S, B, heads, D],
        in one operation."""
        n, readers, shared = self.mine[at], self.readers, self.sides[at].shared
        b, head, row, channel = x.stride()
        ranks = (n * head, 0) if shared else (n * head * readers, n * head)
        shape = (self.degree // readers, readers, x.shape[2], self.batch, n, self.channels)
        return x.as_strided(shape, (*ranks, row, b, head, channel))

    def parts(self, sent: Tensor) -> Sequence[Tensor]:
        """Split a message by tensors, each part in the order of :meth:`by_ranks`."""
        first = self.degree // self.readers, self.readers
        view = sent.view(*first, self.rows, self.batch, sum(self.mine), self.channels)
        return _cut(view, self.mine, 4)

    def by_tokens(self, flat: Tensor) -> Sequence[Tensor]:
        """View this rank's heads of all tokens of the row: for each tensor [B, heads, degree * rows, D]."""
        view = flat.view(self.degree * self.rows, self.batch, sum(self.mine), self.channels)
        return _cut(view.permute(1, 2, 0, 3), self.mine, 1)


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
    _messages: dict[Any, list[Message]] = field(default_factory=dict)
    _statistics: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)  # sends, takes

    @classmethod
    def of(cls, plan: Plan, q: Tensor, k: Tensor) -> HeadExchange:
        heads = q.shape[1], k.shape[1]
        return plan.compute_once(("trade", plan.rank, plan.degree, *heads), lambda: cls._of(plan, *heads))

    @classmethod
    def _of(cls, plan: Plan, heads: int, kv_heads: int) -> HeadExchange:
        degree = plan.degree_for(heads)
        if degree < plan.world_size and not plan.degree:
            _warn_uneven_heads(heads, plan.world_size, degree)
        q_heads, kv_parts = traffic.trade(heads, kv_heads, degree)
        sides = Side(q_heads, plan.q.s_max), Side(kv_parts, plan.kv.s_max)
        rows = plan.rows(degree, heads)
        return cls(rows, plan.rank % degree, degree, plan.world_size, *sides, heads // kv_heads)

    def messages(self, fields: Sequence[Field | Returned]) -> list[Message]:
        """The messages that carry these tensors."""
        batch, kinds = fields[0][0].shape[0], tuple([(side, x.shape[3], x.dtype) for x, side, *_ in fields])
        if (batch, kinds) not in self._messages:
            self._messages[batch, kinds] = self._build_messages(batch, kinds)
        return self._messages[batch, kinds]

    def _build_messages(self, batch: int, kinds: tuple[tuple[Side, int, torch.dtype], ...]) -> list[Message]:
        groups: dict[Any, list[int]] = {}
        for place, (side, channels, dtype) in enumerate(kinds):
            groups.setdefault((side.rows, channels, dtype), []).append(place)
        messages = []
        for (rows, channels, _), places in groups.items():
            sides = [kinds[place][0] for place in places]
            chunk_sizes = [
                sum(same) * rows * batch * channels for same in zip(*(side.counts for side in sides))
            ]
            counts, own = self._row(chunk_sizes), self._row([chunk_sizes[self.rank]] * self.degree)
            own_counts = [side.counts[self.rank] for side in sides]
            messages.append(
                Message(places, sides, own_counts, self.degree, rows, batch, channels, counts, own)
            )
        return messages

    def heads(self, *fields: Field) -> Schedule[list[Tensor]]:
        """Exchange tensors [B, H, S, D] of every rank of the row for this rank's heads of each, [B, heads,
        degree * rows, D]."""
        flights = []
        tensors = [x for x, _ in fields]
        for message in (messages := self.messages(fields)):
            xs = [tensors[place] for place in message.places]
            flights.append((yield AllToAll(self._packed(message, xs), message.counts, message.own)))
        for message, flight in zip(messages, flights, strict=True):
            for place, x in zip(message.places, message.by_tokens((yield Wait(flight))), strict=True):
                tensors[place] = x
        return tensors

    def _packed(self, message: Message, xs: list[Tensor]) -> Tensor:
        """Concatenate the heads of each rank of the row, one rank after the other."""
        full = all(x.shape[2] == message.rows for x in xs)
        if message.readers and full:
            return _flat(torch.cat([message.by_ranks(x, at) for at, x in enumerate(xs)], 4))
        sent = xs[0].new_empty(sum(message.counts))
        if not full:
            sent.zero_()
        for target, source, _ in self._matched(message, sent, xs, message.readers > 0):
            target.copy_(source)
        return sent

    def sequence(self, *fields: Returned) -> Schedule[None]:
        """Exchange tensors [B, this rank's heads, degree * rows, D] for all heads of this rank's tokens, into
        the third tensor of each field [B, H, S, D]. Heads that several ranks computed are summed in rank
        order."""
        flights = []
        for message in (messages := self.messages(fields)):
            xs = [fields[place][0] for place in message.places]
            if len(xs) == 1:
                sent = _flat(xs[0].permute(2, 0, 1, 3))
            else:
                sent = xs[0].new_empty(sum(message.own))
                for target, source in zip(message.by_tokens(sent), xs, strict=True):
                    target.copy_(source)
            flights.append((yield AllToAll(sent, message.own, message.counts)))
        for message, flight in zip(messages, flights, strict=True):
            self._unpacked(message, (yield Wait(flight)), [fields[place][2] for place in message.places])

    def _unpacked(self, message: Message, came: Tensor, xs: list[Tensor]) -> None:
        """Copy the received chunk of each rank of the row into tensors [B, H, S, D]."""
        for x, side in zip(xs, message.sides, strict=True):
            if side.shared:
                x.zero_()
        for source, target, side in self._matched(message, came, xs, message.readers == 1):
            target.add_(source) if side.shared else target.copy_(source)

    def _matched(
        self, message: Message, flat: Tensor, xs: list[Tensor], whole_row: bool
    ) -> Iterator[tuple[Tensor, Tensor, Side]]:
        """Pair the parts of a message of this rank's tokens with their places in tensors [B, H, S, D]: views
        of both, and the side, for each tensor; one rank after the other unless ``whole_row``."""
        if whole_row:
            for at, (x, part) in enumerate(zip(xs, message.parts(flat), strict=True)):
                part = part if x.shape[2] == message.rows else part[:, :, : x.shape[2]]
                yield part, message.by_ranks(x, at), message.sides[at]
            return
        counts = message.counts[self._first : self._first + self.degree]
        for rank, chunk in enumerate(flat.split_with_sizes(counts)):
            sizes = [side.counts[rank] for side in message.sides]
            view = chunk.view(message.rows, message.batch, sum(sizes), message.channels)
            parts = view.permute(1, 2, 0, 3).split(sizes, 1)
            for x, side, part in zip(xs, message.sides, parts, strict=True):
                own = x[:, side.heads[rank].start : side.heads[rank].stop]
                yield part[:, :, : x.shape[2]], own, side

    def statistic(self, x: Tensor) -> AllToAll:
        """Send a statistic [B, this rank's heads, degree * rows] to the ranks that own its tokens, to each
        rank [B, heads, rows]; where B is 1, in the final memory order."""
        b, n, _ = x.shape
        if b not in self._statistics:
            chunk_sizes = [heads * b * self.q.rows for heads in self.q.counts]
            self._statistics[b] = self._row([chunk_sizes[self.rank]] * self.degree), self._row(chunk_sizes)
        sent = _flat(x.view(b, n, self.degree, self.q.rows).permute(2, 0, 1, 3))
        return AllToAll(sent, *self._statistics[b])

    def own(self, q: Tensor, came: Tensor) -> Tensor:
        """Join the received parts of :meth:`statistic` to a statistic of this rank's queries [B, H, S]."""
        b, heads, s, _ = q.shape
        rows, counts = self.q.rows, self.q.counts
        if b == 1:
            joined = came.view(1, heads, rows)
        else:
            parts = came.split_with_sizes([n * b * rows for n in counts])
            joined = torch.cat([part.view(b, n, rows) for n, part in zip(counts, parts, strict=True)], 1)
        return joined if s == rows else joined[:, :, :s].contiguous()

    @property
    def _first(self) -> int:
        """The rank of the row's first rank in the world."""
        return self.plan.rank * self.degree

    def _row(self, counts: list[int]) -> list[int]:
        """Extend counts of the row's ranks to all ranks of the world."""
        return [0] * self._first + counts + [0] * (self.world - self._first - self.degree)

    def between_rows(self, schedule: Schedule[T]) -> Schedule[T]:
        """Run a schedule of rows between the ranks at the same place in each row."""
        answer: Any = None
        while True:
            try:
                request = schedule.send(answer)
            except StopIteration as stop:
                return stop.value
            match request:
                case Swap(sends, takes):
                    sends, takes = ([(self._peer(to), x) for to, x in part] for part in (sends, takes))
                    request = Swap(sends, takes)
                case AllToAll(x, sends, takes):
                    request = AllToAll(x, self._column(sends), self._column(takes))
            answer = yield request

    def _peer(self, row: int) -> int:
        return row * self.degree + self.rank

    def _column(self, counts: Sequence[int]) -> list[int]:
        spread = [0] * self.world
        spread[self.rank :: self.degree] = counts
        return spread


def _flat(x: Tensor) -> Tensor:
    """Flatten x into contiguous memory; ``reshape`` alone may return a view with gaps, which process groups
    refuse."""
    return x.reshape(-1).contiguous()


def _cut(x: Tensor, sizes: list[int], dim: int) -> Sequence[Tensor]:
    return x.split_with_sizes(sizes, dim) if len(sizes) > 1 else (x,)


def _warn_uneven_heads(heads: int, world: int, degree: int) -> None:
    if (heads, world) not in _WARNED:
        _WARNED.add((heads, world))
        warnings.warn(
            f"{heads} heads do not go round {world} ranks: rows of {degree} trade heads, and another "
            f"schedule brings keys to the {world // degree} rows",
            stacklevel=2,
        )


@dataclass(frozen=True, eq=False)
class HeadSubsetEngine:
    """An engine for some heads of a layer. A rank need not hold all query heads that share a KV head, so a
    step is a launch for each stretch of KV heads with equally many query heads.

    computed: rowsum(out * dout) - dlse, in the backward pass
    """

    engine: Any
    exchange: HeadExchange
    computed: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tables: Any, *, out: Tensor, lse: Tensor,
                max_scores: Tensor | None = None, state: Sequence[Tensor] = (), h_offset: int = 0,
                **keep: bool) -> Callable[[], None]:  # fmt: skip
        return _all(
            self.engine.forward(
                q, k, v, tables, out=out, lse=lse, max_scores=top, state=state or None, h_offset=first, **keep
            )
            for first, (q, out, lse, top, *state), (k, v) in self._pieces(
                (q, out, lse, max_scores, *state), (k, v)
            )
        )

    def delta(self, out: Tensor, dout: Tensor, dlse: Tensor | None, delta: Tensor) -> Callable[[], None]:
        assert self.computed is not None
        return _all([partial(delta.copy_, self.computed)])

    def dq(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, tables: Any, *,
           dq: Tensor, add: bool = False, h_offset: int = 0) -> Callable[[], None]:  # fmt: skip
        return _all(
            self.engine.dq(q, k, v, dout, lse, delta, tables, dq=dq, add=add, h_offset=first)
            for first, (q, dout, lse, delta, dq), (k, v) in self._pieces((q, dout, lse, delta, dq), (k, v))
        )

    def dkdv(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, tables: Any, *,
             dk: Tensor, dv: Tensor, dq: Tensor, add: bool = False,
             h_offset: int = 0) -> Callable[[], None]:  # fmt: skip
        return _all(
            self.engine.dkdv(q, k, v, dout, lse, delta, tables, dk=dk, dv=dv, dq=dq, add=add, h_offset=first)
            for first, (q, dout, lse, delta, dq), (k, v, dk, dv) in self._pieces(
                (q, dout, lse, delta, dq), (k, v, dk, dv)
            )
        )

    def split(self, q: Tensor, k: Tensor, tables: Any) -> int:
        return 1

    @property
    def fused(self) -> bool:
        return bool(self.engine.fused)

    def _pieces(
        self, rows: Sequence[Tensor | None], keys: Sequence[Tensor]
    ) -> list[tuple[int, Sequence[Any], Sequence[Any]]]:
        """Cut tensors of query heads and of KV heads where the number of query heads for a KV head changes:
        for each piece the layer's index of its first query head, and its part of each tensor."""
        own = self.exchange.q.heads[self.exchange.rank]
        cuts = stretches(own, self.exchange.group)
        if len(cuts) == 1:
            return [(own.start, rows, keys)]
        pieces: list[tuple[int, Sequence[Any], Sequence[Any]]] = []
        for a, b in cuts:
            parts = [None if x is None else x[:, a] for x in rows]
            pieces.append((own.start + a.start, parts, [x[:, b] for x in keys]))
        return pieces


@functools.lru_cache(256)
def stretches(heads: range, group: int) -> list[tuple[slice, slice]]:
    """Cut query heads ``heads`` of a layer so that all KV heads of a piece have equally many: (query heads,
    KV heads) of each piece, counted from the first local one.

    >>> for q, kv in stretches(range(3, 13), 4):
    ...     print(q.start, q.stop, kv.start, kv.stop)
    0 1 0 1
    1 9 1 3
    9 10 3 4
    """
    count = [len(list(same)) for _, same in itertools.groupby(heads, lambda head: head // group)]
    pieces, q, kv = [], 0, 0
    for size, same in itertools.groupby(count):
        kv_heads = len(list(same))
        pieces.append((slice(q, q + size * kv_heads), slice(kv, kv + kv_heads)))
        q, kv = q + size * kv_heads, kv + kv_heads
    return pieces


def _all(launches: Iterable[Callable[[], Any]]) -> Callable[[], None]:
    items = list(launches)
    if len(items) == 1:
        return items[0]

    def run() -> None:
        for launch in items:
            launch()

    return run
