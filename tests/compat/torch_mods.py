"""Score_mods and mask_mods of the forms that torch's flex attention is tested with, by name.

A form is a function of its captured tensors, so that one call can bind them in the dtype of the case and
another in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Mod = Callable[..., Tensor]


class Dims(NamedTuple):
    """Sizes of a call: q [batch, heads, q, dim], k [kv_batch, kv_heads, kv, dim], v [..., v_dim]."""

    batch: int = 1
    heads: int = 2
    q: int = 64
    dim: int = 16
    kv: int | None = None
    kv_heads: int | None = None
    kv_batch: int | None = None
    v_dim: int | None = None

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        rows = self.kv_batch or self.batch, self.kv_heads or self.heads, self.keys
        return (self.batch, self.heads, self.q, self.dim), (*rows, self.dim), (*rows, self.v_dim or self.dim)

    @property
    def keys(self) -> int:
        return self.kv or self.q


class Form(NamedTuple):
    """``bind``: captured tensors -> score_mod; ``captured``: sizes -> these tensors, random in float64."""

    bind: Callable[..., Mod]
    captured: Callable[[Dims], list[Tensor]] = lambda dims: []


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def plain(mod: Mod) -> Form:
    """A form that captures no tensor."""
    return Form(lambda: mod)


def causal_score(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return torch.where(q >= kv, score, -math.inf)


def relative_score(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score + (q - kv)


def alibi(heads: int) -> Mod:
    def add_slope(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score + (kv - q) * torch.exp2(-((h + 1) * 8.0 / heads))

    return add_slope


def composed(first: Mod, second: Mod) -> Mod:
    return lambda s, b, h, q, kv: second(first(s, b, h, q, kv), b, h, q, kv)


def in_documents(mod: Mod, start: Tensor, document: Tensor) -> Mod:
    """Positions counted from the start of each document."""
    return lambda s, b, h, q, kv: mod(s, b, h, q - start[document[q]], kv - start[document[kv]])


def below_length(mod: Mod, lengths: Tensor) -> Mod:
    return lambda s, b, h, q, kv: torch.where(s <= lengths[b], mod(s, b, h, q, kv), -math.inf)


def either(flag: bool, amount: Tensor) -> Mod:
    """A score_mod that branches on a Python value of its closure."""

    def add_or_multiply(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        if flag:
            return score + amount
        return score * amount

    return add_or_multiply


def near_in_grid(width: int, distance: int, divide: Mod) -> Mod:
    def neighbours(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        rows = (divide(q, width) - divide(kv, width)).abs() <= distance
        columns = (q % width - kv % width).abs() <= distance
        return torch.where(rows | columns, score, -math.inf)

    return neighbours


def gated_bias(cut: int, row: Tensor, table: Tensor, gain: Tensor, left: Tensor, right: Tensor) -> Mod:
    """A learned bias behind an index table, gated by head and by both positions, beyond the first rows."""

    def add_bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        inside = (q >= cut) & (kv >= cut)
        gate = torch.sigmoid(gain[h]) * (left[b, h, q] + right[b, h, kv])
        return score + inside.to(score.dtype) * gate * table[row[q, kv], h]

    return add_bias


def documents(dims: Dims) -> list[Tensor]:
    """int32 (first position of each document [3], document of each position [length])."""
    length = max(dims.q, dims.keys)
    start = torch.tensor([0, length // 2, length // 2 + length // 4], dtype=torch.int32)
    return [start, torch.searchsorted(start, torch.arange(length), right=True).to(torch.int32) - 1]


BUILTIN: dict[str, Form] = {
    "identity": plain(lambda s, b, h, q, kv: s),
    "times two": plain(lambda s, b, h, q, kv: s * 2),
    "squared": plain(lambda s, b, h, q, kv: s * s),
    "causal": plain(causal_score),
    "inverse causal": plain(lambda s, b, h, q, kv: torch.where(q <= kv, s, -math.inf)),
    "relative": plain(relative_score),
    "relative causal": plain(composed(relative_score, causal_score)),
    "alibi": plain(alibi(8)),
}

CAPTURING: dict[str, Form] = {
    "head factor": Form(lambda t: lambda s, b, h, q, kv: s * t[h], lambda d: [normal(d.heads)]),
    "document causal": Form(
        lambda start, doc: lambda s, b, h, q, kv: torch.where((q >= kv) & (doc[q] == doc[kv]), s, -math.inf),
        documents,
    ),
    "nested causal": Form(lambda start, doc: in_documents(causal_score, start, doc), documents),
    "index twice": Form(lambda t: lambda s, b, h, q, kv: s + t[b][q], lambda d: [normal(d.batch, d.q)]),
    "index constant, pair, one": Form(
        lambda t: lambda s, b, h, q, kv: s + t[0][b, h][q], lambda d: [normal(4, d.batch, d.heads, d.q)]
    ),
    "index by a captured scalar": Form(
        lambda t, at: lambda s, b, h, q, kv: s + t[b][h][at, q],
        lambda d: [normal(d.batch, d.heads, 4, d.q), torch.tensor(2)],
    ),
    "even keys": plain(lambda s, b, h, q, kv: torch.where(kv % 2 == 0, s, -math.inf)),
    "composed": plain(composed(relative_score, lambda s, b, h, q, kv: torch.where(q <= kv, s, -math.inf))),
    "token, batch and head bias": Form(
        lambda t, u, w: lambda s, b, h, q, kv: s + t[q] + u[b] + w[h],
        lambda d: [normal(d.q), normal(d.batch), normal(d.heads)],
    ),
    "halves by bool": Form(
        lambda t: lambda s, b, h, q, kv: torch.where(t[q] == t[kv], s, -math.inf),
        lambda d: [torch.arange(max(d.q, d.keys)) >= d.q // 2],
    ),
    "bias[q, kv]": Form(lambda t: lambda s, b, h, q, kv: s + t[q, kv], lambda d: [normal(d.q, d.keys)]),
    "bias[b, q, kv]": Form(
        lambda t: lambda s, b, h, q, kv: s + t[b, q, kv], lambda d: [normal(d.batch, d.q, d.keys)]
    ),
    "bias[b, h, q, kv]": Form(
        lambda t: lambda s, b, h, q, kv: s + t[b, h, q, kv], lambda d: [normal(d.batch, d.heads, d.q, d.keys)]
    ),
    "bias of a view": Form(
        lambda t: lambda s, b, h, q, kv: s + t.permute(0, 3, 1, 2)[b, h, q, kv],
        lambda d: [normal(d.batch, d.q, d.keys, d.heads)],
    ),
    "bias[b, h, q, kv // 8]": Form(
        lambda t: lambda s, b, h, q, kv: s + t[b, h, q, kv // 8],
        lambda d: [normal(d.batch, d.heads, d.q, -(-d.keys // 8))],
    ),
    "bias[q - kv]": Form(
        lambda t: lambda s, b, h, q, kv: s + t[(q - kv) + len(t) // 2],
        lambda d: [normal(2 * max(d.q, d.keys))],
    ),
    "bidirectional start": Form(
        lambda t: lambda s, b, h, q, kv: torch.where((q >= kv) | ((q <= t[b]) & (kv <= t[b])), s, -math.inf),
        lambda d: [torch.randint(0, d.q, (d.batch,), dtype=torch.int32)],
    ),
    "grid neighbours": plain(near_in_grid(8, 3, lambda x, width: x // width)),
    "grid neighbours, true division": plain(near_in_grid(8, 3, lambda x, width: x / width)),
    "silu": plain(lambda s, b, h, q, kv: torch.nn.functional.silu(s)),
    "floor division by keys": plain(lambda s, b, h, q, kv: s - q // (1 + kv)),
    "scores below a length": Form(
        lambda t: below_length(causal_score, t), lambda d: [torch.arange(d.batch, dtype=torch.int32) + 1]
    ),
    "int scalar": Form(
        lambda t: lambda s, b, h, q, kv: s + t, lambda d: [torch.tensor(1, dtype=torch.int32)]
    ),
    "branch taken": Form(lambda t: either(True, t), lambda d: [torch.tensor(2, dtype=torch.int32)]),
    "branch not taken": Form(lambda t: either(False, t), lambda d: [torch.tensor(2, dtype=torch.int32)]),
    "bool bias": Form(
        lambda t: lambda s, b, h, q, kv: s + t[b, h.new_zeros(h.shape), q, kv],
        lambda d: [torch.ones(d.batch, 1, d.q, d.keys, dtype=torch.bool).tril()],
    ),
    "query factor": Form(lambda t: lambda s, b, h, q, kv: s * t[q], lambda d: [normal(d.q)]),
    "query and key bias": Form(
        lambda t, u: lambda s, b, h, q, kv: s + t[q] + u[kv], lambda d: [normal(d.q), normal(d.keys)]
    ),
    "log of an element": Form(
        lambda t: lambda s, b, h, q, kv: s + torch.log(t[0]),
        lambda d: [torch.full((1,), 3.0, dtype=torch.float64)],
    ),
    "reciprocal": plain(lambda s, b, h, q, kv: 1 / s),
    "log where positive": plain(lambda s, b, h, q, kv: torch.where(s > 0, torch.log(s), s)),
    "rows of NaN beyond the batch": Form(
        lambda t: lambda s, b, h, q, kv: s + t[b, h, q, kv],
        lambda d: [
            torch.cat([normal(d.batch, d.heads, d.q, d.keys), normal(1, d.heads, d.q, d.keys) / 0 * 0])
        ],
    ),
    "trig": plain(lambda s, b, h, q, kv: torch.sin(torch.cos(s)) + torch.tan(b)),
    "tan": plain(lambda s, b, h, q, kv: torch.tan(s / 4)),
    "sum of a captured row": Form(
        lambda t: lambda s, b, h, q, kv: s + t[b].sum(-1), lambda d: [normal(d.batch, 8)]
    ),
    "distance of captured rows": Form(
        lambda t, scale: (
            lambda s, b, h, q, kv: torch.exp(-(t[q] - t[kv]).pow(2).sum(-1).add(1e-6).sqrt() / scale[h]) * s
        ),
        lambda d: [normal(d.q, 3), torch.logspace(0.001, 0.1, d.heads, dtype=torch.float64)],
    ),
    "dot product of captured rows": Form(  # MLA's positions
        lambda t, u: lambda s, b, h, q, kv: s + 0.3 * torch.dot(t[b, h, q], u[b, h // 2, kv]),
        lambda d: [normal(d.batch, d.heads, d.q, 8), normal(d.batch, 1, d.keys, 8)],
    ),
    "gated table": Form(
        lambda row, *rest: gated_bias(2, row, *rest),
        lambda d: [
            torch.randint(0, 31, (d.q, d.keys)),
            normal(31, d.heads),
            normal(d.heads),
            normal(d.batch, d.heads, d.q),
            normal(d.batch, d.heads, d.keys),
        ],
    ),
}

LEARNED: dict[str, Form] = {
    "bias[|q - kv|]": Form(
        lambda t: lambda s, b, h, q, kv: s + t[torch.abs(q - kv)], lambda d: [normal(2 * max(d.q, d.keys))]
    ),
    "bias[q + kv]": Form(lambda t: lambda s, b, h, q, kv: s + t[q + kv], lambda d: [normal(d.q + d.keys)]),
    "bias[q, kv]": CAPTURING["bias[q, kv]"],
    "bias[q][kv]": Form(lambda t: lambda s, b, h, q, kv: s + t[q][kv], lambda d: [normal(d.q, d.keys)]),
    "bias[kv, q]": Form(lambda t: lambda s, b, h, q, kv: s + t[kv, q], lambda d: [normal(d.keys, d.q)]),
    "bias[h]": Form(lambda t: lambda s, b, h, q, kv: s + t[h], lambda d: [normal(d.heads)]),
    "bias[h, q, kv]": Form(
        lambda t: lambda s, b, h, q, kv: s + t[h, q, kv], lambda d: [normal(d.heads, d.q, d.keys)]
    ),
    "bias[h, kv, q]": Form(
        lambda t: lambda s, b, h, q, kv: s + t[h, kv, q], lambda d: [normal(d.heads, d.keys, d.q)]
    ),
    "bias[b, h, q, kv]": CAPTURING["bias[b, h, q, kv]"],
    "query factor": CAPTURING["query factor"],
    "bias of a clamped distance": Form(
        lambda t: lambda s, b, h, q, kv: s + t[torch.clamp(q - kv + 8, 0, 16)], lambda d: [normal(17)]
    ),
    "bias[kv]": Form(lambda t: lambda s, b, h, q, kv: s + t[kv], lambda d: [normal(d.keys)]),
    "bias[b, h, captured, q]": Form(
        lambda t, at: lambda s, b, h, q, kv: s + t[b, h, at, q],
        lambda d: [normal(d.batch, d.heads, 4, d.q), torch.tensor(0)],
    ),
    "bias[permutation[q]]": Form(
        lambda t, at: lambda s, b, h, q, kv: s + t[at[q]],
        lambda d: [normal(d.q), torch.randint(0, d.q, (d.q,))],
    ),
    "one bias read twice": Form(
        lambda t: lambda s, b, h, q, kv: s + t[q] + t[kv], lambda d: [normal(max(d.q, d.keys))]
    ),
    **{
        name: CAPTURING[name]
        for name in (
            "query and key bias",
            "sum of a captured row",
            "distance of captured rows",
            "dot product of captured rows",
        )
    },
    "head gate": Form(
        lambda t: lambda s, b, h, q, kv: s * torch.sigmoid(t[h].to(torch.float32)),
        lambda d: [normal(d.heads)],
    ),
}

SCORES = {**BUILTIN, **CAPTURING, **LEARNED}


def by_batch(dims: Dims) -> Mod:
    bits = (
        torch.rand(dims.batch, dims.heads, dims.q, dims.keys, generator=torch.Generator().manual_seed(3))
        < 0.4
    )
    return lambda b, h, q, kv: bits[b, h, q, kv]


def two_documents(dims: Dims) -> Mod:
    number = torch.zeros(dims.batch, max(dims.q, dims.keys), dtype=torch.int32)
    number[:, number.shape[1] // 2 :] = 1
    return lambda b, h, q, kv: number[b, q] == number[b, kv]


def clamped_documents(dims: Dims) -> Mod:
    number = documents(dims)[1]
    last = len(number) - 1
    return lambda b, h, q, kv: number[q.clamp(0, last)] == number[kv.clamp(0, last)]


def offset_by_batch(dims: Dims) -> Mod:
    offset = torch.arange(dims.batch)
    return lambda b, h, q, kv: q + offset[b] * 16 >= kv


def padding(dims: Dims) -> Mod:
    lengths = torch.linspace(dims.q // 3, dims.q, dims.batch).long()
    return lambda b, h, q, kv: (q < lengths[b]) & (kv < lengths[b])


def no_row_of(dims: Dims) -> Mod:
    hidden = torch.rand(dims.batch, dims.q, generator=torch.Generator().manual_seed(4)) < 0.5
    return lambda b, h, q, kv: ~hidden[b, q]


MASKS: dict[str, Callable[[Dims], Mod]] = {
    "causal": lambda d: lambda b, h, q, kv: q >= kv,
    "noop": lambda d: lambda b, h, q, kv: b.new_ones((), dtype=torch.bool),
    "inverse causal": lambda d: lambda b, h, q, kv: q <= kv,
    "causal and window": lambda d: lambda b, h, q, kv: (q >= kv) & (q - kv <= d.q // 4),
    "causal beyond a window": lambda d: lambda b, h, q, kv: (q >= kv) & (q - kv > d.q // 4),
    "nothing": lambda d: lambda b, h, q, kv: (q >= kv) & (q < kv),
    "first half of the queries": lambda d: lambda b, h, q, kv: q < d.q // 2,
    "two documents": two_documents,
    "clamped documents": clamped_documents,
    "blocks of 16": lambda d: lambda b, h, q, kv: q // 16 == kv // 16,
    "offset by batch": offset_by_batch,
    "even batch rows": lambda d: lambda b, h, q, kv: (q >= kv) & (b % 2 == 0),
    "lengths": padding,
    "hidden rows": no_row_of,
    "random bits": by_batch,
    "start and end": lambda d: lambda b, h, q, kv: (kv < d.keys // 8) | (kv >= d.keys // 2),
    "head of its own": lambda d: lambda b, h, q, kv: torch.where(h % 2 == 0, q >= kv, q <= kv),
}
