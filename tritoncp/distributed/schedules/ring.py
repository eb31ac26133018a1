"""Ring: K and V travel from rank to rank; the next pair is in flight while the current one is computed.

The kernel continues from the previous step's (acc, m, l) in float32, so that results are neither merged nor
rounded between steps. A buffer travels as far as its last reader; in the backward pass, its float32 gradient
follows one hop behind and goes home in one send (Ring Attention, arXiv 2310.01889; ``plan.ring`` has the
hops).

Two ranks and a causal mask of four blocks: rank 0 has blocks 0 and 3, rank 1 has blocks 1 and 2. In turn 0
each rank sends its keys to the other rank and computes attention to its keys. In turn 1 it continues from
that state with the received keys, and writes out and lse.

>>> from tritoncp import causal, create_block_mask, make_plan
>>> plan = make_plan(create_block_mask(causal(), 1, 1, 512, 512), world_size=2, rank=0, schedule="ring")
>>> plan.owners.tolist()
[[0, 1, 1, 0]]
>>> for rank in range(2):
...     for turn, hop in enumerate(plan.for_rank(rank).ring):
...         blocks = plan.kv.slots[hop.owner][0, :, 1] // 128
...         state = ("load, " if turn else "") + ("store" if hop.more else "finish")
...         print(f"rank {rank}, turn {turn}: keys {blocks.tolist()}, sent to {hop.next}; state: {state}")
rank 0, turn 0: keys [0, 3], sent to 1; state: store
rank 0, turn 1: keys [1, 2], sent to None; state: load, finish
rank 1, turn 0: keys [1, 2], sent to 0; state: store
rank 1, turn 1: keys [0, 3], sent to None; state: load, finish

In the backward pass, each turn adds to dq and to the gradient of the current keys. In turn 1 this is the
gradient of the other rank's keys; it goes home (``dkv_to``) and is added to the gradient of turn 0.

>>> [(hop.dkv_to, hop.dkv_home) for hop in plan.ring]
[(None, None), (1, 1)]
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tritoncp.distributed.collectives import AllToAll, Requests, Ticket
from tritoncp.distributed.profiler_ranges import step_range
from tritoncp.distributed.schedules.buffers import dkdv, empty_dq, new_state, outputs, pack, separate, views
from tritoncp.planning.costs.traffic import Hop
from tritoncp.planning.plan import Plan
from tritoncp.planning.step_tables import BackwardStep, ForwardStep, StepEngine


def forward(
    plan: Plan, engine: StepEngine, q: Tensor, k: Tensor, v: Tensor, want_max: bool
) -> Requests[tuple[Tensor, Tensor, Tensor | None]]:
    """Compute (out [B, Hq, S, E], lse [B, Hq, S], max_scores or None) of this rank's queries."""
    out, lse, top = outputs(plan, engine, q, v, want_max)
    results = out, lse, top, new_state(out, lse)
    current = pack(k, v, plan.kv.s_max)
    for turn, hop in enumerate(plan.ring):
        flight = yield _send(plan, current, hop.next, (hop.previous,))
        if hop.reads:
            (keys, values), tables = views(current, k), plan.tables_for(q, hop.owner)
            with step_range(plan, turn):
                engine.forward(ForwardStep(q, keys, values, tables, *results, turn > 0, hop.more))()
            del keys, values  # views of a buffer that is freed once it was sent
        current = yield flight
    return out, lse, top


def backward(
    plan: Plan, engine: StepEngine, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor
) -> Requests[tuple[Tensor, Tensor, Tensor]]:
    """Compute (dq, dk, dv) of this rank's shards, in lse's dtype; gradients of captures go to the engine's
    buffers."""
    dq = empty_dq(plan, q, lse.dtype)
    current = pack(k, v, plan.kv.s_max)
    home = torch.zeros_like(current, dtype=lse.dtype)  # gradient of this rank's K and V
    grad_flight: Ticket | None = None
    returned = home[:0]
    for turn, hop in enumerate(plan.ring):
        flight = yield _send(plan, current, hop.next, (hop.previous,))
        if hop.reads:
            step = BackwardStep(q, *views(current, k), dout, lse, delta, plan.tables_for(q, hop.owner))
            with step_range(plan, turn, "dq"):
                engine.dq(step, dq, add=turn > 0)()
        if grad_flight is not None:
            returned = yield grad_flight  # dQ is computed meanwhile
        grad = _receive_grad(plan.ring, turn, returned, home)
        if hop.reads:
            with step_range(plan, turn, "dkdv"):  # adds to what the ranks before computed
                dkdv(engine, step, *views(grad, k), dq, add=turn > 0)
            del step  # it holds the keys
        grad_flight = yield _send(plan, grad, hop.dkv_to, (hop.dkv_next, hop.dkv_home))
        current = yield flight
    assert grad_flight is not None
    _receive_grad(plan.ring, len(plan.ring), (yield grad_flight), home)
    return dq, *separate(home, k)


def _send(plan: Plan, x: Tensor, target: int | None, sources: Sequence[int | None]) -> AllToAll:
    """Send a buffer to one rank or none, and receive one from each of ``sources``, in the order of ranks."""
    rows, sends, recvs = plan.kv.s_max, [0] * plan.world_size, [0] * plan.world_size
    for counts, peers in ((sends, (target,)), (recvs, sources)):
        for peer in peers:
            if peer is not None:
                counts[peer] = rows
    return AllToAll(x if target is not None else x[:0], sends, recvs)


def _receive_grad(hops: tuple[Hop, ...], turn: int, returned: Tensor, home: Tensor) -> Tensor:
    """Add the gradient that came home to ``home``, and return the gradient buffer of this step's K and V."""
    if turn == 0:
        return home
    previous = hops[turn - 1]
    sources = sorted(rank for rank in (previous.dkv_next, previous.dkv_home) if rank is not None)
    grads = dict(zip(sources, returned.tensor_split(max(1, len(sources)))))
    if previous.dkv_home is not None:
        home += grads[previous.dkv_home]
    if previous.dkv_next is not None:
        return grads[previous.dkv_next]
    if turn < len(hops) and hops[turn].holds:
        return torch.zeros_like(home)  # this rank is the first to add to the gradient
    return home
