"""Figures of a plan for one layer: evenness of work, bytes sent, and memory of a rank."""

from __future__ import annotations

from typing import NamedTuple

from tritoncp.planning import cost
from tritoncp.planning.memory import Shape, Sizes, peak_under
from tritoncp.planning.plan_data import PlanData


class Metrics(NamedTuple):
    """Figures of a plan for a layer, each of the rank that has the most. For extra bytes, of 16 evenly spaced
    ranks in larger worlds.

    imbalance:            largest work of a rank over the mean; 1.0 is even
    remote_share:         share of the keys read by all ranks that other ranks hold, from 0 to 1
    forward_sent_bytes, backward_sent_bytes: sent to other ranks in a pass
    shard_bytes:          queries, keys, values, out and lse: kept from the forward to the backward pass
    gradient_bytes:       gradients of out, queries, keys and values
    forward_extra_bytes, backward_extra_bytes: most that a pass allocates beyond these: messages, gathered or
                          fetched keys, float32 gradients, states. Tables, captured tensors and partial sums
                          of kernels are left out
    """

    imbalance: float
    remote_share: float
    forward_sent_bytes: int
    backward_sent_bytes: int
    shard_bytes: int
    gradient_bytes: int
    forward_extra_bytes: int
    backward_extra_bytes: int

    @property
    def forward_peak_bytes(self) -> int:
        """Bytes of a layer in its forward pass."""
        return self.shard_bytes + self.forward_extra_bytes

    @property
    def backward_peak_bytes(self) -> int:
        """Bytes of a layer in its backward pass."""
        return self.shard_bytes + self.gradient_bytes + self.backward_extra_bytes

    @classmethod
    def of(cls, plan: PlanData, shape: Shape) -> Metrics:
        views = [plan.seen_by(rank) for rank in range(plan.world_size)]
        forward = [view.bytes_sent(**vars(shape), backward=False) for view in views]
        backward = [view.bytes_sent(**vars(shape)) - sent for view, sent in zip(views, forward)]
        read, stays = int(plan.traffic.sum()), int(plan.traffic.trace())
        size = Sizes.padded_rows(plan, shape)
        extra = peak_under(plan, plan.schedule, cost.sample(plan.world_size), shape)
        return cls(
            imbalance=plan.imbalance,
            remote_share=(read - stays) / read if read else 0.0,
            forward_sent_bytes=max(forward),
            backward_sent_bytes=max(backward),
            shard_bytes=size.shards,
            gradient_bytes=size.q + size.o + size.kv,
            forward_extra_bytes=extra.forward,
            backward_extra_bytes=extra.backward,
        )
