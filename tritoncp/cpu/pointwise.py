"""Attention of tiles by batched products and pointwise operations, for calls with a score_mod."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tritoncp.mods.tracing import vmapped

ScoreMod = Callable[..., Tensor]
PIECE = 1 << 18  # max scores of pointwise operations of a forward pass: small results take memory in use


def _with_hidden_pairs(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method of :class:`Scores`. The score_mod may be undefined for hidden pairs. What an
    elementwise one returns for them is not used; if it raises, for example at a gather, it gets visible pairs
    in their place, as one under vmap does."""

    @functools.wraps(compute)
    def run(self: Scores, *args: Any) -> Any:
        hides = self.score is not None and self.visible is not None
        if not hides or self.elementwise:
            try:
                return compute(self, *args)
            except (IndexError, RuntimeError):
                if not hides or self.substitutes:
                    raise
        return compute(replace(self, substitutes=True), *args)

    return run


@dataclass(frozen=True)
class Scores:
    """The scores of a batch of tiles.

    score:   (captures that require grad) -> the score_mod, or None
    indices: b [n, 1, 1, 1], h [1, H, 1, 1], q_idx [n, 1, height, 1], kv_idx [n, 1, 1, width]
    visible: bool [n, 1 or H, height, width], None for all pairs
    elementwise: whether the score_mod takes 4-d tensors that broadcast, as
        :func:`tritoncp.mods.translate.elementwise.elementwise_form` makes it, else 0-d ones
    substitutes: whether the score_mod gets visible pairs in place of hidden ones
    """

    scale: float
    score: Callable[[Sequence[Tensor]], ScoreMod] | None
    indices: tuple[Tensor, Tensor, Tensor, Tensor]
    visible: Tensor | None
    elementwise: bool = False
    substitutes: bool = False

    @_with_hidden_pairs
    def forward(self, q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return (out [n, H, height, E], lse [n, H, height]) of tiles."""
        p = self._raw(q, k)
        total, m = p.new_empty(p.shape[:3]), p.new_empty(p.shape[:3])
        for at, piece in self._pieces():
            raw = p[:, :, at]
            scores = piece._modified(raw, captures)
            top = scores.amax(-1)
            m[:, :, at] = top = torch.where(top == -torch.inf, 0, top)
            # Not sub_: a score_mod may return a view of a capture.
            total[:, :, at] = _probabilities(torch.sub(scores, top[..., None], out=raw)).sum(-1)
        filled = total != 0  # also true for NaN
        total = torch.where(filled, total, 1)
        lse = torch.where(filled, m + total.log(), -torch.inf)
        return _products(p, v) / total[..., None], lse

    @_with_hidden_pairs
    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor,
        captures: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, Sequence[Tensor]]:  # fmt: skip
        """Return (dq, dk, dv, gradients of captures) of tiles. lse: finite"""
        if captures and self.visible is not None and not self.substitutes:
            # Hidden pairs could add 0 times infinity to the gradients of captures.
            return replace(self, substitutes=True).backward(q, k, v, dout, lse, delta, captures)
        raw, captured = self._raw(q, k), ()
        if self.score is None:
            scores, pull = self._modified(raw, ()), None
        else:
            # Inside an op, autograd is off, but functorch's transforms work.
            scores, pull, *_ = torch.func.vjp(lambda raw, *caps: self._modified(raw, caps), raw, *captures)
        p = _probabilities(scores - lse[..., None])
        ds = _products(dout, v, transpose=True).sub_(delta[..., None]).mul_(p)
        if pull is not None:
            ds, *captured = pull(ds)
            if self.visible is not None:  # the score_mod's derivative may be infinite for hidden pairs
                ds = torch.where(self.visible, ds, 0)
        heads = k.shape[1]
        return (
            _products(ds, k) * self.scale,
            _reduced(ds, q * self.scale, heads),
            _reduced(p, dout, heads),
            captured,
        )

    @_with_hidden_pairs
    def probabilities(self, q: Tensor, k: Tensor, lse: Tensor, captures: Sequence[Tensor]) -> Tensor:
        """Return the probabilities of the pairs of tiles: [n, H, height, width]. lse: [n, H, height],
        finite"""
        return _probabilities(torch.sub(self._modified(self._raw(q, k), captures), lse[..., None]))

    @_with_hidden_pairs
    def largest(self, q: Tensor, k: Tensor, captures: Sequence[Tensor]) -> Tensor:
        """Return the largest score of each row of tiles: [n, H, height]."""
        return self._modified(self._raw(q, k), captures).amax(-1)

    def _raw(self, q: Tensor, k: Tensor) -> Tensor:
        return _products(q * self.scale, k, transpose=True)

    def _pieces(self) -> Iterator[tuple[slice, Scores]]:
        """Yield slices of rows, and the scores of these rows: all rows under vmap, whose time does not depend
        on their number, and if rows may need a visible pair of others."""
        (b, h, rows, keys), visible = self.indices, self.visible
        count = max(1, PIECE // (len(b) * h.shape[1] * keys.shape[3]))
        if not self.elementwise or self.substitutes or count >= rows.shape[2]:
            yield slice(None), self
            return
        for start in range(0, rows.shape[2], count):
            at = slice(start, start + count)
            part = None if visible is None else visible[:, :, at]
            yield at, replace(self, indices=(b, h, rows[:, :, at], keys), visible=part)

    def _modified(self, raw: Tensor, captures: Sequence[Tensor]) -> Tensor:
        """Apply the score_mod; scores of hidden pairs become -inf."""
        scores = raw
        if self.score is not None:
            pairs = self._with_visible_pairs(raw) if self.substitutes else (raw, *self.indices)
            scores = _scores_of(self.score(captures), self.elementwise, *pairs)
        return scores if self.visible is None else torch.where(self.visible, scores, -torch.inf)

    def _with_visible_pairs(self, raw: Tensor) -> tuple[Tensor, ...]:
        """Return scores, b, h, q_idx and kv_idx of all pairs, 4-d, with hidden pairs replaced by the tile's
        first visible pair for this head, or else for another head."""
        assert self.visible is not None
        b, heads, rows, keys = self.indices
        first = self.visible.flatten(2).int().argmax(-1)  # [n, 1 or H]
        scores = raw.detach().flatten(2)
        if first.shape[1] > 1:
            sees = self.visible.flatten(2).any(-1)
            other = torch.where(sees, torch.arange(heads.numel()), sees.int().argmax(1, keepdim=True))
            first, heads = first.gather(1, other), heads.flatten()[other][..., None, None]
            scores = scores.gather(1, other[..., None].expand_as(scores))
        width = self.visible.shape[3]
        pairs = []
        for index, place in ((rows, first // width), (keys, first % width)):
            substitute = index.flatten(1).gather(1, place)[..., None, None]  # [n, 1 or H, 1, 1]
            pairs.append(torch.where(self.visible, index, substitute))
        scores = scores.gather(2, first.expand(-1, raw.shape[1])[..., None])
        return torch.where(self.visible, raw, scores[..., None]), b, heads, *pairs


def _scores_of(mod: ScoreMod, elementwise: bool, raw: Tensor, *indices: Tensor) -> Tensor:
    """Return the scores of a score_mod for 4-d tensors that broadcast, in the shape and dtype of raw."""
    if elementwise:
        return mod(raw, *indices).to(raw.dtype).expand(raw.shape)
    levels = [(0, *(None if x.shape[dim] == 1 else 0 for x in indices)) for dim in reversed(range(raw.ndim))]
    used = [x.squeeze([dim for dim, size in enumerate(x.shape) if size == 1]) for x in indices]
    return vmapped(mod, *levels)(raw, *used).to(raw.dtype)


def _probabilities(x: Tensor) -> Tensor:
    """Compute exp(x) in place, with x <= 0 up to rounding. Tiny results, whose products could be subnormal,
    are set to 0: exp and products of subnormal numbers take up to 80 times as long, exp of -inf 8 times."""
    limits = torch.finfo(x.dtype)
    least = limits.tiny / limits.eps
    return torch.threshold_(x.clamp_(math.log(least), 0).exp_(), 2 * least, 0)


def _products(a: Tensor, b: Tensor, transpose: bool = False) -> Tensor:
    """Multiply a [n, H, rows, x] by b [n, Hkv, x, y], or by transposed b [n, Hkv, y, x]: grouped-query
    products."""
    n, heads, rows, x = a.shape
    kv_heads = b.shape[1]
    joined = a.reshape(n * kv_heads, heads // kv_heads * rows, x)
    b = b.reshape(n * kv_heads, *b.shape[2:])  # before the transpose, to keep one layout
    product = torch.bmm(joined, b.mT if transpose else b)
    return product.view(n, heads, rows, product.shape[2])


def _reduced(scores: Tensor, x: Tensor, kv_heads: int) -> Tensor:
    """Multiply transposed scores [n, H, rows, keys] by x [n, H, rows, D], and sum over the query heads of
    each KV head: [n, Hkv, keys, D]."""
    n, heads, rows, keys = scores.shape
    group = heads // kv_heads * rows
    left = scores.reshape(n * kv_heads, group, keys)
    return torch.bmm(left.mT, x.reshape(n * kv_heads, group, x.shape[3])).unflatten(0, (n, kv_heads))
