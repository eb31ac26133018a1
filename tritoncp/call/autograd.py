"""Forward and backward pass of a call, their registered ops, and their autograd function.

Each op is one whole pass: launches and collectives stay inside, so that neither numbers of steps nor Work
handles enter a graph. Outside of graphs a :class:`~tritoncp.call.facts.Call` is passed to the passes
directly; it is encoded as arguments of an op only if the dispatcher is needed.

A pass, and the autograd function, take a list of calls: the call of one rank, or the calls of all ranks of a
simulated world.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch.autograd import forward_ad

from tritoncp.call.engine_factory import engine_of, gradient_buffers, sum_gradients
from tritoncp.call.facts import Call
from tritoncp.call.op_arguments import CALL_SCHEMA, OpArguments
from tritoncp.call.prepare import compare_call
from tritoncp.core.dynamo_boundary import untraced
from tritoncp.distributed import collectives, consistency, failures, groups
from tritoncp.distributed.collectives import Requests
from tritoncp.distributed.compile_ahead import CompilingEngine, compile_pass
from tritoncp.distributed.profiler_ranges import step_range
from tritoncp.distributed.schedules import local, schedule_of
from tritoncp.distributed.schedules.buffers import laid_out_as, outputs, stats_dtype
from tritoncp.graph.checkpoint_policies import warn_if_repeated
from tritoncp.graph.dispatch import (
    call_op,
    needs_dispatcher,
    refuse_batched_gradients,
    refuse_transform,
    refuse_transforms,
    register_op,
)
from tritoncp.graph.spec import decode_spec
from tritoncp.mods.tracing import fresh_dispatch
from tritoncp.planning.step_tables import Engine
from tritoncp.selection.selection import Selection

_NO_CONTEXT = nullcontext()


def current_device(x: Tensor) -> AbstractContextManager[Any]:
    """Make the GPU of ``x`` the current one, since Triton launches on the current GPU."""
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

    def without_neg(self) -> BackwardInputs:
        """Resolve lazy negations."""
        return BackwardInputs._make([None if x is None else x.resolve_neg() for x in self])


def forward_schedule(call: Call, q: Tensor, k: Tensor, v: Tensor, *, trains: bool = False) -> Requests[Any]:
    """Return the schedule that computes out, lse, and max_scores or None. trains: whether a backward pass
    may follow, whose kernels then compile beside those of the forward pass"""
    if call.expand is not None:
        call.expand.check_call(call.plan, call.is_invariant)
    engine, schedule = engine_of(call, q, k, v), schedule_of(call.plan, call.is_invariant)

    def start(engine: Engine) -> Requests[Any]:
        return schedule.forward(call.plan, engine, q, k, v, call.want_max)

    if not may_compile(engine) or (schedule is local and not trains):  # one kernel
        return start(engine)

    def compile_others() -> None:
        compile_pass(start, engine, call.plan.world_size)
        if trains:
            compile_backward(call, engine, q, k, v)

    return followed(start(engine), compile_others)


def may_compile(engine: Engine) -> bool:
    """Return whether kernels of a pass may have to be compiled, and can be before it runs: selected keys and
    expanded latents are data that other ranks send."""
    return getattr(engine, "is_new", False)


def followed(steps: Requests[Any], compile_others: Callable[[], object]) -> Requests[Any]:
    """Run a schedule; if one of its kernels has to be compiled, compile those of ``compile_others()`` beside
    it."""
    from tritoncp.kernels.compiling import followed_by  # late: it imports Triton

    answer: Any = None
    while True:
        with followed_by(compile_others):  # not while other schedules run
            try:
                request = steps.send(answer)
            except StopIteration as stop:
                return stop.value
        answer = yield request


def compile_backward(call: Call, engine: Engine, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Compile the kernels of a backward pass for a dout with the layout of out; one of another layout may
    need other kernels. engine: of the forward pass"""
    out, lse, _ = outputs(call.plan, engine, q, v, False)
    sums = gradient_buffers(call, lse)
    engine = engine_of(call, q, k, v, (out, lse, out), sums)
    if "lse" not in call.returns:  # else its gradient is unknown
        CompilingEngine(engine).delta(out, out, None, lse)()
    inputs = BackwardInputs(out, None, q, k, v, out, lse)
    compile_pass(partial(start_backward, call, inputs, lse), engine, call.plan.world_size)


def backward_schedule(call: Call, inputs: BackwardInputs, sums: Sequence[Tensor]) -> Requests[Any]:
    """Return the schedule that computes dq, dk, dv, and adds gradients of captures to ``sums``."""
    engine, dout, dlse = backward_engine(call, inputs, sums)
    inputs = inputs._replace(dout=dout, dlse=dlse)
    steps = _backward_steps(call, engine, inputs)
    if not may_compile(engine):
        return steps
    start = partial(start_backward, call, inputs, inputs.lse)
    return followed(steps, partial(compile_pass, start, engine, call.plan.world_size))


def start_backward(call: Call, inputs: BackwardInputs, delta: Tensor, engine: Engine) -> Requests[Any]:
    """Begin a backward pass, without what it shares with others: delta and sums of captures."""
    dout, _, q, k, v, _, lse = inputs
    if call.expand is not None and not k.stride(0):
        k = k.clone(memory_format=torch.contiguous_format)  # a separate gradient for each batch row
    schedule = schedule_of(call.plan, call.is_invariant)
    return schedule.backward(call.plan, engine, q, k, v, dout, lse, delta)


def _backward_steps(call: Call, engine: Engine, inputs: BackwardInputs) -> Requests[Any]:
    dout, dlse, q, k, v, out, lse = inputs
    delta = start_delta(call, engine, out, dout, dlse, lse)
    grads = yield from start_backward(call, inputs, delta, engine)
    return [in_own_memory(grad, x) for grad, x in zip(grads, (q, k, v), strict=True)]


def backward_engine(
    call: Call, inputs: BackwardInputs, sums: Sequence[Tensor]
) -> tuple[Engine, Tensor, Tensor | None]:
    """Return the engine of a backward pass, and dout and dlse as kernels read them."""
    dout, dlse, q, k, v, out, lse = inputs
    if dlse is not None:  # for rows that see no key, lse is -inf and dlse may be NaN
        dlse = dlse.masked_fill(lse == -torch.inf, 0).contiguous()
    dout = dout if 0 not in dout.stride() else dout.contiguous()
    extra = (out, lse, dout) if dlse is None else (out, lse, dout, dlse)
    return engine_of(call, q, k, v, extra, sums), dout, dlse


def start_delta(
    call: Call, engine: Engine, out: Tensor, dout: Tensor, dlse: Tensor | None, lse: Tensor
) -> Tensor:
    """Start to compute delta = rowsum(out * dout) - dlse [B, H, S]; return it."""
    delta = torch.empty_like(lse)
    with current_device(delta), step_range(call.plan, 0, "delta"):
        engine.delta(out, dout, dlse, delta)()
    return delta


def in_own_memory(grad: Tensor, x: Tensor) -> Tensor:
    """Copy a gradient into x's dtype (its only rounding) and memory order, unless it has both and separate
    memory: dk and dv may be views of one buffer, and outputs of an op must not share memory."""
    if grad.untyped_storage().nbytes() > grad.nbytes:
        return laid_out_as(x, x.shape[3]).copy_(grad)
    return grad.to(x.dtype)


def drive(
    calls: Sequence[Call], passes: Sequence[Requests[Any]], x: Tensor, direction: str = ""
) -> list[Any]:
    """Run the pass of one rank, or in lockstep the passes of all ranks of a simulated world, on the device of
    x; return the results."""
    group = calls[0].group
    with current_device(x):
        if group is None and len(passes) == 1:
            return [collectives.run_alone(passes[0])]
        # Below autograd, views of messages are not tracked and take half the time.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            if len(passes) == 1:
                return [collectives.run(passes[0], group, calls[0].plan.schedule, direction)]
            return collectives.lockstep(passes)


def forward_pass(calls: Sequence[Call], tensors: Sequence[Tensor], trains: bool = False) -> list[Tensor]:
    """Compute out, lse and, if requested, max_scores of each call. tensors: query, key and value of each;
    trains: as in :func:`forward_schedule`"""
    if calls[0].group is not None:
        compare_call(calls[0], *tensors[:3])
    if len(calls) == 1:
        passes = [forward_schedule(calls[0], *tensors, trains=trains)]
    else:
        shards = (tensors[at : at + 3] for at in range(0, len(tensors), 3))
        passes = [forward_schedule(call, *x, trains=trains) for call, x in zip(calls, shards, strict=True)]
    return [x for results in drive(calls, passes, tensors[0]) for x in results if x is not None]


def backward_pass(calls: Sequence[Call], inputs: Sequence[BackwardInputs]) -> list[Tensor]:
    """Compute dq, dk and dv of each call, then the gradients of captures that require grad, which all calls
    share. Raises RuntimeError if state that a mask_mod reads has changed since its mask was made."""
    calls[0].plan.check_sources()
    consistency.compare_kind(calls[0].group, "a backward pass")
    sums = gradient_buffers(calls[0], inputs[0].lse)
    passes = [backward_schedule(call, one, sums) for call, one in zip(calls, inputs, strict=True)]
    grads = drive(calls, passes, inputs[0].lse, "backward ")
    return [x for part in grads for x in part] + sum_gradients(calls[0], sums)


# -- the registered ops ------------------------------------------------------------------------------------


def _forward_body(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> list[Tensor]:
    """Body of the forward op: run :func:`forward_pass` on decoded :class:`OpArguments`."""
    written = OpArguments(*arguments).with_leaves()
    with failures.closing(written.group):
        return forward_pass([written.decode(q)], (q, k, v))


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
        call = written.decode(inputs.q)
        dq, dk, dv, *sums = backward_pass([call], [inputs])
        return [dq, dk, dv, *written.order_sums(call, sums)]


def _backward_fake(*args: Any) -> list[Tensor]:
    """Fake kernel of the backward op: allocate its results."""
    written = OpArguments(*args[7:])
    sums = [x.new_empty(x.shape) for x in map(written.captures.__getitem__, written.wants)]
    return [laid_out_as(x, x.shape[3]) for x in args[2:5]] + sums


# -- autograd ----------------------------------------------------------------------------------------------


class Attention(torch.autograd.Function):
    """Autograd function of the call of one rank, or of the calls of all ranks of a simulated world, which
    exchange tensors within the process. tensors: query, key and value of each call, then the captures, which
    all calls share. Results: out, lse and, if requested, max_scores of each call."""

    @staticmethod
    def forward(ctx: Any, calls: Sequence[Call | OpArguments], *tensors: Tensor) -> tuple[Tensor, ...]:
        results = _run_forward(calls, tensors, True)
        width = len(results) // len(calls)
        chosen = [call.selected for call in calls if call.selected is not None]
        saved = *tensors, *[one.indices for one in chosen]  # for version checks and hooks
        ctx.save_for_backward(*results[::width], *results[1::width], *saved)
        ctx.calls, ctx.forms = [call.with_captures(()) for call in calls], [one[1:] for one in chosen]
        if chosen:
            ctx.calls = [call._replace(selected=None) for call in ctx.calls]
        if width > 2:
            ctx.mark_non_differentiable(*results[2::width])
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @untraced
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        try:
            return Attention.gradients(ctx, grads)
        except BaseException as error:
            with contextlib.suppress(ValueError):  # raised if the group was destroyed
                failures.stop(ctx.calls[0].group, error)
            raise

    @staticmethod
    def gradients(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """Return the gradients of the arguments of :meth:`forward`."""
        refuse_batched_gradients(*grads)
        count, saved = len(ctx.calls), ctx.saved_tensors
        end = len(saved) - len(ctx.forms)
        captures, width, inputs = saved[5 * count : end], len(grads) // count, []
        for i in range(count):
            out, lse, (q, k, v) = saved[i], saved[count + i], saved[2 * count + 3 * i : 2 * count + 3 * i + 3]
            dout, dlse = grads[width * i : width * i + 2]
            dout = torch.zeros_like(out) if dout is None else dout
            inputs.append(BackwardInputs(dout, dlse, q, k, v, out, lse))
        calls = [call.with_captures(captures) for call in ctx.calls]
        if ctx.forms:
            chosen = [Selection(x, *form) for x, form in zip(saved[end:], ctx.forms, strict=True)]
            calls = [call._replace(selected=one) for call, one in zip(calls, chosen, strict=True)]
        parts = backward(calls, inputs)
        if not captures:
            return None, *parts
        rest: list[Tensor | None] = [None] * len(captures)
        for place, grad in zip(calls[0].wants, parts[3 * count :], strict=True):
            rest[place] = grad
        return None, *parts[: 3 * count], *rest

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> None:
        refuse_transform(TransformType.Jvp)


class Final(torch.autograd.Function):
    """Autograd function around a backward pass. It raises for a second derivative."""

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
    """Return whether a call needs an autograd node. Forward-mode AD also uses the node, so that autograd
    reports the missing forward derivative."""
    if forward_ad._current_level >= 0:
        return True
    if torch.is_grad_enabled():
        for x in tensors:
            if x.requires_grad:
                return True
    return False


def attend(calls: Sequence[Call | OpArguments], shards: Sequence[Tensor]) -> list[Tensor]:
    """Run the forward pass of a rank's call, or of the calls of all ranks of a simulated world,
    differentiably; return out, lse and, if requested, max_scores of each.

    shards: query, key and value of each call
    """
    tensors = *shards, *calls[0].captures
    return list(Attention.apply(calls, *tensors)) if needs_autograd(tensors) else _run_forward(calls, tensors)


def _run_forward(
    calls: Sequence[Call | OpArguments], tensors: Sequence[Tensor], trains: bool = False
) -> list[Tensor]:
    """Run the forward pass of calls below autograd, as an op if the dispatcher is needed. tensors: query, key
    and value of each call, then the captures; trains: as in :func:`forward_schedule`"""
    if len(calls) > 1:  # there is no op for several ranks: modes see nothing, as in the body of an op
        with fresh_dispatch():
            shards = [x.resolve_neg() for x in tensors[: 3 * len(calls)]]
            return forward_pass(cast(Sequence[Call], calls), shards, trains)
    call, shard = calls[0], tensors[:3]
    if needs_dispatcher(tensors):
        warn_if_repeated(forward_op, *shard)
        return list(call_op(forward_op, *shard, *OpArguments.of(call)))
    return forward_pass([call], shard, trains) if isinstance(call, Call) else _forward_body(*shard, *call)


def backward(calls: Sequence[Call | OpArguments], inputs: Sequence[BackwardInputs]) -> list[Tensor]:
    """Run the backward pass of calls, see :func:`backward_pass`. A second derivative raises."""
    present = [x for one in inputs for x in one if x is not None]
    present.extend(calls[0].captures)

    def compute() -> list[Tensor]:
        if len(calls) > 1:
            with fresh_dispatch():
                return backward_pass(cast(Sequence[Call], calls), [one.without_neg() for one in inputs])
        call, one = calls[0], inputs[0]
        if needs_dispatcher(present):
            return list(call_op(backward_op, *one, *OpArguments.of(call)))
        if isinstance(call, OpArguments):
            return _backward_body(*one, *call)
        groups.group_of(call.group)  # raises if the group was destroyed after the forward pass
        return backward_pass([call], inputs)

    return list(Final.apply(compute, *present)) if needs_autograd(present) else compute()


def _forward_autograd(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> list[Tensor]:
    """The Autograd kernel of the forward op."""
    refuse_transforms()
    return list(attend([OpArguments(*arguments)], (q, k, v)))


def _backward_autograd(*args: Any) -> list[Tensor]:
    """The Autograd kernel of the backward op."""
    return backward([OpArguments(*args[7:])], [BackwardInputs(*args[:7])])


QKV = "Tensor query, Tensor key, Tensor value"
FORWARD = f"({QKV}, {CALL_SCHEMA}) -> Tensor[]"
BACKWARD = f"(Tensor dout, Tensor? dlse, {QKV}, Tensor out, Tensor lse, {CALL_SCHEMA}) -> Tensor[]"
forward_op = register_op("forward", _forward_body, _forward_fake, _forward_autograd, FORWARD)
backward_op = register_op("backward", _backward_body, _backward_fake, _backward_autograd, BACKWARD)
