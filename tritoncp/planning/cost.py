"""The cost model of schedules: time and memory of a layer.

It ranks schedules; it does not predict the time of a step. Hardware figures are arguments and name their
source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tritoncp.planning import traffic
from tritoncp.planning.memory import Shape, peak_under, rows_of_steps

if TYPE_CHECKING:
    from tritoncp.planning.plan import Plan

BACKWARD_RATIO = 2.5  # time of the backward pass in units of the forward pass: five matrix products for two
DKDV_SHARE = 0.6  # share of dK and dV in the backward pass's time; the rest is dQ
MAX_SAMPLED_RANKS = 16  # ranks whose cost is computed: the slowest of them sets the step's time


@dataclass(frozen=True)
class Hardware:
    """Attained rates of a GPU and its interconnect.

    flops: of attention in 16 bits, per second; bandwidth: bytes that a rank sends per second; latency:
    seconds per message; scattered: share of the bandwidth that an all-to-all of many pieces attains; memory:
    bytes of the device's memory read and written per second."""

    name: str
    flops: float
    bandwidth: float
    latency: float
    scattered: float
    source: str
    memory: float = 2.4e12  # of an H100 or H200, by datasheets 3.35e12 and 4.8e12


NVLINK = Hardware("H100/H200, NVLink", 5.0e14, 4.0e11, 1.0e-5, 0.7, "datasheets, half of the peak FLOPs")
NETWORK = Hardware("H100/H200, 400 Gb/s", 5.0e14, 4.5e10, 2.0e-5, 0.7, "datasheets, half of the peak FLOPs")


@dataclass(frozen=True)
class Cost:
    """Seconds of the slowest rank's forward and backward pass, and the most bytes of a rank in either beyond
    its shards and results (:mod:`tritoncp.planning.memory`)."""

    schedule: str
    forward: float
    backward: float
    memory: int = 0

    @property
    def total(self) -> float:
        return self.forward + self.backward


def hardware_of(world_size: int) -> Hardware:
    """Return the assumed hardware: NVLink for up to eight ranks, the network beyond."""
    return NVLINK if world_size <= 8 else NETWORK


def costs(plan: Plan, shape: Shape, hardware: Hardware) -> tuple[Cost, ...]:
    """Estimate the cost of every schedule for this plan's placement, cheapest first."""
    ranks = sample(plan.world_size)
    pairs = _pairs(plan, ranks)
    views = [plan.for_rank(rank) for rank in ranks]
    estimates = [
        _ring(views, pairs, shape, hardware),
        _fetch(views, pairs, shape, hardware),
        _allgather(plan, pairs, shape, hardware),
    ]
    if not shape.latent:  # a latent has no heads to exchange
        estimates.append(_ulysses(plan, shape, hardware))
    with_memory = (
        replace(one, memory=max(peak_under(plan, one.schedule, ranks, shape)[:2])) for one in estimates
    )
    return tuple(sorted(with_memory, key=lambda cost: cost.total))


def sample(world_size: int) -> list[int]:
    """Return up to MAX_SAMPLED_RANKS ranks, evenly spaced: those whose cost is computed."""
    return (
        torch.linspace(0, world_size - 1, min(world_size, MAX_SAMPLED_RANKS)).round().int().unique().tolist()
    )


def _pairs(plan: Plan, ranks: Sequence[int]) -> Tensor:
    """Count the pairs in listed blocks between these ranks' queries and each rank's keys, per head, averaged
    over the batch rows of mask and placement: float64 [ranks, W]."""
    queries = traffic.count_queries(plan.mask, plan.q, ranks)
    return traffic.sum_by_owner(queries, plan.kv).double() / (
        max(queries.shape[1], plan.kv.batch) * plan.mask.H
    )


def _seconds(shape: Shape, pairs: Tensor, hardware: Hardware) -> Tensor:
    """Forward time of ``pairs`` visible pairs per head, 2 (D + E) FLOPs each."""
    flops = 2 * shape.batch * shape.heads * (shape.head_dim + shape.v_head_dim)
    return pairs * (flops / hardware.flops)


def _expansion(shape: Shape, rows: int, hardware: Hardware) -> float:
    """Forward time of expanding rows of a latent to keys and values, by a product with one matrix. Backward
    the rows are expanded again, and two products give the gradients of latent and matrix."""
    return rows * shape.latent * 2 * shape.expanded_row / hardware.flops


EXPANSION_BACKWARD = 3  # products with the matrix, for one forward


def _allgather(plan: Plan, pairs: Tensor, shape: Shape, hardware: Hardware) -> Cost:
    compute = float(_seconds(shape, pairs.sum(1).max(), hardware))
    own = plan.kv.s_max * shape.row
    peers = 0 if plan.derived.reads_only_own_keys else plan.world_size - 1
    groups = len(traffic.head_groups(shape.sent_heads, own * shape.itemsize))
    expand = _expansion(shape, (peers + 1) * plan.kv.s_max, hardware)
    latency = groups * hardware.latency * (peers > 0)
    gather = peers * own * shape.itemsize / hardware.bandwidth + latency
    back = peers * own * 4 / hardware.bandwidth + latency
    exposed, hidden = gather / groups, gather * (groups - 1) / groups
    forward = exposed + max(compute + expand, hidden)
    backward = BACKWARD_RATIO * compute + EXPANSION_BACKWARD * expand
    backward = exposed + max(backward, hidden + back * (groups - 1) / groups) + back / groups
    return Cost("allgather", forward, backward)


def _ring(views: Sequence[Plan], pairs: Tensor, shape: Shape, hardware: Hardware) -> Cost:
    size = views[0].kv.s_max * shape.row
    hop = size * shape.itemsize / hardware.bandwidth + hardware.latency
    follow = size * 4 / hardware.bandwidth + hardware.latency
    times, expand = _seconds(shape, pairs, hardware), _expansion(shape, views[0].kv.s_max, hardware)
    forward = backward = 0.0
    for hops in zip(*(view.ring for view in views)):
        compute = max(float(times[i, h.owner]) if h.reads else 0.0 for i, h in enumerate(hops))
        reads, moves = any(h.reads for h in hops), any(h.next is not None for h in hops)
        follows = any(h.dkv_to is not None for h in hops)
        forward += max(compute + reads * expand, moves * hop)
        back = BACKWARD_RATIO * compute + EXPANSION_BACKWARD * reads * expand
        backward += max(back, moves * hop + follows * follow)
    return Cost("ring", forward, backward)


def _fetch(views: Sequence[Plan], pairs: Tensor, shape: Shape, hardware: Hardware) -> Cost:
    forward = backward = 0.0
    remote_rows = views[0].traffic.clone().fill_diagonal_(0)
    for view, row in zip(views, pairs):
        near = float(_seconds(shape, row[view.rank], hardware))
        far = float(_seconds(shape, row.sum() - row[view.rank], hardware))
        share = shape.row // (shape.batch if view.batch > 1 else 1)
        received, sent_rows = remote_rows[view.rank], remote_rows[:, view.rank]
        elements = max(int(received.sum()), int(sent_rows.sum())) * share
        wire = elements / (hardware.bandwidth * hardware.scattered)
        start = int((received > 0).sum()) * hardware.latency
        receive_time, return_time = wire * shape.itemsize + start, wire * 4 + start
        own, remote = (_expansion(shape, n, hardware) for n in rows_of_steps(view, "fetch"))
        forward = max(forward, max(near + own, receive_time) + far + remote)
        tail = BACKWARD_RATIO * far * DKDV_SHARE + max(return_time, BACKWARD_RATIO * far * (1 - DKDV_SHARE))
        back = BACKWARD_RATIO * near + EXPANSION_BACKWARD * own
        backward = max(backward, max(back, receive_time) + EXPANSION_BACKWARD * remote + tail)
    return Cost("fetch", forward, backward)


def _ulysses(plan: Plan, shape: Shape, hardware: Hardware) -> Cost:
    """Estimate the exchange of sequence for heads and back, without overlap, plus a fetch between rows of
    ranks if there are several."""
    degree = plan.degree_for(shape.heads)
    rows = plan.rows(degree, shape.heads)
    ranks = sample(rows.world_size)
    views = [rows.for_rank(rank) for rank in ranks]
    pairs = _pairs(rows, ranks)
    q_heads, kv_heads = traffic.trade(shape.heads, shape.kv_heads, degree)
    largest = replace(shape, heads=max(map(len, q_heads)), kv_heads=max(map(len, kv_heads)))
    inner = _fetch(views, pairs, largest, hardware)
    d, e, item = shape.head_dim, shape.v_head_dim, shape.itemsize
    tokens = (degree - 1) * plan.q.s_max * shape.batch
    summed = not rows.derived.reads_only_own_keys or traffic.share(kv_heads)  # dK and dV, in float32
    grad = 4 if summed else item
    out = tokens * largest.heads * (d * item + e * item + 4)  # send queries, receive outputs and lse
    keys = tokens * largest.kv_heads * (d + e)
    rate = hardware.bandwidth * hardware.scattered
    forward_exchange = (out + keys * item) / rate + 3 * hardware.latency
    # Sends queries, gradients of outputs, lse and delta; receives gradients of queries.
    backward_exchange = (tokens * largest.heads * ((2 * d + e) * item + 8) + keys * (item + grad)) / rate
    backward = inner.backward + backward_exchange + (3 + summed) * hardware.latency
    return Cost("ulysses", inner.forward + forward_exchange, backward)
