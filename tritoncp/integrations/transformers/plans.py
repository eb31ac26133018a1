"""`ContextParallelPlan`: the plans of a sharded batch, which the model passes to every attention layer."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import masking_utils

from tritoncp.api.masks import create_block_mask
from tritoncp.api.plans import make_plan
from tritoncp.api.trees import PackedTree
from tritoncp.core.bounded_cache import TensorCache, computed_once
from tritoncp.core.handles import handle_of, stand_for
from tritoncp.core.records import replace
from tritoncp.integrations.transformers.images.feature_rows import FeatureRows
from tritoncp.integrations.transformers.mask_functions import Pattern
from tritoncp.integrations.transformers.masks import ModelMask
from tritoncp.integrations.transformers.packed_rows import PackedRows
from tritoncp.masks.mask import Mask
from tritoncp.masks.mask_mod import UNBOUNDED
from tritoncp.masks.prefix_tree import tree as tree_mask
from tritoncp.planning import ScheduleName
from tritoncp.planning.plan import Plan
from tritoncp.planning.work import Work

IGNORED = -100  # the label that transformers' losses ignore
OWN_LOSS = (
    "omit labels, and compute the loss from the logits of each rank and "
    "tritoncp.shard(labels, batch['context_parallel'].plan, dim=1, pad=-100)"
)


def create_layer_mask(batch: ModelMask, layer: ModelMask, block: int | tuple[int, int]) -> Mask:
    """Return the global mask, with the documents and padding of the batch, for layers of the kind of
    ``layer``. batch: the global mask of one kind; others differ in window, chunks and images"""
    pattern, padding = layer.pattern or Pattern(), batch.attention_mask
    left = None if padding is None else (padding.cumsum(-1) == 0).sum(-1)
    base = batch.pattern or Pattern()
    own = replace(
        base, window=pattern.window, chunk=pattern.chunk, left_padding=left, images=pattern.images,
        is_bounded=pattern.is_bounded,
    )  # fmt: skip
    mod = replace(batch, pattern=own).mask_mod
    rows, length = batch.batch if mod.reads[0] else None, batch.q_len
    return create_block_mask(mod, rows, None, length, length, BLOCK_SIZE=block)


def _text_pattern(pattern: Pattern) -> Pattern:
    """Return the pattern of a text, for a model that makes masks of images for texts too. Raises ValueError
    if there are images."""
    if pattern.images is not None and bool((pattern.images >= 0).any()):
        raise ValueError(
            "a layer sees images by a mask that shard_batch did not make: put token_type_ids or "
            "mm_token_type_ids [B, S] into the batch before, and pass the model, not its config; if it "
            "is so, the model makes other masks than for generation: run it on whole sequences, without "
            "shard_batch"
        )
    return pattern.without_images


def create_tree_mask(packed: PackedTree, layer: ModelMask, block: int | tuple[int, int]) -> Mask:
    """Return the mask of a prefix tree for layers of the kind of ``layer``: windows count along paths."""
    pattern = layer.pattern
    if pattern is None or pattern.chunk or pattern.window[1] != 0:
        raise ValueError(
            f"tree: layers of the kind {layer.kind} see no tree; causal layers with or without a window are "
            "needed: pass the trajectories as packed documents, without tree="
        )
    if pattern.images is not None and bool((pattern.images >= 0).any()):
        raise ValueError(
            "tree: layers see images both ways, which the mask of a tree does not show: pass the "
            "trajectories as packed documents, without tree="
        )
    mod = tree_mask(packed.parent, packed.lengths, window=(pattern.window[0], UNBOUNDED))
    size = len(packed.tokens)
    return create_block_mask(mod, None, None, size, size, BLOCK_SIZE=block)


class ContextParallelPlan:
    """The plans of one batch and their mesh: a keyword argument of the model, which passes it to every
    attention layer. No dataclass: FSDP rebuilds dataclasses among the arguments of a module.

    plans:          a plan for each kind of layer, all with one placement
    mesh:           the mesh of the ranks; None: one process
    position_ids:   [B, S_local], of this rank's tokens; or [axes, B, S_local]
    mask:           the global mask of one kind of layer
    block:          tokens per block of the placement
    schedule:       schedule of the plans
    attention_mask: attention_mask of the batch, [B, S], for layers that run on whole sequences
    documents:      index of the document of each token, [B, S], if a row has several, for the same layers
    labels:         whether shard_batch has shifted labels of the batch, for a next-token loss
    tree:           the prefix tree of the batch's only row, or None
    features:       for each kind of features, such as "image", the places of their rows
    """

    def __init__(
        self, plans: dict[str, Plan], mesh: Any, position_ids: Tensor, mask: ModelMask,
        block: int | tuple[int, int], schedule: ScheduleName, attention_mask: Tensor | None,
        documents: Tensor | None, labels: bool, tree: PackedTree | None, features: dict[str, FeatureRows],
    ) -> None:  # fmt: skip
        self.plans, self.mesh, self.position_ids, self.mask = plans, mesh, position_ids, mask
        self.block, self.schedule, self.labels = block, schedule, labels
        self.attention_mask, self.documents, self.tree = attention_mask, documents, tree
        self.features = features
        self.reached = False  # whether a layer has got this object
        self._checked = TensorCache(8)
        self._add_handle()

    def _add_handle(self) -> None:
        """Set the handle, by which graphs find this object. It refers to a copy, since a cycle would never be
        freed."""
        without = object.__new__(type(self))
        vars(without).update(vars(self))
        self.handle = handle_of(without)
        stand_for(self, self.handle)

    def __deepcopy__(self, memo: Any) -> ContextParallelPlan:
        return self  # a copy is for the same batch, on the same ranks

    def __getstate__(self) -> dict[str, Any]:
        if isinstance(self.mesh, dist.ProcessGroup):
            raise TypeError(
                "a batch of shard_batch with a process group has no meaning in another process: pickle the "
                "batch before shard_batch, or shard it with a DeviceMesh"
            )
        return {name: x for name, x in vars(self).items() if name not in ("_checked", "handle")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _checked=TensorCache(8))
        self._add_handle()

    @property
    def plan(self) -> Plan:
        """One of the plans, to pass to :func:`tritoncp.shard` and :func:`tritoncp.unshard` (all have the same
        placement)."""
        return next(iter(self.plans.values()))

    @property
    def shape(self) -> torch.Size:
        """The shape of this rank's tokens, (B, S_local)."""
        return self.position_ids.shape[-2:]

    @property
    def several(self) -> bool:
        """Whether several ranks share the batch."""
        return self.plan.world_size > 1

    @computed_once
    def packed_rows(self, is_causal: bool) -> PackedRows:
        """Return the documents of the whole batch, for layers that run on one at a time."""
        assert self.documents is not None
        return PackedRows(self.documents, is_causal=is_causal)

    def layer_plan(self, attention_mask: Any) -> Plan:
        """Return the plan of a layer. attention_mask: the mask that the model made from this rank's tokens,
        which determines the kind of layer.

        For a kind of layer that is not in the config, such as a bidirectional one, the plan is made here (all
        ranks reach the same layer).
        """
        self.reached = True
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
            of_text = _text_pattern(pattern)
            plan = self.plans.get(of_text.kind)
            if plan is None:
                plan = self._plan_alike(replace(attention_mask, pattern=of_text))
            self.plans[pattern.kind] = plan
        return self.plans[pattern.kind]

    def _is_padded(self, mask: Tensor | None) -> bool:
        """Return whether a padding mask of local tokens has padding (some models make one without
        padding)."""
        if mask is None or self._checked.find(id(mask), [mask]):
            return False
        if not bool(mask.all()):
            return True
        self._checked.keep(id(mask), [mask], True)
        return False

    def mask_of(self, layer: ModelMask) -> Mask:
        """Return the global mask for layers of the kind of ``layer``."""
        if self.tree is not None:
            return create_tree_mask(self.tree, layer, self.block)
        return create_layer_mask(self.mask, layer, self.block)

    def _plan_alike(self, layer: ModelMask) -> Plan:
        """Make the plan of another kind of layer, with the placement of the existing plans."""
        rows = iter(self.plan.owners)

        def same_placement(work: Work) -> Sequence[Sequence[int]]:
            owners = next(rows)
            return [(owners == rank).nonzero()[:, 0].tolist() for rank in range(work.world_size)]

        balancer = None if self.plan.balancer == "natural" else same_placement
        mask = self.mask_of(layer)
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
        positions = self.position_ids if self.position_ids.ndim == 2 else self.position_ids[0]
        if masking_utils.find_packed_sequence_indices(positions) is not None:
            warnings.warn(
                "transformers makes the masks of this model without position_ids, so that packed documents "
                "see each other; shard_batch separates them. Compare losses with "
                "shard_batch(batch, model, mesh=None), not with the plain model",
                stacklevel=2,
            )

    def check_positions(self, position_ids: Tensor | None) -> None:
        """Raise ValueError if a call's positions differ from the batch's. (The same tensor object needs no
        comparison.)"""
        own = self.position_ids
        if position_ids is None or position_ids is own:
            return
        if self._checked.find(id(position_ids), [position_ids]):
            return
        axes = position_ids.shape[0] if position_ids.ndim == 3 else 1
        if own.ndim == 3:
            own = own[-axes:] if 1 < axes <= len(own) else own[0]  # of the text, if it is the first axis
        elif axes > 1 and not bool((position_ids == position_ids[:1]).all()):
            raise ValueError(
                f"position_ids is {list(position_ids.shape)}: the model makes positions of several axes (of "
                "images and video) itself, and counts them within a shard: put position_ids "
                f"[{axes}, B, S] into the batch, or run it on whole sequences, without shard_batch"
            )
        valid = self.plan.valid.to(own.device)
        same = position_ids.shape[-1] == own.shape[-1] and position_ids.ndim in (2, 3)
        if not same or bool(((position_ids != own) & valid).any()):
            raise ValueError(
                "position_ids differ from the plan's: pass the tokens, positions and plan of one "
                "shard_batch(batch, model.config, mesh) to the model, unedited"
            )
        self._checked.keep(id(position_ids), [position_ids], True)
