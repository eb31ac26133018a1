"""Packed documents as lists of lengths, their masks by loops, and attention to one document at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

from tests.kernels.support.harness import Answer
from tritoncp import varlen_attention
from tritoncp.reference.dense import dense_attention

F64, NAN = torch.float64, math.nan
AUX = AuxRequest(lse=True, max_scores=True)


class Docs(NamedTuple):
    """Tokens of each document, and rows of padding behind it, for queries and keys."""

    q: Sequence[int]
    kv: Sequence[int]
    q_pad: Sequence[int]
    kv_pad: Sequence[int]

    @property
    def arguments(self) -> dict[str, Tensor]:
        """The cu_seqlens of varlen_attention."""
        rows, kv_rows = (
            [a + b for a, b in zip(*side)] for side in ((self.q, self.q_pad), (self.kv, self.kv_pad))
        )
        names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
        return dict(zip(names, map(cumulative, (self.q, self.kv, rows, kv_rows))))

    def slices(self) -> list[tuple[slice, slice]]:
        """List the rows of each document's tokens, for queries and keys."""
        sides = (self.arguments[f"cu_seqlens_{side}_padded"].tolist() for side in ("q", "kv"))
        return [(slice(i, i + n), slice(j, j + m)) for i, j, n, m in zip(*sides, self.q, self.kv)]

    @property
    def lengths(self) -> tuple[int, int]:
        return sum(self.q) + sum(self.q_pad), sum(self.kv) + sum(self.kv_pad)

    def is_token(self) -> tuple[Tensor, Tensor]:
        """Return which rows of queries and of keys are tokens, not padding."""
        flags = tuple(torch.zeros(length, dtype=torch.bool) for length in self.lengths)
        for slices in self.slices():
            for side, rows in zip(flags, slices):
                side[rows] = True
        return flags[0], flags[1]


def cumulative(lengths: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


def level(queries: int, keys: int, causal: bool, window: tuple[int, int]) -> Tensor:
    """One document, pair by pair: bool [queries, keys], the last of each level with the other."""
    visible = torch.zeros(queries, keys, dtype=torch.bool)
    for i, j in itertools.product(range(queries), range(keys)):
        ahead = j - (i + keys - queries)
        visible[i, j] = (
            (not causal or ahead <= 0)
            and (window[0] < 0 or -ahead <= window[0])
            and (window[1] < 0 or ahead <= window[1])
        )
    return visible


def whole(docs: Docs, causal: bool, window: tuple[int, int]) -> Tensor:
    """The mask of the buffer, document by document."""
    visible = torch.zeros(docs.lengths, dtype=torch.bool)
    for (rows, cols), queries, keys in zip(docs.slices(), docs.q, docs.kv):
        visible[rows, cols] = level(queries, keys, causal, window)
    return visible


LAYOUTS = {
    "packed": Docs([9, 1, 30, 13], [9, 1, 30, 13], [0] * 4, [0] * 4),
    "padded": Docs([9, 0, 30, 13], [9, 0, 30, 13], [7, 2, 2, 3], [7, 2, 2, 3]),
    "cross": Docs([9, 5, 0, 13, 4], [17, 3, 6, 0, 21], [3, 0, 1, 3, 0], [0, 5, 2, 4, 3]),
    "more queries": Docs([40, 7], [11, 7], [0, 9], [5, 0]),
}


class Packed(NamedTuple):
    """Whole buffers [t, h, d], NaN wherever padding lies; gradients of out and lse to start from."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor


def buffers(docs: Docs, heads: int = 4, kv_heads: int = 2, dim: int = 8, v_dim: int = 6, dtype=F64) -> Packed:
    """Make random buffers."""
    queries, keys = docs.is_token()
    shapes = ((heads, dim), (kv_heads, dim), (kv_heads, v_dim), (heads, v_dim), (heads,))
    tensors = []
    for shape, tokens in zip(shapes, (queries, keys, keys, queries, queries)):
        x = torch.randn(len(tokens), *shape, dtype=dtype)
        tensors.append(x.masked_fill(~tokens.view(-1, *[1] * len(shape)), NAN))
    return Packed(*tensors)


def one_by_one(x: Packed, docs: Docs, causal: bool, window: tuple[int, int]) -> Answer:
    """Each document by itself, in float64; zeros (-inf) wherever no document is."""
    empty = [torch.zeros_like(t, dtype=F64) for t in (x.dout, x.dlse, x.dlse, x.q, x.k, x.v)]
    want = Answer(*empty)
    want.lse.fill_(-math.inf)
    want.max_scores.fill_(-math.inf)
    for (rows, cols), queries, keys in zip(docs.slices(), docs.q, docs.kv):
        if not queries or not keys:
            continue
        leaves = [t[s].double().detach().requires_grad_() for t, s in zip(x[:3], (rows, cols, cols))]
        visible = level(queries, keys, causal, window)
        results = dense_attention(*(rearrange(t, "t h d -> 1 h t d") for t in leaves), visible[None, None])
        out, lse, top = (rearrange(t, "1 h t ... -> t h ...") for t in results)
        for buffer, part in zip(want[:3], (out, lse, top)):
            buffer[rows] = part.detach()
        loss = (out * x.dout[rows]).sum() + (lse * x.dlse[rows])[lse != -math.inf].sum()
        for buffer, s, grad in zip(want[3:], (rows, cols, cols), torch.autograd.grad(loss, leaves)):
            buffer[s] = grad
    return want


def agree(got: Answer, want: Answer, docs: Docs, atol: float, rtol: float = 0) -> None:
    """Compare two answers, and padding of the first with zeros (-inf)."""
    queries, keys = docs.is_token()
    for name, x, y in zip(Answer._fields, got, want):
        torch.testing.assert_close(x.double(), y, atol=atol, rtol=rtol, msg=lambda m, n=name: f"{n}: {m}")
        padding = x[~(keys if name in ("dk", "dv") else queries)]
        empty = -math.inf if name in ("lse", "max_scores") else 0
        assert bool((padding == empty).all()), f"{name} in padding"


def whole_call(x: Packed, *args: Any, **options: Any) -> Answer:
    """The public call on one rank that holds everything."""
    leaves = [t.clone().requires_grad_() for t in x[:3]]
    out, aux = varlen_attention(*leaves, *args, return_aux=AUX, **options)
    grads = torch.autograd.grad([out, aux.lse], leaves, [x.dout, x.dlse.to(aux.lse.dtype)])
    return Answer(out.detach(), aux.lse.detach(), aux.max_scores, *grads)
