"""The cost model of schedules: time and memory of a layer.

It ranks schedules; it does not predict the time of a step. Hardware figures are arguments and name their
source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tritoncp.masks.visible_keys import count_visible_keys
from tritoncp.planning.costs import traffic
from tritoncp.planning.costs.hardware import Hardware
from tritoncp.planning.costs.layer import Shape
from tritoncp.planning.costs.message_bytes import bytes_exchanged, elements_fetched, trade_heads

if TYPE_CHECKING:
    from tritoncp.planning.plan import Plan

BACKWARD_RATIO = 2.5  # time of the backward pass in units of the forward pass: five matrix products for two
DKDV_SHARE = 0.6  # share of dK and dV in the backward pass's time; the rest is dQ
MAX_SAMPLED_RANKS = 16  # max number of ranks whose cost is computed; the slowest one sets the step's time


@dataclass(frozen=True)
class Cost:
    """Seconds of the slowest rank's forward and backward pass."""

    schedule: str
    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


def costs(plan: Plan, shape: Shape, hardware: Hardware) -> tuple[Cost, ...]:
    """Estimate the cost of every schedule for this plan's placement, cheapest first."""
    ranks = sample(plan.world_size)
    pairs = _pairs(plan, ranks, shape)
    estimates = [estimate(plan, ranks, pairs, shape, hardware) for estimate in (_ring, _fetch, _allgather)]
    if not shape.latent:  # a latent has no heads to exchange
        estimates.append(_ulysses(plan, shape, hardware))
    return tuple(sorted(estimates, key=lambda cost: cost.total))


def sample(world_size: int) -> list[int]:
    """Return the ranks whose cost is computed: up to MAX_SAMPLED_RANKS, evenly spaced."""
    return (
        torch.linspace(0, world_size - 1, min(world_size, MAX_SAMPLED_RANKS)).round().int().unique().tolist()
    )


def _pairs(plan: Plan, ranks: Sequence[int], shape: Shape) -> Tensor:
    """Count the pairs in listed blocks between these ranks' queries and each rank's keys, per head, averaged
    over the batch rows of mask and placement: float64 [ranks, W]. Of a row, as many as the layer selects
    count, evenly from all ranks."""
    queries = traffic.count_queries(plan.mask, plan.q, ranks)
    pairs = traffic.sum_by_owner(queries, plan.kv).double() / (
        max(queries.shape[1], plan.kv.batch) * plan.mask.H
    )
    return pairs * _selected_share(plan, ranks, shape.selected) if shape.selected else pairs


def _selected_share(plan: Plan, ranks: Sequence[int], selected: int) -> Tensor:
    """Return the share of visible pairs that ``selected`` keys a query are, for the queries of each rank:
    float64 [ranks, 1]."""
    seen = count_visible_keys(plan.mask, plan.mask.B, plan.mask.H, plan.first_row).double().sum(1)
    taken = seen.clamp(max=selected * plan.mask.H)
    shares = []
    for rank in ranks:
        at = plan.q.positions(rank)
        batch = max(len(at), len(seen))
        index, valid = at.clamp(min=0).expand(batch, -1), at >= 0
        sums = [float((x.expand(batch, -1).gather(1, index) * valid).sum()) for x in (taken, seen)]
        shares.append([sums[0] / sums[1] if sums[1] else 1.0])
    return torch.tensor(shares, dtype=torch.float64)


def _seconds(shape: Shape, pairs: Tensor, hardware: Hardware) -> Tensor:
    """Estimate the forward time of ``pairs`` visible pairs per head, 2 (D + E) FLOPs each."""
    flops = 2 * shape.batch * shape.heads * (shape.head_dim + shape.v_head_dim)
    return pairs * (flops / hardware.flops)


def _expansion(shape: Shape, rows: Tensor | int, hardware: Hardware) -> Any:
    """Estimate the forward time of expanding rows of a latent to keys and values, by a product with one
    matrix. The backward pass expands them again, and two more products give the gradients of latent and
    matrix."""
    return rows * shape.latent * 2 * shape.expanded_row / hardware.flops


EXPANSION_BACKWARD = 3  # products with the matrix, in units of the forward's product


def _allgather(plan: Plan, ranks: Sequence[int], pairs: Tensor, shape: Shape, hardware: Hardware) -> Cost:
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


def _ring(plan: Plan, ranks: Sequence[int], pairs: Tensor, shape: Shape, hardware: Hardware) -> Cost:
    size = plan.kv.s_max * shape.row
    hop = size * shape.itemsize / hardware.bandwidth + hardware.latency
    follow = size * 4 / hardware.bandwidth + hardware.latency
    times, expand = _seconds(shape, pairs, hardware).tolist(), _expansion(shape, plan.kv.s_max, hardware)
    forward = backward = 0.0
    for hops in zip(*(plan.derived.ring(rank) for rank in ranks)):
        compute = max(times[i][h.owner] if h.reads else 0.0 for i, h in enumerate(hops))
        reads, moves = any(h.reads for h in hops), any(h.next is not None for h in hops)
        follows = any(h.dkv_to is not None for h in hops)
        forward += max(compute + reads * expand, moves * hop)
        back = BACKWARD_RATIO * compute + EXPANSION_BACKWARD * reads * expand
        backward += max(back, moves * hop + follows * follow)
    return Cost("ring", forward, backward)


def _fetch(plan: Plan, ranks: Sequence[int], pairs: Tensor, shape: Shape, hardware: Hardware) -> Cost:
    near = _seconds(shape, pairs[range(len(ranks)), ranks], hardware)
    far = _seconds(shape, pairs.sum(1), hardware) - near
    elements = elements_fetched(plan, shape)
    wire = torch.maximum(elements.sum(0), elements.sum(1))[ranks] / (hardware.bandwidth * hardware.scattered)
    start = (elements[ranks] > 0).sum(1) * hardware.latency
    receive_time, return_time = wire * shape.itemsize + start, wire * 4 + start
    rows = plan.traffic.clone().fill_diagonal_(0).sum(1) // plan.batch
    own, remote = (_expansion(shape, x[ranks], hardware) for x in (torch.tensor(plan.kv.lengths), rows))
    forward = torch.maximum(near + own, receive_time) + far + remote
    back = BACKWARD_RATIO * near + EXPANSION_BACKWARD * own
    tail = torch.maximum(return_time, BACKWARD_RATIO * far * (1 - DKDV_SHARE))
    backward = torch.maximum(back, receive_time) + EXPANSION_BACKWARD * remote
    backward = backward + BACKWARD_RATIO * far * DKDV_SHARE + tail
    return Cost("fetch", float(forward.max()), float(backward.max()))


def _ulysses(plan: Plan, shape: Shape, hardware: Hardware) -> Cost:
    """Estimate the exchange of sequence for heads and back, without overlap, plus a fetch between rows of
    ranks if there are several."""
    rows, q_heads, kv_heads, summed = trade_heads(plan, shape)
    ranks = sample(rows.world_size)
    largest = replace(shape, heads=max(map(len, q_heads)), kv_heads=max(map(len, kv_heads)))
    inner = _fetch(rows, ranks, _pairs(rows, ranks, shape), largest, hardware)
    sent = (int(x.max()) / (hardware.bandwidth * hardware.scattered) for x in bytes_exchanged(plan, shape))
    starts = 3 * hardware.latency, (3 + summed) * hardware.latency  # wide dK and dV share no message with dQ
    forward, backward = (x + y + z for x, y, z in zip((inner.forward, inner.backward), sent, starts))
    return Cost("ulysses", forward, backward)
