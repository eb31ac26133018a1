"""The oracle: slow, obvious attention that every fast path is compared with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tritoncp.masks import Mask
from tritoncp.pointwise import vmapped


class Dense(NamedTuple):
    """out [B, Hq, Q, Dv]; lse (natural log) and max_scores [B, Hq, Q], -inf for rows that see nothing."""

    out: Tensor
    lse: Tensor
    max_scores: Tensor


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Tensor | None = None,
    score_mod: Callable[..., Tensor] | None = None,
    *,
    scale: float | None = None,
) -> Dense:
    """Attention in plain differentiable torch, in the inputs' dtype. O(Q * KV) memory.

    q: [B, Hq, Q, D]; k: [B or 1, Hkv, KV, D]; v: [B or 1, Hkv, KV, Dv]; Hq a multiple of Hkv.
    mask: a Mask (block lists first), or bool, broadcast to [B, Hq, Q, KV]; None = everyone sees everyone.
    score_mod: (score, b, h, q_idx, kv_idx) -> score, called on visible pairs only; what it captures
    gets gradients. A row that sees nothing: out 0, lse -inf, gradients 0. max_scores has no gradient.

    >>> x = torch.ones(1, 1, 2, 4, dtype=torch.float64)
    >>> out, lse, _ = dense_attention(x, x, x, torch.tensor([[True, False], [False, False]]))
    >>> out[0, 0, :, 0].tolist(), lse.tolist()
    ([1.0, 0.0], [[[2.0, -inf]]])
    """
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1).expand(q.shape[0], -1, -1, -1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    visible = _visible(mask, scores)
    scores = torch.where(visible, _modified(scores, visible, score_mod), -math.inf)
    max_scores = scores.detach().amax(-1)
    m = torch.where(max_scores == -math.inf, 0, max_scores)
    p = torch.exp(scores - m[..., None])
    total = p.sum(-1)
    empty = total == 0
    total = torch.where(empty, 1, total)
    lse = torch.where(empty, -math.inf, m + torch.log(total))
    return Dense(p @ v / total[..., None], lse, max_scores)


def _visible(mask: Mask | Tensor | None, scores: Tensor) -> Tensor:
    """bool [B, H, Q, KV]."""
    if mask is None:
        return torch.ones_like(scores, dtype=torch.bool)
    if isinstance(mask, Mask):
        B, H = scores.shape[:2]
        mask = mask.to_dense(B, H, scores.device).to(scores.device)
    return mask.expand(scores.shape)


def _modified(scores: Tensor, visible: Tensor, score_mod: Callable[..., Tensor] | None) -> Tensor:
    """Visible scores after score_mod; the others are left as they are, and never asked about."""
    if score_mod is None:
        return scores
    at = visible.nonzero(as_tuple=True)
    if not len(at[0]):
        return scores
    modified = vmapped(score_mod, (0, 0, 0, 0, 0))(scores[at], *at)
    return scores.index_put(at, modified.to(scores.dtype))
