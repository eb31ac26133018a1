"""The CPU engine: runs attention steps in plain torch, with the contract of the Triton kernels.

A step is a few batches of tiles of equal shape. Without a score_mod torch's flash kernel computes them, else
batched products and pointwise operations; the results of tiles are merged in float32 (float64 for float64
tensors). Memory is O(S * block).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tritoncp.core.bounded_cache import BoundedCache
from tritoncp.cpu import flash
from tritoncp.cpu.packing import even_step, gather, scatter, scatter_add
from tritoncp.cpu.pointwise import Scores
from tritoncp.cpu.step import HeadGroup, Step
from tritoncp.cpu.tiles import TileBatch
from tritoncp.mods.tracing import fresh_dispatch
from tritoncp.planning.step_tables import BackwardStep, ForwardStep, Tables

Launch = Callable[[], None]
LN2 = math.log(2)
CACHE_SCORES = 1 << 20  # max scores of a tile for pointwise operations, so that they fit in the cache
MAX_EXPONENT = 8.0  # max exponent of a weight; above it, sums are rescaled first
GATHERED = 1 << 24  # max elements that a batch of tiles gathers


@dataclass(frozen=True)
class CpuEngine:
    """The CPU engine of one attention call.

    mask:     the mask_mod (b, h, q_idx, kv_idx) -> bool
    score:    (captures that require grad) -> the score_mod (score, b, h, q_idx, kv_idx) -> score
    elementwise: whether the score_mod takes tensors that broadcast, see :class:`Scores`
    captures: these captures, in the dtype in which gradients are accumulated
    grads:    buffers for their gradients
    first_row:  index in the whole batch of the tensors' batch row 0, for masks and mods
    first_head: index in the layer of the tensors' first query head, for the same use
    steps:    cache of steps, see :meth:`Step.of`
    """

    scale: float
    mask: Callable[..., Tensor] | None = None
    score: Callable[[Sequence[Tensor]], Callable[..., Tensor]] | None = None
    captures: Sequence[Tensor] = ()
    grads: Sequence[Tensor] = ()
    first_row: int = 0
    first_head: int = 0
    elementwise: bool = False
    steps: BoundedCache[Any, Step] = field(default_factory=lambda: BoundedCache(64))
    v_head_dim = None  # the head dim of values
    selected = None  # the mask alone decides

    @property
    def fused(self) -> bool:
        return True

    def from_head(self, first: int) -> CpuEngine:
        """Copy the engine for tensors that begin with another query head of the layer."""
        return replace(self, first_head=first)

    def forward(self, inputs: ForwardStep) -> Launch:
        """Prepare a forward step."""
        q, k, v, tables, out, lse, max_scores, state, load_state, store_state = inputs

        @fresh_dispatch()
        def run() -> None:
            use_flash = self.score is None
            step = self._step(tables, q, k, use_flash)
            width = max(q.shape[3], v.shape[3]) if use_flash else None
            rows = step.q.pack(q, lse.dtype, width)
            keys, values = (step.kv.pack(x, lse.dtype, width) for x in (k, v))
            exposed = values if step.hides else None
            if use_flash and not flash.can_compute(rows, keys, exposed, self.scale):
                use_flash, step = False, self._step(tables, q, k, False)
            sums = _Sums.of(rows, values.shape[2])
            if load_state:
                sums.load(step, *state or ())
            for group, tiles, visible in self._tiles(step, rows, use_flash):
                part = self._forward_tiles(step, group, tiles, visible, rows, keys, values, use_flash)
                sums.add(group, tiles, *part)
            if max_scores is not None:
                part_step = self._step(tables, q, k, False)
                self._add_largest(part_step, rows, keys, max_scores, load_state)
            if store_state:
                sums.store(step, *state or ())
            else:
                sums.finish(step, out, lse)

        return run

    def delta(self, out: Tensor, dout: Tensor, dlse: Tensor | None, delta: Tensor) -> Launch:
        @fresh_dispatch()
        def run() -> None:
            torch.sum(out.to(delta.dtype) * dout.to(delta.dtype), -1, out=delta)
            if dlse is not None:
                delta.sub_(dlse)

        return run

    def dq(self, inputs: BackwardStep, dq: Tensor, *, add: bool = False) -> Launch:
        """Prepare to clear dq, to which :meth:`dkdv` then adds."""
        return lambda: None if add else _clear(dq)

    def dkdv(
        self, inputs: BackwardStep, dk: Tensor, dv: Tensor, dq: Tensor, *, add: bool = False, split: int = 1
    ) -> Launch:
        """Prepare a backward step: compute dk and dv, and add to dq and to the buffers of captures'
        gradients."""
        q, k, v, dout, lse, delta, tables = inputs

        @fresh_dispatch()
        def run() -> None:
            use_flash, dtype = self.score is None, lse.dtype
            step = self._step(tables, q, k, use_flash)
            width = max(q.shape[3], v.shape[3])
            douts, deltas = step.q.pack(dout, dtype, width), step.q.pack(delta[..., None], dtype)[..., 0]
            rows = step.q.pack(q, dtype, width)
            keys, values = (step.kv.pack(x, dtype, width) for x in (k, v))
            use_flash = use_flash and flash.can_compute(rows, keys, values, self.scale, backward=True)
            outs = flash.rows_with_delta(douts, deltas) if use_flash else None
            if outs is None:
                use_flash, step = False, self._step(tables, q, k, False)
            lses = step.q.pack(lse[..., None], dtype)[..., 0]
            lses = torch.where(lses == -torch.inf, 0, lses)
            totals = [torch.zeros_like(x) for x in (rows, keys, values)]
            packed = BackwardStep(rows, keys, values, douts, lses, deltas, tables)
            for group, tiles, visible in self._tiles(step, rows, use_flash):
                grads = self._backward_tiles(step, group, tiles, visible, packed, outs if use_flash else None)
                for total, heads, starts, grad in zip(
                    totals, (group.heads, group.kv_heads, group.kv_heads),
                    (tiles.rows, tiles.cols, tiles.cols), grads, strict=True,
                ):  # fmt: skip
                    scatter_add(total[heads], starts, grad)
            step.q.unpack(totals[0][..., : q.shape[3]], dq, add=True)
            step.kv.unpack(totals[1][..., : k.shape[3]], dk, add)
            step.kv.unpack(totals[2][..., : v.shape[3]], dv, add)

        return run

    def split(self, q: Tensor, k: Tensor, tables: Tables) -> int:
        return 1

    def _step(self, tables: Tables, q: Tensor, k: Tensor, use_flash: bool) -> Step:
        return Step.of(tables, q, k, self.mask, self.first_row, self.first_head, use_flash, self.steps)

    def _tiles(
        self, step: Step, q: Tensor, use_flash: bool
    ) -> Iterator[tuple[HeadGroup, TileBatch, Tensor | None]]:
        """Yield (head group, tiles, :meth:`Step.visible` of the tiles) for all batches of a step, split so
        that memory is bounded."""
        for group, tiles in self._parts(step, q, use_flash):
            visible = step.visible(group, tiles)
            if visible is not None and self.score is not None:
                # Skip tiles without visible pairs, for which a score_mod may be undefined.
                shows = visible.flatten(1).any(1)
                if not bool(shows.all()):
                    tiles, visible = tiles.take(shows.nonzero()[:, 0].tolist()), visible[shows]
            if tiles.tiles:
                yield group, tiles, visible

    def _parts(self, step: Step, q: Tensor, use_flash: bool) -> Iterator[tuple[HeadGroup, TileBatch]]:
        """Yield the batches of a step, split so that memory is bounded."""
        for group in step.groups:
            heads = group.heads.stop - group.heads.start
            for tiles in group.batches:
                pairs = tiles.height * tiles.width
                if use_flash:
                    masks = pairs * (tiles.kind == "masked")
                    numbers = heads * q.shape[2] * (tiles.height + tiles.width) + masks
                    yield from ((group, part) for part in tiles.split(max(1, GATHERED // numbers)))
                    continue
                height = max(1, min(tiles.height, CACHE_SCORES // (heads * tiles.width)))
                for part in tiles.split(max(1, CACHE_SCORES // (heads * pairs))):
                    yield from ((group, piece) for piece in part.split_rows(height))

    def _scores(self, step: Step, group: HeadGroup, tiles: TileBatch, visible: Tensor | None) -> Scores:
        indices = step.indices(group, tiles)
        return Scores(self.scale, self.score, indices, visible, self.elementwise)

    def _forward_tiles(
        self, step: Step, group: HeadGroup, tiles: TileBatch, visible: Tensor | None, q: Tensor, k: Tensor,
        v: Tensor, use_flash: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return (out, lse) of a batch of tiles."""
        rows = gather(q[group.heads], tiles.rows, tiles.height)
        keys, values = (gather(x[group.kv_heads], tiles.cols, tiles.width) for x in (k, v))
        if use_flash:
            bias = flash.hide(visible, rows.dtype)
            return flash.forward(rows, keys, values, bias, self.scale, tiles.kind == "causal")
        scores = self._scores(step, group, tiles, visible)
        return scores.forward(rows, keys, values, self.captures)

    def _add_largest(self, step: Step, q: Tensor, k: Tensor, max_scores: Tensor, add: bool) -> None:
        """Write max_scores, or with ``add`` their maximum over this and earlier steps. (It is a separate
        function, so that other results do not depend on whether max_scores is requested.)"""
        top = q.new_full(q.shape[:2], -torch.inf)
        if add:
            top = step.q.pack(max_scores[..., None], q.dtype)[..., 0]
        for group, tiles, visible in self._tiles(step, q, False):
            rows = gather(q[group.heads], tiles.rows, tiles.height)
            keys = gather(k[group.kv_heads], tiles.cols, tiles.width)
            scores = self._scores(step, group, tiles, visible)
            into = top[group.heads, :, None]
            before = gather(into, tiles.rows, tiles.height)
            scatter(
                into, tiles.rows, torch.maximum(before, scores.largest(rows, keys, self.captures)[..., None])
            )
        step.q.unpack(top[..., None], max_scores[..., None])

    def _backward_tiles(
        self, step: Step, group: HeadGroup, tiles: TileBatch, visible: Tensor | None, packed: BackwardStep,
        out: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return (dq, dk, dv) of a batch of tiles; the gradients of captures go to their buffers. packed: the
        inputs as packed rows. out: for flash attention."""
        rows, douts = (gather(x[group.heads], tiles.rows, tiles.height) for x in (packed.q, packed.dout))
        lses, deltas = (
            gather(x[group.heads, :, None], tiles.rows, tiles.height)[..., 0]
            for x in (packed.lse, packed.delta)
        )
        keys, values = (gather(x[group.kv_heads], tiles.cols, tiles.width) for x in (packed.k, packed.v))
        if out is not None:
            bias = flash.hide(visible, rows.dtype)
            outs = gather(out[group.heads], tiles.rows, tiles.height)
            is_causal = tiles.kind == "causal"
            return flash.backward(rows, keys, values, outs, lses, douts, bias, self.scale, is_causal)
        scores = self._scores(step, group, tiles, visible)
        *grads, captured = scores.backward(rows, keys, values, douts, lses, deltas, self.captures)
        for buffer, grad in zip(self.grads, captured):
            buffer += grad
        return grads[0], grads[1], grads[2]


@dataclass
class _Sums:
    """Merged results of tiles for packed rows: sums of exp(score - m) * value and of exp(score - m).

    acc, l: these sums, [H, T, E] and [H, T]
    m:      [H, T], about the log of the sum's max part, -inf for rows without a key
    """

    acc: Tensor
    m: Tensor
    l: Tensor

    @classmethod
    def of(cls, q: Tensor, width: int) -> _Sums:
        rows = q.shape[:2]
        return cls(q.new_zeros(*rows, width), q.new_full(rows, -torch.inf), q.new_zeros(rows))

    def load(self, step: Step, acc: Tensor, m: Tensor, l: Tensor) -> None:
        """Load a state."""
        self.acc.copy_(step.q.pack(acc, self.l.dtype, self.acc.shape[2]))
        m, l = (step.q.pack(x[..., None], self.l.dtype)[..., 0] for x in (m, l))
        self.m, self.l = m * LN2, l.clone()

    def store(self, step: Step, acc: Tensor, m: Tensor, l: Tensor) -> None:
        """Store the state."""
        step.q.unpack(self.acc[..., : acc.shape[3]], acc)
        for packed, into in ((self.m / LN2, m), (self.l, l)):
            step.q.unpack(packed[..., None], into[..., None])

    def finish(self, step: Step, out: Tensor, lse: Tensor) -> None:
        """Write out and lse."""
        self.acc.div_(torch.where(self.l == 0, 1, self.l)[..., None])
        step.q.unpack(self.acc[..., : out.shape[3]], out)
        step.q.unpack((self.m + self.l.log())[..., None], lse[..., None])

    def add(self, group: HeadGroup, tiles: TileBatch, out: Tensor, lse: Tensor) -> None:
        """Merge the results of a batch of tiles."""
        totals = self.acc[group.heads], self.m[group.heads, :, None], self.l[group.heads, :, None]
        lse = lse[..., None]
        acc, m, l = (gather(x, tiles.rows, tiles.height) for x in totals)
        if bool((m == -torch.inf).all()):  # the first keys of these rows
            for total, part in zip(totals, (out, lse, (lse != -torch.inf).to(lse.dtype))):
                scatter(total, tiles.rows, part)
            return
        if bool((lse > m + MAX_EXPONENT).any()):
            raised = torch.maximum(m, lse)
            factor = torch.where(m == -torch.inf, 0, torch.exp(m - raised))
            acc, m, l = acc.mul_(factor), raised, l * factor
        weight = torch.where(lse == -torch.inf, 0, torch.exp(lse - m))
        acc, l = acc.addcmul_(out, weight), l + weight
        if even_step(tiles.rows) is None:  # in the other case ``acc`` is a view
            scatter(totals[0], tiles.rows, acc)
        scatter(totals[1], tiles.rows, m)
        scatter(totals[2], tiles.rows, l)


def _clear(x: Tensor) -> None:
    x.zero_()
