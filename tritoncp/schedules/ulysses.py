"""Ulysses: sequence shards become head shards by an all-to-all, and back (arXiv 2309.14509).

Ranks stand in rows of ``degree`` neighbours. A row trades sequence for heads, so that each of its ranks holds
all of the row's tokens for some query heads and the KV heads these read; another schedule runs between rows.
Heads need not divide: cuts are even to within one query head, and a KV head goes to every rank that reads it.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from tritoncp import steps
from tritoncp.comm import AllToAll, Schedule, Swap, Wait
from tritoncp.plan import Plan
from tritoncp.schedules import local, ring
from tritoncp.sharding import lengthen

T = TypeVar("T")

_TOLD: set[tuple[int, int]] = set()


def over(inner: ModuleType) -> SimpleNamespace:
    """The schedule that runs ``inner`` between rows."""
    return SimpleNamespace(forward=partial(forward, inner), backward=partial(backward, inner))


def forward(
    inner: Any, plan: Plan, engine: Any, q: Tensor, k: Tensor, v: Tensor, want_max: bool
) -> Schedule[tuple[Tensor, Tensor, Tensor | None]]:
    """(out [B, Hq, S, E], lse [B, Hq, S], max_scores or None) of this rank's queries."""
    trade = Trade.of(plan, q, k)
    (whole_q,) = yield from trade.heads([q], trade.q_heads)
    keys = yield from trade.heads([k, v], trade.kv_heads)
    row = local if trade.plan.world_size == 1 else inner
    inside = row.forward(trade.plan, Heads(engine, trade), whole_q, *keys, want_max)
    whole_out, whole_lse, top = yield from trade.between_rows(inside)
    some = [whole_out, *[_channels(x, q.dtype) for x in (whole_lse, top) if x is not None]]
    back = yield from trade.sequence(some, trade.q_heads, q.shape[2])
    out, lse, *tops = _parts(back, some)
    out = out.clone(memory_format=torch.contiguous_format)  # a result may be edited: it is nobody's view
    lse, *tops = (_numbers(x, whole_lse.dtype) for x in (lse, *tops))
    return out, lse, tops[0] if tops else None


def backward(
    inner: Any, plan: Plan, engine: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    dout: Tensor, dlse: Tensor | None,
) -> Schedule[tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """(dq, dk, dv) of this rank's shards, in lse's dtype; gradients of captures go to engine's buffers."""
    trade = Trade.of(plan, q, k)
    delta = torch.empty_like(lse)
    engine.delta(out, dout, dlse, delta)()
    some = [q, dout, _channels(lse, q.dtype), _channels(delta, q.dtype)]
    whole_q, whole_dout, *stats = yield from trade.heads(some, trade.q_heads)
    # One head alone is not copied on arrival: between its rows lie numbers, which leave none a multiple of 16
    # bytes behind the other, as descriptors want them.
    whole_q, whole_dout = whole_q.contiguous(), whole_dout.contiguous()
    whole_lse, whole_delta = (_numbers(x, lse.dtype) for x in stats)
    keys = yield from trade.heads([k, v], trade.kv_heads)
    alone = ring if trade.shares else local  # a ring of one leaves dK and dV in float32, to be summed
    row = alone if trade.plan.world_size == 1 else inner
    heads = Heads(engine, trade, whole_delta)
    inside = row.backward(trade.plan, heads, whole_q, *keys, whole_dout, whole_lse, whole_dout, None)
    dq, *dkv = yield from trade.between_rows(inside)
    dq = yield from trade.sequence([dq.to(q.dtype)], trade.q_heads, q.shape[2])
    total = yield from trade.total(dkv, k.shape[2], k.shape[1])
    dk, dv = _parts(total, dkv)
    return dq, dk, dv


@dataclass(frozen=True, eq=False)
class Trade:
    """One call's exchange within a row.

    plan:     the rows as ranks: each holds the tokens of its ranks, one after the other
    rank, degree: this rank's place in its row, and the row's length
    world:    all ranks
    q_heads:  query heads of each rank of a row; kv_heads: the KV heads they read; group: Hq // Hkv
    """

    plan: Plan
    rank: int
    degree: int
    world: int
    q_heads: list[range]
    kv_heads: list[range]
    group: int

    @classmethod
    def of(cls, plan: Plan, q: Tensor, k: Tensor) -> Trade:
        heads = q.shape[1], k.shape[1]
        return plan._once(("trade", plan.rank, plan.degree, *heads), lambda: cls._of(plan, *heads))

    @classmethod
    def _of(cls, plan: Plan, heads: int, kv_heads: int) -> Trade:
        degree = plan.degree_for(heads)
        if degree < plan.world_size and not plan.degree:
            _say(heads, plan.world_size, degree)
        rows = plan.rows(degree, heads)
        parts = steps.trade(heads, kv_heads, degree)
        return cls(rows, plan.rank % degree, degree, plan.world_size, *parts, heads // kv_heads)

    @functools.cached_property
    def shares(self) -> bool:
        """Whether several ranks of a row read the same KV head."""
        return steps.share(self.kv_heads)

    def dealt(self, device: torch.device) -> Tensor:
        """The KV heads of the row's first rank, of the second, ...: int64, kept on the device."""
        made = partial(torch.tensor, [*itertools.chain.from_iterable(self.kv_heads)], device=device)
        return self.plan._once(("dealt", *self.kv_heads, device), made)

    def heads(self, xs: Sequence[Tensor], whose: Sequence[range]) -> Schedule[list[Tensor]]:
        """Tensors [B, H, S, D], [B, H, S, E], ... of every rank of the row, in one message -> of each
        [B, this rank's heads, degree * s_max, its channels]."""
        s_max = (self.plan.q if whose is self.q_heads else self.plan.kv).s_max // self.degree
        sent = _joined([lengthen(x, 2, s_max).transpose(0, 1) for x in xs])  # [H, B, s_max, D + E + ...]
        if whose is self.kv_heads and self.shares:
            sent = sent.index_select(0, self.dealt(sent.device))
        mine = len(whose[self.rank])
        takes = self._row([mine] * self.degree)
        flight = yield AllToAll(sent.contiguous(), self._row(map(len, whose)), takes)
        came = (yield Wait(flight)).view(self.degree, mine, *sent.shape[1:])
        return [x.permute(2, 1, 0, 3, 4).flatten(2, 3) for x in _parts(came, xs)]

    def sequence(self, xs: Sequence[Tensor], whose: Sequence[range], rows: int) -> Schedule[Tensor]:
        """Tensors [B, this rank's heads, degree * s_max, D], [..., E], ... -> this rank's tokens in one
        [B, heads, rows, D + E + ...], of the heads of the row's first rank, of the second, ..."""
        cut = [x.unflatten(2, (self.degree, -1)).permute(2, 1, 0, 3, 4) for x in xs]
        sent = _joined(cut).flatten(0, 1)  # [degree * heads, B, s_max, D + E + ...]
        takes = self._row(map(len, whose))
        flight = yield AllToAll(sent.contiguous(), self._row([cut[0].shape[1]] * self.degree), takes)
        return (yield Wait(flight)).transpose(0, 1)[:, :, :rows]

    def total(self, xs: Sequence[Tensor], rows: int, heads: int) -> Schedule[Tensor]:
        """Gradients of keys, summed over the ranks that read a head, in rank order: [B, heads, rows, D+E]."""
        came = yield from self.sequence(xs, self.kv_heads, rows)
        if not self.shares:
            return came
        total = came.new_zeros(len(came), heads, *came.shape[2:])
        for part, whose in zip(came.split([len(part) for part in self.kv_heads], 1), self.kv_heads):
            total[:, whose.start : whose.stop] += part
        return total

    def _row(self, counts: Iterable[int]) -> list[int]:
        """Counts of the row's ranks among all ranks of the world."""
        first = self.plan.rank * self.degree
        return [0] * first + list(counts) + [0] * (self.world - first - self.degree)

    def between_rows(self, schedule: Schedule[T]) -> Schedule[T]:
        """A schedule of rows, spoken between the ranks that stand at the same place in them."""
        answer: Any = None
        while True:
            try:
                asked = schedule.send(answer)
            except StopIteration as stop:
                return stop.value
            match asked:
                case Swap(sends, takes, aside):
                    sends, takes = ([(self._peer(to), x) for to, x in part] for part in (sends, takes))
                    asked = Swap(sends, takes, aside)
                case AllToAll(x, sends, takes):
                    asked = AllToAll(x, self._column(sends), self._column(takes))
            answer = yield asked

    def _peer(self, row: int) -> int:
        return row * self.degree + self.rank

    def _column(self, counts: Sequence[int]) -> list[int]:
        spread = [0] * self.world
        spread[self.rank :: self.degree] = counts
        return spread


def _joined(xs: Sequence[Tensor]) -> Tensor:
    """Tensors that differ in their channels, the last dimension, as one."""
    return torch.cat(xs, -1) if len(xs) > 1 else xs[0]  # type: ignore[arg-type]


def _parts(x: Tensor, xs: Sequence[Tensor]) -> Sequence[Tensor]:
    """x [..., all channels] cut as ``xs`` were joined."""
    return x.split_with_sizes([part.shape[-1] for part in xs], -1) if len(xs) > 1 else [x]


def _channels(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers [B, H, S] as channels [B, H, S, n] of another dtype, bit by bit."""
    return x.unsqueeze(3).view(dtype)


def _numbers(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same back again, in memory of its own."""
    made = x.new_empty(x.shape[:3], dtype=dtype)
    _channels(made, x.dtype).copy_(x)
    return made


def _say(heads: int, world: int, degree: int) -> None:
    if (heads, world) not in _TOLD:
        _TOLD.add((heads, world))
        warnings.warn(
            f"{heads} heads do not go round {world} ranks: rows of {degree} trade heads, and another "
            f"schedule brings keys to the {world // degree} rows",
            stacklevel=2,
        )


@dataclass(frozen=True, eq=False)
class Heads:
    """An engine for some heads of a layer: query heads that share a KV head need not all be here, so a step
    is a launch for each stretch of KV heads with equally many query heads.

    computed: rowsum(out * dout) - dlse, in the backward pass
    """

    engine: Any
    trade: Trade
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
    ) -> Iterator[tuple[int, list[Any], list[Any]]]:
        """Tensors of query heads and of KV heads, cut where the number of heads that share one changes: first
        of a piece's query heads, of all in the layer, and its part of each tensor."""
        mine = self.trade.q_heads[self.trade.rank]
        cuts = stretches(mine, self.trade.group)
        if len(cuts) == 1:
            yield mine.start, list(rows), list(keys)
            return
        for a, b in cuts:
            parts = [None if x is None else x[:, a] for x in rows]
            yield mine.start + a.start, parts, [x[:, b] for x in keys]


@functools.lru_cache(256)
def stretches(heads: range, group: int) -> list[tuple[slice, slice]]:
    """Query heads ``heads`` of a layer cut so that all KV heads of a piece have equally many: (query heads,
    KV heads) of each piece, counted from the first one here.

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
    made = list(launches)

    def run() -> None:
        for launch in made:
            launch()

    return run
