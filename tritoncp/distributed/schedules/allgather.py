"""All-gather: one collective for each head group of K and V, and one attention step over the gathered buffer.

Head group g + 1 is gathered while g is computed. One step reads the keys of all ranks, so no results are
merged. The backward pass gathers again instead of keeping global K and V; a reduce-scatter adds the ranks' dK
and dV in float32.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from tritoncp.distributed.collectives import AllGather, ReduceScatter, Requests, Ticket
from tritoncp.distributed.profiler_ranges import step_range
from tritoncp.distributed.schedules.buffers import dkdv, dq_of_one_step, outputs, pack, separate, views
from tritoncp.planning.costs import traffic
from tritoncp.planning.plan import Plan
from tritoncp.planning.step_tables import BackwardStep, Engine, ForwardStep


def forward(
    plan: Plan, engine: Engine, q: Tensor, k: Tensor, v: Tensor, want_max: bool
) -> Requests[tuple[Tensor, Tensor, Tensor | None]]:
    """Compute (out [B, Hq, S, E], lse [B, Hq, S], max_scores or None) of this rank's queries."""
    tables = plan.tables_for(q)
    out, lse, top = outputs(plan, engine, q, v, want_max)
    kv, q_groups = _groups(plan, k, v, q, out, lse, top)
    flight = yield _gather(plan, *kv[0])
    engines = _engines(engine, q_groups)
    for index, (q_, out_, lse_, top_) in enumerate(q_groups):
        keys, values = views((yield flight), k)
        if index + 1 < len(kv):
            flight = yield _gather(plan, *kv[index + 1])
        step = ForwardStep(q_, keys, values, tables, out_, lse_, top_)
        with step_range(plan, index):
            engines[index].forward(step)()
    return out, lse, top


def backward(
    plan: Plan, engine: Engine, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor
) -> Requests[tuple[Tensor, Tensor, Tensor]]:
    """Compute dq, and dk and dv in lse's dtype, of this rank's shards; gradients of captures go to the
    engine's buffers."""
    tables = plan.tables_for(q)
    dq = dq_of_one_step(plan, engine, q, lse)
    kv, q_groups = _groups(plan, k, v, q, dout, lse, delta, dq)
    returning: list[Ticket] = []
    flight = yield _gather(plan, *kv[0])
    engines = _engines(engine, q_groups)
    for index, (q_, dout_, lse_, delta_, dq_) in enumerate(q_groups):
        keys, values = views((yield flight), k)
        if index + 1 < len(kv):
            flight = yield _gather(plan, *kv[index + 1])
        step = BackwardStep(q_, keys, values, dout_, lse_, delta_, tables)
        with step_range(plan, index, "dq"):
            engines[index].dq(step, dq_)()
        grads = keys.new_zeros(keys.shape[2], *keys.shape[:2], k.shape[3] + v.shape[3], dtype=lse.dtype)
        with step_range(plan, index, "dkdv"):
            dkdv(engines[index], step, *views(grads, keys), dq_)
        returning.append((yield ReduceScatter(grads)))
    parts = []
    for ticket in returning:
        parts.append((yield ticket))
    return dq, *separate(torch.cat(parts, 2), k)


Pieces = list[tuple[Any, ...]]  # each head group's part of every tensor


def _groups(plan: Plan, k: Tensor, v: Tensor, q: Tensor, *rest: Tensor | None) -> tuple[Pieces, Pieces]:
    """Split tensors [B, H, ...] into head groups: K and V by KV heads, q and the rest by query heads. Returns
    the parts of each group, None for an absent tensor."""
    b, kv_heads, _, d = k.shape
    # The padded size of a message, which is equal on all ranks.
    nbytes = plan.kv.s_max * b * kv_heads * (d + v.shape[3]) * k.itemsize
    sizes = traffic.head_groups(kv_heads, nbytes)
    if len(sizes) == 1 or not v.shape[3]:  # a latent is expanded for all heads at once
        return [(k, v)], [(q, *rest)]
    group = q.shape[1] // kv_heads
    return _cut(sizes, k, v), _cut([size * group for size in sizes], q, *rest)


def _engines(engine: Engine, q_groups: Pieces) -> list[Engine]:
    """Make the engine of each head group."""
    if len(q_groups) == 1:
        return [engine]
    ends = itertools.accumulate(q.shape[1] for q, *_ in q_groups)
    return [engine, *map(engine.from_head, list(ends)[:-1])]


def _cut(sizes: list[int], *tensors: Tensor | None) -> Pieces:
    """Split tensors [B, H, ...] into head groups of these sizes."""
    parts = [[None] * len(sizes) if x is None else x.split_with_sizes(sizes, 1) for x in tensors]
    return list(zip(*parts, strict=True))


def _gather(plan: Plan, k: Tensor, v: Tensor) -> AllGather:
    """Gather these heads of K and V from every rank, in one buffer."""
    return AllGather(pack(k, v, plan.kv.s_max))
