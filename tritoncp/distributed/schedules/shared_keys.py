"""Exchange of keys and values that chunks of a layer's queries share. They are sent once and read by the
attention of each chunk, which sends nothing; their gradients are summed over chunks in float32 and return
once.

A buffer holds rows [n, heads, D + E]: under allgather all ranks' shards, under fetch the rank's rows and
then the fetched ones. The batch rows of a token follow each other; if batch rows fetch different rows, each
row belongs to one batch row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritoncp.core.records import replace
from tritoncp.distributed.collectives import AllGather, AllToAll, ReduceScatter, start_in_graph
from tritoncp.distributed.profiler_ranges import step_range
from tritoncp.distributed.schedules.buffers import dkdv, dq_of_one_step, outputs, pack, separate, views
from tritoncp.distributed.schedules.fetch import number_rows
from tritoncp.planning.derived import DerivedTables
from tritoncp.planning.plan import Plan
from tritoncp.planning.step_tables import BackwardStep, ForwardStep, StepEngine, Tables

SCHEDULES = "allgather", "fetch"  # schedules that send keys to the queries


def check_schedule(plan: Plan) -> None:
    """Raise ValueError for a plan whose keys chunks cannot share."""
    if plan.world_size == 1 or plan.schedule not in SCHEDULES:
        raise ValueError(
            f"a graph whose chunks share keys was called with a plan of schedule {plan.schedule!r} on "
            f"{plan.world_size} ranks; make the plan with schedule={' or '.join(map(repr, SCHEDULES))}, or "
            "cut the graph with repeat=True"
        )


def reading_part(plan: Plan, index: int, count: int) -> Plan:
    """Return the plan of one of ``count`` chunks of the queries, which reads the whole plan's buffer of
    keys."""
    key = "reading", index, count, plan.rank, plan.schedule, plan.first_row
    part: Plan | None = plan.derived.parts.get(key)
    if part is None:
        chunk = plan.part(index, count)
        derived = DerivedTables(chunk.mask, chunk.q, chunk.kv, whole=plan.derived)
        part = plan.derived.parts.put(key, replace(chunk, derived=derived, handle=None))
    return part


def send_keys(plan: Plan, k: Tensor, v: Tensor, group: Any) -> Tensor:
    """Start the exchange of keys and values; return the buffer, which is filled after a wait for it."""
    if plan.schedule == "allgather":
        shard = pack(k, v, plan.kv.s_max)
        return start_in_graph(AllGather(shard.flatten(0, 1)), group)
    own = number_rows(plan, pack(k, v, k.shape[2]))
    buffer = own.new_empty(len(own) + sum(plan.fetch.takes), *own.shape[1:])
    buffer[: len(own)] = own
    rows = own.index_select(0, plan.fetch_rows(own.device))
    request = AllToAll(rows, plan.fetch.sends, plan.fetch.takes, buffer[len(own) :])
    return start_in_graph(request, group, buffer).flatten(0, 1)


def forward(
    plan: Plan, engine: StepEngine, q: Tensor, keys: Tensor, values: Tensor, want_max: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute (out, lse, max_scores or None) of a chunk's queries; keys and values: of :func:`views_of`."""
    out, lse, top = outputs(plan, engine, q, values, want_max)
    with step_range(plan, 0):
        engine.forward(ForwardStep(q, keys, values, _tables(plan, q), out, lse, top))()
    return out, lse, top


def backward(
    plan: Plan, engine: StepEngine, q: Tensor, keys: Tensor, values: Tensor, dout: Tensor, lse: Tensor,
    delta: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute dq of a chunk's queries, and their part of the gradients of all rows of the buffer, in lse's
    dtype: [n, heads, D] and [n, heads, E]."""
    dq = dq_of_one_step(plan, engine, q, lse)
    step = BackwardStep(q, keys, values, dout, lse, delta, _tables(plan, q))
    with step_range(plan, 0, "dq"):
        engine.dq(step, dq)()
    batch = _batch_of_row(plan, q.shape[0])
    heads, rows = keys.shape[1:3]
    grads = [lse.new_zeros(rows, batch, heads, x.shape[3]) for x in (keys, values)]
    dk, dv = (x.permute(1, 2, 0, 3).expand(q.shape[0], -1, -1, -1) for x in grads)
    with step_range(plan, 0, "dkdv"):
        dkdv(engine, step, dk, dv, dq)
    return dq, grads[0].flatten(0, 1), grads[1].flatten(0, 1)


def send_gradients(plan: Plan, dk: Sequence[Tensor], dv: Sequence[Tensor], k: Tensor, group: Any) -> Tensor:
    """Sum the gradients of all chunks, and start to return them to the ranks of the keys; return the buffer
    for :func:`land_gradients`."""
    d = k.shape[3]
    total = torch.cat([dk[0], dv[0]], 2)
    for one, other in zip(dk[1:], dv[1:], strict=True):
        total[..., :d] += one
        total[..., d:] += other
    if plan.schedule == "allgather":
        return start_in_graph(ReduceScatter(total), group)
    rows = total.unflatten(0, (-1, _batch_of_row(plan, k.shape[0])))
    length = _local_rows(plan, k)
    buffer = rows.new_empty(length + sum(plan.fetch.sends), *rows.shape[1:])
    buffer[:length] = rows[:length]
    request = AllToAll(rows[length:], plan.fetch.takes, plan.fetch.sends, buffer[length:])
    return start_in_graph(request, group, buffer).flatten(0, 1)


def land_gradients(plan: Plan, returned: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return dk and dv of this rank's shards, in the dtype of the buffer. Under fetch the returned gradients
    are added one rank after the other, so that the order of every sum is fixed."""
    batch = _batch_of_row(plan, k.shape[0])
    rows = returned.unflatten(0, (-1, batch))
    if plan.schedule == "allgather":
        return separate(rows, k)
    length = _local_rows(plan, k)
    home = rows[:length].clone()
    for places, part in plan.returned_parts(rows[length:]):
        home[places] += part
    if plan.fetch.batched:
        home = home.view(k.shape[0], k.shape[2], *home.shape[2:]).transpose(0, 1)
    return separate(home, k)


def views_of(plan: Plan, buffer: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """View the keys [B, heads, rows, D] and the values [B, heads, rows, E] of a buffer, for queries of B
    batch rows and D channels."""
    return views(buffer.unflatten(0, (-1, _batch_of_row(plan, q.shape[0]))), q)


def _tables(plan: Plan, q: Tensor) -> Tables:
    buffer = "gathered" if plan.schedule == "allgather" else "held"
    return plan.tables_for(q, buffer)


def _batch_of_row(plan: Plan, batch: int) -> int:
    """Return the number of batch rows that a row of the buffer has."""
    return 1 if plan.schedule == "fetch" and plan.fetch.batched else batch


def _local_rows(plan: Plan, k: Tensor) -> int:
    """Return the number of rows of a fetch's buffer that are this rank's shard."""
    return k.shape[2] * (k.shape[0] if plan.fetch.batched else 1)
