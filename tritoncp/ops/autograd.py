"""Forward and backward pass of a call, their registered ops, and their autograd function.

Each op is one whole pass: launches and collectives stay inside, so that neither step counts nor Work handles
enter a graph. Outside of graphs a :class:`~tritoncp.ops.call.Call` is passed to the passes directly; it is
encoded as arguments of an op only where the dispatcher is needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch.autograd import forward_ad

from tritoncp.core.dynamo_boundary import untraced
from tritoncp.distributed import collectives, consistency, failures, groups
from tritoncp.distributed.collectives import Requests
from tritoncp.distributed.profiler_ranges import step_range
from tritoncp.distributed.schedules import schedule_of
from tritoncp.distributed.schedules.buffers import laid_out_as, stats_dtype
from tritoncp.ops import signatures
from tritoncp.ops.call import CALL_SCHEMA, Call, OpArguments, decode_spec
from tritoncp.ops.checkpoint_policies import warn_if_repeated
from tritoncp.ops.dispatch import (
    call_op,
    needs_dispatcher,
    refuse_batched_gradients,
    refuse_transform,
    refuse_transforms,
    register_op,
)
from tritoncp.ops.engine_factory import engine_of, gradient_buffers, sum_gradients
from tritoncp.planning.step_tables import Engine

_NO_CONTEXT = nullcontext()


def current_device(x: Tensor) -> AbstractContextManager[Any]:
    """Make the GPU that holds ``x`` the current one: Triton launches there, and it may be another."""
    is_other = x.is_cuda and x.device.index != torch.cuda.current_device()
    return torch.cuda.device(x.device) if is_other else _NO_CONTEXT


# -- the passes --------------------------------------------------------------------------------------------


class BackwardInputs(NamedTuple):
    """Tensors of a backward pass besides captures: gradients of out and lse (dlse None: lse is unused),
    inputs and results of the forward pass."""

    dout: Tensor
    dlse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


def forward_schedule(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Requests[Any]:
    """Return the schedule that computes out, lse, and max_scores or None."""
    if call.expand is not None:
        call.expand.check_call(call.plan, call.is_invariant)
    engine = engine_of(call, q, k, v)
    pass_of = schedule_of(call.plan, call.is_invariant)
    return pass_of.forward(call.plan, engine, q, k, v, call.want_max)


def backward_schedule(call: Call, inputs: BackwardInputs, sums: Sequence[Tensor]) -> Requests[Any]:
    """Return the schedule that computes dq, dk, dv, and adds gradients of captures to ``sums``."""
    engine, dout, delta = backward_engine(call, inputs, sums)
    qkv = inputs[2:5]

    def steps() -> Requests[Any]:
        schedule, (q, k, v) = schedule_of(call.plan, call.is_invariant), qkv
        if call.expand is not None and not k.stride(0):
            k = k.clone(memory_format=torch.contiguous_format)  # a separate gradient for each batch row
        grads = yield from schedule.backward(call.plan, engine, q, k, v, dout, inputs.lse, delta)
        return [in_own_memory(grad, x) for grad, x in zip(grads, qkv, strict=True)]

    return steps()


def backward_engine(
    call: Call, inputs: BackwardInputs, sums: Sequence[Tensor]
) -> tuple[Engine, Tensor, Tensor]:
    """Return (engine of a backward pass, dout in a memory order that kernels read, delta = rowsum(out * dout)
    - dlse [B, H, S])."""
    dout, dlse, q, k, v, out, lse = inputs
    if dlse is not None:  # in rows that see no key, lse is -inf and dlse may be NaN
        dlse = dlse.masked_fill(lse == -torch.inf, 0).contiguous()
    dout = dout if 0 not in dout.stride() else dout.contiguous()
    extra = (out, lse, dout) if dlse is None else (out, lse, dout, dlse)
    engine = engine_of(call, q, k, v, extra, sums)
    delta = torch.empty_like(lse)
    with current_device(lse), step_range(call.plan, 0, "delta"):
        engine.delta(out, dout, dlse, delta)()
    return engine, dout, delta


def in_own_memory(grad: Tensor, x: Tensor) -> Tensor:
    """Copy a gradient into x's dtype (its only rounding) and memory order, unless it has both: dk and dv may
    be views of one buffer, and outputs of an op must not share memory."""
    if grad.untyped_storage().nbytes() > grad.nbytes:
        return laid_out_as(x, x.shape[3]).copy_(grad)
    return grad.to(x.dtype)


def _drive(call: Call, schedule: Requests[Any], x: Tensor, direction: str = "") -> Any:
    """Run the schedule of this rank on the device of x, and return its result."""
    with current_device(x):
        if call.group is None:
            return collectives.run_alone(schedule)
        # Below autograd, views of messages are not tracked and take half the time.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return collectives.run(schedule, call.group, call.plan.schedule, direction)


def forward_pass(call: Call, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Compute out, lse and, if requested, max_scores."""
    if call.group is not None:
        signatures.compare_call(call, q, k, v)
    out, lse, top = _drive(call, forward_schedule(call, q, k, v), q)
    return [out, lse] if top is None else [out, lse, top]


def backward_pass(call: Call, inputs: BackwardInputs) -> list[Tensor]:
    """Compute [dq, dk, dv, *gradients of captures that require grad]."""
    consistency.compare_kind(call.group, "a backward pass")
    sums = gradient_buffers(call, inputs.lse)
    grads: list[Tensor]
    grads = _drive(call, backward_schedule(call, inputs, sums), inputs.lse, "backward ")
    return grads + sum_gradients(call, sums)


# -- the registered ops ------------------------------------------------------------------------------------


def _forward_body(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> list[Tensor]:
    """Body of the forward op: run :func:`forward_pass` on decoded :class:`OpArguments`."""
    written = OpArguments(*arguments).with_leaves()
    with failures.closing(written.group):
        return forward_pass(written.decode(q), q, k, v)


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> list[Tensor]:
    """Fake kernel of the forward op: allocate its results."""
    spec = decode_spec(OpArguments(*arguments).spec)
    e = v.shape[3] if spec.sizes is None else spec.sizes[2]
    results = [laid_out_as(q, e), q.new_empty(q.shape[:3], dtype=stats_dtype(q.dtype))]
    return [*results, torch.empty_like(results[1])] if "max_scores" in spec.returns else results


def _backward_body(*args: Any) -> list[Tensor]:
    """Body of the backward op. args: fields of :class:`BackwardInputs`, then of :class:`OpArguments`"""
    inputs, written = BackwardInputs(*args[:7]), OpArguments(*args[7:]).with_leaves()
    with failures.closing(written.group):
        call = written.decode(inputs.q, is_backward=True)
        dq, dk, dv, *sums = backward_pass(call, inputs)
        return [dq, dk, dv, *written.order_sums(call, sums)]


def _backward_fake(*args: Any) -> list[Tensor]:
    """Fake kernel of the backward op: allocate its results."""
    written = OpArguments(*args[7:])
    sums = [x.new_empty(x.shape) for x in map(written.captures.__getitem__, written.wants)]
    return [laid_out_as(x, x.shape[3]) for x in args[2:5]] + sums


# -- autograd ----------------------------------------------------------------------------------------------


class Attention(torch.autograd.Function):
    """Autograd function of one call. tensors: query, key, value, then captures of the score_mod"""

    @staticmethod
    def forward(ctx: Any, call: Call | OpArguments, *tensors: Tensor) -> tuple[Tensor, ...]:
        results = _run_forward(call, tensors)
        ctx.save_for_backward(*results[:2], *tensors)
        ctx.call = call.with_captures(())  # captures are saved tensors, for version checks and hooks
        ctx.mark_non_differentiable(*results[2:])
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @untraced
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Any, ...]:
        try:
            return Attention.gradients(ctx, dout, dlse)
        except BaseException as error:
            with contextlib.suppress(ValueError):  # raised if the group was destroyed
                failures.stop(ctx.call.group, error)
            raise

    @staticmethod
    def gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of the arguments of :meth:`forward`."""
        refuse_batched_gradients(dout, dlse)
        out, lse, q, k, v, *captures = ctx.saved_tensors
        call = ctx.call.with_captures(captures)
        dout = torch.zeros_like(out) if dout is None else dout
        dq, dk, dv, *sums = backward(call, BackwardInputs(dout, dlse, q, k, v, out, lse))
        rest: list[Tensor | None] = [None] * len(captures)
        for place, grad in zip(call.wants, sums, strict=True):
            rest[place] = grad
        return None, dq, dk, dv, *rest

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> None:
        refuse_transform(TransformType.Jvp)


class Final(torch.autograd.Function):
    """Autograd function around a backward pass, which raises for a second derivative."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[[], Iterable[Tensor]], *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(compute())

    @staticmethod
    @untraced
    def backward(ctx: Any, *grads: Any) -> None:
        raise RuntimeError(
            "tritoncp.flex_attention has no second derivative: for a small problem on one device, use "
            "tritoncp.reference.dense.dense_attention(q, k, v, mask, score_mod), which is plain torch"
        )


def needs_autograd(tensors: Iterable[Tensor]) -> bool:
    """Return whether a call needs an autograd node. Forward-mode AD also takes the node, on which autograd
    reports that it has no forward derivative."""
    if forward_ad._current_level >= 0:
        return True
    if torch.is_grad_enabled():
        for x in tensors:
            if x.requires_grad:
                return True
    return False


def forward(call: Call | OpArguments, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Run the forward pass of a call, differentiably; return out, lse and, if requested, max_scores."""
    tensors = q, k, v, *call.captures
    return list(Attention.apply(call, *tensors)) if needs_autograd(tensors) else _run_forward(call, tensors)


def _run_forward(call: Call | OpArguments, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Run the forward pass of a call below autograd, as an op where the dispatcher is needed. tensors: q, k,
    v, then the captures of the call."""
    q, k, v = tensors[:3]
    if needs_dispatcher(tensors):
        warn_if_repeated(forward_op, q, k, v)
        return list(call_op(forward_op, q, k, v, *call.as_arguments()))
    return forward_pass(call, q, k, v) if isinstance(call, Call) else _forward_body(q, k, v, *call)


def backward(call: Call | OpArguments, inputs: BackwardInputs) -> list[Tensor]:
    """Run the backward pass of a call; a second derivative raises."""
    present = [x for x in (*inputs, *call.captures) if x is not None]

    def compute() -> list[Tensor]:
        if needs_dispatcher(present):
            return list(call_op(backward_op, *inputs, *call.as_arguments()))
        if isinstance(call, OpArguments):
            return _backward_body(*inputs, *call)
        groups.group_of(call.group)  # raises if the group was destroyed after the forward pass
        call.plan.check_sources()
        return backward_pass(call, inputs)

    return refuse_second_derivative(compute, present)


def refuse_second_derivative(compute: Callable[[], list[Tensor]], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Run ``compute``, a backward pass of ``tensors``; a second derivative raises."""
    return list(Final.apply(compute, *tensors)) if needs_autograd(tensors) else compute()


def _forward_autograd(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> list[Tensor]:
    """The Autograd kernel of the forward op."""
    refuse_transforms()
    return forward(OpArguments(*arguments), q, k, v)


def _backward_autograd(*args: Any) -> list[Tensor]:
    """The Autograd kernel of the backward op."""
    return backward(OpArguments(*args[7:]), BackwardInputs(*args[:7]))


QKV = "Tensor query, Tensor key, Tensor value"
FORWARD = f"({QKV}, {CALL_SCHEMA}) -> Tensor[]"
BACKWARD = f"(Tensor dout, Tensor? dlse, {QKV}, Tensor out, Tensor lse, {CALL_SCHEMA}) -> Tensor[]"
forward_op = register_op("forward", _forward_body, _forward_fake, _forward_autograd, FORWARD)
backward_op = register_op("backward", _backward_body, _backward_fake, _backward_autograd, BACKWARD)
