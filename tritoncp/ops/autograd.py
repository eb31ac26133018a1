"""Two registered ops, one whole forward and one whole backward pass, and the autograd node that joins them.

Launches and collectives stay inside the ops, so neither step counts nor Work handles enter a graph.  The plan
travels as a 0-d CPU tensor that names it: another plan causes no recompilation, and the plan stays
alive as long as a graph holds that tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType

from tritoncp.core.dynamo_boundary import untraced
from tritoncp.core.handles import object_of
from tritoncp.distributed import collectives, consistency
from tritoncp.distributed.schedules import schedule_of
from tritoncp.distributed.schedules.buffers import laid_out_as, stats_dtype
from tritoncp.ops import engine_factory, signatures
from tritoncp.ops.dispatch import group_op, register_op, run_below_autograd
from tritoncp.ops.engine_factory import Spec
from tritoncp.ops.transforms import refuse_transform, refuse_transforms
from tritoncp.planning.plan import Plan

_NO_CONTEXT = nullcontext()


def plan_of(handle: Tensor, x: Tensor) -> Plan:
    """Return the plan of a handle for the batch rows of x, after a check that its mask has not changed."""
    plan: Plan = object_of(handle)
    plan.check_sources()
    return plan.of_batch(x.shape[0])


def _drive(
    group: Any, plan: Plan, ranks: int, schedule: Callable[[int, Plan], Any], device: torch.device,
    direction: str = "",
) -> list[Any]:  # fmt: skip
    """Run the schedules of this process's ranks and return their results. Kernels run below autograd, as
    torch's own do: views are not tracked there and take half the time."""
    with torch._C._AutoDispatchBelowADInplaceOrView(), current_device(device):
        if group is None:
            return collectives.lockstep([schedule(i, plan.seen_by(i)) for i in range(ranks)])
        return [collectives.run(schedule(0, plan), group, plan.schedule, direction)]


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make ``device`` the current GPU: Triton launches there, and the tensors may be on another GPU."""
    is_other = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if is_other else _NO_CONTEXT


@group_op
def _attend(
    q: list[Tensor],
    k: list[Tensor],
    v: list[Tensor],
    captures: list[Tensor],
    ints: list[int],
    floats: list[float],
    scale: float,
    plan: Tensor,
    spec: str,
) -> list[Tensor]:
    """Compute outs, lses and, if requested, max_scores of this process's ranks."""
    call = Spec.decode(spec)

    def schedule(i: int, p: Plan) -> Any:
        return schedule_of(p).forward(p, engine, q[i], k[i], v[i], call.want_max)

    plan_of_call, group = plan_of(plan, q[0]), call.group
    if group is not None:
        signatures.compare_call(group, plan_of_call, spec, scale, q[0], k[0], v[0], captures, ints, floats)
    engine = engine_factory.engine_of(spec, plan_of_call, scale, q, k, v, captures, ints, floats)
    outs, lses, tops = zip(*_drive(group, plan_of_call, len(q), schedule, q[0].device), strict=True)
    return [*outs, *lses, *(tops if call.want_max else ())]


def _forward_fake(q: list[Tensor], k: list[Tensor], v: list[Tensor], *rest: Any) -> list[Tensor]:
    """Allocate the results of :func:`_attend`, which has the same arguments, for shapes only."""
    spec = rest[-1]
    outs = [laid_out_as(x, y.shape[3]) for x, y in zip(q, v, strict=True)]
    stats = [x.new_empty(x.shape[:3], dtype=stats_dtype(x)) for x in q]
    tops = [torch.empty_like(x) for x in stats] if Spec.decode(spec).want_max else []
    return [*outs, *stats, *tops]


@group_op
def _differentiate(
    douts: list[Tensor],
    dlses: list[Tensor],
    q: list[Tensor],
    k: list[Tensor],
    v: list[Tensor],
    outs: list[Tensor],
    lses: list[Tensor],
    captures: list[Tensor],
    ints: list[int],
    floats: list[float],
    scale: float,
    plan: Tensor,
    spec: str,
) -> list[Tensor]:
    """Compute dq, dk, dv of this process's ranks, then the gradients of captures that require one."""
    call = Spec.decode(spec)

    def schedule(i: int, p: Plan) -> Any:
        # lse is -inf in rows that see no key, and the gradient of a loss there may not be finite.
        dlse = dlses[i].masked_fill(lses[i] == -torch.inf, 0).contiguous() if dlses else None
        dout = douts[i] if 0 not in douts[i].stride() else douts[i].contiguous()
        parts = yield from schedule_of(p).backward(p, engine, q[i], k[i], v[i], outs[i], lses[i], dout, dlse)
        # The only rounding. dk and dv may be views of one buffer, and outputs of an op must not share memory.
        return tuple(in_own_memory(grad, x[i]) for grad, x in zip(parts, (q, k, v), strict=True))

    plan_of_call, grads = plan_of(plan, q[0]), engine_factory.gradient_buffers(call, captures, lses[0])
    extra = *outs, *lses, *douts, *dlses
    engine = engine_factory.engine_of(
        spec, plan_of_call, scale, q, k, v, captures, ints, floats, extra, grads
    )
    consistency.compare_kind(call.group, "a backward pass")
    grads_by_rank = _drive(call.group, plan_of_call, len(q), schedule, q[0].device, "backward ")
    sums = engine_factory.sum_gradients(call, captures, grads)
    return [x for part in zip(*grads_by_rank, strict=True) for x in part] + sums


def _backward_fake(*args: Any) -> list[Tensor]:
    """Allocate the results of :func:`_differentiate`, which has the same arguments, for shapes only."""
    _, _, q, k, v, _, _, captures, *_, spec = args
    sums = [x.new_empty(x.shape) for x in (captures[i] for i in Spec.decode(spec).wants)]
    return [laid_out_as(x, x.shape[3]) for x in (*q, *k, *v)] + sums


def in_own_memory(grad: Tensor, x: Tensor) -> Tensor:
    """Convert a gradient of x to the dtype and memory order of x, in its own memory."""
    if grad.untyped_storage().nbytes() > grad.nbytes:
        return laid_out_as(x, x.shape[3]).copy_(grad)
    return grad.to(x.dtype)


def _split(tensors: Sequence[Tensor], *lengths: int) -> list[list[Tensor]]:
    """Cut a flat sequence of tensors into lists of these lengths."""
    rest = iter(tensors)
    return [list(itertools.islice(rest, length)) for length in lengths]


def _or_zeros(grad: Tensor | None, like: Tensor) -> Tensor:
    """Return a gradient of ``like``, zeros in place of None."""
    return torch.zeros_like(like) if grad is None else grad


class Attention(torch.autograd.Function):
    """The autograd node of all ranks of this process: one under a process group, all of a simulated world.

    call: number of ranks, number of captured tensors, and the remaining arguments of the op
    """

    @staticmethod
    def forward(ctx: Any, call: tuple[Any, ...], plan: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        n, num_captures, *constants, spec = ctx.call = call
        lists = _split(tensors, n, n, n, num_captures)
        results = run_below_autograd(forward_op, _attend, tensors, *lists, *constants, plan, spec)
        ctx.save_for_backward(plan, *tensors, *results[: 2 * n])
        # Saved-tensor hooks, as for offloading, may save a copy of the handle, which does not keep the plan
        # alive.
        ctx.held = plan, engine_factory.score_structure(spec)
        ctx.mark_non_differentiable(*results[2 * n :])
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @untraced
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        try:
            return Attention.gradients(ctx, *grads)
        except BaseException as error:
            Spec.decode(ctx.call[-1]).stop_group(error)
            raise

    @staticmethod
    def gradients(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of the arguments of :meth:`forward`."""
        n, num_captures, *constants, spec = ctx.call
        plan, *saved = ctx.saved_tensors
        q, k, v, captures, outs, lses = _split(saved, n, n, n, num_captures, n, n)
        douts = [_or_zeros(*pair) for pair in zip(grads[:n], outs, strict=True)]
        pairs = list(zip(grads[n : 2 * n], lses, strict=True))
        dlses = [_or_zeros(*pair) for pair in pairs] if any(grad is not None for grad, _ in pairs) else []
        all_grads = _backward(douts, dlses, q, k, v, outs, lses, captures, *constants, plan, spec)
        rest: list[Tensor | None] = [None] * num_captures
        for place, grad in zip(Spec.decode(spec).wants, all_grads[3 * n :], strict=True):
            rest[place] = grad
        return None, None, *all_grads[: 3 * n], *rest

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> None:
        refuse_transform(TransformType.Jvp)


class Final(torch.autograd.Function):
    """The autograd node of the backward pass under ``create_graph``, which raises for a second derivative."""

    @staticmethod
    def forward(ctx: Any, args: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(run_below_autograd(backward_op, _differentiate, tensors, *args))

    @staticmethod
    @untraced
    def backward(ctx: Any, *grads: Any) -> None:
        raise RuntimeError(
            "tritoncp.flex_attention can be differentiated once: its backward pass has no derivative. "
            "Compute second derivatives with torch's flex_attention, on one device and a small problem"
        )


def needs_autograd(tensors: Iterable[Tensor]) -> bool:
    """Return whether a call needs an autograd node. Forward-mode AD also takes the node, on which autograd
    reports that it has no forward derivative."""
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and True in [x.requires_grad for x in tensors]


def forward(
    q: list[Tensor], k: list[Tensor], v: list[Tensor], captures: list[Tensor], *rest: Any
) -> list[Tensor]:
    """Run ``forward_op`` differentiably, with the same arguments."""
    refuse_transforms()
    tensors = *q, *k, *v, *captures
    if not needs_autograd(tensors):
        return run_below_autograd(forward_op, _attend, tensors, q, k, v, captures, *rest)
    *constants, plan, spec = rest
    return list(Attention.apply((len(q), len(captures), *constants, spec), plan, *tensors))


def _backward(*args: Any) -> list[Tensor]:
    """Run ``backward_op``, with the same arguments, so that a second derivative raises."""
    tensors = list(itertools.chain.from_iterable(args[:8]))
    if not needs_autograd(tensors):
        return run_below_autograd(backward_op, _differentiate, tensors, *args)
    return list(Final.apply(args, *tensors))


forward_op = register_op("forward", _attend, _forward_fake, forward)
backward_op = register_op("backward", _differentiate, _backward_fake, _backward)
