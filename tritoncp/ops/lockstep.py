"""Calls of all ranks of a simulated world in lockstep, as one autograd function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tritoncp.core.dynamo_boundary import untraced
from tritoncp.core.tracing import fresh_dispatch
from tritoncp.distributed import collectives
from tritoncp.ops import autograd, dispatch
from tritoncp.ops.autograd import BackwardInputs, backward_schedule, forward_schedule
from tritoncp.ops.call import Call
from tritoncp.ops.engine_factory import gradient_buffers, sum_gradients


def attend_in_lockstep(
    calls: Sequence[Call], q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor]
) -> list[list[Tensor]]:
    """Run the calls of all ranks, differentiably; return out, lse and, if requested, max_scores of each.

    With fake or meta tensors each rank's op runs separately: nothing is sent.
    """
    shards = list(zip(q, k, v, strict=True))
    if dispatch.is_traced(q[0]):
        return [_run_op(call, *shard) for call, shard in zip(calls, shards, strict=True)]
    flat = Lockstep.apply(calls, *[x for shard in shards for x in shard], *calls[0].captures)
    return _cut(list(flat), len(flat) // len(calls))


def _run_op(call: Call, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    arguments = call.as_arguments()
    (plan,), captures = dispatch.as_inputs([arguments.plan]), dispatch.as_inputs(arguments.captures)
    results: list[Tensor] = autograd.forward_op(q, k, v, *arguments._replace(plan=plan, captures=captures))
    return results


class Lockstep(torch.autograd.Function):
    """Autograd function of the calls of all ranks. tensors: q, k, v of each rank, then the captures of the
    score_mod, which all ranks share. Results: out, lse and, if requested, max_scores of each rank."""

    @staticmethod
    def forward(ctx: Any, calls: Sequence[Call], *tensors: Tensor) -> tuple[Tensor, ...]:
        shards, captures = (
            _cut([x.resolve_neg() for x in tensors], 3)[: len(calls)],
            tensors[3 * len(calls) :],
        )
        schedules = [partial(forward_schedule, call, *shard) for call, shard in zip(calls, shards)]
        results = _run(schedules, tensors[0])
        rows = [(*shard, out, lse) for shard, (out, lse, _) in zip(shards, results)]
        ctx.save_for_backward(*[x for row in rows for x in row], *captures)
        ctx.calls = [call.with_captures(()) for call in calls]
        ctx.mark_non_differentiable(*[top for *_, top in results if top is not None])
        ctx.set_materialize_grads(False)
        return tuple([x for row in results for x in row if x is not None])

    @staticmethod
    @untraced
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        saved, n = ctx.saved_tensors, len(ctx.calls)
        rows, captures = _cut(saved, 5)[:n], saved[5 * n :]
        calls = [call.with_captures(captures) for call in ctx.calls]
        compute = partial(_gradients, calls, _cut(grads, len(grads) // n), rows)
        results = autograd.refuse_second_derivative(compute, [x for x in (*grads, *saved) if x is not None])
        rest: list[Tensor | None] = [None] * len(captures)
        for place, grad in zip(calls[0].wants, results[3 * n :], strict=True):
            rest[place] = grad
        return None, *results[: 3 * n], *rest


def _gradients(
    calls: Sequence[Call], grads: Sequence[Sequence[Any]], rows: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Compute dq, dk, dv of each rank, then the gradients of captures.

    grads: gradients of the results of each rank; rows: q, k, v, out, lse of each rank
    """
    calls[0].plan.check_sources()
    sums, schedules = gradient_buffers(calls[0], rows[0][4]), []
    for call, (dout, dlse, *_), (q, k, v, out, lse) in zip(calls, grads, rows, strict=True):
        dout = torch.zeros_like(out) if dout is None else dout.resolve_neg()
        inputs = BackwardInputs(dout, dlse, q, k, v, out, lse)
        schedules.append(partial(backward_schedule, call, inputs, sums))
    parts = _run(schedules, rows[0][4])
    return [x for part in parts for x in part] + sum_gradients(calls[0], sums)


def _run(schedules: Sequence[Callable[[], Any]], x: Tensor) -> list[Any]:
    """Make schedules and run them in lockstep on the device of x, as the body of an op runs, which modes of
    torch do not see."""
    with fresh_dispatch():
        generators = [schedule() for schedule in schedules]
        with torch._C._AutoDispatchBelowADInplaceOrView(), autograd.current_device(x):
            return collectives.lockstep(generators)


def _cut(flat: Sequence[Any], width: int) -> list[Any]:
    """Split a sequence into lists of ``width`` items."""
    return [flat[at : at + width] for at in range(0, len(flat), width)]
