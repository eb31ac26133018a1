"""Calls of models: indexers are prepared, and on several ranks arguments besides a plan and tokens without
their plan are checked.

Attention sees neither the labels of a call nor its tokens, and transformers has no hook for the calls of all
models: :func:`watch_calls` wraps ``PreTrainedModel.__call__``.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from tritoncp.integrations.transformers.indexers.layers import select_by_tiles
from tritoncp.integrations.transformers.model_classes import argument_names, has_custom_loss, has_indexers
from tritoncp.integrations.transformers.plans import OWN_LOSS, ContextParallelPlan
from tritoncp.integrations.transformers.positions import NO_PLAN

# Ends of the names of classes with one output per sequence.
POOLING_HEADS = ("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction")
_SHARDS: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tokens or embeddings in this rank's shards
_NAMES: set[str] = set()  # attention implementations of models whose compiled calls are checked too


class _Outermost(threading.local):
    """Whether this thread is in the call of a model; only outermost calls are checked."""

    runs = False


_CALL = _Outermost()


def watch_calls(attention: str) -> None:
    """Check the calls of all transformers models if there are several ranks. Compiled calls are checked only
    with a plan or with this attention, since a check breaks the graph."""
    _NAMES.add(attention)
    PreTrainedModel.__call__ = _checked_call


def note_shard(tokens: Tensor) -> None:
    """Remember the tokens [B, S_local] or embeddings of a shard while they exist."""
    _SHARDS[tokens] = True


def _checked_call(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """Call a model, as nn.Module does, between checks."""
    if has_indexers(model.config) and model.config._attn_implementation in _NAMES:
        _prepare(model)
    is_watched = dist.is_available() and dist.is_initialized()
    if torch.compiler.is_compiling():
        has_plan = kwargs.get("context_parallel") is not None
        is_watched = is_watched and (has_plan or model.config._attn_implementation in _NAMES)
    if not (is_watched and _begin(model, args, kwargs)):
        return nn.Module.__call__(model, *args, **kwargs)
    try:
        out = nn.Module.__call__(model, *args, **kwargs)
    finally:
        _end()
    _check_reached(kwargs)
    return out


_prepare = torch.compiler.disable(select_by_tiles)


@torch.compiler.disable
def _begin(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Check an outermost call, and return whether it is one."""
    if _CALL.runs:
        return False
    _check_arguments(model, args, kwargs)
    _CALL.runs = True
    return True


@torch.compiler.disable
def _end() -> None:
    _CALL.runs = False


def _check_arguments(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ValueError for the tokens of a shard without its plan, and for arguments that have another
    meaning on a shard than on the whole sequence."""
    plan = kwargs.get("context_parallel")
    if plan is None and not _SHARDS:
        return
    call = {**dict(zip(argument_names(type(model)), args)), **kwargs}
    if plan is None:
        for name in ("input_ids", "inputs_embeds"):
            if _is_shard(call.get(name)):
                raise ValueError(f"{name} {list(call[name].shape)} is a shard: {NO_PLAN}")
    elif isinstance(plan, ContextParallelPlan) and plan.several:
        plan.reached = False
        refuse_arguments(call)
        if type(model).__name__.endswith(POOLING_HEADS):
            raise ValueError(
                f"{type(model).__name__} reads one token of a shard for the whole sequence: call its base "
                "model, and its head with that token of tritoncp.unshard(hidden_states, plan, mesh, dim=1)"
            )
        if call.get("labels") is None:
            return
        if call.get("shift_labels") is None or has_custom_loss(model.config, model):
            raise ValueError(
                f"labels are passed beside the plan of a shard, within which {type(model).__name__} would "
                "shift and average them: put labels [B, S] into the batch before shard_batch, which shifts "
                f"them over the whole sequence; or {OWN_LOSS}"
            )


@torch.compiler.disable
def _check_reached(kwargs: dict[str, Any]) -> None:
    """Raise ValueError after a call if no layer got its plan."""
    plan = kwargs.get("context_parallel")
    if isinstance(plan, ContextParallelPlan) and plan.several and not plan.reached:
        raise ValueError(f"no layer of the model has got its argument context_parallel: {NO_PLAN}")


def _is_shard(tokens: Any) -> bool:
    """Return whether rows of a call equal the rows of an existing shard (generation clones tokens, and
    repeats them for its beams). Synchronises if the shapes fit."""
    if type(tokens) is not Tensor or tokens.is_meta or not tokens.numel():
        return False
    return any(
        tokens is shard
        or (
            (tokens.shape[1:], tokens.dtype, tokens.device) == (shard.shape[1:], shard.dtype, shard.device)
            and bool((shard == tokens[:1]).flatten(1).all(1).any())
        )
        for shard in list(_SHARDS)
    )


def refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments of a model, or values of a batch, that refer to the whole sequence,
    while a rank would apply them to its shard."""
    if arguments.get("output_router_logits"):
        raise ValueError(
            "output_router_logits=True adds an auxiliary loss of the experts' load, which a rank would "
            "compute for its own tokens: omit it"
        )
    for name in ("logits_to_keep", "num_logits_to_keep"):
        keep = arguments.get(name)
        if isinstance(keep, Tensor) or keep:
            raise ValueError(
                f"{name} would keep the last rows of each shard: omit it, and select rows of "
                "tritoncp.unshard(logits, batch['context_parallel'].plan, mesh, dim=1)"
            )
