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
from transformers import AttentionInterface, AttentionMaskInterface

from tritoncp.api.attention import flex_attention
from tritoncp.integrations.transformers.calls import watch_calls
from tritoncp.integrations.transformers.graph import (
    checked_plan,
    has_handle,
    mask_mod_in_graph,
    plan_in_graph,
)
from tritoncp.integrations.transformers.masks import (
    MaskWithKeys,
    ModelMask,
    check_dense,
    create_mask,
    default_mask,
    mask_of_call,
)
from tritoncp.integrations.transformers.plans import ContextParallelPlan
from tritoncp.integrations.transformers.positions import refuse_local_positions
from tritoncp.integrations.transformers.whole_sequences import plan_of_call
from tritoncp.kernels.tile_rules import head_dim_fault
from tritoncp.masks.named import softcap as softcap_mod
from tritoncp.selection import Selection

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
    sinks: Any = None, indices: Tensor | Selection | None = None, block_indices: Any = None,
    context_parallel: ContextParallelPlan | None = None, kernel_options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute attention with the signature of transformers' attention interface.

    query: [B, Hq, S, D]; key: [B, Hkv, S_kv, D]; value: [B, Hkv, S_kv, E]. attention_mask: from
    :func:`tritoncp.integrations.transformers.masks.create_mask`, or dense [B or 1, 1 or Hq, S, S_kv]: bool,
    or float, added to the scores. s_aux: [Hq], sinks. indices: the keys that each query may see, [B, S, n] or
    the Selection of an indexer; block_indices: the same, or blocks [B, heads, S, n] of module.indexer.
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
    if isinstance(attention_mask, MaskWithKeys):
        attention_mask, indices = attention_mask
    chosen = indices if block_indices is None else block_indices
    selected = _selection(module, chosen)
    if selected is not None and isinstance(attention_mask, Tensor):  # a step of generation
        hidden = _hide_others(selected, query, key.shape[2])
        bias, selected = hidden if bias is None else bias + hidden, None
    if sinks is not None:
        raise ValueError(
            "sinks depend on the query, and only one sink per head is supported: load this model with "
            'attn_implementation="eager"'
        )
    pairs = query.shape[2], key.shape[2]
    context_parallel = context_parallel or plan_of_call(module)
    if context_parallel is not None:
        if bias is not None or isinstance(chosen, Tensor):
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
        if query.shape[2] == 1 and bias is None and selected is None:
            if attention_mask is not None:
                check_dense(attention_mask)
            return _attend_one_query(module, query, key, value, attention_mask, scaling, softcap, s_aux), None
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        if isinstance(attention_mask, ModelMask) and attention_mask.kv_len != key.shape[2]:
            raise ValueError(
                f"attention_mask is for {attention_mask.kv_len} keys, the call has {key.shape[2]}: this "
                'model adds keys of its own; load it with attn_implementation="eager", on one process'
            )
        default = default_mask(is_causal and query.shape[2] > 1, sliding_window)
        if cu_seq_lens_q is None and torch.compiler.is_dynamo_compiling() and has_handle(attention_mask):
            mask = mask_mod_in_graph(attention_mask)
        else:
            mask = mask_of_call(attention_mask, default, cu_seq_lens_q, cu_seq_lens_k)
    score_mod = None if softcap is None else _softcap(softcap)
    if bias is not None:
        score_mod = _add_bias(bias.expand(-1, -1, *pairs), score_mod)
    out = flex_attention(
        query, key, value, score_mod, mask, scaling, enable_gqa=True, kernel_options=kernel_options,
        mesh=mesh, sinks=s_aux, selected=selected,
    )  # fmt: skip
    return out.transpose(1, 2), None


def _selection(module: Any, indices: Tensor | Selection | None) -> Selection | None:
    """Return the selected keys of a call. indices: a tensor of keys [B, S, n], or of blocks
    [B, heads, S, n]"""
    if not isinstance(indices, Tensor):
        return indices
    if indices.ndim == 3:
        return Selection(indices[:, None])
    return Selection(indices, module.indexer.block_size)


def _hide_others(selected: Selection, query: Tensor, keys: int) -> Tensor:
    """Return scores to add, [B, Hq, S, keys]: -inf for keys that are not selected, else 0."""
    hidden = ~selected.to_dense(keys)
    hidden = hidden.repeat_interleave(query.shape[1] // hidden.shape[1], 1)
    return query.new_zeros(hidden.shape).masked_fill(hidden, -torch.inf)


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
