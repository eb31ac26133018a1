"""Buffers that schedules share: K and V in messages, and the tensors that a pass fills.

In a message K and V are one tensor [rows, B, heads, D + E]; rows come first, so that a row's place in a
buffer does not depend on batch or heads. If batch rows send different tokens it is [rows, 1, heads, D + E],
and each row belongs to one batch row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritoncp.planning.plan import Plan
from tritoncp.planning.step_tables import BackwardStep, StepEngine


def pack(k: Tensor, v: Tensor, rows: int) -> Tensor:
    """Copy k and v into a message of ``rows`` rows, with zeros past their last row."""
    b, h, s, d = k.shape
    packed = torch.empty(rows, b, h, d + v.shape[3], dtype=k.dtype, device=k.device)
    if s < rows:
        packed[s:] = 0
    keys, values = views(packed if s == rows else packed[:s], k)
    keys.copy_(k)
    values.copy_(v)
    return packed


def views(packed: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """View K [B, heads, rows, D] and V [B, heads, rows, E] in a buffer; ``k`` gives B and D."""
    x, b, d = packed.permute(1, 2, 0, 3), k.shape[0], k.shape[3]
    x = x if x.shape[0] == b else x.expand(b, -1, -1, -1)
    keys, values = x.split_with_sizes([d, x.shape[3] - d], 3)
    return keys, values


def stats_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of lse, max_scores and sums for queries of ``dtype``, without torch.promote_types,
    which is slower and an op that dispatch modes see."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def laid_out_as(x: Tensor, channels: int, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate dense [B, H, S, channels] with the stride order of x [B, H, S, D] and channels innermost, so
    that a model that transposed its inputs transposes the result back without a copy. torch's attention has
    the same layout, also for expanded dimensions, which come next to the channels.

    >>> x = torch.empty(2, 7, 3, 8).transpose(1, 2)  # [B, S, H, D], as a projection leaves it
    >>> laid_out_as(x, 4).transpose(1, 2).is_contiguous()
    True
    >>> laid_out_as(torch.empty(8).expand(2, 7, 3, 8), 4).is_contiguous()
    True
    """
    strides = x.stride()
    # A symbolic stride counts as neither 0 nor 1: a comparison would make a guard on a size of the graph.
    numbers = strides if type(x) is Tensor else [n if type(n) is int else None for n in strides]
    if numbers[3] == 1 and channels == x.shape[3] and 0 not in numbers:
        return torch.empty_like(x, dtype=dtype)
    # Not by sorted(): where strides cannot be compared, its result differs between releases of Python.
    order: list[int] = []
    for dim in range(3):
        smaller = (at for at, other in enumerate(order) if _is_less(strides[other], strides[dim]))
        order.insert(next(smaller, len(order)), dim)
    size = (*x.shape[:3], channels)
    return torch.empty_permuted(size, (*order, 3), dtype=dtype or x.dtype, device=x.device)


def _is_less(a: Any, b: Any) -> bool:
    """Return whether stride a is known to be less than b. In a graph, strides of unbounded sizes are not."""
    if isinstance(a, int) and isinstance(b, int):
        return a < b
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(a < b)


def outputs(
    plan: Plan, engine: StepEngine, q: Tensor, v: Tensor, want_max: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Allocate out, lse and max_scores; padding rows get the values of rows that see no key. For latents, the
    engine knows the number of channels of out."""
    dtype = stats_dtype(q.dtype)
    (b, h, s, _), e = q.shape, engine.v_head_dim or v.shape[3]
    out, lse = laid_out_as(q, e), torch.empty(b, h, s, dtype=dtype, device=q.device)
    top = torch.empty_like(lse) if want_max else None
    if not plan.q.is_filled(plan.rank):
        out.zero_()
        for x in (lse,) if top is None else (lse, top):
            x.fill_(-torch.inf)
    return out, lse, top


def empty_grad(x: Tensor, dtype: torch.dtype, filled: bool) -> Tensor:
    """Allocate the gradient of x [B, H, S, D]: uninitialised if kernels write to every row, as in ``filled``
    placements, else zeros, since kernels do not write padding."""
    grad = laid_out_as(x, x.shape[3], dtype)
    return grad if filled else grad.zero_()


def empty_dq(plan: Plan, q: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocate dQ for a first step, which writes it. A fused engine clears it and adds to it."""
    return empty_grad(q, dtype, plan.q.is_filled(plan.rank))


def dq_of_one_step(plan: Plan, engine: StepEngine, q: Tensor, lse: Tensor) -> Tensor:
    """Allocate dQ for a pass of one step: in q's dtype, or in lse's for a fused engine, which adds to it."""
    return empty_dq(plan, q, lse.dtype if engine.fused else q.dtype)


def new_state(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the state (acc, m, l) that is carried between steps, in lse's dtype."""
    return torch.empty_like(out, dtype=lse.dtype), torch.empty_like(lse), torch.empty_like(lse)


def dkdv(
    engine: StepEngine, step: BackwardStep, dk: Tensor, dv: Tensor, dq: Tensor, add: bool = False
) -> None:
    """Compute the gradients of a step's keys and values, and write them to dk, dv [B, h, rows, D|E] or add
    them; a fused engine adds the gradients of the queries to ``dq``."""
    (b, h, rows, d), e = dk.shape, dv.shape[3]
    has_own_rows = b == 1 or dk.stride(0) > 0  # stride 0: batch rows share storage, so split partials alias
    split = engine.split(step.q, step.k, step.tables) if has_own_rows else 1
    if split == 1:
        engine.dkdv(step, dk, dv, dq, add=add)()
        return
    parts = step.lse.new_zeros(b, h * split, rows, d + e)
    engine.dkdv(step, parts[..., :d], parts[..., d:], dq, split=split)()
    for grad, part in zip((dk, dv), parts.unflatten(1, (h, split)).sum(2).split([d, e], 3), strict=True):
        grad.copy_(grad + part if add else part)


def separate(dkv: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """View dk and dv [B, h, S, D|E] in a buffer, in its dtype; ``k`` gives S and D."""
    return views(dkv[: k.shape[2]], k)
