"""Shards of a global batch: the masks of a model's layers, one placement for all, and tensors cut by it."""

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
from tritoncp.integrations.transformers.plans import OWN_LOSS, BatchMasks, ContextParallelPlan
from tritoncp.integrations.transformers.positions import SHARDS
from tritoncp.integrations.transformers.whole_sequences import hook_layers
from tritoncp.masks.block_runs import content
from tritoncp.masks.varlen import Documents
from tritoncp.planning.plan import Plan
from tritoncp.planning.work import Balancer

IGNORED = -100  # the label that transformers' losses leave out
# Kinds of layers that are no attention, or have another part beside it.
OTHER_LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
# Inputs that a model turns into embeddings and puts in the places of tokens.
FEATURES = ("pixel_values", "pixel_values_videos", "input_features", "input_values")
# Consumed by the plan: they describe the whole sequence.
CONSUMED = ("attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


@group_call
def shard_batch(
    batch: Mapping[str, Any],
    config: PreTrainedConfig | nn.Module,
    mesh: Any = None,
    *,
    balancer: str | Balancer | None = "ptrr",
    schedule: str = "auto",
    BLOCK_SIZE: int | tuple[int, int] = 128,
) -> dict[str, Any]:
    """Return this rank's shard of a global batch, with its plans, as keyword arguments of the model.

    batch: the same on all ranks of the mesh. ``input_ids`` int64 [B, S] or ``inputs_embeds`` [B, S, E];
    ``labels`` [B, S], not shifted; ``position_ids`` [B or 1, S], which restart at 0 in each packed document;
    or ``cu_seq_lens_q`` [documents + 1] for one row; or ``attention_mask`` [B, S], 0 at padding. Other
    tensors [B, S, ...] are sharded too, everything else is passed on.
    config: of the model, or the model itself, which one with recurrent or convolutional layers (Mamba, gated
    delta nets) needs: hooks then run these on whole sequences, gathered and cut again. The kinds of layers
    (``layer_types``, ``sliding_window``, chunks, bidirectional) get a plan each, of one placement.
    mesh: as for :func:`tritoncp.make_plan`, which has ``balancer`` and ``schedule``; None: this process
    alone, the same call without communication. BLOCK_SIZE: tokens of a block of the placement.

    Returns a dict for ``model(**batch)``: tensors [B, S_local], equally long on all ranks; ``shift_labels``,
    shifted before sharding (``labels`` only make the model compute its loss); ``num_items_in_batch``, the
    labels of the whole batch, so that a rank's loss is its part of the mean: the parts of all ranks add up
    to it, and gradients are those of the sum. ``context_parallel`` holds plans and mesh.

    Raises ValueError for tensors that do not fit, an attention_mask together with restarting position_ids,
    images and audio on several ranks, a config that is not set to this attention, models that compute
    attention themselves, and the config alone of one with recurrent layers; RuntimeError on all ranks if one
    of them fails, or their token ids differ.

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
        raise TypeError(
            f"shard_batch has a {wrong} for the model: pass the model of transformers, or its config"
        )
    group = groups.group_of(mesh)
    read = partial(_read_batch, batch, config, model, group)
    (kinds, position_ids), _ = together(group, "shard_batch", read)
    if model is not None:
        hook_layers(model)
    several = group is not None and group.size() > 1
    order = balancer if several else None
    masks = BatchMasks(next(iter(kinds.values())), BLOCK_SIZE)
    plans = make_plan(
        {kind: masks.create(request) for kind, request in kinds.items()},
        mesh, balancer=order, schedule=schedule,
    )  # fmt: skip
    whole = {name: x for name, x in batch.items() if name not in CONSUMED and x is not None}
    whole |= {"position_ids": position_ids, **_labels(batch)}
    plan = next(iter(plans.values()))
    local = {name: _shard(name, x, plan, position_ids.shape) for name, x in whole.items()}
    described = {"attention_mask": None, **{name: batch[name] for name in CONSUMED if name in batch}}
    shifted = batch.get("labels") is not None and batch.get("shift_labels") is None
    own = ContextParallelPlan(
        plans, mesh, local["position_ids"], masks, schedule, described, shifted and several
    )
    if several:
        SHARDS.add(own)
    return {**local, "use_cache": False, "context_parallel": own}


def _read_batch(
    batch: Mapping[str, Any], config: PreTrainedConfig, model: nn.Module | None, group: Any
) -> tuple[tuple[dict[str, ModelMask], Tensor], Facts, tuple[int, ...]]:
    """Return the mask of each kind of layer and the position_ids [B, S], and the facts for ranks to
    compare."""
    text, tokens = _check_config(config, model), _tokens(batch)
    several = group is not None and group.size() > 1
    if several and not (may_be_recurrent(text) or takes_positions(text, model)):
        raise ValueError(
            f"the models of {type(text).__name__} take no position_ids, and would count positions within a "
            "shard: run them on whole sequences, without shard_batch"
        )
    features = [name for name in FEATURES if batch.get(name) is not None]
    if several and features:
        raise ValueError(
            f"the batch has {', '.join(features)}, which the model would put in the places of the tokens of "
            "a shard: put them into inputs_embeds [B, S, E] of the whole batch, in place of input_ids, or "
            "run the model on whole sequences, without shard_batch"
        )
    if several and batch.get("labels") is not None and has_loss_of_its_own(config, model):
        raise ValueError(
            f"the model of {type(config).__name__} computes its loss itself, which a rank would do of its "
            f"shard alone: {OWN_LOSS}"
        )
    shape, device = tokens.shape[:2], tokens.device
    documents, position_ids = _positions(batch, text, shape, device)
    masks = _kinds(text, batch.get("attention_mask"), documents, shape, device)
    facts = {"call": fact("shard_batch"), "batch": _fact_of(tokens)} if group is not None else {}
    return (masks, position_ids.expand(shape)), facts, ()


def _tokens(batch: Mapping[str, Any]) -> Tensor:
    """Return what the model embeds, [B, S], or its embeddings, [B, S, E]."""
    tokens = batch.get("input_ids") if batch.get("input_ids") is not None else batch.get("inputs_embeds")
    if not isinstance(tokens, Tensor) or tokens.ndim < 2:
        raise ValueError("the batch has no input_ids [B, S] and no inputs_embeds [B, S, E]")
    return tokens


def _fact_of(tokens: Tensor) -> tuple[Text, bytes]:
    """Return the fact about a batch that ranks compare: its token ids, or the shape of its embeddings."""
    size = f"{tokens.dtype} {list(tokens.shape)}"
    if tokens.is_floating_point():
        return fact(f"embeddings {size}")
    ids = to_host([tokens])[0]
    text = f"tokens {size} from {ids.flatten()[:8].tolist()} on"
    return fact(text, size.encode() + content(ids))


def _check_config(config: PreTrainedConfig, model: nn.Module | None) -> PreTrainedConfig:
    """Return the config of the text model, if the model, or any of the config, can be context parallel."""
    text = config.get_text_config()
    if not is_registered(text._attn_implementation):
        raise ValueError(
            f"the attention of the config is {text._attn_implementation!r}: call register(), then load the "
            'model with attn_implementation="tritoncp", or model.set_attn_implementation("tritoncp")'
        )
    if config.is_encoder_decoder:
        raise ValueError(
            "encoder-decoder models are not supported, for queries and keys have two lengths: run them on "
            "whole sequences, without shard_batch"
        )
    other_kinds = set(getattr(text, "layer_types", None) or ()) & OTHER_LAYERS
    if model is None and (other_kinds or may_be_recurrent(text) or may_convolve(text)):
        raise ValueError(
            f"models of {type(text).__name__} have layers that are no attention "
            f"({', '.join(sorted(other_kinds)) or 'recurrent or convolutional'}) and run on whole sequences: "
            "pass the model itself, shard_batch(batch, model, mesh)"
        )
    modules = model.modules() if model is not None and may_be_recurrent(text) else ()
    if computes_attention_itself(text) and not any(map(is_recurrent, modules)):
        raise ValueError(
            f"the models of {type(text).__name__} compute attention, its mask or what replaces it by code "
            "of their own, which would see a shard alone: run them on whole sequences, without shard_batch"
        )
    if hasattr(config, "patching_mode"):
        raise ValueError(
            f"the models of {type(config).__name__} group tokens into patches by a model of the whole "
            "sequence: run them on whole sequences, without shard_batch"
        )
    if has_sparse_layers(text):
        raise ValueError(
            f"layers of {type(text).__name__} select keys by scores of the whole sequence "
            f"({', '.join(sorted(SPARSE_LAYERS.intersection(text.layer_types)))}), which a rank would select "
            "within its shard: run the model on whole sequences, without shard_batch"
        )
    own = {"sliding_window", "attention_chunk_size"}.intersection(
        getattr(text, "per_layer_attributes", None) or ()
    )
    if own and not text.allow_global_per_layer_attribute_access:
        raise ValueError(
            f"the layers of {type(text).__name__} have values of {' and '.join(sorted(own))} of their own, "
            "from which transformers makes no masks of a whole batch: run the model without shard_batch"
        )
    if getattr(text, "output_router_logits", False):
        raise ValueError(
            "output_router_logits=True adds a loss of the experts' load, which a rank would compute of its "
            "own tokens: set it to False"
        )
    return text


def _positions(
    batch: Mapping[str, Any], config: PreTrainedConfig, shape: torch.Size, device: torch.device
) -> tuple[Tensor | None, Tensor]:
    """Return the positions that separate documents, None if there are none, and those of the embeddings:
    [B, S].

    Raises ValueError for positions that do not fit, or contradict the attention_mask.
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
                "position_ids restart within the tokens of attention_mask: transformers then lets documents "
                "see each other. Leave attention_mask out for packed documents, or position_ids for one text "
                "a row"
            )
        return None, ids
    return ids, ids


def _default_positions(
    batch: Mapping[str, Any], config: PreTrainedConfig, shape: torch.Size, device: torch.device
) -> Tensor:
    """Return the positions that a model makes itself, [B, S]: RoBERTa's begin behind the id of padding, OPT's
    leave padding out."""
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
            "cu_seq_lens_q is for one row of packed documents, the same for queries and keys and without an "
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
    """Return the global mask of each kind of layer: transformers says what kinds there are."""
    if attention_mask is not None and attention_mask.shape != shape:
        raise ValueError(
            f"attention_mask is {list(attention_mask.shape)}; padding [B, S] is needed, here {list(shape)}: "
            "for a mask of pairs, make a plan of your own and call tritoncp.flex_attention"
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
    if not kinds:  # layers that are no attention, or of kinds that transformers has no masks for
        one = masking_utils.create_causal_mask(**arguments)
        one = one if isinstance(one, ModelMask) else create_mask(shape[0], shape[1], shape[1])
        kinds = {str(one.kind): one}
    return dict(sorted(kinds.items()))  # transformers lists a set, in another order in each process


def _labels(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the labels of the next tokens, and their number in the whole batch unless the batch has it."""
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
    """Return this rank's part of a tensor [B, S, ...]; anything else as it is."""
    if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[:2] != shape:
        if name in ("labels", "shift_labels"):
            raise ValueError(f"{name} is {list(x.shape)}; {list(shape)} is needed")
        return x
    return shard(x, plan, dim=1, pad=IGNORED if name in ("labels", "shift_labels") else 0)
