"""The cost of a schedule: a small model of time and memory, from a plan's own work and bytes.

It ranks schedules; it does not predict a step to the microsecond.  Every number of hardware says where it is
from, and all of them are arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tritoncp.planning import traffic as steps

if TYPE_CHECKING:
    from tritoncp.planning.plan import Plan

BACKWARD = 2.5  # five matrix products for two
DKDV = 0.6  # of the backward pass; the rest is dQ
SAMPLED = 16  # ranks looked at: the slowest of them is the step's time


@dataclass(frozen=True)
class Hardware:
    """flops: attained by attention in 16 bits, a second; bandwidth: bytes a rank sends a second; latency:
    seconds a message; scattered: share of the bandwidth that an all-to-all of many pieces attains."""

    name: str
    flops: float
    bandwidth: float
    latency: float
    scattered: float
    source: str


NVLINK = Hardware("H100/H200, NVLink", 5.0e14, 4.0e11, 1.0e-5, 0.7, "datasheets, half of the peak FLOPs")
NETWORK = Hardware("H100/H200, 400 Gb/s", 5.0e14, 4.5e10, 2.0e-5, 0.7, "datasheets, half of the peak FLOPs")


@dataclass(frozen=True)
class Shape:
    """One layer's attention. The choice depends on heads / kv_heads, and on little else."""

    batch: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    v_head_dim: int = 128
    itemsize: int = 2

    @property
    def row(self) -> int:
        """Elements of one token's K and V."""
        return self.batch * self.kv_heads * (self.head_dim + self.v_head_dim)

    def state_bytes(self, rows: int) -> int:
        """float32 (acc, m, l) between the steps of so many query rows."""
        return rows * self.batch * self.heads * (self.v_head_dim + 2) * 4

    def seconds(self, pairs: Tensor, hardware: Hardware) -> Tensor:
        """Forward time of so many visible pairs a head, 2 (D + E) FLOPs each."""
        return pairs * (2 * self.batch * self.heads * (self.head_dim + self.v_head_dim) / hardware.flops)


@dataclass(frozen=True)
class Cost:
    """Seconds of the slowest rank's forward and backward pass, and its bytes beyond the shard."""

    schedule: str
    forward: float
    backward: float
    memory: int

    @property
    def total(self) -> float:
        return self.forward + self.backward


def hardware_of(world_size: int) -> Hardware:
    """NVLink within eight ranks, the network beyond."""
    return NVLINK if world_size <= 8 else NETWORK


def costs(plan: Plan, shape: Shape, hardware: Hardware) -> tuple[Cost, ...]:
    """The cost of every schedule for this plan's placement, cheapest first."""
    ranks = _sample(plan.world_size)
    pairs = _pairs(plan, ranks)
    views = [plan.for_rank(rank) for rank in ranks]
    each = (
        _allgather(plan, pairs, shape, hardware),
        _ring(views, pairs, shape, hardware),
        _fetch(views, pairs, shape, hardware),
        _ulysses(plan, shape, hardware),
    )
    return tuple(sorted(each, key=lambda cost: cost.total))


def _sample(world_size: int) -> list[int]:
    return torch.linspace(0, world_size - 1, min(world_size, SAMPLED)).round().int().unique().tolist()


def _pairs(plan: Plan, ranks: Sequence[int]) -> Tensor:
    """Pairs in listed blocks between these ranks' queries and each rank's keys, a head, summed over the batch
    rows of mask and placement and divided by their number: float64 [ranks, W]."""
    seen = steps.weights(plan.mask, plan.q, ranks)
    return steps.by_owner(seen, plan.kv).double() / (max(seen.shape[1], plan.kv.batch) * plan.mask.H)


def _allgather(plan: Plan, pairs: Tensor, shape: Shape, hardware: Hardware) -> Cost:
    compute = float(shape.seconds(pairs.sum(1).max(), hardware))
    own = plan.kv.s_max * shape.row
    rows, groups = (plan.world_size - 1) * own, len(steps.head_groups(shape.kv_heads, own * shape.itemsize))
    gather = rows * shape.itemsize / hardware.bandwidth + groups * hardware.latency
    back = rows * 4 / hardware.bandwidth + groups * hardware.latency
    exposed, hidden = gather / groups, gather * (groups - 1) / groups
    forward = exposed + max(compute, hidden)
    backward = exposed + max(BACKWARD * compute, hidden + back * (groups - 1) / groups) + back / groups
    memory = plan.world_size * plan.kv.s_max * shape.row * (shape.itemsize + 4) // groups * min(2, groups)
    return Cost("allgather", forward, backward, memory)


def _ring(views: Sequence[Plan], pairs: Tensor, shape: Shape, hardware: Hardware) -> Cost:
    size = views[0].kv.s_max * shape.row
    hop = size * shape.itemsize / hardware.bandwidth + hardware.latency
    follow = size * 4 / hardware.bandwidth + hardware.latency
    times = shape.seconds(pairs, hardware)
    forward = backward = 0.0
    for hops in zip(*(view.ring for view in views)):
        compute = max(float(times[i, h.owner]) if h.reads else 0.0 for i, h in enumerate(hops))
        moves = any(h.next is not None for h in hops)
        follows = any(h.dkv_to is not None for h in hops)
        forward += max(compute, moves * hop)
        backward += max(BACKWARD * compute, moves * hop + follows * follow)
    memory = size * (2 * shape.itemsize + 8) + shape.state_bytes(views[0].s_local)
    return Cost("ring", forward, backward, memory)


def _fetch(views: Sequence[Plan], pairs: Tensor, shape: Shape, hardware: Hardware) -> Cost:
    forward = backward = 0.0
    most = 0
    traffic = views[0].traffic.clone().fill_diagonal_(0)
    for view, row in zip(views, pairs):
        near = float(shape.seconds(row[view.rank], hardware))
        far = float(shape.seconds(row.sum() - row[view.rank], hardware))
        share = shape.row // (shape.batch if view.batched else 1)
        comes, goes = traffic[view.rank], traffic[:, view.rank]
        take, give, peers = int(comes.sum()) * share, int(goes.sum()) * share, int((comes > 0).sum())
        wire = max(take, give) / (hardware.bandwidth * hardware.scattered)
        come, back = wire * shape.itemsize, wire * 4
        come, back = (seconds + peers * hardware.latency for seconds in (come, back))
        forward = max(forward, max(near, come) + far)
        ends = BACKWARD * far * DKDV + max(back, BACKWARD * far * (1 - DKDV))
        backward = max(backward, max(BACKWARD * near, come) + ends)
        most = max(most, take * (shape.itemsize + 4))
    return Cost("fetch", forward, backward, most + shape.state_bytes(views[0].s_local))


def _ulysses(plan: Plan, shape: Shape, hardware: Hardware) -> Cost:
    """Sequence for heads and back, nothing hidden; between rows, if there are several, a fetch."""
    degree = plan.degree_for(shape.heads)
    rows = plan.rows(degree, shape.heads)
    ranks = _sample(rows.world_size)
    views = [rows.for_rank(rank) for rank in ranks]
    pairs = _pairs(rows, ranks)
    q_heads, kv_heads = steps.trade(shape.heads, shape.kv_heads, degree)
    most = replace(shape, heads=max(map(len, q_heads)), kv_heads=max(map(len, kv_heads)))
    inner = _fetch(views, pairs, most, hardware)
    d, e, item = shape.head_dim, shape.v_head_dim, shape.itemsize
    tokens = (degree - 1) * plan.q.s_max * shape.batch
    summed = rows.world_size > 1 or steps.share(kv_heads)  # dK and dV, in float32
    grad = 4 if summed else item
    out = tokens * most.heads * (d * item + e * item + 4)  # queries there, outputs and lse back
    keys = tokens * most.kv_heads * (d + e)
    rate = hardware.bandwidth * hardware.scattered
    there = (out + keys * item) / rate + 3 * hardware.latency
    # Queries, gradients of outputs, lse and delta there, gradients of queries back.
    again = (tokens * most.heads * ((2 * d + e) * item + 8) + keys * (item + grad)) / rate
    held = degree * plan.s_local * (most.heads * (d + 2 * e) * item + most.kv_heads * (d + e) * (item + grad))
    memory = shape.batch * held + (inner.memory if rows.world_size > 1 else 0)
    backward = inner.backward + again + (3 + summed) * hardware.latency
    return Cost("ulysses", inner.forward + there, backward, memory)


def why(found: Sequence[Cost], hardware: Hardware) -> str:
    """The choice in a line."""
    times = ", ".join(f"{cost.schedule} {cost.total * 1e3:.3g}" for cost in found)
    return f"predicted ms a layer on {hardware.name}: {times}"


def sent(plan: Plan, schedule: str, shape: Shape) -> list[int]:
    """Bytes that each rank would send in a forward and a backward pass of one layer."""
    layer: dict[str, Any] = {"batch": shape.batch, "heads": shape.heads, "kv_heads": shape.kv_heads}
    layer |= {"head_dim": shape.head_dim, "v_head_dim": shape.v_head_dim, "itemsize": shape.itemsize}
    other = replace(plan, schedule=schedule, handle=None)
    return [other.for_rank(rank).bytes_sent(**layer) for rank in range(plan.world_size)]
