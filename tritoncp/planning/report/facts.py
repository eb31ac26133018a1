"""Facts about a plan for one layer, which text, JSON and pictures show."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tritoncp.masks.mask_mod import name_of
from tritoncp.planning import cost
from tritoncp.planning.memory import TensorBytes

if TYPE_CHECKING:
    from tritoncp.planning.plan import Plan


@dataclass(frozen=True)
class Facts:
    """The facts about a plan for one layer that text, JSON and pictures show.

    >>> from tritoncp import causal, create_block_mask, make_plan
    >>> plan = make_plan(create_block_mask(causal(), 1, 1, 65536, 65536), world_size=4, rank=0)
    >>> facts = Facts.of(plan, heads=16, kv_heads=16)
    >>> sorted(facts.bytes_sent)
    ['allgather', 'fetch', 'ring', 'ulysses']
    """

    plan: Plan
    shape: cost.Shape
    hardware: cost.Hardware
    expression: str  # the mask as its author wrote it

    @classmethod
    def of(cls, plan: Plan, hardware: cost.Hardware | None = None, **shape: int) -> Facts:
        """Return the facts for a layer of this ``shape``, on the assumed hardware if none is passed."""
        mod = plan.mask.mask_mod
        layer = cost.Shape.of_layer(plan, **shape)
        expression = "" if mod is None else name_of(mod)
        return cls(plan, layer, hardware or cost.hardware_of(plan.world_size), expression)

    @cached_property
    def costs(self) -> tuple[cost.Cost, ...]:
        """Cost of every schedule for this placement, cheapest first; empty for one rank."""
        return cost.costs(self.plan, self.shape, self.hardware) if self.plan.world_size > 1 else ()

    @cached_property
    def own_cost(self) -> cost.Cost:
        """Cost of the plan's own schedule; "ulysses+ring" is estimated as "ulysses"."""
        if self.plan.world_size == 1:
            return cost.local_cost(self.plan, self.shape, self.hardware)
        name = self.plan.schedule.partition("+")[0]
        return next(one for one in self.costs if one.schedule == name)

    @cached_property
    def bytes_sent(self) -> dict[str, list[int]]:
        """Bytes that each rank sends in a forward and a backward pass, by schedule."""
        schedules = dict.fromkeys([*(estimate.schedule for estimate in self.costs), self.plan.schedule])
        return {name: cost.bytes_under(self.plan, name, self.shape) for name in schedules}

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Figures of the plan's own schedule."""
        return cost.plan_metrics(self.plan, self.shape, self.own_cost)

    @property
    def shard_bytes(self) -> int:
        """Bytes of this rank's queries, keys, values, outputs and lse."""
        return TensorBytes.of(self.plan, self.shape).shards

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
            "shard_bytes": self.shard_bytes,
            "metrics": self.metrics,
            "schedules": {
                estimate.schedule: {
                    "forward_ms": estimate.forward * 1e3,
                    "backward_ms": estimate.backward * 1e3,
                    "extra_bytes": estimate.memory,
                    "sent_bytes": self.bytes_sent[estimate.schedule],
                }
                for estimate in self.costs
            },
            "reads_bytes": self.reads.tolist(),
        }  # fmt: skip
