"""`shard_batch`: shards a global batch for a model, by one placement for the masks of all its layers."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig, masking_utils

from tritoncp.api.group_call import group_call
from tritoncp.api.plans import make_plan
from tritoncp.api.shards import shard
from tritoncp.api.trees import PackedTree
from tritoncp.core.host_copy import to_host
from tritoncp.distributed import groups
from tritoncp.distributed.consistency import Compared, Text, fact, together
from tritoncp.integrations.transformers.batch_checks import (
    CONSUMED,
    check_config,
    check_names,
    check_shardable,
    check_tree,
)
from tritoncp.integrations.transformers.calls import note_shard
from tritoncp.integrations.transformers.images.image_positions import find_image_positions
from tritoncp.integrations.transformers.images.own_images import (
    feature_tokens,
    names_of_features,
    place_features,
)
from tritoncp.integrations.transformers.masks import ModelMask, create_mask
from tritoncp.integrations.transformers.model_classes import (
    counts_by_padding_mask,
    counts_from_padding,
    own_mask_function,
    position_axes,
    unwrap_model,
)
from tritoncp.integrations.transformers.plans import (
    IGNORED,
    ContextParallelPlan,
    create_layer_mask,
    create_tree_mask,
)
from tritoncp.integrations.transformers.whole_sequences import hook_layers
from tritoncp.masks.prefix_tree import tree as tree_mask
from tritoncp.masks.runs.block_runs import content
from tritoncp.masks.varlen import Documents
from tritoncp.planning import ScheduleName
from tritoncp.planning.balance import BalancerName
from tritoncp.planning.plan import Plan
from tritoncp.planning.work import Balancer

TYPES = ("token_type_ids", "mm_token_type_ids")  # of tokens, from which models make masks


@group_call
def shard_batch(
    batch: Mapping[str, Any],
    config: PreTrainedConfig | nn.Module,
    mesh: Any = None,
    *,
    balancer: BalancerName | Balancer | None = "ptrr",
    schedule: ScheduleName = "auto",
    BLOCK_SIZE: int | tuple[int, int] = 128,
    tree: PackedTree | None = None,
) -> dict[str, Any]:
    """Return this rank's shard of a global batch, with its plans, as keyword arguments of the model.

    >>> from transformers import LlamaConfig
    >>> from tritoncp.integrations.transformers import register
    >>> register()
    >>> config = LlamaConfig(attn_implementation="tritoncp")
    >>> tokens = torch.arange(6)[None]
    >>> batch = shard_batch({"input_ids": tokens, "labels": tokens}, config)
    >>> batch["shift_labels"].tolist(), int(batch["num_items_in_batch"])
    ([[1, 2, 3, 4, 5, -100]], 5)

    Args:
        batch: the whole batch, equal on all ranks of the mesh. ``input_ids`` int64 [B, S] or
            ``inputs_embeds`` [B, S, E]; ``labels`` [B, S], not shifted; ``position_ids`` [B or 1, S], which
            restart at 0 in each packed document, or [axes, B, S] for models with positions of images, the
            text's first if documents are packed; or ``cu_seq_lens_q`` [documents + 1] for one row; or
            ``attention_mask`` [B, S], 0 at padding. Images, videos and audio (``pixel_values`` and its kin)
            as the model takes them: each rank embeds a part, and gets the rows of its tokens. Types of tokens
            (``token_type_ids``, ``mm_token_type_ids`` [B, S]) give masks in which images see both ways, and
            positions of images. Other tensors [B, S, ...] are sharded too; all other values are passed on.
        config: the model's config; or the model itself, which is needed for images and for recurrent or
            convolutional layers (Mamba, gated delta nets): these then gather their inputs to whole sequences,
            run on each document alone, and shard their outputs. Each kind of layer (``layer_types``,
            ``sliding_window``, chunks, bidirectional) gets a plan; all plans have one placement.
        mesh: DeviceMesh or process group of the ranks that share the batch; None: this process alone, with a
            warning in a world of several ranks.
        balancer: see :func:`tritoncp.make_plan`.
        schedule: see :func:`tritoncp.make_plan`.
        BLOCK_SIZE: tokens per block of the placement.
        tree: the prefix tree whose tokens are ``input_ids`` [1, S], of :func:`tritoncp.pack_trajectories`:
            each token sees its path, windows count along it, and positions are depths. Pass
            ``shift_labels``, the label of each row, instead of ``labels``, which would be shifted by rows.
            Only for models of attention layers.

    Returns:
        A dict for ``model(**batch)``: tensors [B, S_local], of equal length on all ranks; ``shift_labels``,
        shifted before sharding (``labels`` is there only so that the model computes a loss);
        ``num_items_in_batch``, the number of labels in the whole batch, so that the losses of all ranks add
        up to the mean loss, and gradients are gradients of this sum; ``context_parallel``, plans and mesh.

    Raises:
        ValueError: for tensors that do not fit, names that differ from these by a letter, an attention_mask
            together with restarting position_ids, a config with another attention implementation, models that
            compute attention themselves, and a config without the model if it has recurrent layers or the
            batch has images.
        RuntimeError: on all ranks, if one of them fails or their token ids differ.
    """
    model = unwrap_model(config) if isinstance(config, nn.Module) else None
    config = config if model is None else getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        wrong = type(config if model is None else model).__name__
        raise TypeError(f"config is a {wrong}; pass the transformers model, or its config")
    _warn_without_mesh(mesh)
    group = groups.group_of(mesh)
    read = partial(_read_batch, batch, config, model, group, tree)
    (kinds, position_ids, documents), _ = together(group, "shard_batch", read)
    if model is not None:
        hook_layers(model)
    several = group is not None and group.size() > 1
    mask = next(iter(kinds.values()))
    masks = {
        kind: create_layer_mask(mask, one, BLOCK_SIZE)
        if tree is None
        else create_tree_mask(tree, one, BLOCK_SIZE)
        for kind, one in kinds.items()
    }
    plans = make_plan(masks, mesh, balancer=balancer, schedule=schedule)
    plan = next(iter(plans.values()))
    tokens = feature_tokens(batch, model) if several else {}
    features = place_features(batch, tokens, plan.q)
    local = _local_inputs({**batch, "position_ids": position_ids}, model, plan, set(tokens.values()))
    shifted = batch.get("labels") is not None and batch.get("shift_labels") is None
    own = ContextParallelPlan(
        plans, mesh, local["position_ids"], mask, BLOCK_SIZE, schedule, batch.get("attention_mask"),
        documents, shifted and several, tree, features,
    )  # fmt: skip
    part, all_tokens = _tokens(local), _tokens(batch)
    if several and not (
        part.shape == all_tokens.shape and torch.equal(part, all_tokens)
    ):  # one rank has all tokens
        note_shard(part)
    return {**local, "use_cache": False, "context_parallel": own}


def _warn_without_mesh(mesh: Any) -> None:
    """Warn about a call without a mesh in a world of several ranks, which would all compute the same."""
    size = int(os.environ.get("WORLD_SIZE", "1")) if dist.is_torchelastic_launched() else 1
    if dist.is_initialized():
        size = dist.get_world_size()
    if mesh is None and size > 1:
        warnings.warn(
            f"shard_batch without a mesh in a world of {size} ranks returns the whole batch, for this "
            "process alone: pass torch.distributed.group.WORLD, or mesh['cp'] of a device mesh",
            stacklevel=4,
        )


def _read_batch(
    batch: Mapping[str, Any],
    config: PreTrainedConfig,
    model: nn.Module | None,
    group: Any,
    tree: PackedTree | None,
) -> tuple[tuple[dict[str, ModelMask], Tensor, Tensor | None], Compared, tuple[int, ...]]:
    """Return ((mask of each kind of layer, position_ids [B, S] or [axes, B, S], index of the document of each
    token [B, S] or None), facts for the ranks to compare, numbers)."""
    text, tokens = check_config(config, model), _tokens(batch)
    check_names(batch, config, model)
    if group is not None and group.size() > 1:
        check_shardable(batch, config, model)
    elif model is None:
        feature_tokens(batch, model)  # a vision tower that is not prepared would get the plan
    shape, device = tokens.shape[:2], tokens.device
    if tree is not None:
        check_tree(batch, tree, config, model)
        batch = {**batch, "position_ids": tree_mask(tree.parent, tree.lengths).depth[None].long().to(device)}
    restarting, position_ids = _positions(batch, text, shape, device)
    if model is not None and position_ids.ndim == 2:
        position_ids = find_image_positions(batch, model, restarting, position_ids)
    masks = _kinds(config, batch, None if tree else restarting, shape, device)
    documents = None
    if restarting is not None and tree is None:
        documents = masking_utils.find_packed_sequence_indices(restarting.expand(shape))
    facts = {"call": fact("shard_batch"), "batch": _fact_of(tokens)} if group is not None else {}
    return (masks, position_ids, documents), facts, ()


def _tokens(batch: Mapping[str, Any]) -> Tensor:
    """Return the batch's token ids [B, S], or embeddings [B, S, E]."""
    tokens = batch.get("input_ids") if batch.get("input_ids") is not None else batch.get("inputs_embeds")
    if not isinstance(tokens, Tensor) or tokens.ndim < 2:
        raise ValueError(
            "the batch has neither input_ids [B, S] nor inputs_embeds [B, S, E]: pass one of them"
        )
    return tokens


def _fact_of(tokens: Tensor) -> tuple[Text, bytes]:
    """Return the fact for the ranks to compare: a digest of the token ids, or the shape of the embeddings."""
    size = f"{tokens.dtype} {list(tokens.shape)}"
    if tokens.is_floating_point():
        return fact(f"embeddings {size}")
    ids = to_host([tokens])[0]
    text = f"tokens {size} from {ids.flatten()[:8].tolist()} on"
    return fact(text, size.encode() + content(ids))


def _positions(
    batch: Mapping[str, Any], config: PreTrainedConfig, shape: torch.Size, device: torch.device
) -> tuple[Tensor | None, Tensor]:
    """Return (positions that mark packed documents or None, positions of the embeddings, [B, S] or
    [axes, B, S]).

    Raises ValueError for positions of another shape, or that contradict the attention_mask.
    """
    ids, mask, axes = batch.get("position_ids"), batch.get("attention_mask"), position_axes(config)
    if ids is not None:
        fits = ids.ndim == 2 or (ids.ndim == 3 and axes > 1 and len(ids) in (axes, axes + 1))
        if not fits or ids.shape[-1] != shape[1] or ids.shape[-2] not in (1, shape[0]):
            more = f" or [{axes}, B or 1, S]" * (axes > 1)
            raise ValueError(
                f"position_ids is {list(ids.shape)}; [B or 1, S]{more} is needed, here {list(shape)}"
            )
        ids = ids.expand(*ids.shape[:-2], *shape)
    packed = _packed_positions(batch, shape, device)
    if packed is not None:
        return packed, packed.expand(shape) if ids is None else ids
    if ids is None:
        return None, _default_positions(batch, config, shape, device)
    if ids.ndim == 3:  # as in transformers: if there is one axis more, the first is for the text
        return (ids[0] if len(ids) > axes and mask is None else None), ids
    if mask is not None and mask.ndim == 2:
        tokens = mask.bool()
        broken = (ids.diff(dim=1) != 1) & (tokens[:, 1:] & tokens[:, :-1]).to(ids.device)
        if bool(broken.any()):
            raise ValueError(
                "position_ids restart within a row that has an attention_mask, where transformers lets "
                "documents see each other: omit attention_mask for packed documents, or position_ids for one "
                "text per row"
            )
        return None, ids
    return ids, ids


def _default_positions(
    batch: Mapping[str, Any], config: PreTrainedConfig, shape: torch.Size, device: torch.device
) -> Tensor:
    """Return the positions that a model computes by default, [B, S]: RoBERTa's begin after the padding id,
    OPT's do not count padding."""
    mask = batch.get("attention_mask")
    if mask is not None and counts_by_padding_mask(config):
        return mask.long().cumsum(1) * mask.long() - 1
    tokens, padding = batch.get("input_ids"), getattr(config, "pad_token_id", None)
    if tokens is not None and padding is not None and counts_from_padding(config):
        is_token = tokens != padding
        return is_token.cumsum(1) * is_token + padding
    return torch.arange(shape[1], device=device).expand(shape)


def _packed_positions(batch: Mapping[str, Any], shape: torch.Size, device: torch.device) -> Tensor | None:
    """Return positions within the documents of cu_seq_lens_q, [1, S]; None without it."""
    cu, cu_k = batch.get("cu_seq_lens_q"), batch.get("cu_seq_lens_k")
    if cu is None:
        return None
    if (
        shape[0] != 1
        or batch.get("attention_mask") is not None
        or (cu_k is not None and not torch.equal(cu, cu_k))
    ):
        raise ValueError(
            "cu_seq_lens_q needs one row of packed documents, equal lengths for queries and keys, and no "
            f"attention_mask; the batch has {shape[0]} rows: pass position_ids that restart at each document"
        )
    return Documents.of("cu_seq_lens_q", cu, cu, shape[1]).of_rows()[1][None].to(device)


def _kinds(
    config: PreTrainedConfig,
    batch: Mapping[str, Any],
    documents: Tensor | None,
    shape: torch.Size,
    device: torch.device,
) -> dict[str, ModelMask]:
    """Return {kind of layer: global mask}, made by transformers' functions for the model's config, or by the
    function of the model if the batch has types of tokens (images, a prefix)."""
    attention_mask = batch.get("attention_mask")
    if attention_mask is not None and attention_mask.shape != shape:
        raise ValueError(
            f"attention_mask is {list(attention_mask.shape)}; a padding mask [B, S] is needed, here "
            f"{list(shape)}: for any other mask, make a plan and call tritoncp.flex_attention"
        )
    arguments = {
        "config": config.get_text_config(),
        "inputs_embeds": torch.empty(*shape, 0, device=device),
        "attention_mask": attention_mask,
        "position_ids": documents,
    }
    types = {name: batch[name] for name in TYPES if batch.get(name) is not None}
    own = own_mask_function(config, types.keys())
    create = own or masking_utils.create_masks_for_generate
    arguments[_cache_argument(create)] = None
    first = {} if own is None else {**types, "is_first_iteration": True}  # the call has all tokens
    requests = create(**arguments, **first)
    requests = requests.values() if isinstance(requests, dict) else [requests]
    kinds = {one.kind: one for one in requests if isinstance(one, ModelMask) and one.kind}
    if not kinds:  # layers that are not attention, or of kinds for which transformers has no masks
        one = masking_utils.create_causal_mask(**arguments)
        one = one if isinstance(one, ModelMask) else create_mask(shape[0], shape[1], shape[1])
        kinds = {str(one.kind): one}
    return dict(sorted(kinds.items()))  # transformers iterates over a set: its order differs by process


@cache
def _cache_argument(function: Callable[..., Any]) -> str:
    """Return the name of the cache argument of a mask function of transformers: "cache" since 5.24."""
    return "cache" if "cache" in inspect.signature(function).parameters else "past_key_values"


def _labels(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return shifted labels, and num_items_in_batch unless the batch has it."""
    labels, shifted = batch.get("labels"), batch.get("shift_labels")
    if shifted is None:
        if labels is None:
            return {}
        shifted = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    count = batch.get("num_items_in_batch")
    count = (shifted != IGNORED).sum() if count is None else count
    return {
        "labels": shifted if labels is None else labels,
        "shift_labels": shifted,
        "num_items_in_batch": count,
    }


def _local_inputs(
    batch: Mapping[str, Any], model: nn.Module | None, plan: Plan, feature_tokens: set[int | None]
) -> dict[str, Any]:
    """Return this rank's shard of a batch with positions. feature_tokens: the tokens that stand for features,
    which are not for padding"""
    names = names_of_features(model)
    given = {name: x for name, x in batch.items() if name not in CONSUMED and x is not None}
    padding = next(token for token in range(len(feature_tokens) + 1) if token not in feature_tokens)
    pads = {"labels": IGNORED, "shift_labels": IGNORED, "input_ids": padding}
    shape = batch["position_ids"].shape[-2:]
    return {
        name: x if name in names else _shard(name, x, plan, shape, pads.get(name, 0))
        for name, x in (given | _labels(batch)).items()
    }


def _shard(name: str, x: Any, plan: Plan, shape: torch.Size, pad: int) -> Any:
    """Return this rank's shard of a tensor [B, S, ...]; any other value unchanged."""
    if name == "position_ids" and x.ndim == 3:
        return shard(x, plan, dim=2, batch_dim=1)
    if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[:2] != shape:
        if name in ("labels", "shift_labels"):
            raise ValueError(f"{name} is {list(x.shape)}; {list(shape)} is needed")
        return x
    return shard(x, plan, dim=1, pad=pad)
