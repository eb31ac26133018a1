"""Local: one step over the rank's shard of keys, without messages. It serves a world of one rank, and plans
in which no rank reads keys of another."""

from __future__ import annotations

import torch
from torch import Tensor

from tritoncp.distributed.collectives import Requests
from tritoncp.distributed.profiler_ranges import step_range
from tritoncp.distributed.schedules.buffers import (
    dkdv,
    dq_of_one_step,
    empty_grad,
    outputs,
)
from tritoncp.planning.plan import Plan
from tritoncp.planning.step_tables import BackwardStep, ForwardStep, StepEngine


def forward(
    plan: Plan, engine: StepEngine, q: Tensor, k: Tensor, v: Tensor, want_max: bool
) -> Requests[tuple[Tensor, Tensor, Tensor | None]]:
    """Compute (out [B, Hq, S, E], lse [B, Hq, S], max_scores or None) of this rank's queries."""
    out, lse, top = outputs(plan, engine, q, v, want_max)
    tables = plan.tables_for(q, plan.rank)
    with step_range(plan, 0):
        engine.forward(ForwardStep(q, k, v, tables, out, lse, top))()
    return out, lse, top
    yield  # a schedule is a generator


def backward(
    plan: Plan, engine: StepEngine, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor,
    key_dtype: torch.dtype | None = None,
) -> Requests[tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """Compute (dq, dk, dv) in the dtypes of q, k, v, or dk and dv in ``key_dtype``; gradients of captures go
    to the engine's buffers."""
    step = BackwardStep(q, k, v, dout, lse, delta, plan.tables_for(q, plan.rank))
    dq = dq_of_one_step(plan, engine, q, lse)
    dk, dv = (empty_grad(x, key_dtype or x.dtype, plan.kv.is_filled(plan.rank)) for x in (k, v))
    with step_range(plan, 0, "dq"):
        engine.dq(step, dq)()
    with step_range(plan, 0, "dkdv"):
        dkdv(engine, step, dk, dv, dq)
    return dq, dk, dv
    yield  # a schedule is a generator
