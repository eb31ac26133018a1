"""Ulysses: sequence shards become head shards by an all-to-all, and back (arXiv 2309.14509).

Ranks form rows of ``degree`` neighbours. A row exchanges sequence for heads, so that each of its ranks has
all tokens of the row for some query heads and the KV heads that they read; another schedule runs between
rows. ``degree`` need not divide the heads: ranks differ by at most one query head, and a KV head goes to
every rank that reads it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from tritoncp.distributed.collectives import Requests
from tritoncp.distributed.schedules import local, ordered
from tritoncp.distributed.schedules.head_exchange import Field, HeadExchange, Side
from tritoncp.distributed.schedules.schedule import Schedule
from tritoncp.planning.plan import Plan
from tritoncp.planning.selected_rows import SelectedRows
from tritoncp.planning.step_tables import (
    BackwardStep,
    Engine,
    ForwardStep,
    PreparedStep,
    SelectedEngine,
    StepEngine,
    Tables,
)


@dataclass(frozen=True)
class Ulysses:
    """The schedule of Ulysses within rows, and of ``between`` between rows."""

    between: Schedule[StepEngine]

    def forward(
        self, plan: Plan, engine: Engine, q: Tensor, k: Tensor, v: Tensor, want_max: bool
    ) -> Requests[tuple[Tensor, Tensor, Tensor | None]]:
        """Compute (out [B, Hq, S, E], lse [B, Hq, S], max_scores or None) of this rank's queries."""
        exchange = HeadExchange.of(plan, q, k)
        q_heads, keys, values, *indices = yield from exchange.to_heads(
            (q, exchange.q), (k, exchange.kv), (v, exchange.kv), *_selected_indices(engine, exchange, len(q))
        )
        row, own_heads = self._schedule_between_rows(exchange), _engine_of_heads(engine, exchange, *indices)
        computation = row.forward(exchange.plan, own_heads, q_heads, keys, values, want_max)
        whole_out, *whole_stats = yield from exchange.run_between_rows(computation)
        whole = [whole_out, *(x[..., None] for x in whole_stats if x is not None)]
        out, *stats = yield from exchange.to_sequence(*((x, exchange.q, q) for x in whole))
        lse, *top = (x[..., 0].contiguous() for x in stats)
        return out, lse, top[0] if want_max else None

    def backward(
        self, plan: Plan, engine: Engine, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor,
        delta: Tensor,
    ) -> Requests[tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
        """Compute (dq, dk, dv) of this rank's shards; gradients of captures go to the engine's buffers."""
        exchange = HeadExchange.of(plan, q, k)
        dq, dk, dv = yield from self._head_gradients(exchange, engine, q, k, v, dout, lse, delta)
        dq = dq.to(q.dtype)  # once the received tensors are freed
        dq, dk, dv = yield from exchange.to_sequence(
            (dq, exchange.q, q), (dk, exchange.kv, k), (dv, exchange.kv, v)
        )
        return dq, dk, dv

    def _head_gradients(
        self, exchange: HeadExchange, engine: Engine, q: Tensor, k: Tensor, v: Tensor, dout: Tensor,
        lse: Tensor, delta: Tensor,
    ) -> Requests[tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
        """Compute (dq, dk, dv) of this rank's heads, for all tokens of the row. The received tensors are
        freed when it returns, before gradients are sent."""
        stats = torch.stack((lse, delta), -1)
        q_heads, keys, values, whole_dout, whole_stats, *indices = yield from exchange.to_heads(
            (q, exchange.q), (k, exchange.kv), (v, exchange.kv), (dout, exchange.q), (stats, exchange.q),
            *_selected_indices(engine, exchange, len(q)),
        )  # fmt: skip
        whole_lse, whole_delta = (x.contiguous() for x in whole_stats.unbind(-1))
        row, own_heads = self._schedule_between_rows(exchange), _engine_of_heads(engine, exchange, *indices)
        run = row.backward
        if row is local and exchange.kv.shared:  # dK and dV are summed over the ranks that share a KV head
            run = partial(local.backward, key_dtype=lse.dtype)
        computation = run(exchange.plan, own_heads, q_heads, keys, values, whole_dout, whole_lse, whole_delta)
        return (yield from exchange.run_between_rows(computation))

    def _schedule_between_rows(self, exchange: HeadExchange) -> Schedule[StepEngine]:
        """Return the schedule between rows, which is ``local`` if no row reads keys of another."""
        between = self.between
        return local if exchange.plan.derived.reads_only_own_keys and between is not ordered else between


def _selected_indices(engine: Engine, exchange: HeadExchange, batch: int) -> list[Field]:
    """Return the selected keys of this rank's queries as a field of the exchange, if there are some: a head
    of the selection goes to every rank that computes a query head of it."""
    if engine.selected is None:
        return []
    rows = engine.selected.cut(_query_block(engine.selected, exchange))
    heads = [rows.shares_of(own) for own in exchange.q.heads]
    side = Side(heads, exchange.q.rows // rows.query_block)
    return [(rows.indices.expand(batch, -1, -1, -1), side)]


def _query_block(rows: SelectedRows, exchange: HeadExchange) -> int:
    """Return how many queries share a row of the selection if those of several ranks follow each other."""
    return math.gcd(rows.query_block, exchange.q.rows)


def _engine_of_heads(engine: Engine, exchange: HeadExchange, indices: Tensor | None = None) -> StepEngine:
    """Return the engine for this rank's heads. A rank may have only some of the query heads that share a KV
    head, so a step is one launch for each stretch of KV heads with the same number of query heads. indices:
    of the selected keys of the row's queries"""
    own = exchange.q.heads[exchange.rank]
    if engine.selected is not None and indices is not None:
        rows, positions = engine.selected, exchange.plan.positions_on(indices.device)
        rows = rows.for_queries(indices, positions, _query_block(rows, exchange), rows.share_of(own.start))
        engine = cast(SelectedEngine, engine).with_selected(rows)
    cuts = stretches(own, exchange.group)
    return engine.from_head(own.start) if len(cuts) == 1 else StretchesEngine(engine, own.start, cuts)


class StretchesEngine(NamedTuple):
    """An engine for the heads from ``first`` on, cut by :func:`stretches`."""

    engine: Engine
    first: int
    cuts: Sequence[tuple[slice, slice]]

    def forward(self, step: ForwardStep) -> PreparedStep:
        return self._join(lambda engine, q, kv: engine.forward(_cut_step(step, q, kv)))

    def dq(self, step: BackwardStep, dq: Tensor, *, add: bool = False) -> PreparedStep:
        return self._join(lambda engine, q, kv: engine.dq(_cut_step(step, q, kv), dq[:, q], add=add))

    def dkdv(
        self, step: BackwardStep, dk: Tensor, dv: Tensor, dq: Tensor, *, add: bool = False, split: int = 1
    ) -> PreparedStep:
        return self._join(
            lambda engine, q, kv: engine.dkdv(_cut_step(step, q, kv), dk[:, kv], dv[:, kv], dq[:, q], add=add)
        )

    def split(self, q: Tensor, k: Tensor, tables: Tables) -> int:
        return 1

    @property
    def fused(self) -> bool:
        return self.engine.fused

    @property
    def selected(self) -> SelectedRows | None:
        return self.engine.selected

    def with_selected(self, selected: SelectedRows) -> StretchesEngine:
        return self._replace(engine=cast(SelectedEngine, self.engine).with_selected(selected))

    @property
    def v_head_dim(self) -> int | None:
        return self.engine.v_head_dim

    def _join(self, prepare: Callable[[Engine, slice, slice], PreparedStep]) -> PreparedStep:
        """Prepare the launch of each stretch; return a function that starts them in order."""
        launches = [prepare(self.engine.from_head(self.first + q.start), q, kv) for q, kv in self.cuts]

        def run() -> None:
            for launch in launches:
                launch()

        return run


Step = TypeVar("Step", ForwardStep, BackwardStep)


def _cut_step(step: Step, q: slice, kv: slice) -> Step:
    """Cut the tensors of a step to some of their query heads and KV heads."""
    fields = step._asdict()
    cut: dict[str, Any] = {
        name: x[:, kv if name in ("k", "v") else q] for name, x in fields.items() if isinstance(x, Tensor)
    }
    if fields.get("state"):
        cut["state"] = [x[:, q] for x in fields["state"]]
    return step._replace(**cut)


@functools.lru_cache(256)
def stretches(heads: range, group: int) -> list[tuple[slice, slice]]:
    """Cut the query heads ``heads`` of a layer into stretches in which each KV head has the same number of
    query heads. Returns (query heads, KV heads) of each stretch, as slices that count from the first head of
    ``heads``.

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
