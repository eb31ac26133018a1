"""Ops by which chunks of the queries share one exchange of keys between ranks; :mod:`tritoncp.chunking`
replaces the ops of :mod:`tritoncp.call.autograd` by them in a graph.

Forward: ``send_keys``, a wait, ``forward_part`` of each chunk. Backward: ``send_keys`` and a wait again,
``backward_part`` of each chunk, ``send_gradients``, a wait, ``land_gradients``. The waits are
``_c10d_functional.wait_tensor``. ``plan`` is always the handle of the whole plan.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tritoncp.call.autograd import (
    BackwardInputs,
    backward_engine,
    current_device,
    in_own_memory,
    needs_autograd,
    start_delta,
)
from tritoncp.call.engine_factory import engine_of, gradient_buffers, sum_gradients
from tritoncp.call.facts import Call
from tritoncp.call.op_arguments import CALL_SCHEMA, OpArguments
from tritoncp.call.prepare import compare_call
from tritoncp.core.handles import object_of
from tritoncp.distributed import failures
from tritoncp.distributed.schedules import shared_keys
from tritoncp.distributed.schedules.buffers import laid_out_as, stats_dtype
from tritoncp.graph.dispatch import register_op
from tritoncp.graph.spec import decode_spec
from tritoncp.planning.plan import Plan


def _plan(handle: Tensor) -> Plan:
    """Return the plan of a handle, after a check that its schedule sends each key once."""
    plan: Plan = object_of(handle)
    plan.check_sources()
    shared_keys.check_schedule(plan)
    return plan


def _send_keys(k: Tensor, v: Tensor, backward: bool, *arguments: Any) -> Tensor:
    """Start the exchange of keys and values; return the buffer, which is filled after a wait."""
    written = OpArguments(*arguments).with_leaves()
    with failures.closing(written.group):
        whole = _plan(written.plan)
        if not backward:  # the forward pass has compared the call across ranks
            compare_call(written.decode(k), k, k, v)
        return shared_keys.send_keys(whole, k, v, written.group)


def _send_keys_fake(k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return k.new_empty(_new_size(), k.shape[1], k.shape[3] + v.shape[3])


def _reading_call(written: OpArguments, q: Tensor, index: int, count: int) -> Call:
    """Decode the call for one of ``count`` chunks of the queries, with the whole plan's buffer of keys."""
    call = written.decode(q)
    shared_keys.check_schedule(call.plan)
    return call._replace(plan=shared_keys.reading_part(call.plan, index, count))


def _forward_part(q: Tensor, buffer: Tensor, index: int, count: int, *arguments: Any) -> list[Tensor]:
    """Compute out, lse and, if requested, max_scores of one of ``count`` chunks of the queries."""
    written = OpArguments(*arguments).with_leaves()
    with failures.closing(written.group), current_device(q):
        call = _reading_call(written, q, index, count)
        k, v = shared_keys.views_of(call.plan, buffer, q)
        results = shared_keys.forward(call.plan, engine_of(call, q, k, v), q, k, v, call.want_max)
    return [x for x in results if x is not None]


def _forward_part_fake(q: Tensor, buffer: Tensor, *rest: Any) -> list[Tensor]:
    lse = q.new_empty(q.shape[:3], dtype=stats_dtype(q.dtype))
    out = laid_out_as(q, buffer.shape[2] - q.shape[3])
    return [out, lse, *([torch.empty_like(lse)] if "max_scores" in decode_spec(rest[-1]).returns else [])]


def _backward_part(
    dout: Tensor, dlse: Tensor | None, q: Tensor, buffer: Tensor, out: Tensor, lse: Tensor, index: int,
    count: int, *arguments: Any,
) -> list[Tensor]:  # fmt: skip
    """Compute for one chunk: dq, its parts of dk and dv for the buffer's rows, and gradients of captures."""
    written = OpArguments(*arguments).with_leaves()
    with failures.closing(written.group), current_device(q):
        call = _reading_call(written, q, index, count)
        k, v = shared_keys.views_of(call.plan, buffer, q)
        sums = gradient_buffers(call, lse)
        engine, dout, dlse = backward_engine(call, BackwardInputs(dout, dlse, q, k, v, out, lse), sums)
        delta = start_delta(call, engine, out, dout, dlse, lse)
        dq, dk, dv = shared_keys.backward(call.plan, engine, q, k, v, dout, lse, delta)
    return [in_own_memory(dq, q), dk, dv, *written.order_sums(call, sum_gradients(call, sums))]


def _backward_part_fake(
    dout: Tensor, dlse: Tensor | None, q: Tensor, buffer: Tensor, out: Tensor, lse: Tensor, index: int,
    count: int, *arguments: Any,
) -> list[Tensor]:  # fmt: skip
    (n, heads, width), d, written = buffer.shape, q.shape[3], OpArguments(*arguments)
    grads = [buffer.new_empty(n, heads, size, dtype=stats_dtype(q.dtype)) for size in (d, width - d)]
    sums = [x.new_empty(x.shape) for x in map(written.captures.__getitem__, written.wants)]
    return [laid_out_as(q, d), *grads, *sums]


def _send_gradients(dk: list[Tensor], dv: list[Tensor], k: Tensor, plan: Tensor, spec: str) -> Tensor:
    """Sum dk and dv over chunks and start to send them to the ranks of the keys."""
    with failures.closing(group := decode_spec(spec).group):
        return shared_keys.send_gradients(_plan(plan), dk, dv, k, group)


def _send_gradients_fake(dk: list[Tensor], dv: list[Tensor], k: Tensor, plan: Tensor, spec: str) -> Tensor:
    return dk[0].new_empty(_new_size(), dk[0].shape[1], dk[0].shape[2] + dv[0].shape[2])


def _land_gradients(returned: Tensor, k: Tensor, v: Tensor, plan: Tensor) -> list[Tensor]:
    """Return dk and dv of this rank's shards from the received messages."""
    grads = shared_keys.land_gradients(_plan(plan), returned, k)
    return [in_own_memory(grad, x) for grad, x in zip(grads, (k, v), strict=True)]


def _land_gradients_fake(returned: Tensor, k: Tensor, v: Tensor, plan: Tensor) -> list[Tensor]:
    return [laid_out_as(x, x.shape[3]) for x in (k, v)]


def _new_size() -> Any:
    """Return the unbacked symbol for the rows of a message, which depend on the plan."""
    return torch.library.get_ctx().new_dynamic_size()


def _below_autograd(op: str) -> Any:
    """Make the Autograd kernel of an op without a derivative: the joint graph contains the backward pass."""

    def run(*args: Any) -> Any:
        if needs_autograd(x for x in tree_leaves(args) if isinstance(x, Tensor)):
            raise RuntimeError(
                f"tritoncp::{op} has no derivative, since it belongs to a joint graph that chunking.chunk "
                "rewrote: rewrite the graph where AOTAutograd partitions it, or run it under torch.no_grad()"
            )
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.tritoncp, op).default(*args)

    return run


def _register(name: str, body: Any, fake: Any, schema: str = "") -> Any:
    return register_op(name, body, fake, _below_autograd(name), schema)


_CHUNK = f"SymInt index, SymInt count, {CALL_SCHEMA}"
_SEND = f"(Tensor key, Tensor value, bool backward, {CALL_SCHEMA}) -> Tensor"
_FORWARD = f"(Tensor query, Tensor buffer, {_CHUNK}) -> Tensor[]"
_BACKWARD = (
    f"(Tensor dout, Tensor? dlse, Tensor query, Tensor buffer, Tensor out, Tensor lse, {_CHUNK}) -> Tensor[]"
)
send_keys_op = _register("send_keys", _send_keys, _send_keys_fake, _SEND)
forward_part_op = _register("forward_part", _forward_part, _forward_part_fake, _FORWARD)
backward_part_op = _register("backward_part", _backward_part, _backward_part_fake, _BACKWARD)
send_gradients_op = _register("send_gradients", _send_gradients, _send_gradients_fake)
land_gradients_op = _register("land_gradients", _land_gradients, _land_gradients_fake)
