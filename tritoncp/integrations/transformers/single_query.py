"""Attention of a single query, as in decoding, in plain torch."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor


def attend_one_query(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention with one query per sequence; return out [B, Hq, 1, E].

    query: [B, Hq, 1, D]; key: [B, Hkv, S, D]; value: [B, Hkv, S, E], Hq a multiple of Hkv. visible: bool
    [B or 1, 1, 1, S]; None: all keys. sinks: [Hq], see :func:`tritoncp.flex_attention`. Without softcap and
    sinks this is torch's scaled_dot_product_attention.

    >>> q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 1, 5, 8)
    >>> attend_one_query(q, k, k, None, softcap=30.0).shape
    torch.Size([1, 2, 1, 8])
    """
    if softcap is None and sinks is None:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    key_heads, dim = key.shape[1], query.shape[3]
    grouped = rearrange(query, "b (k g) 1 d -> b k g d", k=key_heads)  # g: the query heads of a KV head
    scores = (grouped @ key.mT).float() * (dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        logits = rearrange(sinks.float(), "(k g) -> 1 k g 1", k=key_heads).expand(len(query), -1, -1, 1)
        weights = torch.cat([scores, logits], -1).softmax(-1)[..., :-1]
    return rearrange(weights.to(value.dtype) @ value, "b k g e -> b (k g) 1 e")
