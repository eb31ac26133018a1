"""Two registered ops, one whole forward and one whole backward pass, and the autograd function around them.

Launches and collectives stay inside the ops, so neither step counts nor Work handles enter a graph.  The plan
travels as a 0-d CPU tensor that names it: nothing is compiled again for another plan, and the plan stays
alive while any graph still holds that tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tritoncp import captured, comm, engines
from tritoncp.engines import Spec
from tritoncp.handles import handle_of, held_by
from tritoncp.mods import Mod
from tritoncp.plan import Plan
from tritoncp.schedules import allgather



def pin(plan: Plan) -> Plan:
    """The plan with its handle: a tensor that keeps it known to the ops for as long as anyone holds it."""
    return plan if plan.handle is not None else replace(plan, handle=handle_of(plan))


def _resolved(plan: Tensor, call: Spec, q: list[Tensor]) -> tuple[Plan, Mod | None]:
    """The plan behind a handle, and its mask_mod where masked blocks need one."""
    known: Plan = held_by(plan)
    known.check_sources()
    return known, captured.mask_of(known, q, every_rank=call.world == "")


def _drive(call: Spec, plan: Plan, ranks: int, schedule: Callable[[int, Plan], Any]) -> list[Any]:
    if not call.world:
        return comm.lockstep([schedule(i, plan.for_rank(i)) for i in range(ranks)])
    return [comm.run(schedule(0, plan), comm.named(call.world))]


@torch.library.custom_op("tritoncp::forward", mutates_args=())
def forward_op(q: list[Tensor], k: list[Tensor], v: list[Tensor], captures: list[Tensor], ints: list[int],
               floats: list[float], scale: float, plan: Tensor, spec: str) -> list[Tensor]:
    """Outs, lses and, if asked for, max_scores of each rank that runs here."""
    call = Spec.decode(spec)
    known, mask = _resolved(plan, call, q)
    engine = engines.make(call, scale, mask, q[0], captures, ints, floats)
    done = _drive(call, known, len(q), lambda i, p: allgather.forward(p, engine, q[i], k[i], v[i], call.want_max))
    outs, lses, tops = zip(*done, strict=True)
    return [*outs, *lses, *(tops if call.want_max else ())]


@forward_op.register_fake
def _(q: list[Tensor], k: list[Tensor], v: list[Tensor], captures: list[Tensor], ints: list[int],
      floats: list[float], scale: float, plan: Tensor, spec: str) -> list[Tensor]:
    outs = [x.new_empty(*x.shape[:3], y.shape[3]) for x, y in zip(q, v, strict=True)]
    stats = [x.new_empty(x.shape[:3], dtype=_stats(x)) for x in q]
    tops = [torch.empty_like(x) for x in stats] if Spec.decode(spec).want_max else []
    return [*outs, *stats, *tops]


@torch.library.custom_op("tritoncp::backward", mutates_args=())
def backward_op(douts: list[Tensor], dlses: list[Tensor], q: list[Tensor], k: list[Tensor], v: list[Tensor],
                outs: list[Tensor], lses: list[Tensor], captures: list[Tensor], ints: list[int],
                floats: list[float], scale: float, plan: Tensor, spec: str) -> list[Tensor]:
    """dq, dk, dv of each rank that runs here, then the gradients of captures that want one."""
    call = Spec.decode(spec)
    grads = _buffers(call, captures, lses[0])
    known, mask = _resolved(plan, call, q)
    engine = engines.make(call, scale, mask, q[0], captures, ints, floats, grads)

    def schedule(i: int, p: Plan) -> Any:
        # Where nothing was seen lse is -inf and a loss of it may well have no finite slope.
        dlse = dlses[i].masked_fill(lses[i] == -torch.inf, 0).contiguous() if dlses else None
        dout = douts[i] if 0 not in douts[i].stride() else douts[i].contiguous()
        return allgather.backward(p, engine, q[i], k[i], v[i], outs[i], lses[i], dout, dlse)

    done = _drive(call, known, len(q), schedule)
    sources = [captures[i] for i in call.wants]
    return [x for part in zip(*done, strict=True) for x in part] + [
        grad.to(source.dtype) for grad, source in zip(grads, sources, strict=True)
    ]


@backward_op.register_fake
def _(douts: list[Tensor], dlses: list[Tensor], q: list[Tensor], k: list[Tensor], v: list[Tensor],
      outs: list[Tensor], lses: list[Tensor], captures: list[Tensor], ints: list[int], floats: list[float],
      scale: float, plan: Tensor, spec: str) -> list[Tensor]:
    sources = [*q, *k, *v, *(captures[i] for i in Spec.decode(spec).wants)]
    return [x.new_empty(x.shape) for x in sources]


def _stats(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _buffers(call: Spec, captures: Sequence[Tensor], like: Tensor) -> list[Tensor]:
    return [torch.zeros(captures[i].shape, dtype=like.dtype, device=like.device) for i in call.wants]


class Attention(torch.autograd.Function):
    """One node for every rank that runs here: one under a process group, all of a simulated world."""

    @staticmethod
    def forward(ctx: Any, spec: str, ranks: int, ints: list[int], floats: list[float], scale: float,
                plan: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (list(tensors[i * ranks : (i + 1) * ranks]) for i in range(3))
        captures = list(tensors[3 * ranks :])
        results = forward_op(q, k, v, captures, ints, floats, scale, plan, spec)
        ctx.spec, ctx.ranks, ctx.ints, ctx.floats, ctx.scale = spec, ranks, ints, floats, scale
        ctx.save_for_backward(plan, *tensors, *results[: 2 * ranks])
        ctx.mark_non_differentiable(*results[2 * ranks :])
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        n, (plan, *saved) = ctx.ranks, ctx.saved_tensors
        tensors, outs, lses = saved[: -2 * n], saved[-2 * n : -n], saved[-n:]
        q, k, v, captures = tensors[:n], tensors[n : 2 * n], tensors[2 * n : 3 * n], tensors[3 * n :]
        douts = [torch.zeros_like(out) if g is None else g for out, g in zip(outs, grads[:n], strict=True)]
        dlses = grads[n : 2 * n]
        lse_grads = [torch.zeros_like(x) if g is None else g for x, g in zip(lses, dlses, strict=True)]
        found = backward_op(
            douts, lse_grads if any(g is not None for g in dlses) else [], q, k, v, outs, lses, captures,
            ctx.ints, ctx.floats, ctx.scale, plan, ctx.spec,
        )
        rest: list[Tensor | None] = [None] * len(captures)
        for place, grad in zip(Spec.decode(ctx.spec).wants, found[3 * n :], strict=True):
            rest[place] = grad
        return (None, None, None, None, None, None, *found[: 3 * n], *rest)
