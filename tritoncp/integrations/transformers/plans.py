"""The plans of a batch, as attention gets them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tritoncp.integrations.transformers.masks import ModelMask
from tritoncp.integrations.transformers.positions import CheckedTensors
from tritoncp.planning.plan import Plan


@dataclass(frozen=True, eq=False)
class ContextParallelPlan:
    """The plans of one batch and their mesh, which are passed together, as a keyword argument of a model's
    call, to every attention.

    plans:        a plan for each kind of layer, all with one placement
    mesh:         the mesh of the ranks; None: one process
    position_ids: [B, S_local], of this rank's tokens
    """

    plans: dict[str, Plan]
    mesh: Any
    position_ids: Tensor
    _checked: CheckedTensors = field(default_factory=CheckedTensors, repr=False)

    @property
    def plan(self) -> Plan:
        """A plan with the placement of all, for :func:`tritoncp.shard` and :func:`tritoncp.unshard`."""
        return next(iter(self.plans.values()))

    def plan_of(self, attention_mask: Any) -> Plan:
        """Return the plan of the layer whose mask, of the local tokens, the model passes to its attention."""
        if isinstance(attention_mask, Plan):
            return attention_mask
        if isinstance(attention_mask, ModelMask) and attention_mask.attention_mask is not None:
            raise ValueError(
                "an attention_mask beside the batch of shard_batch: its plan has the padding already; put "
                "the mask into the batch before it is sharded"
            )
        if attention_mask is None and len(self.plans) == 1:  # a shard of one token
            return self.plan
        kind = attention_mask.kind if isinstance(attention_mask, ModelMask) else None
        if kind not in self.plans:
            raise ValueError(
                f"a layer has the mask {kind or 'of a custom mask function'}, and the plans are for "
                f"{', '.join(self.plans)}: pass the config of this model to shard_batch"
            )
        return self.plans[kind]

    def check_positions(self, position_ids: Tensor | None) -> None:
        """Raise ValueError if a call has other positions than the batch, whose own tensor is not read."""
        own = self.position_ids
        if position_ids is None or position_ids is own or position_ids in self._checked:
            return
        valid = self.plan.valid.to(own.device)
        same = position_ids.shape[-1] == own.shape[-1] and position_ids.ndim == 2
        if not same or bool(((position_ids != own) & valid).any()):
            raise ValueError(
                "position_ids are not those of the plan: tokens, positions and plan of a batch belong "
                "together; pass all of shard_batch(batch, model.config, mesh) to the model, unedited"
            )
        self._checked.add(position_ids)
