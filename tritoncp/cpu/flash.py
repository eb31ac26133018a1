"""Tiles by torch's flash kernel for the CPU.

It returns lse 0 for rows that see no key, so these get -inf here. Its backward pass takes out and lse of the
whole row, and gives the tile's exact share of the gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return (out [n, H, height, D], lse [n, H, height]) of tiles; q, k and v have one D.

    bias: added to the scores [n, 1 or H, height, width]; causal: whether keys above the diagonal are hidden
    """
    out, lse = _forward(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    if bias is not None:
        empty = bias.amax(-1) == -torch.inf
        if bool(empty.any()):
            lse = lse.masked_fill(empty, -torch.inf)
    return out, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, bias: Tensor | None,
    causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv) of tiles. out: any rows whose products with dout are delta; lse: finite."""
    tiles, heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
    shared = tiles * kv_heads < min(torch.get_num_threads(), tiles * heads)
    if shared:  # torch's kernel has one thread for each head of k
        k, v = (x[:, :, None].expand(-1, -1, heads // kv_heads, -1, -1).flatten(1, 2) for x in (k, v))
    dq, dk, dv = _backward(dout, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale)
    if shared:
        dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2) for x in (dk, dv))
    return dq, dk, dv


def rows_with_delta(dout: Tensor, delta: Tensor) -> Tensor | None:
    """Return rows whose products with dout [H, T, D] are delta [H, T], which torch's kernel takes in place of
    out; None where there are none: a row of dout is 0, and delta is not."""
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
    """Return whether torch's kernel computes tiles exactly. It scales products of q and k after it has them,
    and returns lse 0 for rows whose scores are all -inf: products must be finite.

    v:        must be finite too where tiles hide pairs: those of absent blocks are among them; else None
    backward: whether in addition scores must be so small that their rounding, which differs from that of the
              forward pass, changes no probability by more than about a thousandth
    """
    if not q.numel() or not k.numel():
        return True
    limits = torch.finfo(q.dtype)
    largest = limits.max / max(1.0, abs(scale))
    if backward and scale:
        largest = min(largest, 1e-3 / limits.eps / abs(scale))
    # Of numbers' sizes first, which is quicker; neither holds for a NaN.
    fits = _size(q) * _size(k) * q.shape[-1] < largest or _norm(q) * _norm(k) < largest
    return bool(fits) and (v is None or bool(_size(v) < torch.inf))


def _size(x: Tensor) -> Tensor:
    """Return the largest size of a number in x; NaN if there is one."""
    return torch.stack(torch.aminmax(x)).abs().amax()


def _norm(x: Tensor) -> Tensor:
    """Return the largest norm of a row of x [H, T, D]."""
    return torch.linalg.vector_norm(x, dim=-1).amax()


def hide(visible: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return 0 for visible pairs, -inf for hidden ones; for one tile if all tiles have the same; None where
    all pairs are visible."""
    if visible is None:
        return None
    visible = visible[:1] if visible.stride(0) == 0 else visible
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -torch.inf)
