"""The reference: slow, simple attention, and the errors that fast implementations may have against it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritoncp.masks.mask import Mask
from tritoncp.mods.tracing import vmapped


class Dense(NamedTuple):
    """Results of a forward pass: out [B, Hq, Q, Dv]; lse (natural log) and max_scores [B, Hq, Q], -inf for
    rows without a visible key."""

    out: Tensor
    lse: Tensor
    max_scores: Tensor


class Training(NamedTuple):
    """Results of a forward and a backward pass; ``captured``: gradients of the score_mod's captures, then of
    the sinks if there are any."""

    out: Tensor
    lse: Tensor
    max_scores: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    captured: tuple[Tensor, ...]


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Tensor | None = None,
    score_mod: Callable[..., Tensor] | None = None,
    *,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Dense:
    """Compute attention in plain differentiable torch, in the inputs' dtype. O(Q * KV) memory.

    q: [B, Hq, Q, D]; k: [B or 1, Hkv, KV, D]; v: [B or 1, Hkv, KV, Dv]; Hq a multiple of Hkv.
    mask: a Mask (its block lists win over the mask_mod), or bool, broadcast to [B, Hq, Q, KV]; None = all
        queries see all keys.
    score_mod: (score, b, h, q_idx, kv_idx) -> score, called on visible pairs only; captured tensors get
        gradients.
    sinks: [Hq], logits of one more key for each head, whose value is zero.

    A row that sees nothing has out 0, lse -inf (or the sink) and gradients 0. max_scores has no gradient.

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
    return Dense(*_add_sinks(p @ v / total[..., None], lse, sinks), max_scores)


def eager_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Tensor | None,
    dout: Tensor,
    dlse: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    captured: Sequence[Tensor] = (),
    *,
    sinks: Tensor | None = None,
) -> Training:
    """Compute both passes with the rounding of torch's eager flex attention: scores and softmax in float32;
    P, dS, out and the sums over a group's heads in the inputs' dtype; delta from the rounded out. Sinks
    rescale the output, which is how users of flex attention apply them.

    dout, dlse: gradients of out and lse, from which the backward pass starts
    captured:   leaves that ``score_mod`` reads and that require gradients
    """
    q, k, v = (x.detach() for x in (q, k, v))
    group, dtype = q.shape[1] // k.shape[1], q.dtype
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    factor = 1 / math.sqrt(q.shape[-1])
    scores = (q.float() @ k.float().mT * factor).requires_grad_()
    b, h, i, j = (torch.arange(size, device=q.device) for size in scores.shape)
    index = b[:, None, None, None], h[:, None, None], i[:, None], j
    modified = scores * 1 if score_mod is None else score_mod(scores, *index)
    modified = torch.where(_visible(mask, scores), modified, -math.inf)
    logits = modified.detach()
    lse = logits.logsumexp(-1)
    p = torch.where(lse[..., None] == -math.inf, 0, torch.exp(logits - lse[..., None]))
    out = p.to(dtype) @ v
    ends, dsinks = (out, lse), []
    if sinks is not None:
        leaves = [x.detach().requires_grad_() for x in (out, lse, sinks)]
        ends = _add_sinks(leaves[0], leaves[1], leaves[2])
        dout, dlse, *dsinks = torch.autograd.grad(ends, leaves, (dout, dlse))
    delta = (out.float() * dout.float()).sum(-1) - dlse
    ds = p * (dout.float() @ v.float().mT - delta[..., None])
    leaves = [scores, *captured]
    grads = torch.autograd.grad(modified, leaves, ds, allow_unused=True)
    dscores, *dcaptured = (torch.zeros_like(x) if dx is None else dx for dx, x in zip(grads, leaves))
    back = (dscores * factor).to(dtype)
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (back.mT @ q, p.to(dtype).mT @ dout))
    out, lse = (x.detach() for x in ends)
    return Training(out, lse, logits.amax(-1), back @ k, dk, dv, (*dcaptured, *dsinks))


def largest_error(result: Tensor, exact: Tensor) -> float:
    """Return the max absolute error; infinite if a result is NaN or has the wrong shape.

    >>> largest_error(torch.tensor([1.0, -math.inf]), torch.tensor([1.5, -math.inf]))
    0.5
    >>> largest_error(torch.tensor([math.nan]), torch.tensor([0.0]))
    inf
    """
    if result.shape != exact.shape:
        return math.inf
    if not result.numel():
        return 0.0
    wide = result.to(exact.dtype)
    return float(
        torch.where(wide == exact, 0, (wide - exact).abs()).nan_to_num(math.inf, posinf=math.inf).amax()
    )


def allowed_error(eager: Tensor, exact: Tensor) -> float:
    """Return the allowed error of a result in the dtype of ``eager``: twice the error of ``eager``, the
    result of torch's eager attention, plus two units in the last place of the max value.

    >>> allowed_error(torch.tensor([1.0]), torch.tensor([1.0])) == 2 * torch.finfo(torch.float32).eps
    True
    """
    limits = torch.finfo(eager.dtype)
    largest = max(float(exact.abs().max()), limits.tiny)
    return 2 * largest_error(eager, exact) + 2 * limits.eps * 2.0 ** math.floor(math.log2(largest))


def _add_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Add exp(sink) to the sums of exponentials behind out and lse."""
    if sinks is None:
        return out, lse
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return (out * torch.exp(lse - total)[..., None]).to(out.dtype), total


def _visible(mask: Mask | Tensor | None, scores: Tensor) -> Tensor:
    """Return the visible pairs: bool [B, H, Q, KV]."""
    if mask is None:
        return torch.ones_like(scores, dtype=torch.bool)
    if isinstance(mask, Mask):
        B, H = scores.shape[:2]
        mask = mask.to_dense(B, H).to(scores.device)
    return mask.expand(scores.shape)


def _modified(scores: Tensor, visible: Tensor, score_mod: Callable[..., Tensor] | None) -> Tensor:
    """Return scores with score_mod applied to the visible pairs only."""
    if score_mod is None:
        return scores
    at = visible.nonzero(as_tuple=True)
    if not len(at[0]):
        return scores
    modified = vmapped(score_mod, (0, 0, 0, 0, 0))(scores[at], *at)
    return scores.index_put(at, modified.to(scores.dtype))
