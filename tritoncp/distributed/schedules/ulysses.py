"""Ulysses: sequence shards become head shards by an all-to-all, and back (arXiv 2309.14509).

Ranks form rows of ``degree`` neighbours. A row exchanges sequence for heads, so that each of its ranks holds
all of the row's tokens for some query heads and the KV heads these read; another schedule runs between rows.
Heads need not divide: cuts are even to within one query head, and a KV head goes to every rank that reads it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor

from tritoncp.distributed.collectives import Schedule, Wait
from tritoncp.distributed.schedules import local, ordered
from tritoncp.distributed.schedules.buffers import laid_out_as
from tritoncp.distributed.schedules.head_exchange import HeadExchange
from tritoncp.planning.plan import Plan
from tritoncp.planning.step_tables import BackwardStep, ForwardStep


def with_inner(inner: ModuleType) -> SimpleNamespace:
    """Combine Ulysses within rows with the schedule ``inner`` between rows."""
    return SimpleNamespace(forward=partial(forward, inner), backward=partial(backward, inner))


def forward(
    inner: Any, plan: Plan, engine: Any, q: Tensor, k: Tensor, v: Tensor, want_max: bool
) -> Schedule[tuple[Tensor, Tensor, Tensor | None]]:
    """Compute (out [B, Hq, S, E], lse [B, Hq, S], max_scores or None) of this rank's queries."""
    exchange = HeadExchange.of(plan, q, k)
    tensors = yield from exchange.to_heads((q, exchange.q), (k, exchange.kv), (v, exchange.kv))
    row = _schedule_between_rows(inner, exchange)
    computation = row.forward(exchange.plan, HeadSubsetEngine(engine, exchange), *tensors, want_max)
    whole_out, *stats = yield from exchange.run_between_rows(computation)
    flights = []
    for x in stats if want_max else stats[:1]:
        flights.append((yield exchange.statistic_request(x)))
    out = laid_out_as(q, v.shape[3])
    yield from exchange.to_sequence((whole_out, exchange.q, out))
    own_stats = []
    for flight in flights:
        own_stats.append(exchange.join_statistic(q, (yield Wait(flight))))
    return out, own_stats[0], own_stats[1] if want_max else None


def backward(
    inner: Any, plan: Plan, engine: Any, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor,
    delta: Tensor,
) -> Schedule[tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """Compute (dq, dk, dv) of this rank's shards; gradients of captures go to the engine's buffers."""
    exchange = HeadExchange.of(plan, q, k)
    grads = yield from _head_gradients(inner, exchange, engine, q, k, v, dout, lse, delta)
    own_grads = [laid_out_as(x, x.shape[3], grad.dtype) for x, grad in zip((q, k, v), grads, strict=True)]
    yield from exchange.to_sequence(
        *zip(grads, (exchange.q, exchange.kv, exchange.kv), own_grads, strict=True)
    )
    return own_grads[0], own_grads[1], own_grads[2]


def _head_gradients(
    inner: Any, exchange: HeadExchange, engine: Any, q: Tensor, k: Tensor, v: Tensor, dout: Tensor,
    lse: Tensor, delta: Tensor,
) -> Schedule[tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """Compute (dq, dk, dv) of this rank's heads, for all tokens of the row. The received tensors are local
    and freed before gradients are sent."""
    stats = [(x[..., None], exchange.q) for x in (lse, delta)]
    tensors = yield from exchange.to_heads(
        (q, exchange.q), (k, exchange.kv), (v, exchange.kv), (dout, exchange.q), *stats
    )
    *whole_qkv, whole_dout = tensors[:4]
    whole_lse, whole_delta = (x[..., 0].contiguous() for x in tensors[4:])
    row, heads = _schedule_between_rows(inner, exchange), HeadSubsetEngine(engine, exchange)
    run = row.backward
    if row is local and exchange.kv.shared:  # dK and dV are summed over the ranks that share a KV head
        run = partial(local.backward, key_dtype=lse.dtype)
    computation = run(exchange.plan, heads, *whole_qkv, whole_dout, whole_lse, whole_delta)
    dq, dk, dv = yield from exchange.run_between_rows(computation)
    return dq.to(q.dtype), dk, dv


def _schedule_between_rows(inner: Any, exchange: HeadExchange) -> Any:
    """Return the schedule between rows: ``local`` where no row reads keys of another."""
    return local if exchange.plan.derived.reads_only_own_keys and inner is not ordered else inner


@dataclass(frozen=True, eq=False)
class HeadSubsetEngine:
    """An engine for a part of the heads of a layer. A rank may hold some of the query heads that share a KV
    head, so a step is one launch for each stretch of KV heads with equally many query heads."""

    engine: Any
    exchange: HeadExchange

    def forward(self, step: ForwardStep, *, h_offset: int = 0) -> Callable[[], None]:
        rows = step.q, step.out, step.lse, step.max_scores, *(step.state or ())
        return _join_launches(
            self.engine.forward(
                step._replace(q=q, k=k, v=v, out=out, lse=lse, max_scores=top, state=state or None),
                h_offset=first,
            )
            for first, (q, out, lse, top, *state), (k, v) in self._pieces(rows, (step.k, step.v))
        )

    def dq(
        self, step: BackwardStep, dq: Tensor, *, add: bool = False, h_offset: int = 0
    ) -> Callable[[], None]:
        return _join_launches(
            self.engine.dq(part, own, add=add, h_offset=first)
            for first, part, own, _ in self._parts(step, dq)
        )

    def dkdv(
        self, step: BackwardStep, dk: Tensor, dv: Tensor, dq: Tensor, *, add: bool = False, h_offset: int = 0
    ) -> Callable[[], None]:
        return _join_launches(
            self.engine.dkdv(part, *grads, own, add=add, h_offset=first)
            for first, part, own, grads in self._parts(step, dq, dk, dv)
        )

    def _parts(
        self, step: BackwardStep, dq: Tensor, *grads: Tensor
    ) -> Iterator[tuple[int, BackwardStep, Tensor, Sequence[Tensor]]]:
        """Cut a backward step by :meth:`_pieces`: the first query head of each, its inputs, its part of dq,
        its parts of the gradients of keys and values."""
        rows, keys = (step.q, step.dout, step.lse, step.delta, dq), (step.k, step.v, *grads)
        for first, (q, dout, lse, delta, own), (k, v, *parts) in self._pieces(rows, keys):
            yield first, BackwardStep(q, k, v, dout, lse, delta, step.tables), own, parts

    def split(self, q: Tensor, k: Tensor, tables: Any) -> int:
        return 1

    @property
    def fused(self) -> bool:
        return bool(self.engine.fused)

    def _pieces(
        self, rows: Sequence[Tensor | None], keys: Sequence[Tensor]
    ) -> list[tuple[int, Sequence[Any], Sequence[Any]]]:
        """Cut tensors of query heads and of KV heads by :func:`stretches`: for each, the layer's index of its
        first query head, its parts of ``rows``, its parts of ``keys``."""
        own = self.exchange.q.heads[self.exchange.rank]
        cuts = stretches(own, self.exchange.group)
        if len(cuts) == 1:
            return [(own.start, rows, keys)]
        return [
            (own.start + a.start, [x if x is None else x[:, a] for x in rows], [x[:, b] for x in keys])
            for a, b in cuts
        ]


@functools.lru_cache(256)
def stretches(heads: range, group: int) -> list[tuple[slice, slice]]:
    """Cut the query heads ``heads`` of a layer into stretches with equally many query heads for each KV head.
    Returns (query heads, KV heads) of each stretch, as slices that count from the first head of ``heads``.

    group: query heads of the layer that share a KV head

    >>> for q, kv in stretches(range(3, 13), 4):
    ...     print(q.start, q.stop, kv.start, kv.stop)
    0 1 0 1
    1 9 1 3
    9 10 3 4
    """
    counts = [len(list(members)) for _, members in itertools.groupby(heads, lambda head: head // group)]
    pieces, q, kv = [], 0, 0
    for size, equal_counts in itertools.groupby(counts):
        kv_heads = len(list(equal_counts))
        pieces.append((slice(q, q + size * kv_heads), slice(kv, kv + kv_heads)))
        q, kv = q + size * kv_heads, kv + kv_heads
    return pieces


def _join_launches(launches: Iterable[Callable[[], Any]]) -> Callable[[], None]:
    """Return a function that starts these launches in order."""
    items = list(launches)

    def run() -> None:
        for launch in items:
            launch()

    return run
