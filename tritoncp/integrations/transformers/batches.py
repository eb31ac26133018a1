"""`shard_batch`: shards a global batch for a model, by one placement for the masks of all its layers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, masking_utils

from tritoncp.api.group_call import group_call
from tritoncp.api.plans import make_plan
from tritoncp.api.shards import shard
from tritoncp.core.host_copy import to_host
from tritoncp.distributed import groups
from tritoncp.distributed.consistency import Facts, Text, fact, together
from tritoncp.integrations.transformers.attention import is_registered
from tritoncp.integrations.transformers.masks import ModelMask, create_mask
from tritoncp.integrations.transformers.model_classes import (
    SPARSE_LAYERS,
    computes_attention_itself,
    counts_by_padding_mask,
    counts_from_padding,
    has_loss_of_its_own,
    has_sparse_layers,
    is_recurrent,
    may_be_recurrent,
    may_convolve,
    takes_positions,
    unwrap_model,
)
from tritoncp.integrations.transformers.plans import OWN_LOSS, ContextParallelPlan, create_layer_mask
from tritoncp.integrations.transformers.positions import SHARDS
from tritoncp.integrations.transformers.whole_sequences import hook_layers
from tritoncp.masks.block_runs import content
from tritoncp.masks.varlen import Documents
from tritoncp.planning import ScheduleName
from tritoncp.planning.balance import BalancerName
from tritoncp.planning.plan import Plan
from tritoncp.planning.work import Balancer

IGNORED = -100  # the label that transformers' losses ignore
# Kinds of layers other than attention, or with another part besides it.
OTHER_LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
# Inputs whose embeddings the model puts in the places of tokens.
FEATURES = ("pixel_values", "pixel_values_videos", "input_features", "input_values")
# Inputs that describe the whole sequence: the plan contains them, the model does not get them.
CONSUMED = ("attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


@group_call
def shard_batch(
    batch: Mapping[str, Any],
    config: PreTrainedConfig | nn.Module,
    mesh: Any = None,
    *,
    balancer: BalancerName | Balancer | None = "ptrr",
    schedule: ScheduleName = "auto",
    BLOCK_SIZE: int | tuple[int, int] = 128,
) -> dict[str, Any]:
    """Return this rank's shard of a global batch, with its plans, as keyword arguments of the model.

    batch: equal on all ranks of the mesh. ``input_ids`` int64 [B, S] or ``inputs_embeds`` [B, S, E];
    ``labels`` [B, S], not shifted; ``position_ids`` [B or 1, S], which restart at 0 in each packed document;
    or ``cu_seq_lens_q`` [documents + 1] for one row; or ``attention_mask`` [B, S], 0 at padding. Other
    tensors [B, S, ...] are sharded too; all other values are passed through.
    config: the model's config; or the model itself, which is needed for recurrent or convolutional layers
    (Mamba, gated delta nets): hooks then gather the inputs of these layers to whole sequences, and shard
    their outputs. Each kind of layer (``layer_types``, ``sliding_window``, chunks, bidirectional) gets a
    plan; all plans have one placement.
    mesh, balancer, schedule: see :func:`tritoncp.make_plan`; mesh None: one process, without communication.
    BLOCK_SIZE: tokens per block of the placement.

    Returns a dict for ``model(**batch)``: tensors [B, S_local], of equal length on all ranks;
    ``shift_labels``, shifted before sharding (``labels`` is there only so that the model computes a loss);
    ``num_items_in_batch``, the number of labels in the whole batch, so that the losses of all ranks add up to
    the mean loss, and gradients are those of this sum; ``context_parallel``, plans and mesh.

    Raises ValueError for tensors that do not fit, an attention_mask together with restarting position_ids,
    images and audio on several ranks, a config with another attention implementation, models that compute
    attention themselves, and a config without the model if it has recurrent layers; RuntimeError on all ranks
    if one of them fails, or their token ids differ.

    >>> from transformers import LlamaConfig
    >>> from tritoncp.integrations.transformers import register
    >>> register()
    >>> config = LlamaConfig(attn_implementation="tritoncp")
    >>> tokens = torch.arange(6)[None]
    >>> batch = shard_batch({"input_ids": tokens, "labels": tokens}, config)
    >>> batch["shift_labels"].tolist(), int(batch["num_items_in_batch"])
    ([[1, 2, 3, 4, 5, -100]], 5)
    """
    model = unwrap_model(config) if isinstance(config, nn.Module) else None
    config = config if model is None else getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        wrong = type(config if model is None else model).__name__
        raise TypeError(f"config is a {wrong}; pass the transformers model, or its config")
    group = groups.group_of(mesh)
    read = partial(_read_batch, batch, config, model, group)
    (kinds, position_ids), _ = together(group, "shard_batch", read)
    if model is not None:
        hook_layers(model)
    several = group is not None and group.size() > 1
    mask = next(iter(kinds.values()))
    plans = make_plan(
        {kind: create_layer_mask(mask, request, BLOCK_SIZE) for kind, request in kinds.items()},
        mesh, balancer=balancer, schedule=schedule,
    )  # fmt: skip
    whole = {name: x for name, x in batch.items() if name not in CONSUMED and x is not None}
    whole |= {"position_ids": position_ids, **_labels(batch)}
    plan = next(iter(plans.values()))
    local = {name: _shard(name, x, plan, position_ids.shape) for name, x in whole.items()}
    described = {"attention_mask": None, **{name: batch[name] for name in CONSUMED if name in batch}}
    shifted = batch.get("labels") is not None and batch.get("shift_labels") is None
    own = ContextParallelPlan(
        plans, mesh, local["position_ids"], mask, BLOCK_SIZE, schedule, described, shifted and several
    )
    if several:
        SHARDS.add(own)
    return {**local, "use_cache": False, "context_parallel": own}


def _read_batch(
    batch: Mapping[str, Any], config: PreTrainedConfig, model: nn.Module | None, group: Any
) -> tuple[tuple[dict[str, ModelMask], Tensor], Facts, tuple[int, ...]]:
    """Return ((mask of each kind of layer, position_ids [B, S]), facts for the ranks to compare, numbers)."""
    text, tokens = _check_config(config, model), _tokens(batch)
    several = group is not None and group.size() > 1
    if several and not (may_be_recurrent(text) or takes_positions(text, model)):
        raise ValueError(
            f"models of {type(text).__name__} have no argument position_ids, and would count positions "
            "within a shard: run them on whole sequences, without shard_batch"
        )
    features = [name for name in FEATURES if batch.get(name) is not None]
    if several and features:
        raise ValueError(
            f"the batch has {', '.join(features)}, whose embeddings the model puts in the places of tokens, "
            "which on a shard are others: pass inputs_embeds [B, S, E] of the whole batch with them, in "
            "place of input_ids, or run the model on whole sequences, without shard_batch"
        )
    if several and batch.get("labels") is not None and has_loss_of_its_own(config, model):
        raise ValueError(
            f"labels: the model of {type(config).__name__} computes its own loss, which on a rank would be "
            f"that of its shard alone: {OWN_LOSS}"
        )
    shape, device = tokens.shape[:2], tokens.device
    documents, position_ids = _positions(batch, text, shape, device)
    masks = _kinds(text, batch.get("attention_mask"), documents, shape, device)
    facts = {"call": fact("shard_batch"), "batch": _fact_of(tokens)} if group is not None else {}
    return (masks, position_ids.expand(shape)), facts, ()


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


def _check_config(config: PreTrainedConfig, model: nn.Module | None) -> PreTrainedConfig:
    """Return the config of the text model; raise ValueError if the model (if None, a model of this config)
    cannot be context parallel."""
    text = config.get_text_config()
    if not is_registered(text._attn_implementation):
        raise ValueError(
            f"config has the attention {text._attn_implementation!r}: call register(), then load the model "
            'with attn_implementation="tritoncp", or call model.set_attn_implementation("tritoncp")'
        )
    if config.is_encoder_decoder:
        raise ValueError(
            "config is of an encoder-decoder model, where queries and keys have different lengths: run it on "
            "whole sequences, without shard_batch"
        )
    other_kinds = set(getattr(text, "layer_types", None) or ()) & OTHER_LAYERS
    if model is None and (other_kinds or may_be_recurrent(text) or may_convolve(text)):
        raise ValueError(
            f"models of {type(text).__name__} have layers other than attention "
            f"({', '.join(sorted(other_kinds)) or 'recurrent or convolutional'}), which need whole "
            "sequences: pass the model itself, shard_batch(batch, model, mesh), to gather for these layers"
        )
    modules = model.modules() if model is not None and may_be_recurrent(text) else ()
    if computes_attention_itself(text) and not any(map(is_recurrent, modules)):
        raise ValueError(
            f"models of {type(text).__name__} compute attention or its mask by code of their own, which "
            "would see a shard alone: run them on whole sequences, without shard_batch"
        )
    if hasattr(config, "patching_mode"):
        raise ValueError(
            f"models of {type(config).__name__} group tokens into patches by a model that needs the whole "
            "sequence: run them on whole sequences, without shard_batch"
        )
    if has_sparse_layers(text):
        raise ValueError(
            f"layers of {type(text).__name__} select keys by scores over the whole sequence "
            f"({', '.join(sorted(SPARSE_LAYERS.intersection(text.layer_types)))}); a rank would select "
            "within its shard: run the model on whole sequences, without shard_batch"
        )
    own = {"sliding_window", "attention_chunk_size"}.intersection(
        getattr(text, "per_layer_attributes", None) or ()
    )
    if own and not text.allow_global_per_layer_attribute_access:
        raise ValueError(
            f"layers of {type(text).__name__} differ in {' and '.join(sorted(own))}, for which transformers "
            "makes no masks of a whole batch: run the model without shard_batch"
        )
    if getattr(text, "output_router_logits", False):
        raise ValueError(
            "output_router_logits=True adds an auxiliary loss of the experts' load, which a rank would "
            "compute for its own tokens: set it to False"
        )
    return text


def _positions(
    batch: Mapping[str, Any], config: PreTrainedConfig, shape: torch.Size, device: torch.device
) -> tuple[Tensor | None, Tensor]:
    """Return (positions that mark packed documents or None, positions of the embeddings [B, S]).

    Raises ValueError for positions of another shape, or that contradict the attention_mask.
    """
    ids, mask = batch.get("position_ids"), batch.get("attention_mask")
    if ids is not None and (ids.ndim != 2 or ids.shape[1] != shape[1] or ids.shape[0] not in (1, shape[0])):
        raise ValueError(f"position_ids is {list(ids.shape)}; [B or 1, S] is needed, here {list(shape)}")
    packed = _packed_positions(batch, shape, device)
    if packed is not None:
        return packed, packed if ids is None else ids
    if ids is None:
        return None, _default_positions(batch, config, shape, device)
    ids = ids.expand(shape)
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
    tokens, padding = batch.get("input_ids"), config.pad_token_id
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
    attention_mask: Tensor | None,
    documents: Tensor | None,
    shape: torch.Size,
    device: torch.device,
) -> dict[str, ModelMask]:
    """Return {kind of layer: global mask}, by transformers' functions for the model's config."""
    if attention_mask is not None and attention_mask.shape != shape:
        raise ValueError(
            f"attention_mask is {list(attention_mask.shape)}; a padding mask [B, S] is needed, here "
            f"{list(shape)}: for any other mask, make a plan and call tritoncp.flex_attention"
        )
    arguments = {
        "config": config,
        "inputs_embeds": torch.empty(*shape, 0, device=device),
        "attention_mask": attention_mask,
        "past_key_values": None,
        "position_ids": documents,
    }
    requests = masking_utils.create_masks_for_generate(**arguments)
    requests = requests.values() if isinstance(requests, dict) else [requests]
    kinds = {one.kind: one for one in requests if isinstance(one, ModelMask) and one.kind}
    if not kinds:  # layers other than attention, or of kinds for which transformers has no masks
        one = masking_utils.create_causal_mask(**arguments)
        one = one if isinstance(one, ModelMask) else create_mask(shape[0], shape[1], shape[1])
        kinds = {str(one.kind): one}
    return dict(sorted(kinds.items()))  # transformers iterates over a set, whose order differs by process


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


def _shard(name: str, x: Any, plan: Plan, shape: torch.Size) -> Any:
    """Return this rank's shard of a tensor [B, S, ...]; any other value unchanged."""
    if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[:2] != shape:
        if name in ("labels", "shift_labels"):
            raise ValueError(f"{name} is {list(x.shape)}; {list(shape)} is needed")
        return x
    return shard(x, plan, dim=1, pad=IGNORED if name in ("labels", "shift_labels") else 0)
