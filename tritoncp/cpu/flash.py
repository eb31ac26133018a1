"""Attention of tiles by torch's flash kernel for the CPU.

The kernel returns lse 0 for rows that see no key; they get -inf here. Its backward pass gets out and lse of
the whole row, and returns exactly the tile's part of the gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (out [n, H, height, D], lse [n, H, height]) of tiles; q, k and v have equal D.

    bias: [n, 1 or H, height, width], added to the scores; causal: row i sees keys 0 to i
    """
    out, lse = _forward(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    if bias is not None:
        empty = bias.amax(-1) == -torch.inf
        if bool(empty.any()):
            lse = lse.masked_fill(empty, -torch.inf)
    return out, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, bias: Tensor | None,
    scale: float, causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv) of tiles. out: any rows whose dot products with dout are delta; lse: finite"""
    tiles, heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
    shared = tiles * kv_heads < min(torch.get_num_threads(), tiles * heads)
    if shared:  # torch's kernel runs one thread per head of k: expand k to use more threads
        k, v = (x[:, :, None].expand(-1, -1, heads // kv_heads, -1, -1).flatten(1, 2) for x in (k, v))
    dq, dk, dv = _backward(dout, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale)
    if shared:
        dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2) for x in (dk, dv))
    return dq, dk, dv


def rows_with_delta(dout: Tensor, delta: Tensor) -> Tensor | None:
    """Return rows whose dot products with dout [H, T, D] are delta [H, T], to pass to torch's kernel as out.
    None if they do not exist, because a row of dout is 0 and its delta is not."""
    norm = torch.linalg.vector_norm(dout, dim=-1)
    limits = torch.finfo(dout.dtype)
    if not bool(((norm > (limits.tiny / limits.eps) ** 0.5) & (norm < torch.inf)).all()):
        largest = dout.abs().amax(-1)
        largest = torch.where(largest == 0, 1, largest)
        dout, delta = dout / largest[..., None], delta / largest
        norm = torch.linalg.vector_norm(dout, dim=-1)
    factor = delta / torch.where((norm == 0) & (delta == 0), 1, norm) / torch.where(norm == 0, 1, norm)
    return dout * factor[..., None] if bool(torch.isfinite(factor).all()) else None


def can_compute(q: Tensor, k: Tensor, v: Tensor | None, scale: float, backward: bool = False) -> bool:
    """Return whether torch's kernel computes these tiles correctly. It scales after the product of q and k,
    and returns lse 0 for rows whose scores are all -inf, so products have to be finite.

    v:        values, which have to be finite too if tiles hide pairs; else None
    backward: whether scores also have to be small: the backward pass rounds them differently, which must not
              change probabilities by more than about a thousandth
    """
    if not q.numel() or not k.numel():
        return True
    limits = torch.finfo(q.dtype)
    largest = limits.max / max(1.0, abs(scale))
    if backward and scale:
        largest = min(largest, 1e-3 / limits.eps / abs(scale))
    # First by magnitudes, which is faster, then by norms; both comparisons are False for NaN.
    fits = _size(q) * _size(k) * q.shape[-1] < largest or _norm(q) * _norm(k) < largest
    return bool(fits) and (v is None or bool(_size(v) < torch.inf))


def _size(x: Tensor) -> Tensor:
    """Return the max magnitude in x, NaN if x has a NaN."""
    return torch.stack(torch.aminmax(x)).abs().amax()


def _norm(x: Tensor) -> Tensor:
    """Return the max norm of the rows of x [H, T, D]."""
    return torch.linalg.vector_norm(x, dim=-1).amax()


def hide(visible: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Convert visible pairs to a bias: 0, or -inf for hidden pairs. Returns one tile if all are equal, and
    None for None."""
    if visible is None:
        return None
    visible = visible[:1] if visible.stride(0) == 0 else visible
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -torch.inf)
