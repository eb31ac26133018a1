"""The dense engine: the same step contract as the kernels, in plain torch, for tests.

In float64 it separates errors of plan and communication from errors of blockwise engines. A step takes
O(S_local * rows) memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tritoncp.core.tracing import fresh_dispatch, vmapped
from tritoncp.masks.block_runs import ABSENT, Kind, Runs
from tritoncp.planning.placement import row_positions
from tritoncp.planning.step_tables import Tables

Step = Callable[[], None]
LN2 = math.log(2)


@dataclass(frozen=True)
class DenseEngine:
    """One attention call.

    mask:     the user's function over (b, h, q_idx, kv_idx)
    score:    from the captures that want gradients to the user's function over (score, b, h, q_idx, kv_idx)
    captures: these tensors, at least as wide as their gradients' sums; ``grads`` are buffers for the sums
    first_row: batch row of the whole that row 0 of the tensors is, for the indices of masks and mods
    """

    scale: float
    mask: Callable[..., Tensor] | None = None
    score: Callable[[Sequence[Tensor]], Callable[..., Tensor]] | None = None
    captures: Sequence[Tensor] = ()
    grads: Sequence[Tensor] = ()
    first_row: int = 0

    @property
    def fused(self) -> bool:
        return False

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, tables: Tables, *, out: Tensor, lse: Tensor,
        max_scores: Tensor | None = None, state: Sequence[Tensor] = (), load_state: bool = False,
        store_state: bool = False, h_offset: int = 0,
    ) -> Step:  # fmt: skip
        """Run a forward step with the contract of the kernels.

        state: (acc [B, H, S, E], m, l [B, H, S]), m in log2 units
        """

        @fresh_dispatch()
        def step() -> None:
            before = [x.clone() for x in state] if load_state else None
            acc, m, l = self._continued(q, k, v, tables, lse.dtype, before, h_offset)
            if store_state:
                for buffer, now in zip(state, (acc, m, l)):
                    buffer.copy_(now)
                return
            filled = l != 0  # a NaN is passed on
            safe = torch.where(filled, l, 1)
            out.copy_(acc / safe[..., None])
            lse.copy_(torch.where(filled, (m + safe.log2()) * LN2, -torch.inf))
            if max_scores is not None:
                max_scores.copy_(m * LN2)

        return step

    def _continued(
        self, q: Tensor, k: Tensor, v: Tensor, tables: Tables, dtype: torch.dtype,
        before: Sequence[Tensor] | None, h_offset: int,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Update (acc, m, l) with the scores of these keys."""
        q, k, v = _wide(q, k, v, tables, dtype)
        raw = q @ k.mT * self.scale
        scores = self._modified(raw, self.captures, *self._visible(tables, q, k, h_offset), h_offset)
        none = raw.new_full(raw.shape[:3], -torch.inf)
        top = scores.amax(-1) / LN2 if scores.shape[-1] else none
        m = top if before is None else torch.maximum(top, before[1])
        finite = torch.where(m == -torch.inf, 0, m)
        p = torch.exp2(scores / LN2 - finite[..., None])
        acc, l = p @ v, p.sum(-1)
        if before is not None:
            scale = torch.exp2(before[1] - finite)
            acc, l = before[0] * scale[..., None] + acc, before[2] * scale + l
        return acc, m, l

    def delta(self, out: Tensor, dout: Tensor, dlse: Tensor | None, delta: Tensor) -> Step:
        @fresh_dispatch()
        def step() -> None:
            delta.copy_((out.to(delta.dtype) * dout.to(delta.dtype)).sum(-1) - (0 if dlse is None else dlse))

        return step

    def dq(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, tables: Tables, *,
        dq: Tensor, add: bool = False, h_offset: int = 0,
    ) -> Step:  # fmt: skip
        @fresh_dispatch()
        def step() -> None:
            _, ds, wide = self._backward(q, k, v, dout, lse, delta, tables, h_offset, self.grads)
            _store(dq, ds @ wide[1] * self.scale, add)

        return step

    def dkdv(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, tables: Tables, *,
        dk: Tensor, dv: Tensor, dq: Tensor | None = None, add: bool = False, h_offset: int = 0,
    ) -> Step:  # fmt: skip
        @fresh_dispatch()
        def step() -> None:
            p, ds, wide = self._backward(q, k, v, dout, lse, delta, tables, h_offset, ())
            for into, x in ((dk, ds.mT @ wide[0] * self.scale), (dv, p.mT @ wide[2])):
                _store(into, x.unflatten(1, (k.shape[1], -1)).sum(2), add)

        return step

    def split(self, q: Tensor, k: Tensor, tables: Tables) -> int:
        return 1

    def _backward(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, tables: Tables,
        h_offset: int, grads: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
        """Compute probabilities, the gradient of the raw scores, and q, k, dout in the accumulating dtype."""
        q, k, v = _wide(q, k, v, tables, lse.dtype)
        dout, delta = (_zero_padding(x, tables.q_slots).to(lse.dtype) for x in (dout, delta[..., None]))
        at, visible = self._visible(tables, q, k, h_offset)
        # An op runs below autograd; functorch's transforms bring their own.
        scores, pull, *_ = torch.func.vjp(
            lambda raw, *caps: self._modified(raw, caps, at, visible, h_offset),
            q @ k.mT * self.scale,
            *self.captures,
        )
        finite = torch.where(lse == -torch.inf, 0, lse)[..., None]
        p = torch.exp((scores - finite).clamp(max=0))  # rounding of lse could make it exceed 1
        ds, *capture_grads = pull(p * (dout @ v.mT - delta))
        for buffer, grad in zip(grads, capture_grads):
            buffer += grad
        return p, ds, (q, k, dout)

    def _modified(
        self, raw: Tensor, captures: Sequence[Tensor], at: Sequence[Tensor], visible: Tensor, h_offset: int
    ) -> Tensor:
        """Apply the score_mod to the scores of visible pairs; scores of hidden pairs are -inf."""
        pairs = b, h, row, col = visible.nonzero(as_tuple=True)
        if self.score is None or not len(b):
            return torch.where(visible, raw, -torch.inf)
        places = b + self.first_row, h + h_offset, at[0][b % len(at[0]), row], at[1][b % len(at[1]), col]
        scores = vmapped(self.score(captures), (0, 0, 0, 0, 0))(raw[pairs], *places).to(raw.dtype)
        return torch.full_like(raw, -torch.inf).index_put(pairs, scores)

    def _visible(
        self, tables: Tables, q: Tensor, k: Tensor, h_offset: int
    ) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return positions of rows [Bp, S] and columns [Bp, rows], visible pairs: bool [B, H, S, rows]."""
        b, h = q.shape[:2]
        at = row_positions(tables.q_slots, q.shape[2]), row_positions(tables.kv_slots, k.shape[2])
        slot = _slot_of_row(tables.q_slots, q.shape[2]), _slot_of_row(tables.kv_slots, k.shape[2])
        kinds = Runs(tables.row_ptr, tables.row_runs, tables.kv_slots.shape[1]).to_kinds()
        if kinds.shape[1] > 1:
            kinds = kinds[:, h_offset : h_offset + h]
        kinds = kinds.expand(b, h, -1, -1)
        if 0 in kinds.shape:
            return at, torch.zeros(b, h, q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        rows = slot[0].clamp(min=0).expand(b, -1)[:, None, :, None].expand(-1, h, -1, kinds.shape[3])
        kinds = kinds.gather(2, rows)
        cols = slot[1].clamp(min=0).expand(b, -1)[:, None, None].expand(-1, h, q.shape[2], -1)
        kinds = kinds.gather(3, cols)
        real = (slot[0] >= 0)[:, None, :, None] & (slot[1] >= 0)[:, None, None, :]
        visible = (kinds != ABSENT) & real
        if tables.mask == "none":
            return at, visible
        return at, visible & ((kinds != Kind.MASKED) | self._inside(tables, at, b, h, h_offset))

    def _inside(self, tables: Tables, at: tuple[Tensor, Tensor], b: int, h: int, h_offset: int) -> Tensor:
        """Return the visible pairs of masked blocks: bool, broadcastable to [B, H, S, rows]."""
        rows, cols = at[0].clamp(min=0), at[1].clamp(min=0)
        if tables.window is not None:
            gap = rows[:, None, :, None] - cols[:, None, None, :]
            left, right = tables.window
            visible = torch.ones_like(gap, dtype=torch.bool) if left is None else gap <= left
            return visible if right is None else visible & (-gap <= right)
        if tables.mask == "interval":
            assert tables.lo is not None and tables.hi is not None
            lo, hi = (
                (x[:, h_offset : h_offset + h] if x.shape[1] > 1 else x) for x in (tables.lo, tables.hi)
            )
            where = cols[:, None, None, :]
            return (where >= lo[..., None]) & (where < hi[..., None])
        assert self.mask is not None
        device = at[0].device
        heads = torch.arange(h, device=device) + h_offset
        call = vmapped(
            self.mask, (None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, 0, 0)
        )
        batch = torch.arange(b, device=device) + self.first_row
        return call(batch, heads, rows.expand(b, -1), cols.expand(b, -1))


def _store(into: Tensor, x: Tensor, add: bool) -> None:
    if into.stride(0) == 0:  # batch rows share storage: sum their parts, of which only one is not zero
        into, x = into[:1], x.sum(0, keepdim=True)
    into.copy_(into + x if add else x)


def _wide(
    q: Tensor, k: Tensor, v: Tensor, tables: Tables, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Convert q, k and v to the accumulating dtype, and repeat k and v for every query head."""
    group = q.shape[1] // k.shape[1]
    k, v = (_zero_padding(x, tables.kv_slots).repeat_interleave(group, 1) for x in (k, v))
    return _zero_padding(q, tables.q_slots).to(dtype), k.to(dtype), v.to(dtype)


def _zero_padding(x: Tensor, slots: Tensor) -> Tensor:
    """Return x [B, H, rows, n] with zeros outside slots, so that padding times 0 is 0."""
    padding = row_positions(slots, x.shape[2]) < 0
    return x.masked_fill(padding[:, None, :, None], 0)


def _slot_of_row(slots: Tensor, rows: int) -> Tensor:
    """Return the slot that covers each row of the buffer, -1 for padding: int64 [Bp, rows]."""
    row = torch.arange(rows, device=slots.device)
    inside = (row >= slots[..., :1]) & (row < slots[..., :1] + slots[..., 2:])  # [Bp, slots, rows]
    if slots.shape[1] == 0:
        return torch.full((slots.shape[0], rows), -1, device=slots.device)
    return torch.where(inside.any(1), inside.int().argmax(1), -1)
