"""Fetch: one all-to-all of exactly the remote keys that the queries of each rank see.

Attention to the local keys is computed during the all-to-all. In the backward pass, the float32 gradients
return by the mirrored all-to-all and are added in rank order. ``plan.fetch`` has the rows.

Two ranks and a causal mask of four blocks: rank 0 has blocks 0 and 3, and sees the keys of all blocks; rank 1
has blocks 1 and 2, and sees block 0 of rank 0. Step 0 of each rank reads its keys; step 1 continues from the
state of step 0 with the fetched keys.

>>> from tritoncp import causal, create_block_mask, make_plan
>>> plan = make_plan(create_block_mask(causal(), 1, 1, 512, 512), world_size=2, rank=0, schedule="fetch")
>>> for rank in range(2):
...     own, fetch = plan.kv.slots[rank][0], plan.for_rank(rank).fetch
...     keys = [(slots[:, 1] // 128).tolist() for slots in (own, fetch.slots[0])]
...     print(f"rank {rank}: keys {keys[0]}, then {keys[1]}; rows to each rank {fetch.sends}")
rank 0: keys [0, 3], then [1, 2]; rows to each rank (0, 128)
rank 1: keys [1, 2], then [0]; rows to each rank (256, 0)
"""

import torch
from torch import Tensor

from tritoncp.distributed.collectives import AllToAll, Requests
from tritoncp.distributed.profiler_ranges import step_range
from tritoncp.distributed.schedules.buffers import (
    dkdv,
    empty_dq,
    new_state,
    outputs,
    pack,
    separate,
    views,
)
from tritoncp.planning.plan import Plan
from tritoncp.planning.step_tables import BackwardStep, ForwardStep, StepEngine


def forward(
    plan: Plan, engine: StepEngine, q: Tensor, k: Tensor, v: Tensor, want_max: bool
) -> Requests[tuple[Tensor, Tensor, Tensor | None]]:
    """Compute (out [B, Hq, S, E], lse [B, Hq, S], max_scores or None) of this rank's queries."""
    out, lse, top = outputs(plan, engine, q, v, want_max)
    results = out, lse, top, new_state(out, lse)
    near, far = (plan.tables_for(q, where) for where in (plan.rank, "fetched"))
    has_remote = sum(plan.fetch.takes) > 0
    flight = yield request_rows(plan, pack(k, v, k.shape[2]))
    with step_range(plan, 0):
        engine.forward(ForwardStep(q, k, v, near, *results, store_state=has_remote))()
    fetched = yield flight
    if has_remote:
        keys, values = views(fetched, k)
        with step_range(plan, 1):
            engine.forward(ForwardStep(q, keys, values, far, *results, load_state=True))()
    return out, lse, top


def backward(
    plan: Plan, engine: StepEngine, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor
) -> Requests[tuple[Tensor, Tensor, Tensor]]:
    """Compute (dq, dk, dv) of this rank's shards, in lse's dtype; gradients of captures go to the engine's
    buffers."""
    near, far = (plan.tables_for(q, where) for where in (plan.rank, "fetched"))
    has_remote = sum(plan.fetch.takes) > 0
    local = pack(k, v, k.shape[2])
    flight = yield request_rows(plan, local)
    dq = empty_dq(plan, q, lse.dtype)
    home = torch.zeros_like(local, dtype=lse.dtype)
    step = BackwardStep(q, k, v, dout, lse, delta, near)
    with step_range(plan, 0, "dq"):
        engine.dq(step, dq)()
    with step_range(plan, 0, "dkdv"):
        dkdv(engine, step, *views(home, k), dq)
    fetched = yield flight
    grads = torch.zeros_like(fetched, dtype=lse.dtype)
    step = BackwardStep(q, *views(fetched, k), dout, lse, delta, far)
    if has_remote:
        with step_range(plan, 1, "dkdv"):
            dkdv(engine, step, *views(grads, k), dq)
    flight = yield AllToAll(grads, plan.fetch.takes, plan.fetch.sends)
    if has_remote:
        with step_range(plan, 1, "dq"):  # while they return
            engine.dq(step, dq, add=True)()
    add_home(plan, home, (yield flight))
    return dq, *separate(home, k)


def request_rows(plan: Plan, local: Tensor) -> AllToAll:
    """Start the all-to-all that receives the remote rows of K and V for this rank, and sends the rows that
    other ranks read."""
    rows = plan.fetch_rows(local.device)
    return AllToAll(number_rows(plan, local).index_select(0, rows), plan.fetch.sends, plan.fetch.takes)


def number_rows(plan: Plan, local: Tensor) -> Tensor:
    """View [S, B, h, D + E] by the row numbers of ``plan.fetch``: unchanged, or as [B * S, 1, h, D + E]."""
    return local.transpose(0, 1).flatten(0, 1)[:, None] if plan.fetch.batched else local


def add_home(plan: Plan, home: Tensor, grads: Tensor) -> None:
    """Add the returned gradients one rank after the other, so that the order of every sum is fixed."""
    for rows, part in plan.returned_parts(grads):
        if plan.fetch.batched:
            home[rows % len(home), rows // len(home)] += part[:, 0]
        else:
            home[rows] += part
