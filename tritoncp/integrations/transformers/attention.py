"""The attention implementation "tritoncp" for transformers: the attention function, and its registration."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface

from tritoncp.api.attention import flex_attention
from tritoncp.integrations.transformers.calls import watch_calls
from tritoncp.integrations.transformers.graph import (
    checked_plan,
    has_handle,
    mask_mod_in_graph,
    plan_in_graph,
)
from tritoncp.integrations.transformers.masks import ModelMask, create_mask
from tritoncp.integrations.transformers.plans import ContextParallelPlan
from tritoncp.integrations.transformers.positions import refuse_local_positions
from tritoncp.integrations.transformers.whole_sequences import plan_of_call
from tritoncp.kernels.tile_rules import head_dim_fault
from tritoncp.masks.closed_forms import SlidingWindow
from tritoncp.masks.mask import Mask
from tritoncp.masks.mask_mod import UNBOUNDED, MaskMod, and_masks
from tritoncp.masks.named import softcap as softcap_mod
from tritoncp.masks.varlen import varlen
from tritoncp.planning.plan import Plan

# Modules with a dict from names of implementations to classes of attention, in some release of transformers.
TABLES = (
    "bark.modeling_bark", "data2vec.modeling_data2vec_vision", "deepseek_ocr2.modeling_deepseek_ocr2",
    "falcon.modeling_falcon", "git.modeling_git", "gpt_neo.modeling_gpt_neo", "gptj.modeling_gptj",
    "sam.modeling_sam", "sam_hq.modeling_sam_hq", "superglue.modeling_superglue",
    "unlimited_ocr.modeling_unlimited_ocr",
)  # fmt: skip


def register(name: str = "tritoncp") -> None:
    """Register tritoncp's attention with transformers, for ``attn_implementation="tritoncp"``.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> register()
    >>> config = LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
    ...                      num_attention_heads=2, num_key_value_heads=1, attn_implementation="tritoncp")
    >>> LlamaForCausalLM(config)(torch.arange(24)[None]).logits.shape
    torch.Size([1, 24, 32])

    A loaded model takes it too: ``model.set_attn_implementation("tritoncp")``. Sinks, soft capping, windows,
    chunks, packed documents, padding and ``cu_seq_lens_q`` have the same meaning as in transformers'
    implementations; keys and values are not repeated for query heads. Queries are [B, Hq, S, D] in bf16, fp16
    or fp32, on GPUs and CPUs; out is [B, S, Hq, E]. The model runs on one process without other changes, and
    on the ranks of a mesh with the batches of :func:`shard_batch`. A second call of register has no effect.

    The model raises ValueError for attention dropout in training. On several ranks the calls of all models of
    transformers are checked: they raise for a shard without its plan, and for labels beside a plan. A model
    that has custom attention code runs that code, as with "eager".

    Args:
        name: name of the attention function and of its mask function in transformers.

    Returns:
        None.
    """
    watch_calls(name)
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, create_mask)
    for module in TABLES:
        with suppress(ImportError):  # some versions of transformers do not have this module
            for table, classes in vars(import_module(f"transformers.models.{module}")).items():
                if table.endswith("_ATTENTION_CLASSES"):
                    classes[name] = classes["eager"]


def is_registered(name: str | None) -> bool:
    """Return whether :func:`register` added the attention implementation of this name."""
    return AttentionInterface().get(name) is attention_forward


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
    scaling: float | None = None, dropout: float = 0.0, softcap: float | None = None,
    s_aux: Tensor | None = None, position_bias: Tensor | None = None, is_causal: bool | None = None,
    sliding_window: int | None = None, position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None, cu_seq_lens_k: Tensor | None = None,
    sinks: Any = None, indices: Tensor | None = None, context_parallel: ContextParallelPlan | None = None,
    kernel_options: dict[str, Any] | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute attention with the signature of transformers' attention interface.

    query: [B, Hq, S, D]; key: [B, Hkv, S_kv, D]; value: [B, Hkv, S_kv, E]. attention_mask: from
    :func:`tritoncp.integrations.transformers.masks.create_mask`, or dense [B or 1, 1 or Hq, S, S_kv]: bool,
    or float, added to the scores. s_aux: [Hq], sinks. indices: [B, S, n], the keys that each query may see.
    context_parallel: from :func:`shard_batch`; then tensors are shards. Other keyword arguments, which models
    pass to every implementation, are ignored. Returns (out [B, S, Hq, E], None).
    """
    if dropout > 0:
        raise ValueError(
            f"dropout={dropout} in training: tritoncp has no attention dropout; set it to 0 in the config, "
            "attention_dropout=0.0, or call model.eval()"
        )
    for name, x in (("query", query), ("value", value)):
        if fault := head_dim_fault(x.shape[3], name == "value"):
            supported = fault.partition(":")[0]
            raise ValueError(
                f"{name} has head dim {x.shape[3]}; {supported}: load this model with "
                'attn_implementation="sdpa", on one process'
            )
    mesh, bias = None, position_bias
    if indices is not None:
        hidden = query.new_full((len(query), 1, query.shape[2], key.shape[2]), -torch.inf)
        selected = hidden.scatter(-1, indices.long()[:, None], 0.0)
        bias = selected if bias is None else bias + selected
    if sinks is not None:
        raise ValueError(
            "sinks depend on the query, and only one sink per head is supported: load this model with "
            'attn_implementation="eager"'
        )
    pairs = query.shape[2], key.shape[2]
    context_parallel = context_parallel or plan_of_call(module)
    if context_parallel is not None:
        if bias is not None:
            raise ValueError(
                "position_bias or indices are computed from the tokens of a shard alone: run this model on "
                "whole sequences, without shard_batch"
            )
        in_graph = torch.compiler.is_dynamo_compiling() and has_handle(attention_mask)
        plan_of_layer = plan_in_graph if in_graph else checked_plan
        mask = plan_of_layer(context_parallel, attention_mask, position_ids)
        mesh = context_parallel.mesh
    else:
        if isinstance(attention_mask, Tensor) and attention_mask.ndim == 4:
            attention_mask = attention_mask.expand(-1, -1, *pairs)
        if isinstance(attention_mask, Tensor) and attention_mask.is_floating_point():
            bias = attention_mask if bias is None else bias + attention_mask
            attention_mask, is_causal, sliding_window = None, False, None
        refuse_local_positions(attention_mask, position_ids, query.shape[2] == key.shape[2])
        if query.shape[2] == 1 and bias is None:
            if attention_mask is not None:
                _check_dense(attention_mask)
            return _attend_one_query(module, query, key, value, attention_mask, scaling, softcap, s_aux), None
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        if isinstance(attention_mask, ModelMask) and attention_mask.kv_len != key.shape[2]:
            raise ValueError(
                f"attention_mask is for {attention_mask.kv_len} keys, the call has {key.shape[2]}: this "
                'model adds keys of its own; load it with attn_implementation="eager", on one process'
            )
        default = _default_mask(is_causal and query.shape[2] > 1, sliding_window)
        mask = _mask_of(attention_mask, default, cu_seq_lens_q, cu_seq_lens_k)
    score_mod = None if softcap is None else _softcap(softcap)
    if bias is not None:
        score_mod = _add_bias(bias.expand(-1, -1, *pairs), score_mod)
    out = flex_attention(
        query, key, value, score_mod, mask, scaling, enable_gqa=True, kernel_options=kernel_options,
        mesh=mesh, sinks=s_aux,
    )  # fmt: skip
    return out.transpose(1, 2), None


_softcap = cache(softcap_mod)  # the same function for each cap


def _add_bias(bias: Tensor, inner: Callable[..., Tensor] | None) -> Callable[..., Tensor]:
    """Return a score_mod that adds a dense float mask [B or 1, 1 or Hq, S, S_kv] to the scores."""
    if bias.ndim != 4:
        raise ValueError(
            f"attention_mask is {list(bias.shape)}; a float mask [batch, heads, queries, keys] is needed"
        )
    rows, heads = bias.shape[:2]

    def add(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        score = score if inner is None else inner(score, b, h, q_idx, kv_idx)
        return score + bias[b if rows > 1 else 0, h if heads > 1 else 0, q_idx, kv_idx]

    return add


def _default_mask(is_causal: bool, window: int | None) -> SlidingWindow:
    """Return the mask of a module for calls without one. window: as in transformers, including the query"""
    left = UNBOUNDED if window is None else window - 1
    return SlidingWindow(left, 0 if is_causal else left)


def _mask_of(
    attention_mask: Any, default: SlidingWindow, cu_seq_lens_q: Tensor | None, cu_seq_lens_k: Tensor | None
) -> Any:
    """Return the mask of a call without a plan."""
    if cu_seq_lens_q is not None:
        return _packed_mask(attention_mask, default, cu_seq_lens_q, cu_seq_lens_k)
    if isinstance(attention_mask, ModelMask):
        in_graph = torch.compiler.is_dynamo_compiling() and has_handle(attention_mask)
        return mask_mod_in_graph(attention_mask) if in_graph else attention_mask.mask_mod
    if attention_mask is None:
        return default
    if isinstance(attention_mask, Mask | MaskMod | BlockMask | Plan):
        return attention_mask
    _check_dense(attention_mask)
    dense = attention_mask
    rows, heads = dense.shape[:2]

    def visible(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return dense[b if rows > 1 else 0, h if heads > 1 else 0, q_idx, kv_idx]

    return and_masks(visible)


def _packed_mask(mask: Any, default: SlidingWindow, cu_q: Tensor, cu_k: Tensor | None) -> MaskMod:
    """Return the mask of packed documents from flash attention's ``cu_seq_lens`` arguments."""
    left, right = default.window
    if isinstance(mask, ModelMask):
        if mask.pattern is None or mask.pattern.chunk or mask.padding is not None or mask.batch != 1:
            raise ValueError(
                "cu_seq_lens_q needs one row of packed documents without padding, chunks or a custom mask "
                "function: pass position_ids that restart at each document instead"
            )
        left, right = mask.pattern.window
    elif mask is not None:
        raise ValueError("cu_seq_lens_q and attention_mask in one call: pass one of them")
    return varlen(cu_q, cu_k, causal=False, window=(left, right))


def _attend_one_query(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None,
    scaling: float | None, softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Compute attention of one query per sequence by torch's scaled_dot_product_attention, or with softcap or
    sinks by the model's eager attention. visible: bool [B or 1, 1, 1, S_kv]; None: all keys"""
    if softcap is None and sinks is None:
        grouped = query.shape[1] != key.shape[1]
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, visible, scale=scaling, enable_gqa=grouped
        ).transpose(1, 2)
    mask = None if visible is None else query.new_zeros(visible.shape).masked_fill(~visible, -torch.inf)
    eager = inspect.unwrap(type(module).forward).__globals__["eager_attention_forward"]
    out: Tensor = eager(module, query, key, value, mask, scaling=scaling, softcap=softcap, s_aux=sinks)[0]
    return out


def _check_dense(mask: Any) -> None:
    """Raise ValueError unless a mask is a dense bool mask."""
    if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.dtype != torch.bool:
        kind = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask is {kind}; a padding mask [batch, tokens], a bool or float mask [batch, 1, "
            "queries, keys], or a mask of tritoncp is needed"
        )
