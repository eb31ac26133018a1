"""Ordered: all keys that a rank reads, in global order, in one step (kernel option ``invariant``).

The keys are fetched; under Ulysses they come by the exchange of heads. Then out, lse and dq of a row have the
same bits as on one rank with the whole sequence. If each rank also has all queries, as under Ulysses, dk and
dv have them too.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from tritoncp.distributed.collectives import AllToAll, Requests
from tritoncp.distributed.schedules import fetch, local
from tritoncp.distributed.schedules.buffers import outputs, pack, separate, views
from tritoncp.planning.ordered_step import OrderedStep, ordered_step
from tritoncp.planning.plan import Plan
from tritoncp.planning.step_tables import SelectedEngine, StepEngine


def forward(
    plan: Plan, engine: StepEngine, q: Tensor, k: Tensor, v: Tensor, want_max: bool
) -> Requests[tuple[Tensor, Tensor, Tensor | None]]:
    """Compute (out [B, Hq, S, E], lse [B, Hq, S], max_scores or None) of this rank's queries."""
    step = ordered_step(plan)
    q_rows, kv_rows = step.rows(q.device)
    keys, values = yield from _send_keys(plan, k, v)
    own_q, *own_keys = _take(q, q_rows), _take(keys, kv_rows), _take(values, kv_rows)
    engine = _engine_of_rows(engine, step, q_rows)
    results = yield from local.forward(step.plan, engine, own_q, own_keys[0], own_keys[1], want_max)
    out, lse, top = outputs(plan, engine, q, v, want_max)
    for x, result, padding in zip((out, lse, top), results, (0, -torch.inf, -torch.inf), strict=True):
        if x is not None and result is not None:
            x.copy_(_put_back(result, q_rows, q.shape[2], padding))
    return out, lse, top


def backward(
    plan: Plan, engine: StepEngine, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor
) -> Requests[tuple[Tensor, Tensor, Tensor]]:
    """Compute (dq, dk, dv) of this rank's shards, in lse's dtype; gradients of captures go to the engine's
    buffers."""
    step = ordered_step(plan)
    q_rows, kv_rows = step.rows(q.device)
    keys, values = yield from _send_keys(plan, k, v)
    own_q, own_dout, own_lse, own_delta = (_take(x, q_rows) for x in (q, dout, lse, delta))
    own_k, own_v = (_take(x, kv_rows) for x in (keys, values))
    engine = _engine_of_rows(engine, step, q_rows)
    dq, *dkv = yield from local.backward(
        step.plan, engine, own_q, own_k, own_v, own_dout, own_lse, own_delta, lse.dtype
    )
    dk, dv = (_put_back(x, kv_rows, keys.shape[2], 0) for x in dkv)
    return _put_back(dq, q_rows, q.shape[2], 0), *(yield from _send_gradients(plan, dk, dv, k))


def _engine_of_rows(engine: StepEngine, step: OrderedStep, q_rows: Tensor) -> StepEngine:
    """Return the engine for the queries of a step, ``q_rows`` of this rank's."""
    if engine.selected is None:
        return engine
    selected, batch = engine.selected.cut(1), len(q_rows)
    indices = selected.indices.expand(max(batch, len(selected.indices)), -1, -1, -1)
    positions = step.plan.positions_on(indices.device)
    return cast(SelectedEngine, engine).with_selected(
        selected.for_queries(_take(indices, q_rows), positions, 1)
    )


def _send_keys(plan: Plan, k: Tensor, v: Tensor) -> Requests[tuple[Tensor, Tensor]]:
    """Return this rank's keys and values, followed by the rows that it fetches."""
    if plan.world_size == 1:
        return k, v
    own = pack(k, v, k.shape[2])
    flight = yield fetch.request_rows(plan, own)
    return views(torch.cat([fetch.number_rows(plan, own), (yield flight)]), k)


def _send_gradients(plan: Plan, dk: Tensor, dv: Tensor, k: Tensor) -> Requests[tuple[Tensor, Tensor]]:
    """Send the gradients of fetched rows home; return the gradients of this rank's keys and values."""
    if plan.world_size == 1:
        return dk, dv
    own = k.shape[2]
    if plan.fetch.batched:  # each row belongs to one batch row, and is zero in the other batch rows
        dk, dv, own = dk.sum(0, keepdim=True), dv.sum(0, keepdim=True), own * k.shape[0]
    packed = pack(dk, dv, dk.shape[2])
    home = packed[:own]
    if plan.fetch.batched:
        home = home.view(k.shape[0], k.shape[2], *home.shape[2:]).transpose(0, 1)
    flight = yield AllToAll(packed[own:], plan.fetch.takes, plan.fetch.sends)
    fetch.add_home(plan, home, (yield flight))
    return separate(home, k)


def _take(x: Tensor, rows: Tensor) -> Tensor:
    """Copy rows [Bp, n] of x [B, H, S, ...] into dense memory."""
    rows = rows.clamp(max=x.shape[2] - 1)
    shape = *x.shape[:2], rows.shape[1], *x.shape[3:]
    return x.gather(2, _index(rows, shape))


def _put_back(x: Tensor, rows: Tensor, length: int, padding: float) -> Tensor:
    """Write x [B, H, n, ...] to rows [Bp, n] of a new tensor of ``length`` rows, ``padding`` in others."""
    whole = x.new_full((*x.shape[:2], length + 1, *x.shape[3:]), padding)  # the last row is for NO_ROW
    return whole.scatter_(2, _index(rows.clamp(max=length), x.shape), x)[:, :, :length]


def _index(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """View rows [Bp, n] as the index of a tensor [B, H, n, ...]."""
    return rows[:, None].reshape(len(rows), 1, -1, *[1] * (len(shape) - 3)).expand(shape)
