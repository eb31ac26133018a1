"""Masks and score_mods for tests of every path, each with its visible pairs in plain index arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tritoncp
from tests.device import generator

Pairs = Callable[..., Tensor]  # (b, h, q, kv) -> which pairs are visible
ScoreMod = Callable[..., Tensor]  # (score, b, h, q, kv) -> score
BALANCERS = (None, "contiguous", "head_tail", "ptrr", "per_document", "locality")


class Sizes(NamedTuple):
    """batch: batch rows; heads: query heads; q, kv: lengths of the sequences"""

    batch: int
    heads: int
    q: int
    kv: int

    @property
    def longest(self) -> int:
        return max(self.q, self.kv)


class Rule(NamedTuple):
    """One mask.

    mod:             given to tritoncp, a closed form where there is one
    visible:         its pairs, written without tritoncp
    by_row, by_head: whether batch rows and heads differ, so that each needs separate lists
    """

    mod: Any
    visible: Pairs
    by_row: bool = False
    by_head: bool = False


def python_rule(mod: Pairs, by_row: bool = False, by_head: bool = False) -> Rule:
    """Return the rule of a Python function, which is the function itself."""
    return Rule(mod, mod, by_row, by_head)


def window(sizes: Sizes, number: int) -> Rule:
    left, right = number % (sizes.longest + 1) - 1, number * 5 % 21 - 1  # -1: no limit
    before, after = (n if n >= 0 else 1 << 20 for n in (left, right))
    visible = lambda b, h, q, kv: (q - kv <= before) & (kv - q <= after)  # noqa: E731
    return Rule(tritoncp.sliding_window(left, right), visible)


def prefix(sizes: Sizes, number: int) -> Rule:
    length = number % (sizes.longest + 1)
    return Rule(tritoncp.prefix_lm(length), lambda b, h, q, kv: (kv <= q) | (kv < length))


def document_ids(sizes: Sizes, number: int) -> Tensor:
    """Number the document of each token, up to five in each batch row: [batch, longest]."""
    cuts = torch.randint(0, sizes.longest + 1, (sizes.batch, number % 5), generator=generator(number))
    return (torch.arange(sizes.longest)[:, None] >= cuts[:, None]).sum(-1)


def documents(sizes: Sizes, number: int) -> Rule:
    ids = document_ids(sizes, number)[0]
    mod = tritoncp.document(ids=ids)
    if sizes.q == sizes.kv and number % 2:
        mod = tritoncp.document(lengths=ids.bincount(minlength=5).tolist())  # some of length 0
    return Rule(mod, lambda b, h, q, kv: ids[q] == ids[kv])


def causal_documents_of_rows(sizes: Sizes, number: int) -> Rule:
    """Causal documents, different in each batch row."""
    ids = document_ids(sizes, number | 4)
    mod = tritoncp.and_masks(tritoncp.causal(), tritoncp.document(ids=ids))
    return Rule(mod, lambda b, h, q, kv: (ids[b, q] == ids[b, kv]) & (q >= kv), by_row=True)


def trees(sizes: Sizes, number: int) -> Rule:
    """A forest for each batch row, of up to 11 segments, some of length 0; two in three have a window."""
    g, n = generator(number), number % 11 + 1
    cuts = torch.randint(0, sizes.longest + 1, (sizes.batch, n - 1), generator=g).sort(1).values
    ends = torch.nn.functional.pad(cuts, (0, 1), value=sizes.longest)
    lengths = ends.diff(dim=1, prepend=torch.zeros(sizes.batch, 1, dtype=torch.int64))
    left = (-1, number % 29, 2)[number % 3]
    parents, tables = [], []
    for ending in ends:
        path, above, parent = [], [], []  # ancestors of a segment, and itself
        for i in range(n):
            path = path[: int(torch.randint(0, len(path) + 1, (), generator=g))]
            parent.append(path[-1] if path else -1)
            path = [*path, i]
            above.append(path)
        table = torch.zeros(sizes.longest, sizes.longest, dtype=torch.bool)
        for q in range(sizes.longest):
            segment = torch.searchsorted(ending, torch.arange(q + 1), right=True)
            (keys,) = torch.isin(segment, torch.tensor(above[segment[q]])).nonzero(as_tuple=True)
            table[q, keys if left == -1 else keys[-left - 1 :]] = True
        parents.append(parent)
        tables.append(table)
    visible = torch.stack(tables)
    mod = tritoncp.tree(parents, lengths, window=(left, -1))
    return Rule(mod, lambda b, h, q, kv: visible[b, q, kv], by_row=True)


def bits(sizes: Sizes, number: int) -> Rule:
    table = torch.rand(sizes, generator=generator(number)) < (0.3, 0.05, 0.6)[number % 3]
    return python_rule(lambda b, h, q, kv: table[b, h, q, kv], by_row=True, by_head=True)


def repeated_bits(sizes: Sizes, number: int) -> Rule:
    table = torch.rand(3, 61, generator=generator(number)) < 0.5
    return python_rule(lambda b, h, q, kv: table[(q + b) % 3, kv % 61], by_row=True)


def hidden_rows(sizes: Sizes, number: int) -> Rule:
    """Hide all keys from single queries and from whole blocks of them."""
    start = number % 17 + 8
    return python_rule(
        lambda b, h, q, kv: (q >= kv) & (q % 5 != number % 5) & ((q < start) | (q >= start + 40))
    )


def causal_blocks(sizes: Sizes, number: int) -> Rule:
    """Noised and clean blocks, by a condition on torch.where."""
    n, half = number % 9 + 1, sizes.longest // 2
    return python_rule(
        lambda b, h, q, kv: torch.where(kv < half, q // n == kv // n, (q - half) // n >= (kv - half) // n)
    )


def sorted_noise(sizes: Sizes, number: int) -> Rule:
    """A mask_mod that sorts, which no kernel can: it is evaluated beforehand."""
    noise = torch.rand(sizes.batch, sizes.heads, sizes.q + sizes.kv, generator=generator(number))
    n = min(7, sizes.q + sizes.kv)
    ordered = noise.sort(2).values
    mod = lambda b, h, q, kv: noise.sort(2).values[b, h, (5 * q + kv) % n] > 0.3  # noqa: E731
    return Rule(mod, lambda b, h, q, kv: ordered[b, h, (5 * q + kv) % n] > 0.3, True, True)


def windows_in_documents(sizes: Sizes, number: int) -> Rule:
    """Positions are counted from the start of each document."""
    ids = document_ids(sizes, number)[0]
    start = torch.searchsorted(ids, torch.arange(5))

    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        distance = (q - start[ids[q]]) - (kv - start[ids[kv]])
        return (ids[q] == ids[kv]) & (distance >= 0) & (distance <= number % 9)

    return python_rule(mod)


def table_of_blocks(sizes: Sizes, number: int) -> Rule:
    """Chosen tiles of keys for each tile of queries; a tile's tokens beyond its length are padding."""
    tile, rows, cols = number % 9 + 4, sizes.q // 4 + 1, sizes.kv // 4 + 1
    chosen = torch.rand(sizes.batch, sizes.heads, rows, cols, generator=generator(number)) < 0.6
    lengths = torch.randint(1, tile + 1, (cols,), generator=generator(number))
    return python_rule(
        lambda b, h, q, kv: chosen[b, h, q // tile, kv // tile] & (kv % tile < lengths[kv // tile]),
        by_row=True, by_head=True,
    )  # fmt: skip


def listed_blocks(sizes: Sizes, number: int) -> Rule:
    """Numbers of tiles of keys for each tile of queries, compared one by one."""
    rows = sizes.batch, sizes.heads, sizes.q // 8 + 1, 2
    listed = torch.randint(0, sizes.kv // 8 + 1, rows, generator=generator(number))
    return python_rule(
        lambda b, h, q, kv: (listed[b, h, q // 8] == (kv // 8).unsqueeze(-1)).any(-1), True, True
    )


def neighbourhood(sizes: Sizes, number: int) -> Rule:
    """A kernel around each pixel of a canvas 8 wide, stored in tiles of 2 x 2 or in Morton order."""

    def tiled(i: Tensor) -> tuple[Tensor, Tensor]:
        tile, inside = i // 4, i % 4
        return tile % 4 * 2 + inside % 2, tile // 4 * 2 + inside // 2

    def even_bits(code: Tensor) -> Tensor:
        code = code & 0x5555
        for shift, kept in ((1, 0x3333), (2, 0x0F0F), (4, 0x00FF)):
            code = (code | (code >> shift)) & kept
        return code

    place = tiled if number % 2 else lambda i: (even_bits(i), even_bits(i >> 1))
    reach = number % 3 + 1

    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        (qx, qy), (kx, ky) = place(q), place(kv)
        return ((qx.clamp(reach, 7 - reach) - kx).abs() <= reach) & ((qy - ky).abs() <= reach)

    return python_rule(mod)


def frames(sizes: Sizes, number: int) -> Rule:
    """A prompt, then frames of a video: a query sees the same places of all frames."""
    prompt, frame = number % 5 + 1, number % 7 + 2
    return python_rule(
        lambda b, h, q, kv: (
            (kv < prompt) | (q < prompt) | (((q - prompt) % frame - (kv - prompt) % frame).abs() < 2)
        )
    )


def tiles_of_video(sizes: Sizes, number: int) -> Rule:
    """A window of 2 x 4 x 2 tiles in a video of 4 x 4 x 2, tiles of 2 tokens, then text that sees all."""

    def places(i: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return i // 16 % 4, i // 4 % 4, i // 2 % 2

    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        seen = (q < 64) & (kv < 64)
        for at, key, count, width in zip(places(q), places(kv), (4, 4, 2), (2, 4, 2)):
            left, right = width // 2, width // 2 - 1
            center = at.clamp(left, count - 1 - right)
            seen = seen & (key >= center - left) & (key <= center + right)
        return seen | (q >= 64) | (kv >= 64)

    return python_rule(mod)


MASKS: dict[str, Callable[[Sizes, int], Rule]] = {  # by the sizes of a call and a number
    "causal": lambda s, n: Rule(tritoncp.causal(), lambda b, h, q, kv: q >= kv),
    "window": window,
    "prefix": prefix,
    "documents": documents,
    "causal documents of rows": causal_documents_of_rows,
    "trees": trees,
    "everything": lambda s, n: python_rule(lambda b, h, q, kv: q >= 0),
    "dilated": lambda s, n: python_rule(lambda b, h, q, kv: (q >= kv) & ((q - kv) % (n % 4 + 2) <= n % 3)),
    "first keys and window": lambda s, n: python_rule(
        lambda b, h, q, kv: (q >= kv) & ((kv < n % 7) | (q - kv <= n % 11))
    ),
    "near": lambda s, n: python_rule(lambda b, h, q, kv: (q - kv).abs() <= n % 30),
    "pieces": lambda s, n: python_rule(lambda b, h, q, kv: q // (n % 50 + 1) == kv // (n % 50 + 1)),
    "blocks of heads": lambda s, n: python_rule(
        lambda b, h, q, kv: (q // 16 + kv // 16 + h) % 3 == n % 3, by_head=True
    ),
    "windows of heads": lambda s, n: python_rule(
        lambda b, h, q, kv: (q >= kv) & (q - kv <= (n % 50) // (h + 1)), by_head=True
    ),
    "bits": bits,
    "repeated bits": repeated_bits,
    "hidden rows": hidden_rows,
    "causal blocks": causal_blocks,
    "sorted noise": sorted_noise,
    "windows in documents": windows_in_documents,
    "table of blocks": table_of_blocks,
    "listed blocks": listed_blocks,
    "neighbourhood": neighbourhood,
    "frames": frames,
    "tiles of video": tiles_of_video,
    "uint8": lambda s, n: python_rule(  # 11 * 24 exceeds 255
        lambda b, h, q, kv: q.to(torch.uint8) * 11 >= kv.to(torch.uint8) * (n % 7 + 1)
    ),
}


class Score(NamedTuple):
    """A score_mod by its learned tensor: ``shape`` of it, () for none; ``bind``: (sizes, visible pairs, that
    tensor) -> the score_mod."""

    shape: Callable[[Sizes], tuple[int, ...]]
    bind: Callable[[Sizes, Pairs, Any], ScoreMod | None]


def plain(mod: ScoreMod | None) -> Score:
    """A score_mod that learns nothing."""
    return Score(lambda s: (), lambda s, visible, x: mod)


def alibi(s: Sizes, visible: Pairs, x: Tensor) -> ScoreMod:
    slopes = torch.tensor([2.0 ** -(h + 1) for h in range(s.heads)], dtype=torch.float64)
    return lambda score, b, h, q, kv: score - slopes[h] * (q - kv).abs()


def of_documents(s: Sizes, visible: Pairs, x: Tensor) -> ScoreMod:
    ids = document_ids(s, 4)[0]
    return lambda score, b, h, q, kv: score * x[ids[q]] + b


def undefined_where_hidden(s: Sizes, visible: Pairs, x: Tensor) -> ScoreMod:
    """Read past the end of the table for a hidden pair."""
    return lambda score, b, h, q, kv: score + x[h, torch.where(visible(b, h, q, kv), kv, 1 << 40)]


def bias_of_path(s: Sizes, visible: Pairs, x: Tensor) -> ScoreMod:
    """The mean of a bias for each edge of the path between two nodes: a loop, unrolled."""
    g = generator(7)
    kinds = torch.randint(0, 5, (s.batch, s.q, s.kv, 3), generator=g)
    lengths = torch.randint(0, 4, (s.batch, s.q, s.kv), generator=g)

    def mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        length, total = lengths[b, q, kv], torch.zeros_like(score)
        for place in range(3):
            total = total + torch.where(length > place, x[place, h, kinds[b, q, kv, place]], 0.0)
        return score + total / length.clamp(min=1)

    return mod


SCORES: dict[str, Score] = {
    "none": plain(None),
    "softcap": plain(lambda s, b, h, q, kv: 3 * torch.tanh(s / 3)),
    "by row": plain(lambda s, b, h, q, kv: s * (b + 1) + (h - q % 3) * 0.25),
    "hides": plain(lambda s, b, h, q, kv: torch.where((q + kv + h) % 4 == 0, -math.inf, s)),
    "alibi": Score(lambda s: (), alibi),
    "slopes": Score(
        lambda s: (s.heads,),
        lambda z, visible, x: lambda s, b, h, q, kv: s - x[h].to(s.dtype) * (q - kv).abs() * (1 + b) / z.q,
    ),
    "distances": Score(
        lambda s: (s.heads, 33),
        lambda z, visible, x: lambda s, b, h, q, kv: s + x[h, (q - kv).clamp(-16, 16) + 16],
    ),
    "temperature": Score(lambda s: (s.batch, s.q), lambda z, visible, x: lambda s, b, h, q, kv: s * x[b, q]),
    "of documents": Score(lambda s: (5,), of_documents),
    "replaces": Score(lambda s: (s.heads,), lambda z, visible, x: lambda s, b, h, q, kv: x[h]),
    "bias of keys": Score(
        lambda s: (s.batch, s.heads, s.kv), lambda z, visible, x: lambda s, b, h, q, kv: x[b, h, kv] + s
    ),
    "product and sum": Score(
        lambda s: (s.heads,),
        lambda z, visible, x: lambda s, b, h, q, kv: s * 0.5 + x[h].to(s.dtype) * torch.sin(s),
    ),
    "decay": Score(
        lambda s: (s.heads,),
        lambda z, visible, x: lambda s, b, h, q, kv: s - torch.exp(x[h].to(s.dtype)) * kv / z.kv,
    ),
    "bias of a path": Score(lambda s: (3, s.heads, 5), bias_of_path),
    "activation": plain(lambda s, b, h, q, kv: torch.log(torch.nn.functional.softplus(s) + 0.1)),
    "undefined where hidden": Score(lambda s: (s.heads, s.kv), undefined_where_hidden),
}
