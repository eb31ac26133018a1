"""Masks and score_mods for tests of every path, and the comparison with the dense oracle."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritoncp import (
    Mask,
    Plan,
    and_masks,
    causal,
    create_block_mask,
    document,
    full_mask,
    prefix_lm,
    simulate,
    sliding_window,
)
from tritoncp.reference.dense import dense_attention

S, BLOCK = 120, 32  # four blocks, the last one ragged: fewer than ranks in the largest world
DOCUMENTS = [40, 3, 50, 27]


def bits(heads: int) -> Tensor:
    return torch.rand(heads, S, S, generator=torch.Generator().manual_seed(5)) < 0.3


def masked(mod: Callable[..., Tensor], heads: int = 1) -> Mask:
    return create_block_mask(mod, 1, heads, S, S, BLOCK_SIZE=BLOCK)


def random_bits(heads: int) -> Mask:
    table = bits(heads)
    return masked(lambda b, h, q, kv: table[h, q, kv], heads)


def some_rows(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Mask single rows and a whole block of rows completely."""
    return (q >= kv) & (q % 5 != 2) & ((q < 64) | (q >= 96))


MASKS: dict[str, Callable[[int], Mask]] = {  # by the number of query heads
    "causal": lambda heads: masked(causal()),
    "window": lambda heads: masked(sliding_window(40, 5)),
    "document": lambda heads: masked(and_masks(causal(), document(lengths=DOCUMENTS))),
    "prefix": lambda heads: masked(prefix_lm(50)),
    "dilated": lambda heads: masked(lambda b, h, q, kv: (q >= kv) & ((q - kv) % 3 == 0)),
    "diagonal": lambda heads: masked(lambda b, h, q, kv: q // 48 == kv // 48),
    "random": random_bits,
    "full": lambda heads: full_mask(S, S, block=BLOCK),
    "empty rows": lambda heads: masked(some_rows),
}


class Score(NamedTuple):
    """A score_mod and the captured tensors that require a gradient."""

    mod: Callable[..., Tensor] | None
    wants: tuple[Tensor, ...] = ()


def alibi(heads: int, dtype: torch.dtype) -> Score:
    slopes = torch.rand(heads, dtype=dtype)
    return Score(lambda s, b, h, q, kv: s - slopes[h] * (q - kv).abs() / 16)


def relative(heads: int, dtype: torch.dtype) -> Score:
    table = torch.randn(heads, 65, dtype=dtype, requires_grad=True)
    return Score(lambda s, b, h, q, kv: s + table[h, (q - kv).clamp(-32, 32) + 32], (table,))


def by_document(heads: int, dtype: torch.dtype) -> Score:
    number = torch.arange(len(DOCUMENTS)).repeat_interleave(torch.tensor(DOCUMENTS))
    temperature = (0.5 + torch.rand(len(DOCUMENTS), dtype=dtype)).requires_grad_()
    return Score(lambda s, b, h, q, kv: s * temperature[number[q]], (temperature,))


SCORES: dict[str, Callable[[int, torch.dtype], Score]] = {
    "none": lambda heads, dtype: Score(None),
    "alibi": alibi,
    "relative": relative,
    "softcap": lambda heads, dtype: Score(lambda s, b, h, q, kv: 2 * torch.tanh(s / 2)),
    "by document": by_document,
}
HEADS = {"MHA": (2, 2), "GQA": (8, 2), "MQA": (4, 1)}
BALANCERS = (None, "contiguous", "head_tail", "ptrr")
WORLDS = (1, 2, 3, 4, 8)


def pairs(factors: Mapping[str, Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    """Yield rows of the full product that together contain every pair of values of every two factors.

    Greedy: the next row is the one with the most pairs not seen yet.
    """
    product = list(itertools.product(*(range(len(values)) for values in factors.values())))
    bits: dict[tuple[int, int, int, int], int] = {}  # a bit for each pair
    sets = []
    for row in product:
        places = itertools.combinations(enumerate(row), 2)
        sets.append(sum(bits.setdefault((*one, *other), 1 << len(bits)) for one, other in places))
    missing = (1 << len(bits)) - 1
    while missing:
        best = max(range(len(product)), key=lambda at: (sets[at] & missing).bit_count())
        missing &= ~sets[best]
        yield tuple(values[i] for values, i in zip(factors.values(), product[best]))


class Answer(NamedTuple):
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    captured: tuple[Tensor, ...]


def differentiate(out: Tensor, lse: Tensor, inputs: Sequence[Tensor], wants: Sequence[Tensor]) -> Answer:
    """Differentiate one fixed loss of out and lse, in which lse of rows that see no key does not count."""
    g = torch.Generator().manual_seed(9)
    by_out, by_lse = (torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.dtype) for x in (out, lse))
    loss = (out * by_out).sum() + (torch.where(lse.isinf(), 0, lse) * by_lse).sum()
    dq, dk, dv, *captured = torch.autograd.grad(loss, [*inputs, *wants], materialize_grads=True)
    return Answer(out.detach(), lse.detach(), dq, dk, dv, tuple(captured))


def tensors(
    heads: tuple[int, int],
    dtype: torch.dtype,
    dim: int = 16,
    v_dim: int = 16,
    length: int = S,
    batch: int = 1,
) -> list[Tensor]:
    """Make q, k, v that require grad."""
    shapes = ((heads[0], dim), (heads[1], dim), (heads[1], v_dim))
    return [torch.randn(batch, h, length, d, dtype=dtype, requires_grad=True) for h, d in shapes]


def oracle(qkv: Sequence[Tensor], mask: Mask, score: Score) -> Answer:
    """Compute the dense answer in float64."""
    inputs = [x.detach().double().requires_grad_() for x in qkv]
    wants = [x.detach().double().requires_grad_() for x in score.wants]
    result = dense_attention(*inputs, mask, rebound(score, wants))
    return differentiate(result.out, result.lse, inputs, wants)


def rebound(score: Score, wants: Sequence[Tensor]) -> Callable[..., Tensor] | None:
    """Return the same function over other tensors, in new closure cells."""
    if score.mod is None or not wants:
        return score.mod
    other = {id(old): new for old, new in zip(score.wants, wants)}
    cells = [
        type(cell)(other.get(id(cell.cell_contents), cell.cell_contents)) for cell in score.mod.__closure__
    ]
    return type(score.mod)(score.mod.__code__, score.mod.__globals__, closure=tuple(cells))


def simulated(qkv: Sequence[Tensor], plan: Plan, score: Score, **options: Any) -> Answer:
    """Run a simulated world of the plan's size."""
    world = simulate(plan.world_size)
    q, k, v = (world.shard(x, plan, dim=2, side=side) for x, side in zip(qkv, ("q", "kv", "kv")))
    outs, lses = world.flex_attention(q, k, v, score.mod, plan, enable_gqa=True, return_lse=True, **options)
    out, lse = (world.unshard(xs, plan, dim=2) for xs in (outs, lses))
    return differentiate(out, lse, qkv, score.wants)


def agree(got: Answer, want: Answer, atol: float, rtol: float, grad_atol: float) -> None:
    limits = [atol, atol, grad_atol, grad_atol, grad_atol] + [8 * grad_atol] * len(want.captured)
    names = [*Answer._fields[:5], *(f"gradient of capture {i}" for i in range(len(want.captured)))]
    for name, limit, value, expected in zip(names, limits, flat(got), flat(want), strict=True):
        same = (value.double() == expected) | (
            (value.double() - expected).abs() <= limit + rtol * expected.abs()
        )
        assert bool(same.all()), (
            f"{name} differs by up to {(value.double() - expected)[~same].abs().max():.3g}"
        )


def flat(answer: Answer) -> list[Tensor]:
    return [*answer[:5], *answer.captured]


TOLERANCE = {  # out and lse; gradients add up more terms
    torch.float64: {"atol": 1e-11, "rtol": 1e-11, "grad_atol": 1e-10},
    torch.float32: {"atol": 2e-6, "rtol": 1e-5, "grad_atol": 1e-5},
}
