"""Attention sinks: a learned logit per head, which takes probability and contributes no value.

Applied once, after the last step of any schedule. With z = exp(lse), the sum over keys, a softmax over keys
and sink is the softmax over keys times z / (z + exp(sink)) = sigmoid(lse - sink). out and lse are
differentiable, so that autograd has the gradients of q, k, v and sinks (StreamingLLM, arXiv 2309.17453; in
gpt-oss sinks are learned).
"""

from __future__ import annotations

import torch
from torch import Tensor


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Apply attention sinks to out [B, H, S, E] and lse [B, H, S]. sinks: [H], logits to the base e, to which
    neither scale nor score_mod applies. A row that sees no key gets out 0 and lse = sink.

    >>> out, lse = with_sinks(torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1), torch.zeros(1))
    >>> out.tolist(), round(lse.item(), 4)
    ([[[[0.5, 0.5]]]], 0.6931)
    """
    logits = sinks.to(lse.dtype)[:, None]
    empty = lse == -torch.inf
    share = torch.where(empty, 0, torch.sigmoid(torch.where(empty, 0, lse) - logits))
    return (out * share[..., None]).to(out.dtype), torch.logaddexp(lse, logits)
