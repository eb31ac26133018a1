"""What schedules share: K and V as they travel, and the tensors a pass fills.

On the wire K and V are one tensor [rows, B, heads, D + E]; rows first, so that a row's place in a buffer does
not depend on batch or heads.  Where batch rows send different rows it is [rows, 1, heads, D + E], each row
one batch row's alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritoncp.plan import Plan


def pack(k: Tensor, v: Tensor, rows: int) -> Tensor:
    """k [B, h, S, D] and v [B, h, S, E] as one [rows, B, h, D + E], zeros past row S."""
    (b, h, s, d), e = k.shape, v.shape[3]
    packed = torch.empty((rows, b, h, d + e), dtype=k.dtype, device=k.device)
    if s < rows:
        packed[s:] = 0
    torch.cat((k, v), 3, out=(packed[:s] if s < rows else packed).permute(1, 2, 0, 3))
    return packed


def views(packed: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """K [B, heads, rows, D] and V [B, heads, rows, E] in a buffer; ``k`` says B and D."""
    x, b, d = packed.permute(1, 2, 0, 3), k.shape[0], k.shape[3]
    x = x if x.shape[0] == b else x.expand(b, -1, -1, -1)
    keys, values = x.split_with_sizes([d, x.shape[3] - d], 3)
    return keys, values


def room(like: Tensor, dtype: torch.dtype, filled: bool, value: float = 0.0) -> Tensor:
    """A contiguous tensor for what kernels write: empty where they write to every row, as in `filled`
    placements, else full of ``value``, as no slot covers padding."""
    made = torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)
    return made if filled else made.fill_(value)


def outputs(plan: Plan, q: Tensor, v: Tensor, want_max: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, lse and max_scores; padding as rows that see nothing."""
    stats = torch.float64 if q.dtype == torch.float64 else torch.float32
    filled, (b, h, s, _), device = plan.q.is_filled(plan.rank), q.shape, q.device
    out = torch.empty((b, h, s, v.shape[3]), dtype=q.dtype, device=device)
    lse = torch.empty((b, h, s), dtype=stats, device=device)
    if not filled:
        out.zero_()
        lse.fill_(-torch.inf)
    return out, lse, room(lse, stats, filled, -torch.inf) if want_max else None


def room_for_dq(plan: Plan, engine: Any, q: Tensor, dtype: torch.dtype) -> Tensor:
    """For a first step that writes it; a fused engine adds to it, in float32, from the beginning."""
    return room(q, dtype, plan.q.is_filled(plan.rank) and not engine.fused)


def new_state(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Room for (acc, m, l) between steps."""
    return torch.empty_like(out, dtype=lse.dtype), torch.empty_like(lse), torch.empty_like(lse)


def dkdv(
    engine: Any, args: tuple[Any, ...], dk: Tensor, dv: Tensor, dq: Tensor, h_offset: int = 0,
    add: bool = False,
) -> None:  # fmt: skip
    """One step's gradients of the keys and values in ``args``, into or added to dk, dv [B, h, rows, D|E]; a
    fused engine adds those of the queries to ``dq`` on the way."""
    q, keys, _, _, lse, _, tables = args
    (b, h, rows, d), e = dk.shape, dv.shape[3]
    apart = b == 1 or dk.stride(0) > 0  # else each row is one batch row's alone, and the others' are the same
    split = engine.split(q, keys, tables) if apart else 1
    if split == 1:
        engine.dkdv(*args, dk=dk, dv=dv, dq=dq, h_offset=h_offset, add=add)()
        return
    parts = lse.new_zeros(b, h * split, rows, d + e)
    engine.dkdv(*args, dk=parts[..., :d], dv=parts[..., d:], dq=dq, h_offset=h_offset, split=split)()
    for into, part in zip((dk, dv), parts.unflatten(1, (h, split)).sum(2).split([d, e], 3), strict=True):
        into.copy_(into + part if add else part)


def separate(dkv: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """dk and dv [B, h, S, D|E] in a buffer, as views in its dtype; ``k`` says S and D."""
    return views(dkv[: k.shape[2]], k)
