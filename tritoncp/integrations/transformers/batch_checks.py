"""Checks of a batch and its model before :func:`shard_batch`, which refuse what a rank cannot compute."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from tritoncp.api.trees import PackedTree
from tritoncp.integrations.transformers.attention import is_registered
from tritoncp.integrations.transformers.calls import refuse_arguments
from tritoncp.integrations.transformers.images.own_images import feature_tokens
from tritoncp.integrations.transformers.model_classes import (
    COMPRESSED_LAYERS,
    adds_features_to_layers,
    computes_attention_itself,
    counts_positions_of_images,
    has_compressed_keys,
    has_custom_loss,
    is_recurrent,
    may_be_recurrent,
    may_convolve,
    names_of_arguments,
    position_axes,
    takes_positions,
)
from tritoncp.integrations.transformers.plans import OWN_LOSS

# Kinds of layers that are not attention, or not only attention.
OTHER_LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
# Inputs that describe the whole sequence. The plan contains them; the model does not get them.
CONSUMED = ("attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
# Names that have a meaning in a batch, besides CONSUMED.
NAMES = ("input_ids", "inputs_embeds", "labels", "shift_labels", "position_ids", "num_items_in_batch")


def check_config(config: PreTrainedConfig, model: nn.Module | None) -> PreTrainedConfig:
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
    other_kinds = OTHER_LAYERS.intersection(_layer_types(text))
    if model is None and (other_kinds or may_be_recurrent(text) or may_convolve(text)):
        raise ValueError(
            f"models of {type(text).__name__} have layers other than attention "
            f"({', '.join(sorted(other_kinds)) or 'recurrent or convolutional'}), which need whole "
            "sequences: pass the model itself, shard_batch(batch, model, mesh), to gather for these layers"
        )
    modules = model.modules() if model is not None and may_be_recurrent(text) else ()
    if computes_attention_itself(text) and not any(map(is_recurrent, modules)):
        raise ValueError(
            f"models of {type(text).__name__} compute attention or its mask by custom code, which would see "
            "only a shard: run them on whole sequences, without shard_batch"
        )
    if hasattr(config, "patching_mode"):
        raise ValueError(
            f"models of {type(config).__name__} group tokens into patches by a model that needs the whole "
            "sequence: run them on whole sequences, without shard_batch"
        )
    if has_compressed_keys(text):
        raise ValueError(
            f"layers of {type(text).__name__} attend to keys that each are made of several tokens, which may "
            f"be on several ranks ({', '.join(sorted(COMPRESSED_LAYERS.intersection(text.layer_types)))}): "
            "run the model on whole sequences, without shard_batch"
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


def check_names(batch: Mapping[str, Any], config: PreTrainedConfig, model: nn.Module | None) -> None:
    """Raise ValueError for a name in the batch that is nearly a known name, and would be ignored."""
    given = {name for name, x in batch.items() if x is not None}
    names = [
        name for name in (*NAMES, *CONSUMED) if not name.startswith("max_length")
    ]  # only kernels read these
    for name in sorted(given.difference(CONSUMED, NAMES)):
        meant = difflib.get_close_matches(name, names, 1, cutoff=0.78)
        if meant and name not in names_of_arguments(config, model):
            raise ValueError(
                f"the batch has {name!r}, which neither shard_batch nor the model reads: name it "
                f"{meant[0]!r}, or take it out of the batch"
            )
    if "seq_idx" in given and given.isdisjoint(("position_ids", "cu_seq_lens_q")):
        raise ValueError(
            "the batch has seq_idx, by which transformers separates documents in recurrent layers alone: "
            "pass position_ids that restart at each document, too"
        )


def check_shardable(batch: Mapping[str, Any], config: PreTrainedConfig, model: nn.Module | None) -> None:
    """Raise ValueError for a batch that the ranks of a model cannot share."""
    text = config.get_text_config()
    if not (may_be_recurrent(text) or takes_positions(text, model)):
        raise ValueError(
            f"models of {type(text).__name__} have no argument position_ids, and would count positions "
            "within a shard: run them on whole sequences, without shard_batch"
        )
    refuse_arguments(batch)
    has_embeddings = batch.get("inputs_embeds") is not None
    feature_tokens(batch, model)
    if has_embeddings and adds_features_to_layers(config):
        raise ValueError(
            f"models of {type(config).__name__} add features of images to the hidden states of several "
            "layers (deepstack), which inputs_embeds do not hold: run the model on whole sequences, without "
            "shard_batch"
        )
    if has_embeddings and batch.get("position_ids") is None and counts_positions_of_images(config):
        axes = position_axes(text)
        raise ValueError(
            f"positions of {type(config).__name__} have {axes} axes, and those of images are not counted "
            f"from inputs_embeds: pass position_ids [{axes}, B, S], model.get_rope_index(...)[0]; or [B, S] "
            "for texts"
        )
    if batch.get("labels") is not None and has_custom_loss(config, model):
        raise ValueError(
            f"labels: the model of {type(config).__name__} computes its own loss, which on a rank would be "
            f"that of its shard alone: {OWN_LOSS}"
        )


def check_tree(
    batch: Mapping[str, Any], tree: PackedTree, config: PreTrainedConfig, model: nn.Module | None
) -> None:
    """Raise ValueError for a batch that is not the row of a prefix tree, and for models that cannot see
    trees."""
    reason = why_no_trees(config, model)
    if reason:
        raise ValueError(f"tree: {reason}: pass the trajectories as packed documents, without tree=")
    tokens = batch.get("input_ids")
    if tokens is None or tokens.shape != (1, len(tree.tokens)):
        shape = "missing" if tokens is None else str(list(tokens.shape))
        raise ValueError(
            f"input_ids is {shape}; the tokens of the tree, tree.tokens[None], are needed: here "
            f"[1, {len(tree.tokens)}]"
        )
    given = {name for name, x in batch.items() if x is not None}
    other = given.intersection((*CONSUMED, "position_ids", "labels"))
    if other:
        raise ValueError(
            f"the batch has {', '.join(sorted(other))} beside a tree, which has positions and no padding, "
            "and whose labels no shift by rows gives: omit them, and pass shift_labels, the label of each row"
        )


def why_no_trees(config: PreTrainedConfig, model: nn.Module | None) -> str:
    """Return the reason why the models of a config cannot have a prefix tree as a row, or ""."""
    text = config.get_text_config()
    name = f"models of {type(text).__name__}"
    if may_be_recurrent(text) or may_convolve(text) or OTHER_LAYERS.intersection(_layer_types(text)):
        return f"{name} have layers that read the tokens of a row in their order"
    if getattr(text, "attention_chunk_size", None):
        return f"{name} attend within chunks of a row"
    if "minimax_m3_sparse" in _layer_types(text):
        return f"{name} select blocks of a row"
    if not takes_positions(text, model) or position_axes(text) > 1:
        return f"{name} have no argument position_ids [B, S]"
    return ""


def _layer_types(text: PreTrainedConfig) -> tuple[str, ...]:
    return tuple(getattr(text, "layer_types", None) or ())
