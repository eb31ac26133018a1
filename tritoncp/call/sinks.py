"""Attention sinks: a learned logit per head, which takes probability and contributes no value.

They are applied once, after the last step of any schedule. With z = exp(lse), the sum over keys, a softmax
over keys and sink is the softmax over keys times z / (z + exp(sink)) = sigmoid(lse - sink). out and lse are
differentiable, so that autograd has the gradients of q, k, v and sinks (StreamingLLM, arXiv 2309.17453; in
gpt-oss sinks are learned).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor, invariant: bool = False) -> tuple[Tensor, Tensor]:
    """Apply attention sinks to out [B, H, S, E] and lse [B, H, S]. sinks: [H], logits to the base e, to which
    neither scale nor score_mod applies. A row that sees no key gets out 0 and lse = sink.

    invariant: whether the bits of a row and of its gradients must not depend on other rows

    >>> out, lse = with_sinks(torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1), torch.zeros(1))
    >>> out.tolist(), round(lse.item(), 4)
    ([[[[0.5, 0.5]]]], 0.6931)
    """
    logits = sinks.to(lse.dtype)[:, None]
    if invariant:
        results: tuple[Tensor, Tensor] = _InvariantSinks.apply(out, lse, logits)
        return results
    empty = lse == -torch.inf
    share = torch.where(empty, 0, torch.sigmoid(torch.where(empty, 0, lse) - logits))
    return (out * share[..., None]).to(out.dtype), lse_with_sinks(lse, sinks)


def lse_with_sinks(lse: Tensor, sinks: Tensor) -> Tensor:
    """Return lse [B, H, S] with attention sinks [H]."""
    return torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])


# -- rows whose bits do not depend on other rows -----------------------------------------------------------
# If torch vectorises a sum, exp, log or sigmoid, bits depend on the number of elements and on the place of an
# element among them. Sums, products and quotients of elements have one rounded result.

_LARGEST = 700.0  # min exponent; exp(-700) vanishes beside 1, and is not subnormal
_LN2 = float.fromhex("0x1.62e42fee00000p-1"), float.fromhex("0x1.a39ef35793c76p-33")  # log(2) in two parts
_EXP = [1 / math.factorial(n) for n in range(14)]
_ATANH = [1 / (2 * n + 1) for n in range(18)]


class _InvariantSinks(torch.autograd.Function):
    """Autograd function of (out [B, H, S, E], lse [B, H, S], logits [H, 1]) -> (out, lse) with sinks."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        empty, stats = lse == -torch.inf, lse.dtype
        wide, sinks = lse.double(), logits.double()
        gap = torch.where(empty, -_LARGEST, (wide - sinks).clamp(-_LARGEST, _LARGEST))
        small = _exp(-gap.abs())  # exp(min(lse, sink)) / exp(max(lse, sink))
        share = torch.where(empty, 0, torch.where(gap < 0, small, 1) / (1 + small)).to(stats)
        ctx.save_for_backward(out, share)
        total = torch.maximum(wide, sinks) + _log1p(small)
        return (out * share[..., None]).to(out.dtype), total.to(stats)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, share = ctx.saved_tensors
        dshare = _row_sums(dout.to(share.dtype) * out.to(share.dtype)) * (share * (1 - share))
        by_sink = dlse * (1 - share) - dshare
        return (
            (dout * share[..., None]).to(out.dtype),
            dlse * share + dshare,
            by_sink.sum((0, 2))[:, None],
        )


def _exp(x: Tensor) -> Tensor:
    """Compute exp of numbers from -700 to 0."""
    n = torch.round(x / math.log(2))
    power = ((n.long() + 1023) << 52).view(torch.float64)  # 2^n
    return _polynomial(_EXP, (x - n * _LN2[0]) - n * _LN2[1]) * power


def _log1p(x: Tensor) -> Tensor:
    """Compute log(1 + x) of numbers from 0 to 1."""
    z = x / (2 + x)
    return 2 * z * _polynomial(_ATANH, z * z)


def _polynomial(coefficients: list[float], x: Tensor) -> Tensor:
    total = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total


def _row_sums(x: Tensor) -> Tensor:
    """Sum over the last dimension, by halves."""
    while (width := x.shape[-1]) > 1:
        half = (width + 1) // 2
        x = torch.cat([x[..., : width - half] + x[..., half:], x[..., width - half : half]], -1)
    return x.sum(-1)  # one element, or none
