"""`ContextParallelPlan`: the plans of a sharded batch, which the model passes to every attention layer."""

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
from tritoncp.core.bounded_cache import TensorCache
from tritoncp.integrations.transformers.mask_functions import Pattern
from tritoncp.integrations.transformers.masks import ModelMask
from tritoncp.integrations.transformers.positions import SHARDS
from tritoncp.masks.mask import Mask
from tritoncp.planning import ScheduleName
from tritoncp.planning.plan import Plan
from tritoncp.planning.work import Work

OWN_LOSS = (
    "omit labels, and compute the loss from the logits of each rank and "
    "tritoncp.shard(labels, batch['context_parallel'].plan, dim=1, pad=-100)"
)


def create_layer_mask(batch: ModelMask, layer: ModelMask, block: int | tuple[int, int]) -> Mask:
    """Return the global mask, with the documents and padding of the batch, for layers of the kind of
    ``layer``. batch: the global mask of one kind; others differ in window and chunks"""
    pattern, padding = layer.pattern or Pattern(), batch.attention_mask
    left = None if padding is None else (padding.cumsum(-1) == 0).sum(-1)
    base = batch.pattern or Pattern()
    own = replace(base, window=pattern.window, chunk=pattern.chunk, left_padding=left)
    mod = replace(batch, pattern=own).mask_mod
    rows, length = batch.batch if mod.reads[0] else None, batch.q_len
    return create_block_mask(mod, rows, None, length, length, BLOCK_SIZE=block)


@dataclass(frozen=True, eq=False)
class ContextParallelPlan:
    """The plans of one batch and their mesh: a keyword argument of the model, which passes it to every
    attention layer.

    plans:        a plan for each kind of layer, all with one placement
    mesh:         the mesh of the ranks; None: one process
    position_ids: [B, S_local], of this rank's tokens
    mask:         the global mask of one kind of layer
    block:        tokens per block of the placement
    schedule:     schedule of the plans
    whole:        arguments that describe the whole sequence, for layers that run on whole sequences
    labels:       whether shard_batch has shifted labels of the batch, for a next-token loss
    """

    plans: dict[str, Plan]
    mesh: Any
    position_ids: Tensor
    mask: ModelMask
    block: int | tuple[int, int]
    schedule: ScheduleName = "auto"
    whole: dict[str, Any] = field(default_factory=dict)
    labels: bool = False
    _checked: TensorCache = field(default_factory=lambda: TensorCache(8), repr=False)

    @property
    def plan(self) -> Plan:
        """One of the plans, to pass to :func:`tritoncp.shard` and :func:`tritoncp.unshard` (all have the same
        placement)."""
        return next(iter(self.plans.values()))

    def layer_plan(self, attention_mask: Any) -> Plan:
        """Return the plan of a layer. attention_mask: the mask that the model made from this rank's tokens,
        which determines the kind of layer.

        For a kind of layer that is not in the config, as bidirectional ones, the plan is made here (all ranks
        reach the same layer).
        """
        SHARDS.discard(self)
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
                f"attention_mask: a layer has {kind}, made from the tokens of a shard: run this model on "
                "whole sequences, without shard_batch"
            )
        if self._is_padded(attention_mask.attention_mask):
            raise ValueError(
                "attention_mask is passed beside the batch of shard_batch, whose plan has the padding: put "
                "the mask into the batch before shard_batch"
            )
        pattern = attention_mask.pattern
        if pattern is None:
            raise ValueError(
                "attention_mask has a custom mask function of the model (as for images or a prefix), which "
                "gets the tokens of a shard alone: run the model on whole sequences, without shard_batch"
            )
        if self.labels and pattern.window[1] != 0:
            raise ValueError(
                f"labels were shifted for a next-token loss, but a layer sees later tokens: {OWN_LOSS}; or "
                "pass shift_labels beside labels, if the loss of the model reads them"
            )
        self._warn_of_documents(pattern)
        if pattern.kind not in self.plans:
            self.plans[pattern.kind] = self._plan_alike(attention_mask)
        return self.plans[pattern.kind]

    def _is_padded(self, mask: Tensor | None) -> bool:
        """Return whether a padding mask of local tokens has padding (some models make a mask without)."""
        if mask is None or self._checked.find(id(mask), [mask]):
            return False
        if not bool(mask.all()):
            return True
        self._checked.keep(id(mask), [mask], True)
        return False

    def _plan_alike(self, layer: ModelMask) -> Plan:
        """Make the plan of another kind of layer, with the placement of the existing plans."""
        rows = iter(self.plan.owners)

        def same_placement(work: Work) -> Sequence[Sequence[int]]:
            owners = next(rows)
            return [(owners == rank).nonzero()[:, 0].tolist() for rank in range(work.world_size)]

        balancer = None if self.plan.balancer == "natural" else same_placement
        mask = create_layer_mask(self.mask, layer, self.block)
        plan = make_plan(mask, self.mesh, balancer=balancer, schedule=self.schedule)
        if not torch.equal(plan.positions, self.plan.positions):
            raise ValueError(
                f"layers of the kind {layer.kind} cannot have the placement of the existing plans: pass "
                "balancer=None to shard_batch"
            )
        return plan

    def _warn_of_documents(self, pattern: Pattern) -> None:
        """Warn if the model, on one process, would let the documents of a row see each other."""
        request = self.mask.pattern
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
        """Raise ValueError if a call's positions differ from the batch's. (The batch's own tensor object
        needs no comparison.)"""
        own = self.position_ids
        if position_ids is None or position_ids is own:
            return
        if self._checked.find(id(position_ids), [position_ids]):
            return
        if position_ids.ndim == 3 and not bool((position_ids == position_ids[:1]).all()):
            raise ValueError(
                f"position_ids is {list(position_ids.shape)}: the model makes positions of several axes (of "
                "images and video) itself, and counts them within a shard: run it on whole sequences, "
                "without shard_batch"
            )
        rows = position_ids[0] if position_ids.ndim == 3 else position_ids
        valid = self.plan.valid.to(own.device)
        same = rows.shape[-1] == own.shape[-1] and rows.ndim == 2
        if not same or bool(((rows != own) & valid).any()):
            raise ValueError(
                "position_ids differ from the plan's: pass the tokens, positions and plan of one "
                "shard_batch(batch, model.config, mesh) to the model, unedited"
            )
        self._checked.keep(id(position_ids), [position_ids], True)
