"""Suggestions in error messages: for misspelled names, and for keywords of other attention functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from typing import Any

from tritoncp.core.dynamo_boundary import constant_result

_SCALE, _CAUSAL, _CAP = "pass scale=...", "pass block_mask=causal()", "pass score_mod=softcap(cap)"
_MASK, _MESH = "pass block_mask=..., a mask or a Plan", "pass mesh=..."
_WINDOW = "pass block_mask=sliding_window(left, right)"
_DOCUMENTS = "pass varlen_mask(cu_seqlens_q, causal=...) as the mask, or call varlen_attention"
_BIAS = "pass a score_mod that adds it, score + bias[b, h, q_idx, kv_idx]"
_PADDING = "pass a mask that hides the padding, lambda b, h, q_idx, kv_idx: kv_idx < length[b]"
_DROPOUT = "there is no dropout; leave it out"
_SINKS = "call flex_attention with sinks=..., one for each query head"
# Keywords of torch, transformers, FlashAttention and others that change the result, and what to do instead.
INSTEAD = {
    "scaling": _SCALE, "softmax_scale": _SCALE, "sm_scale": _SCALE, "qk_scale": _SCALE,
    "causal": _CAUSAL, "is_causal": _CAUSAL,
    "softcap": _CAP, "logit_cap": _CAP, "logit_soft_cap": _CAP, "logits_soft_cap": _CAP,
    "sliding_window": _WINDOW, "window": _WINDOW, "window_size": _WINDOW,
    "cu_seqlens": _DOCUMENTS, "cu_seqlens_q": _DOCUMENTS, "cu_seqlens_k": _DOCUMENTS,
    "cu_seqlens_kv": _DOCUMENTS, "cu_seq_lens_q": _DOCUMENTS, "cu_seq_lens_k": _DOCUMENTS,
    "attn_bias": _BIAS, "bias": _BIAS, "position_bias": _BIAS, "alibi_slopes": "pass score_mod=alibi(slopes)",
    "key_padding_mask": _PADDING, "padding_mask": _PADDING, "head_mask": "multiply the output by it",
    "attn_mask": _MASK, "attention_mask": _MASK, "attention_masks": _MASK, "mask": _MASK,
    "mask_mod": "pass block_mask=create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)",
    "dropout": _DROPOUT, "dropout_p": _DROPOUT, "s_aux": _SINKS, "sink_weights": _SINKS, "sinks": _SINKS,
    "group": _MESH, "process_group": _MESH, "device_mesh": _MESH,
}  # fmt: skip


@constant_result
def suggest(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean ...?)" with the known name that is most like ``name``, "" if none is like it.

    >>> suggest("block_masks", ["block_mask", "scale"]), suggest("layer_id", ["block_mask", "scale"])
    (" (did you mean 'block_mask'?)", '')
    """
    close = get_close_matches(name, sorted(known), 1, 0.75)
    return f" (did you mean {close[0]!r}?)" if close else ""


def advice(name: str, known: Collection[str]) -> str:
    """Return the end of an error about a keyword that a function does not have: what to do instead, or the
    known name that is most like it.

    >>> advice("softmax_scale", ["scale"]), advice("scael", ["scale"]), advice("layer_id", ["scale"])
    (': pass scale=...', " (did you mean 'scale'?)", '')
    """
    instead = INSTEAD.get(name)
    return f": {instead}" if instead else suggest(name, known)


def unexpected_keyword(fn: Callable[..., Any], passed: Iterable[str]) -> TypeError | None:
    """Return the error of a call with a keyword that the function does not have, None if it has all of them.

    >>> def call(*, scale=1): ...
    >>> unexpected_keyword(call, ["is_causal"])
    TypeError("call() got an unexpected keyword argument 'is_causal': pass block_mask=causal()")
    """
    known = inspect.signature(fn).parameters
    if any(one.kind is one.VAR_KEYWORD for one in known.values()):
        return None
    for name in passed:
        if name not in known:
            text = f"{fn.__qualname__}() got an unexpected keyword argument {name!r}{advice(name, known)}"
            return TypeError(text)
    return None
