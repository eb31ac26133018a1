"""The plans of a batch, as attention gets them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from tritoncp.api.masks import create_block_mask
from tritoncp.api.plans import make_plan
from tritoncp.integrations.transformers.mask_functions import Pattern
from tritoncp.integrations.transformers.masks import ModelMask
from tritoncp.integrations.transformers.positions import CheckedTensors
from tritoncp.masks.mask import Mask
from tritoncp.planning.plan import Plan
from tritoncp.planning.work import Work

OWN_LOSS = (
    "leave labels out and compute the loss from the logits of each rank, with the labels that "
    "tritoncp.shard(labels, batch['context_parallel'].plan, dim=1, pad=-100) cuts"
)


@dataclass(frozen=True, eq=False)
class BatchMasks:
    """The masks of a whole batch: one for each kind of layer.

    request: the mask of one kind, from which others differ in window and chunks
    block:   tokens of a block
    """

    request: ModelMask
    block: int | tuple[int, int]

    def create(self, layer: ModelMask) -> Mask:
        """Return the mask of layers of the kind of one: with the documents and the padding of the batch."""
        pattern = layer.pattern or Pattern()
        padding = self.request.attention_mask
        left = None if padding is None else (padding.cumsum(-1) == 0).sum(-1)
        base = self.request.pattern or Pattern()
        own = replace(base, window=pattern.window, chunk=pattern.chunk, left_padding=left)
        mod = replace(self.request, pattern=own).mask_mod
        rows, length = self.request.batch, self.request.q_len
        return create_block_mask(
            mod, rows if mod.reads[0] else None, None, length, length, BLOCK_SIZE=self.block
        )


@dataclass(frozen=True, eq=False)
class ContextParallelPlan:
    """The plans of one batch and their mesh, which are passed together, as a keyword argument of a model's
    call, to every attention.

    plans:        a plan for each kind of layer, all with one placement
    mesh:         the mesh of the ranks; None: one process
    position_ids: [B, S_local], of this rank's tokens
    masks:        the masks of the whole batch
    schedule:     of the plans
    whole:        arguments that describe the whole sequence, for layers that run on it
    labels:       whether the batch has labels that were shifted here, for a loss of next tokens
    """

    plans: dict[str, Plan]
    mesh: Any
    position_ids: Tensor
    masks: BatchMasks
    schedule: str = "auto"
    whole: dict[str, Any] = field(default_factory=dict)
    labels: bool = False
    _checked: CheckedTensors = field(default_factory=CheckedTensors, repr=False)

    @property
    def plan(self) -> Plan:
        """A plan with the placement of all, for :func:`tritoncp.shard` and :func:`tritoncp.unshard`."""
        return next(iter(self.plans.values()))

    def layer_plan(self, attention_mask: Any) -> Plan:
        """Return the plan of the layer whose mask, of the local tokens, the model passes to its attention.

        A kind of layer that the config does not tell, as bidirectional ones, is planned here: all ranks come
        to the same layer.
        """
        if isinstance(attention_mask, Plan):
            return attention_mask
        if attention_mask is None and len(self.plans) == 1:  # a shard of one token
            return self.plan
        if not isinstance(attention_mask, ModelMask):
            kind = (
                "no mask"
                if attention_mask is None
                else f"a mask of its own, a {type(attention_mask).__name__}"
            )
            raise ValueError(
                f"a layer has {kind}, made of the tokens of a shard: this model cannot be context parallel; "
                "run it on whole sequences, without shard_batch"
            )
        if self._is_padded(attention_mask.attention_mask):
            raise ValueError(
                "an attention_mask beside the batch of shard_batch: its plan has the padding already; put "
                "the mask into the batch before it is sharded"
            )
        pattern = attention_mask.pattern
        if pattern is None:
            raise ValueError(
                "a layer has a mask function of the model's own (as for images or a prefix), which sees only "
                "the tokens of a shard: run the model on whole sequences, without shard_batch"
            )
        if self.labels and pattern.window[1] != 0:
            raise ValueError(
                f"a layer sees later tokens, and the batch has labels of next tokens: {OWN_LOSS}; or pass "
                "shift_labels beside labels, if the loss of the model reads them"
            )
        self._warn_of_documents(pattern)
        if pattern.kind not in self.plans:
            self.plans[pattern.kind] = self._plan_alike(attention_mask)
        return self.plans[pattern.kind]

    def _is_padded(self, mask: Tensor | None) -> bool:
        """Return whether a padding mask of local tokens hides any; some models make one that does not."""
        if mask is None or mask in self._checked:
            return False
        if not bool(mask.all()):
            return True
        self._checked.add(mask)
        return False

    def _plan_alike(self, layer: ModelMask) -> Plan:
        """Make the plan of another kind of layer, with the placement of the others."""
        rows = iter(self.plan.owners)

        def same_placement(work: Work) -> Sequence[Sequence[int]]:
            owners = next(rows)
            return [(owners == rank).nonzero()[:, 0].tolist() for rank in range(work.world_size)]

        balancer = None if self.plan.balancer == "natural" else same_placement
        plan = make_plan(self.masks.create(layer), self.mesh, balancer=balancer, schedule=self.schedule)
        if not torch.equal(plan.positions, self.plan.positions):
            raise ValueError(
                f"layers of the kind {layer.kind} cannot have the placement of the others: pass "
                "balancer=None to shard_batch"
            )
        return plan

    def _warn_of_documents(self, pattern: Pattern) -> None:
        """Warn where the model itself would let the documents of a row see each other."""
        request = self.masks.request.pattern
        if request is None or request.documents is None or pattern.documents is not None:
            return
        if masking_utils.find_packed_sequence_indices(self.position_ids) is not None:
            warnings.warn(
                "transformers makes the masks of this model without position_ids, so that packed documents "
                "see each other; the plans of shard_batch separate them. Compare losses with "
                "shard_batch(batch, config, mesh=None), not with the plain model",
                stacklevel=2,
            )

    def check_positions(self, position_ids: Tensor | None) -> None:
        """Raise ValueError if a call has other positions than the batch, whose own tensor is not read."""
        own = self.position_ids
        if position_ids is None or position_ids is own or position_ids in self._checked:
            return
        if position_ids.ndim == 3 and not bool((position_ids == position_ids[:1]).all()):
            raise ValueError(
                f"position_ids is {list(position_ids.shape)}: the model makes positions of several axes (of "
                "images and video) itself, and counts them within a shard: run it on whole sequences, "
                "without shard_batch"
            )
        found = position_ids[0] if position_ids.ndim == 3 else position_ids
        valid = self.plan.valid.to(own.device)
        same = found.shape[-1] == own.shape[-1] and found.ndim == 2
        if not same or bool(((found != own) & valid).any()):
            raise ValueError(
                "position_ids are not those of the plan: tokens, positions and plan of a batch belong "
                "together; pass all of shard_batch(batch, model.config, mesh) to the model, unedited"
            )
        self._checked.add(position_ids)
