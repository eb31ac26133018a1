"""Laws of calls with a score_mod on the CPU engine: how often it is called, and what it may do for pairs that
are hidden."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import tritoncp
from tritoncp.cpu import pointwise
from tritoncp.reference.dense import dense_attention

pytestmark = pytest.mark.usefixtures("cpu_engine")
LENGTH, BLOCK = 320, 32
SLOPES, TABLE = torch.tensor([0.5, 0.25], dtype=torch.float64), torch.linspace(-1, 1, LENGTH).double()
DOCUMENT = torch.arange(LENGTH) // 130
ScoreMod = Callable[..., Tensor]


def shown(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """The mask_mod of causal documents."""
    return (q >= kv) & (DOCUMENT[q] == DOCUMENT[kv])


ELEMENTWISE: dict[str, ScoreMod] = {
    "alibi": lambda s, b, h, q, kv: s + SLOPES[h] * (kv - q),
    "softcap": lambda s, b, h, q, kv: 5 * torch.tanh(s / 5),
    "table": lambda s, b, h, q, kv: s + TABLE[q - kv],
}
# Not defined for some or all pairs that the mask hides.
UNDEFINED: dict[str, ScoreMod] = {
    "gather": lambda s, b, h, q, kv: s + TABLE[torch.where(shown(b, h, q, kv), q - kv, 1 << 40)],
    "division": lambda s, b, h, q, kv: s + 8 // shown(b, h, q, kv).long(),
    "root": lambda s, b, h, q, kv: s * (q - kv).sqrt(),
    "root of the score": lambda s, b, h, q, kv: (s * s * (q - kv)).sqrt(),
    "infinite derivative": lambda s, b, h, q, kv: (s * (q >= kv)).abs().sqrt(),
    "operation on a row": lambda s, b, h, q, kv: s + (-(TABLE * SLOPES[:, None])[h])[q - kv],
}


def inputs() -> tuple[list[Tensor], Any, Tensor]:
    """Return q, k and v [1, 2, 320, 8], causal documents as a mask, and its visible pairs."""
    g = torch.Generator().manual_seed(2)
    leaves = [torch.randn(1, 2, LENGTH, 8, generator=g, dtype=torch.float64).requires_grad_() for _ in "qkv"]
    mask = tritoncp.create_block_mask(shown, 1, 1, LENGTH, LENGTH, BLOCK_SIZE=BLOCK)
    at = torch.arange(LENGTH)
    return leaves, mask, shown(0, 0, at[:, None], at).expand(1, 2, -1, -1)


def results(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.mark.parametrize("piece", [1, 1000, 1 << 30])
@pytest.mark.parametrize("name", [*ELEMENTWISE, *UNDEFINED])
def test_hidden_pairs_add_nothing_whatever_the_score_mod_does_for_them(
    name: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are those of dense attention, which calls the score_mod for visible pairs only, also where
    pieces of tiles have no visible pair."""
    leaves, mask, visible = inputs()
    score = {**ELEMENTWISE, **UNDEFINED}[name]
    monkeypatch.setattr(pointwise, "PIECE", piece)
    found = results(tritoncp.flex_attention(*leaves, score, mask), leaves)
    want = results(dense_attention(*leaves, visible, score).out, leaves)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize("name", [*ELEMENTWISE])
def test_an_elementwise_score_mod_takes_no_vmap_and_no_substitutes(name: str) -> None:
    leaves, mask, _ = inputs()
    with (
        mock.patch.object(pointwise, "vmapped") as vmap,
        mock.patch.object(pointwise.Scores, "_with_visible_pairs") as substitute,
    ):
        results(tritoncp.flex_attention(*leaves, ELEMENTWISE[name], mask), leaves)
    assert not vmap.called and not substitute.called


def test_gradients_of_captures_get_nothing_from_hidden_pairs() -> None:
    """The derivative of the capture is infinite for the hidden pairs."""
    leaves, mask, visible = inputs()
    power = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)

    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s * (power[h] * (q >= kv)).sqrt()

    wanted = [*leaves, power]
    found = results(tritoncp.flex_attention(*leaves, score, mask), wanted)
    want = results(dense_attention(*leaves, visible, score).out, wanted)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-10)


def test_an_index_out_of_range_for_a_visible_pair_raises() -> None:
    leaves, mask, _ = inputs()
    with pytest.raises(IndexError, match="out of bounds"):
        tritoncp.flex_attention(*leaves, lambda s, b, h, q, kv: s + TABLE[q - kv + LENGTH - 100], mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_key_that_is_not_finite_changes_no_row_that_hides_it(value: float, dtype: torch.dtype) -> None:
    q, k, v = (x.detach().to(dtype) for x in inputs()[0])
    mask = inputs()[1]
    score = ELEMENTWISE["alibi"]
    want = tritoncp.flex_attention(q, k, v, score, mask)
    k[:, :, 135] = value  # seen by rows 135 to 259
    out = tritoncp.flex_attention(q, k, v, score, mask)
    torch.testing.assert_close(out[:, :, :135], want[:, :, :135])
    torch.testing.assert_close(out[:, :, 260:], want[:, :, 260:])


@pytest.mark.parametrize("name", ["alibi", "operation on a row"])
def test_the_number_of_calls_of_a_score_mod_is_that_of_tiles_or_pieces(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a forward pass without vmap takes pieces of tiles. Each pass calls it for the same pairs."""
    leaves, mask, _ = inputs()
    calls: list[int] = []
    scores_of = pointwise._scores_of
    monkeypatch.setattr(pointwise, "_scores_of", lambda *x: calls.append(x[2].numel()) or scores_of(*x))

    def count(piece: int) -> tuple[list[int], list[int]]:
        calls.clear()
        monkeypatch.setattr(pointwise, "PIECE", piece)
        out = tritoncp.flex_attention(*leaves, {**ELEMENTWISE, **UNDEFINED}[name], mask)
        forward = list(calls)
        out.sum().backward()
        return forward, calls[len(forward) :]

    forward, backward = count(1 << 30)
    assert forward == backward and len(forward) <= 12
    pieces, tiles = count(max(forward) // 4)
    assert tiles == backward and sum(pieces) == sum(forward)
    assert len(pieces) > 2 * len(tiles) if name == "alibi" else pieces == tiles
