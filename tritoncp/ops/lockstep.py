"""Calls of all ranks of a simulated world: one autograd node, whose passes run in lockstep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tritoncp.core.dynamo_boundary import untraced
from tritoncp.core.tracing import fresh_dispatch
from tritoncp.distributed import collectives
from tritoncp.ops import autograd, call_modes
from tritoncp.ops.autograd import BackwardInputs, backward_schedule, forward_schedule
from tritoncp.ops.call import Call
from tritoncp.ops.engine_factory import gradient_buffers, sum_gradients


def attend_in_lockstep(
    calls: Sequence[Call], q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor]
) -> list[list[Tensor]]:
    """Run the calls of all ranks, differentiably; return out, lse and, if requested, max_scores of each.

    A rank's tensors without values go through the op by themselves, as shapes send no messages.
    """
    shards = list(zip(q, k, v, strict=True))
    if call_modes.is_traced(q[0]):
        return [_run_op(call, *shard) for call, shard in zip(calls, shards, strict=True)]
    flat = Lockstep.apply(calls, *[x for shard in shards for x in shard], *calls[0].captures)
    return [list(flat[rank :: len(calls)]) for rank in range(len(calls))]


def _run_op(call: Call, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    arguments = call.as_arguments()
    (plan,), captures = call_modes.as_inputs([arguments.plan]), call_modes.as_inputs(arguments.captures)
    results: list[Tensor] = autograd.forward_op(q, k, v, *arguments._replace(plan=plan, captures=captures))
    return results


class Lockstep(torch.autograd.Function):
    """The autograd node of all ranks. Its tensors are q, k, v of each rank, then the captures of the
    score_mod, which all ranks share; its results are the outs, the lses and the max_scores of all ranks."""

    @staticmethod
    def forward(ctx: Any, calls: Sequence[Call], *tensors: Tensor) -> tuple[Tensor, ...]:
        n = len(calls)
        shards = [[x.resolve_neg() for x in tensors[3 * rank : 3 * rank + 3]] for rank in range(n)]
        schedules = [partial(forward_schedule, call, *shard) for call, shard in zip(calls, shards)]
        outs, lses, tops = zip(*_run(schedules, shards[0][0].device))
        tops = [x for x in tops if x is not None]
        ctx.save_for_backward(*outs, *lses, *[x for shard in shards for x in shard], *tensors[3 * n :])
        ctx.calls = [call.with_captures(()) for call in calls]
        ctx.mark_non_differentiable(*tops)
        ctx.set_materialize_grads(False)
        return *outs, *lses, *tops

    @staticmethod
    @untraced
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        n, saved = len(ctx.calls), ctx.saved_tensors
        captures = saved[5 * n :]
        calls = [call.with_captures(captures) for call in ctx.calls]
        compute = partial(_gradients, calls, grads[: 2 * n], saved[: 5 * n])
        results = autograd.refuse_second_derivative(compute, [x for x in (*grads, *saved) if x is not None])
        rest: list[Tensor | None] = [None] * len(captures)
        for place, grad in zip(calls[0].wants, results[3 * n :], strict=True):
            rest[place] = grad
        return None, *results[: 3 * n], *rest


def _gradients(calls: Sequence[Call], grads: Sequence[Any], saved: Sequence[Tensor]) -> list[Tensor]:
    """Compute the gradients of q, k, v of each rank, and those of captures.

    grads: douts and dlses; saved: outs, lses, and q, k, v of each rank
    """
    n = len(calls)
    calls[0].plan.check_sources()
    sums, schedules = gradient_buffers(calls[0], saved[n]), []
    for rank, call in enumerate(calls):
        out, lse, dout, dlse = saved[rank], saved[n + rank], grads[rank], grads[n + rank]
        dout = torch.zeros_like(out) if dout is None else dout.resolve_neg()
        shard = saved[2 * n + 3 * rank : 2 * n + 3 * rank + 3]
        inputs = BackwardInputs(dout, dlse, *shard, out, lse)
        schedules.append(partial(backward_schedule, call, inputs, sums))
    parts = _run(schedules, saved[0].device)
    return [x for part in parts for x in part] + sum_gradients(calls[0], sums)


def _run(schedules: Sequence[Callable[[], Any]], device: torch.device) -> list[Any]:
    """Make schedules and run them in lockstep, as the body of an op runs, which modes of torch do not see."""
    with fresh_dispatch(), autograd.current_device(device):
        return collectives.lockstep([schedule() for schedule in schedules])
