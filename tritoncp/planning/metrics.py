"""Figures of a plan for one layer: evenness of work, bytes sent, memory of a rank, predicted time."""

from __future__ import annotations

from typing import NamedTuple

from tritoncp.planning import cost
from tritoncp.planning.memory import Shape, Sizes, peak_under
from tritoncp.planning.plan_data import PlanData


class Metrics(NamedTuple):
    """Figures of a plan for a layer, each of the rank that has the most. For extra bytes and times, of 16
    evenly spaced ranks in larger worlds.

    world_size:           number of ranks
    imbalance:            largest work of a rank over the mean; 1.0 is even
    remote_share:         share of the keys read by all ranks that other ranks hold, from 0 to 1
    forward_sent_bytes, backward_sent_bytes: sent to other ranks in a pass
    shard_bytes:          queries, keys, values, out and lse: kept from the forward to the backward pass
    gradient_bytes:       gradients of out, queries, keys and values
    forward_extra_bytes, backward_extra_bytes: most that a pass allocates beyond these: messages, gathered or
                          fetched keys, float32 gradients, states. Tables, captured tensors and partial sums
                          of kernels are left out
    forward_peak_bytes, backward_peak_bytes: all bytes of the layer in a pass: the sums of those above
    forward_ms, backward_ms: predicted milliseconds of a pass, by the cost model that ranks schedules: to
                          compare plans, not to compare with a clock
    """

    world_size: int
    imbalance: float
    remote_share: float
    forward_sent_bytes: int
    backward_sent_bytes: int
    shard_bytes: int
    gradient_bytes: int
    forward_extra_bytes: int
    backward_extra_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    forward_ms: float
    backward_ms: float

    @classmethod
    def of(cls, plan: PlanData, shape: Shape, time: cost.Cost) -> Metrics:
        views = [plan.seen_by(rank) for rank in range(plan.world_size)]
        forward = [view.bytes_sent(**vars(shape), backward=False) for view in views]
        backward = [view.bytes_sent(**vars(shape)) - sent for view, sent in zip(views, forward)]
        read, stays = int(plan.traffic.sum()), int(plan.traffic.trace())
        size = Sizes.padded_rows(plan, shape)
        gradients = size.q + size.o + size.kv
        extra = peak_under(plan, plan.schedule, cost.sample(plan.world_size), shape)
        return cls(
            world_size=plan.world_size,
            imbalance=plan.imbalance,
            remote_share=(read - stays) / read if read else 0.0,
            forward_sent_bytes=max(forward),
            backward_sent_bytes=max(backward),
            shard_bytes=size.shards,
            gradient_bytes=gradients,
            forward_extra_bytes=extra.forward,
            backward_extra_bytes=extra.backward,
            forward_peak_bytes=size.shards + extra.forward,
            backward_peak_bytes=size.shards + gradients + extra.backward,
            forward_ms=time.forward * 1e3,
            backward_ms=time.backward * 1e3,
        )
