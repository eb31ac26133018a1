"""All-gather: K and V of every rank in one collective a head group, one attention step over the whole buffer.

Head group g + 1 is gathered while g is computed, so nothing needs merging.  The backward pass gathers again
instead of keeping global K and V, and reduce-scatters dK/dV in float32.
"""

from typing import Any

import torch
from torch import Tensor

from tritoncp.comm import AllGather, ReduceScatter, Schedule, Ticket, Wait
from tritoncp.plan import Plan
from tritoncp.schedules.buffers import dkdv, outputs, pack, room_for_dq, separate, views

HEAD_GROUPS = 2  # one in flight, one computed: more only makes smaller messages


def forward(
    plan: Plan, engine: Any, q: Tensor, k: Tensor, v: Tensor, want_max: bool
) -> Schedule[tuple[Tensor, Tensor, Tensor | None]]:
    """(out [B, Hq, S, E], lse [B, Hq, S], max_scores or None) of this rank's queries."""
    tables = plan.tables(q.device, q.shape[0], q.shape[1])
    out, lse, top = outputs(plan, q, v, want_max)
    groups = head_groups(k.shape[1])
    flight = yield _gather(plan, k, v, groups[0])
    for index, heads in enumerate(groups):
        keys, values = views((yield Wait(flight)), k)
        if index + 1 < len(groups):
            flight = yield _gather(plan, k, v, groups[index + 1])
        mine = query_heads(heads, q, k)
        engine.forward(
            q[:, mine],
            keys,
            values,
            tables,
            out=out[:, mine],
            lse=lse[:, mine],
            max_scores=None if top is None else top[:, mine],
            h_offset=mine.start,
        )()
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
    groups = head_groups(k.shape[1])
    returning: list[Ticket] = []
    flight = yield _gather(plan, k, v, groups[0])
    for index, heads in enumerate(groups):
        keys, values = views((yield Wait(flight)), k)
        if index + 1 < len(groups):
            flight = yield _gather(plan, k, v, groups[index + 1])
        mine = query_heads(heads, q, k)
        args = q[:, mine], keys, values, dout[:, mine], lse[:, mine], delta[:, mine], tables
        engine.dq(*args, dq=dq[:, mine], h_offset=mine.start)()
        grads = keys.new_zeros(keys.shape[2], *keys.shape[:2], k.shape[3] + v.shape[3], dtype=lse.dtype)
        dkdv(engine, args, *views(grads, keys), dq[:, mine], h_offset=mine.start)
        returning.append((yield ReduceScatter(grads)))
    parts = []
    for ticket in returning:
        parts.append((yield Wait(ticket)))
    return dq, *separate(torch.cat(parts, 2), k)


def head_groups(kv_heads: int) -> list[slice]:
    """KV heads cut into at most HEAD_GROUPS pieces.

    >>> head_groups(3), head_groups(1)
    ([slice(0, 2, None), slice(2, 3, None)], [slice(0, 1, None)])
    """
    size = -(-kv_heads // min(kv_heads, HEAD_GROUPS))
    return [slice(start, min(start + size, kv_heads)) for start in range(0, kv_heads, size)]


def query_heads(heads: slice, q: Tensor, k: Tensor) -> slice:
    """The query heads that attend to these KV heads."""
    group = q.shape[1] // k.shape[1]
    return slice(heads.start * group, heads.stop * group)


def _gather(plan: Plan, k: Tensor, v: Tensor, heads: slice) -> AllGather:
    """These heads of K and V, of every rank, in one buffer."""
    return AllGather(pack(k[:, heads], v[:, heads], plan.kv.s_max))
