"""All-gather: K and V of every rank in one collective a head group, one attention step over the whole buffer.

Head group g + 1 is gathered while g is computed, so nothing needs merging.  The backward pass gathers again
instead of keeping global K and V, and reduce-scatters dK/dV in float32.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritoncp import steps
from tritoncp.comm import AllGather, ReduceScatter, Schedule, Ticket, Wait
from tritoncp.plan import Plan
from tritoncp.schedules.buffers import dkdv, outputs, pack, room_for_dq, separate, views


def forward(
    plan: Plan, engine: Any, q: Tensor, k: Tensor, v: Tensor, want_max: bool
) -> Schedule[tuple[Tensor, Tensor, Tensor | None]]:
    """(out [B, Hq, S, E], lse [B, Hq, S], max_scores or None) of this rank's queries."""
    tables = plan.tables(q.device, q.shape[0], q.shape[1])
    out, lse, top = outputs(plan, q, v, want_max)
    sizes = steps.head_groups(k.shape[1], _nbytes(plan, k, v))
    kv = list(zip(*_groups(sizes, k, v), strict=True))
    mine = _groups(_query_heads(sizes, q, k), q, out, lse, top)
    flight = yield _gather(plan, *kv[0])
    h_offset = 0
    for index, (q_, out_, lse_, top_) in enumerate(zip(*mine, strict=True)):
        keys, values = views((yield Wait(flight)), k)
        if index + 1 < len(sizes):
            flight = yield _gather(plan, *kv[index + 1])
        final = {"out": out_, "lse": lse_, "max_scores": top_}
        engine.forward(q_, keys, values, tables, **final, h_offset=h_offset)()
        h_offset += q_.shape[1]
    return out, lse, top


def backward(
    plan: Plan,
    engine: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> Schedule[tuple[Tensor, Tensor, Tensor]]:
    """dq, and dk and dv in lse's dtype, of this rank's shards; gradients of captures go to the engine's
    buffers."""
    tables = plan.tables(q.device, q.shape[0], q.shape[1])
    delta = torch.empty_like(lse)
    engine.delta(out, dout, dlse, delta)()
    dq = room_for_dq(plan, engine, q, lse.dtype if engine.fused else q.dtype)
    sizes = steps.head_groups(k.shape[1], _nbytes(plan, k, v))
    kv = list(zip(*_groups(sizes, k, v), strict=True))
    mine = _groups(_query_heads(sizes, q, k), q, dout, lse, delta, dq)
    returning: list[Ticket] = []
    flight = yield _gather(plan, *kv[0])
    h_offset = 0
    for index, (q_, dout_, lse_, delta_, dq_) in enumerate(zip(*mine, strict=True)):
        keys, values = views((yield Wait(flight)), k)
        if index + 1 < len(sizes):
            flight = yield _gather(plan, *kv[index + 1])
        args = q_, keys, values, dout_, lse_, delta_, tables
        engine.dq(*args, dq=dq_, h_offset=h_offset)()
        grads = keys.new_zeros(keys.shape[2], *keys.shape[:2], k.shape[3] + v.shape[3], dtype=lse.dtype)
        dkdv(engine, args, *views(grads, keys), dq_, h_offset=h_offset)
        returning.append((yield ReduceScatter(grads)))
        h_offset += q_.shape[1]
    parts = []
    for ticket in returning:
        parts.append((yield Wait(ticket)))
    return dq, *separate(torch.cat(parts, 2), k)


def _nbytes(plan: Plan, k: Tensor, v: Tensor) -> int:
    """Of a rank's K and V as they travel, padded, which is the same for all ranks."""
    b, h, _, d = k.shape
    return plan.kv.s_max * b * h * (d + v.shape[3]) * k.itemsize


def _query_heads(sizes: list[int], q: Tensor, k: Tensor) -> list[int]:
    """How many query heads attend to these KV heads."""
    return [size * (q.shape[1] // k.shape[1]) for size in sizes]


def _groups(sizes: list[int], *tensors: Tensor | None) -> list[Sequence[Any]]:
    """The heads of each tensor [B, H, ...] in pieces; None in as many where there is none."""
    if len(sizes) == 1:
        return [[x] for x in tensors]
    return [[None] * len(sizes) if x is None else x.split_with_sizes(sizes, 1) for x in tensors]


def _gather(plan: Plan, k: Tensor, v: Tensor) -> AllGather:
    """These heads of K and V, of every rank, in one buffer."""
    return AllGather(pack(k, v, plan.kv.s_max))
