"""What schedules share: K and V as they travel, and the tensors a pass fills.

On the wire K and V are one tensor [rows, B, heads, D + E]; rows first, so that a row's place in a buffer does
not depend on batch or heads.  Where batch rows send different rows it is [rows, 1, heads, D + E], each row
one batch row's alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def pack(k: Tensor, v: Tensor, rows: int) -> Tensor:
    """k [B, h, S, D] and v [B, h, S, E] as one [rows, B, h, D + E], zeros past row S."""
    b, h, s, d = k.shape
    packed = k.new_zeros(rows, b, h, d + v.shape[3])
    local = packed[:s].permute(1, 2, 0, 3)
    local[..., :d] = k
    local[..., d:] = v
    return packed


def views(packed: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """K [B, heads, rows, D] and V [B, heads, rows, E] in a buffer; ``k`` says B and D."""
    x = packed.permute(1, 2, 0, 3).expand(k.shape[0], -1, -1, -1)
    return x[..., : k.shape[3]], x[..., k.shape[3] :]


def outputs(q: Tensor, v: Tensor, want_max: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, lse and max_scores of rows that see nothing: no slot covers padding, and nobody writes there."""
    stats = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=stats)
    return out, lse, torch.full_like(lse, -torch.inf) if want_max else None


def new_state(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Room for (acc, m, l) between steps."""
    return torch.empty_like(out, dtype=lse.dtype), torch.empty_like(lse), torch.empty_like(lse)


def dkdv(
    engine: Any, args: tuple[Any, ...], into: Tensor, dq: Tensor, h_offset: int = 0, add: bool = False
) -> None:
    """One step's gradients of the keys and values in ``args``, into or added to a buffer of their layout; a
    fused engine adds those of the queries to ``dq`` on the way."""
    q, keys, values, *_, tables = args
    (b, h, _, d), e = keys.shape, values.shape[3]
    split = engine.split(q, keys, tables) if into.shape[1] == b else 1
    if split == 1:
        dk, dv = views(into, keys)
        engine.dkdv(*args, dk=dk, dv=dv, dq=dq, h_offset=h_offset, add=add)()
        return
    parts = into.new_zeros(b, h * split, len(into), d + e)
    dk, dv = parts[..., :d], parts[..., d:]
    engine.dkdv(*args, dk=dk, dv=dv, dq=dq, h_offset=h_offset, split=split)()
    total = parts.unflatten(1, (h, split)).sum(2).permute(2, 0, 1, 3)
    into.copy_(into + total if add else total)


def separate(dkv: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """dk and dv [B, h, S, D|E] in a buffer, as views in its dtype; ``k`` says S and D."""
    grads = dkv[: k.shape[2]].permute(1, 2, 0, 3)
    return grads[..., : k.shape[3]], grads[..., k.shape[3] :]
