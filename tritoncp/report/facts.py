"""Facts about a plan for one layer, which text, JSON and pictures show."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tritoncp.core.bounded_cache import computed_once
from tritoncp.core.records import replace
from tritoncp.masks.mask_mod import name_of
from tritoncp.planning.costs import cost
from tritoncp.planning.costs.hardware import Hardware, hardware_of
from tritoncp.planning.costs.layer import Shape, check_latent
from tritoncp.planning.costs.message_bytes import bytes_sent
from tritoncp.planning.moves import rows_between
from tritoncp.planning.placement import in_order
from tritoncp.planning.plan import Plan
from tritoncp.report.dry_run import Peak, largest_peak


@dataclass(frozen=True)
class PlanFacts:
    """The facts about a plan for one layer that text, JSON and pictures show.

    >>> from tritoncp import causal, create_block_mask, make_plan
    >>> plan = make_plan(create_block_mask(causal(), 1, 1, 65536, 65536), world_size=4, rank=0)
    >>> facts = PlanFacts.of(plan, heads=16, kv_heads=16)
    >>> sorted(facts.bytes_sent)
    ['allgather', 'fetch', 'ring', 'ulysses']
    """

    plan: Plan
    shape: Shape
    hardware: Hardware
    expression: str  # the mask as its author wrote it

    @classmethod
    def of(cls, plan: Plan, hardware: Hardware | None = None, **shape: int) -> PlanFacts:
        """Return the facts for a layer of this ``shape``, on the assumed hardware if none is passed."""
        mod = plan.mask.mask_mod
        layer = Shape.of_layer(plan, **shape)
        if layer.latent:
            check_latent(plan, f"latent={layer.latent}")
        expression = "" if mod is None else name_of(mod)
        return cls(plan, layer, hardware or hardware_of(plan.world_size), expression)

    @cached_property
    def costs(self) -> tuple[cost.Cost, ...]:
        """Cost of every schedule for this placement, cheapest first."""
        return cost.costs(self.plan, self.shape, self.hardware)

    @cached_property
    def bytes_sent(self) -> dict[str, list[int]]:
        """Bytes that each rank sends in a forward and a backward pass, by schedule."""
        names = dict.fromkeys([*(estimate.schedule for estimate in self.costs), self.plan.schedule])
        plans = {name: replace(self.plan, schedule=name, handle=None) for name in names}
        return {name: torch.add(*bytes_sent(plan, self.shape)).tolist() for name, plan in plans.items()}

    @computed_once
    def peak(self, schedule: str) -> Peak:
        """Most memory of a rank beyond its shards and results, under a schedule that need not be the
        plan's."""
        return largest_peak(replace(self.plan, schedule=schedule, handle=None), self.shape)

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Figures of the plan's own schedule, each of the rank that has the most; docs/observability.md has
        the meanings. Times are those of 16 evenly spaced ranks in larger worlds."""
        plan, shape = self.plan, self.shape
        own = plan.schedule.partition("+")[0]  # "ulysses+ring" is estimated as "ulysses"
        # one rank sends nothing, which the cheapest schedule counts
        time = next(one for one in self.costs if one.schedule == own or plan.world_size == 1)
        forward, backward = bytes_sent(plan, shape)
        rows, stays = int(plan.traffic.sum()), int(plan.traffic.trace())
        moves = rows_between(plan.q, in_order(plan.q.length, plan.world_size)).fill_diagonal_(0)
        row = (1 if plan.q.batch > 1 else shape.batch) * shape.heads * shape.v_head_dim * shape.itemsize
        tokens = plan.q.s_max * shape.batch * shape.heads  # of the longest shard
        gradients = tokens * (shape.head_dim + shape.v_head_dim) + plan.kv.s_max * shape.row
        gradients *= shape.itemsize
        shards = gradients + tokens * max(4, shape.itemsize)  # with lse
        extra = self.peak(plan.schedule)
        return {
            "world_size": plan.world_size,
            "imbalance": plan.imbalance,
            "remote_share": (rows - stays) / rows if rows else 0.0,
            "forward_sent_bytes": int(forward.max()),
            "backward_sent_bytes": int(backward.max()),
            "reshard_sent_bytes": int(moves.sum(1).max()) * row,
            "shard_bytes": shards,
            "gradient_bytes": gradients,
            "forward_extra_bytes": extra.forward,
            "backward_extra_bytes": extra.backward,
            "forward_peak_bytes": shards + extra.forward,
            "backward_peak_bytes": shards + gradients + extra.backward,
            "forward_ms": time.forward * 1e3,
            "backward_ms": time.backward * 1e3,
        }

    @property
    def reads(self) -> Tensor:
        """Bytes of rank s's keys and values that rank r's queries see, at [r, s]: int64 [W, W]."""
        rows = self.plan.traffic * (1 if self.plan.batch > 1 else self.shape.batch)
        return rows * (self.shape.row // self.shape.batch * self.shape.itemsize)

    def as_json(self) -> dict[str, Any]:
        """Return the facts as JSON values: the output of ``tritoncp plan --json``."""
        plan, mask = self.plan, self.plan.mask
        return {
            "mask": {
                "expression": self.expression or None,
                "q_len": mask.q_len, "kv_len": mask.kv_len, "block_size": [mask.q_block, mask.kv_block],
                "sparsity": mask.sparsity(), "runs": len(mask.runs.stored[1]),
            },
            "world_size": plan.world_size,
            "balancer": plan.balancer,
            "schedule": plan.schedule,
            "reason": plan.reason,
            "layer": asdict(self.shape),
            "hardware": asdict(self.hardware),
            "tokens": [int(slots[0, :, 2].sum()) for slots in plan.q.slots],
            "work": plan.work,
            "imbalance": plan.imbalance,
            "metrics": self.metrics,
            "schedules": {
                estimate.schedule: {
                    "forward_ms": estimate.forward * 1e3,
                    "backward_ms": estimate.backward * 1e3,
                    "extra_bytes": max(self.peak(estimate.schedule)),
                    "sent_bytes": self.bytes_sent[estimate.schedule],
                }
                for estimate in self.costs
            },
            "reads_bytes": self.reads.tolist(),
        }  # fmt: skip
