"""Ring: K and V are sent from rank to rank, the next pair in flight during the computation of this one.

The kernel continues from the previous step's (acc, m, l) in float32, so that no results need merging and none
are rounded between steps.  A buffer travels as far as its last reader; backward, its float32 gradient follows
one hop behind and goes home in one send (Ring Attention, arXiv 2310.01889; ``plan.ring`` has the hops).
"""

from typing import Any

import torch
from torch import Tensor

from tritoncp.distributed.collectives import Schedule, SendRecv, Ticket, Wait
from tritoncp.distributed.profiler_ranges import step_range
from tritoncp.distributed.schedules.buffers import (
    KVBuffer,
    dkdv,
    empty_dq,
    empty_kv_buffer,
    new_state,
    outputs,
    pack,
    separate,
    views,
)
from tritoncp.planning.plan import Plan
from tritoncp.planning.step_tables import BackwardStep, ForwardStep
from tritoncp.planning.traffic import Hop


def forward(
    plan: Plan, engine: Any, q: Tensor, k: Tensor, v: Tensor, want_max: bool
) -> Schedule[tuple[Tensor, Tensor, Tensor | None]]:
    """Compute (out [B, Hq, S, E], lse [B, Hq, S], max_scores or None) of this rank's queries."""
    out, lse, top = outputs(plan, engine, q, v, want_max)
    results = out, lse, top, new_state(out, lse)
    current, free = _kv_buffers(plan, k, v)
    where = q.device, q.shape[0], q.shape[1]
    for turn, hop in enumerate(plan.ring):
        flight = yield _send_kv(hop, current, free)
        if hop.reads:
            tables = plan.tables(*where, hop.owner)
            with step_range(plan, turn):
                engine.forward(ForwardStep(q, current.k, current.v, tables, *results, turn > 0, hop.more))()
        if (yield Wait(flight)):
            current, free = free, current
    return out, lse, top


def backward(
    plan: Plan, engine: Any, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor
) -> Schedule[tuple[Tensor, Tensor, Tensor]]:
    """Compute (dq, dk, dv) of this rank's shards, in lse's dtype; gradients of captures go to the engine's
    buffers."""
    dq = empty_dq(plan, q, lse.dtype)
    current, free = _kv_buffers(plan, k, v)
    home = torch.zeros_like(current.packed, dtype=lse.dtype)  # gradient of the own K and V
    last = max((turn for turn, hop in enumerate(plan.ring) if hop.previous is not None), default=0)
    where = q.device, q.shape[0], q.shape[1]
    grad_flight: Ticket | None = None
    received: list[Tensor] = []
    for turn, hop in enumerate(plan.ring):
        flight = yield _send_kv(hop, current, free)
        if hop.reads:
            tables = plan.tables(*where, hop.owner)
            step = BackwardStep(q, current.k, current.v, dout, lse, delta, tables)
            with step_range(plan, turn, "dq"):
                engine.dq(step, dq, add=turn > 0)()
        if grad_flight is not None:
            received = yield Wait(grad_flight)  # dQ is computed meanwhile
        grad = _current_grad(plan.ring, turn, received, home)
        if hop.reads:
            with step_range(plan, turn, "dkdv"):
                dkdv(engine, step, *views(grad, k), dq, add=turn > 0)
        grad_flight = yield _send_grad(hop, grad, home)
        if (yield Wait(flight)):
            current, free = free, current
        if turn == last:
            free = current  # no hop receives after this one
    assert grad_flight is not None
    _current_grad(plan.ring, len(plan.ring), (yield Wait(grad_flight)), home)
    return dq, *separate(home, k)


def _kv_buffers(plan: Plan, k: Tensor, v: Tensor) -> tuple[KVBuffer, KVBuffer]:
    """Pack this rank's K and V, and allocate a second buffer to receive into, if any hop receives."""
    current = pack(k, v, plan.kv.s_max)
    receives = any(hop.previous is not None for hop in plan.ring)
    return current, empty_kv_buffer(k, v, plan.kv.s_max) if receives else current


def _send_kv(hop: Hop, current: KVBuffer, free: KVBuffer) -> SendRecv:
    """Send K and V to the next rank; receive the next K and V, of the same shape, from the previous one."""
    sends = [(hop.next, current.packed)] if hop.next is not None else []
    recvs = [(hop.previous, free.packed)] if hop.previous is not None else []
    return SendRecv(sends, recvs, current.packed)


def _send_grad(hop: Hop, grad: Tensor, home: Tensor) -> SendRecv:
    """Send the gradient of this step's K and V to their next reader; receive that of the next step's K and V,
    and that of this rank's own if it returns in this turn."""
    recvs = [(peer, torch.empty_like(home)) for peer in (hop.dkv_next, hop.dkv_home) if peer is not None]
    return SendRecv([(hop.dkv_to, grad)] if hop.dkv_to is not None else [], recvs, home)


def _current_grad(hops: tuple[Hop, ...], turn: int, received: list[Tensor], home: Tensor) -> Tensor:
    """Return the gradient buffer of this step's K and V, and add a returned gradient of this rank's own K and
    V to ``home``."""
    if turn == 0:
        return home
    previous, rest = hops[turn - 1], list(received)
    grad = rest.pop(0) if previous.dkv_next is not None else None
    if previous.dkv_home is not None:
        home += rest.pop()
    if grad is None and turn < len(hops) and hops[turn].holds:
        return torch.zeros_like(home)  # no rank has added to the gradient yet
    return home if grad is None else grad
