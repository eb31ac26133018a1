"""Results of translated mods against torch's eager vmap: masks exactly, scores to rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import and_masks, or_masks

from tests.mods.harness import N, eager_mask, eager_score, run_mask, run_score
from tritoncp.mods import Untranslatable, mask_mod, score_mod

G = torch.Generator().manual_seed(1)
TABLE = torch.randn(4, 30, generator=G)
IDS = torch.randint(0, 3, (2, 100), generator=G)
INTS = torch.randint(-9, 9, (100,), generator=G, dtype=torch.int32)
BYTES = torch.randint(0, 255, (100,), generator=G, dtype=torch.uint8)
FLAGS = torch.rand(2, 100, generator=G) > 0.5
POWERS = torch.tensor([0.25, -2.0, 0.5, 1.0]).repeat(8).bfloat16()  # products with indices are exact
HALF = torch.randn(100, generator=G).bfloat16()
WIDE = torch.randn(100, generator=G, dtype=torch.float64)
SLOPES = torch.tensor([0.5, 0.25, -0.125, 2.0])

MASKS: dict[str, Callable[..., Any]] = {
    "causal": lambda b, h, q, k: q >= k,
    "python bool": lambda b, h, q, k: True,
    "head only": lambda b, h, q, k: h == 1,
    "document": lambda b, h, q, k: (IDS[b, q] == IDS[b][k]) & (q - k <= 5),
    "floor division of negatives": lambda b, h, q, k: ((q - k) // 3) % 2 == 0,
    "remainder, negative divisor": lambda b, h, q, k: torch.remainder(k - q, -5) < -1,
    "fmod of negatives": lambda b, h, q, k: torch.fmod(k - q, 5) < -1,
    "truncated division": lambda b, h, q, k: torch.div(q - k, 3, rounding_mode="trunc") > 0,
    "float division": lambda b, h, q, k: q / (k + 1) > 0.7,
    "float floor division": lambda b, h, q, k: (k - 8).float() // 3.0 < (q - 9).float() % -4.0,
    "flags": lambda b, h, q, k: FLAGS[b][q] ^ FLAGS[b, k] | (h == 1),
    "negation": lambda b, h, q, k: ~FLAGS[b][q] & ~(h == 3),
    "uniform flag": lambda b, h, q, k: ~FLAGS[b, h] | (q > k),
    "uniform float": lambda b, h, q, k: (SLOPES[h] > 0.3) | (q > k),
    "int64 products": lambda b, h, q, k: (q * k * 1_000_000_007) % 7 > 3,
    "int32 captures wrap": lambda b, h, q, k: INTS[q] * INTS[k] * 100_000_000 > 0,
    "uint8 captures wrap": lambda b, h, q, k: BYTES[q] + BYTES[k] > 100,
    "int8 casts wrap": lambda b, h, q, k: q.to(torch.int8) + 120 < 0,
    "shifts": lambda b, h, q, k: (q >> 1) & 1 == (k << 2) & 4,
    "shifts out of range": lambda b, h, q, k: ((1 << (q * 8)) >> (k - 3)) > 0,
    "bfloat16": lambda b, h, q, k: HALF[q] * HALF[k] + 0.125 > 0.3,
    "integer powers": lambda b, h, q, k: ((q - k).abs() ** 2 < 9) | ((q - k) ** 3 < -5),
    "powers of tensors": lambda b, h, q, k: (2 ** (q - k)).bool() & ((q - k) ** k > 3),
    "bool arithmetic": lambda b, h, q, k: ((q > k) + (k > 3)) & ((q > k) * 2 + k > 3),
    "logical": lambda b, h, q, k: torch.logical_xor(q > 4, k) | torch.logical_not(q),
    "where": lambda b, h, q, k: torch.where(q > k, IDS[b, q], k) > 1,
    "clamp": lambda b, h, q, k: (torch.clamp(q - k, -2, 3) > 1) | (q.clamp(min=3) != k),
    "extremes": lambda b, h, q, k: torch.maximum(q, k) - torch.minimum(q, k) < 3,
    "rounding": lambda b, h, q, k: (q.float() * 0.5).round() > (k * 0.2).floor() + (q * 0.3).ceil() - 2,
    "sign and negation": lambda b, h, q, k: ((q - k).float().sign() < 0) | (-q < -k),
    "transpose": lambda b, h, q, k: TABLE.T[q % 30][h] > 0,
    "view": lambda b, h, q, k: IDS.view(4, 50)[h, q] > 1,
    "slice": lambda b, h, q, k: IDS[:, 5:50:2][b, q] > IDS[b][k - 10],
    "flip and unsqueeze": lambda b, h, q, k: IDS.flip(1)[b, q] > IDS.unsqueeze(0)[0, b, k],
    "chained gather": lambda b, h, q, k: IDS[b][IDS[b][q] + k] > 0,
    "gather by a tensor": lambda b, h, q, k: TABLE[IDS][b, q, k] > 0,
    "range": lambda b, h, q, k: torch.arange(3, 100)[q] * 2 > k,
    "last element": lambda b, h, q, k: IDS[b, -1] + IDS[-1][q] > k % 3,
    "made inside": lambda b, h, q, k: torch.where(q > k, torch.tensor(5), torch.zeros_like(q)) > k,
    "edit in place": lambda b, h, q, k: (q - k).add_(2).mul_(3) > 7,
    "and_masks": and_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: IDS[b, q] == IDS[b, k]),
    "or_masks": or_masks(lambda b, h, q, k: q >= k + 3, lambda b, h, q, k: k < 4),
}
PLACES = [(1, 2, 3, 0), (0, 1, 0, 7)]


@pytest.mark.parametrize("name", MASKS)
def test_masks_equal_eager_masks(name: str) -> None:
    fn = MASKS[name]
    for place in PLACES:
        expected = eager_mask(lambda *a: torch.as_tensor(fn(*a)), *place).bool()
        assert torch.equal(run_mask(mask_mod(fn), *place), expected), mask_mod(fn).source


SCORES: dict[str, Callable[..., Any]] = {
    "identity": lambda s, b, h, q, k: s,
    "alibi": lambda s, b, h, q, k: s + SLOPES[h] * (k - q),
    "relative bias": lambda s, b, h, q, k: s + TABLE[h][q - k],
    "scaled bias": lambda s, b, h, q, k: s + (TABLE * 2)[h, q] - (-TABLE[h])[q - k],
    "broadcast bias": lambda s, b, h, q, k: (TABLE * SLOPES[:, None])[h, q] * s,
    "bias by table": lambda s, b, h, q, k: s + TABLE[IDS[b, q], k] + torch.exp(TABLE).T[q, h],
    "reshaped bias": lambda s, b, h, q, k: s + TABLE.view(-1)[q] * TABLE.reshape(2, 2, 30)[0, 1, k],
    "one element": lambda s, b, h, q, k: s + TABLE[0, 3],
    "softcap": lambda s, b, h, q, k: torch.tanh(s / 5) * 5,
    "causal": lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")),
    "exponents of heads": lambda s, b, h, q, k: s * torch.exp2(-(h + 1) * 0.5) + 2.0 ** (-8 * (h + 1) / 4),
    "exponentials": lambda s, b, h, q, k: s.sigmoid() + torch.expm1(s) + s.exp() + s.abs().log1p(),
    "roots": lambda s, b, h, q, k: s.square().sqrt() + torch.rsqrt(s * s + 1) + torch.log(s.abs() + 1),
    "waves": lambda s, b, h, q, k: torch.sin(s) * torch.cos(s) + torch.erf(s),
    "activations": lambda s, b, h, q, k: torch.nn.functional.silu(s) + torch.nn.functional.softplus(s),
    "powers": lambda s, b, h, q, k: s.abs() ** 1.5 + s**3 + (s.abs() + 0.1) ** -0.7,
    "extremes": lambda s, b, h, q, k: torch.maximum(s, SLOPES[h]) + s.clamp(-1, 1),
    "bfloat16 bias": lambda s, b, h, q, k: (
        s * HALF[q] + HALF[k] * 0.125
    ),  # vmap itself rounds 0.1 to bfloat16
    "bfloat16 times an index": lambda s, b, h, q, k: s + POWERS[h] * (q - k) + (q > k) * POWERS[q],
    "bfloat16 constants": lambda s, b, h, q, k: s + torch.where(q > k, POWERS[q], 0.5) + k.bfloat16(),
    "scaled differences": lambda s, b, h, q, k: torch.rsub(s, 2.0, alpha=3) + torch.rsub(s, k, alpha=2),
    "literals": lambda s, b, h, q, k: s * 0.1 + 0.3,
    "edit in place": lambda s, b, h, q, k: s.mul_(2).add_(k - q),
    "edit in place by a wider type": lambda s, b, h, q, k: s.add_(WIDE[q]).sub_(WIDE[k]),
    "another dtype": lambda s, b, h, q, k: (s * 3).to(torch.float64),
    "a number": lambda s, b, h, q, k: 1.5,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_scores_equal_eager_scores(name: str, dtype: torch.dtype) -> None:
    fn = SCORES[name]
    scores = torch.randn(N, N, dtype=dtype) * 3
    mod = score_mod(fn, dtype)
    expected = eager_score(lambda *a: torch.as_tensor(fn(*a)), scores.clone(), 1, 2, 3, 0).to(dtype)
    rounding = 1e-12 if dtype is torch.float64 and not mod.tensors else 4e-6
    out = run_score(mod, scores, 1, 2, 3, 0)
    torch.testing.assert_close(out, expected.expand(N, N), rtol=rounding, atol=rounding)


def test_a_factor_of_all_scores_takes_the_scale() -> None:
    folded = {name for name, fn in SCORES.items() if "scale" in score_mod(fn).fn.arg_names}
    assert folded == {"softcap", "exponents of heads", "literals", "edit in place", "another dtype"}


def test_an_argument_without_a_rule_is_refused() -> None:
    with pytest.raises(Untranslatable, match="decimals=1 has no rule"):
        score_mod(lambda s, b, h, q, k: torch.round(s, decimals=1))
    assert (
        run_score(score_mod(lambda s, b, h, q, k: torch.round(s, decimals=0)), torch.full((N, N), 1.7))[0, 0]
        == 2
    )


def test_fp64_constants_keep_their_digits() -> None:
    scores = torch.full((N, N), 1.0, dtype=torch.float64)
    third = 1 / 3
    out = run_score(score_mod(lambda s, b, h, q, k: s * third + 0.1, torch.float64), scores)
    assert out[0, 0].item() == 1 / 3 + 0.1


def test_captures_may_have_any_strides() -> None:
    base = torch.randn(30, 8)
    for view in (base.T[::2], base[::3, 1:5].T, base[:, :1].expand(30, 4).T):
        out = run_score(score_mod(lambda s, b, h, q, k, t=view: s + t[h, q % 9]), torch.zeros(N, N), 0, 3)
        assert torch.equal(out, view[3][torch.arange(N) % 9][:, None].expand(N, N))


def test_a_zero_dimensional_capture_is_read_at_every_call() -> None:
    scale = torch.tensor(2.0)
    mod = score_mod(lambda s, b, h, q, k: s * scale)
    assert run_score(mod, torch.ones(N, N)).unique().tolist() == [2.0]
    scale.fill_(3.0)
    assert run_score(mod, torch.ones(N, N)).unique().tolist() == [3.0]


def test_gathers_out_of_range_read_nothing() -> None:
    """Kernels also evaluate masked positions; the NaNs on both sides of the capture are not read."""
    memory = torch.full((40,), float("nan"))
    table = memory[12:20]
    table.copy_(torch.arange(8.0))
    out = run_score(score_mod(lambda s, b, h, q, k: s + table[q - k]), torch.zeros(N, N))
    i = torch.arange(N)
    diff = i[:, None] - i[None]
    inside = (diff >= -8) & (diff < 8)
    assert torch.equal(out[inside], table[diff[inside]])
    assert out[~inside].unique().tolist() == [0.0]


def test_division_by_zero_does_not_trap() -> None:
    fn = lambda b, h, q, k: (q // k + q % k + torch.fmod(q, k) > 3) & (k > 0)  # noqa: E731
    out = run_mask(mask_mod(fn))
    i, j = torch.arange(N)[:, None], torch.arange(1, N)[None]
    assert torch.equal(out[:, 1:], i // j + i % j + torch.fmod(i, j) > 3)
    assert not out[:, 0].any()


def test_indices_near_the_top_of_32_bits() -> None:
    top = 2**30 - N
    fn = lambda b, h, q, k: ((q + k) // 2 >= k) & (q + 1 > 0) & (k - q < 5) & (q * k > 0)  # noqa: E731
    assert torch.equal(run_mask(mask_mod(fn), 0, 0, top, top), eager_mask(fn, 0, 0, top, top))


# -- random expressions ----------------------------------------------------------------------------------

_LEAVES = st.sampled_from(["q", "k", "h", "IDS[b, q]", "INTS[k]", "INTS[q - k]", "b", "7", "-3", "BYTES[q]"])


_SYMBOLS = st.sampled_from(["+", "-", "*", "&", "|", "^"])
_CHOICE = "torch.where(q >= k, torch.as_tensor({}), torch.as_tensor({}))"


def _combine(children: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pairs = st.tuples(children, children)
    return st.one_of(
        st.builds(lambda ab, op: f"({ab[0]} {op} {ab[1]})", pairs, _SYMBOLS),
        st.builds(lambda a, n, op: f"({a} {op} {n})", children, st.sampled_from([-5, -1, 2, 3, 2**33]),
                  st.sampled_from(["//", "%"])),
        st.builds(lambda a: f"abs({a})", children),
        st.builds(lambda a: f"(-({a}))", children),
        st.builds(lambda ab: _CHOICE.format(*ab), pairs),
        st.builds(lambda a, n: f"(({a}) << {n})", children, st.integers(0, 40)),
    )  # fmt: skip


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    st.recursive(_LEAVES, _combine, max_leaves=8), st.sampled_from(["<", "<=", "==", "!=", ">"])
)
def test_random_integer_expressions(expression: str, comparison: str) -> None:
    scope = {"torch": torch, "IDS": IDS.int() - 1, "INTS": INTS.long(), "BYTES": BYTES.long()}
    fn = eval(f"lambda b, h, q, k: torch.as_tensor({expression} + 0 * q) {comparison} k", scope)
    try:
        expected = eager_mask(fn, 1, 2, 3, 5)
    except (OverflowError, RuntimeError):  # of torch itself: a Python number too large for int64
        return
    out = run_mask(mask_mod(fn), 1, 2, 3, 5)
    assert torch.equal(out, expected), mask_mod(fn).source


LOADS: dict[str, tuple[int, Callable[..., Any]]] = {
    "captures nothing": (0, lambda s, b, h, q, k: s - (q - k).abs()),
    "by head": (0, lambda s, b, h, q, k: s - SLOPES[h] * (q - k)),
    "by head of batch row": (0, lambda s, b, h, q, k: s * (TABLE * 2)[h][b + 1]),
    "by row": (1, lambda s, b, h, q, k: s + HALF[q]),
    "by row and by key, apart": (1, lambda s, b, h, q, k: s + HALF[q] * HALF[k]),
    "by distance": (2, lambda s, b, h, q, k: s + TABLE[h, (q - k) % 30]),
    "by a value loaded by row": (1, lambda s, b, h, q, k: s + SLOPES[IDS[b, q]]),
    "loaded by row, not used": (0, lambda s, b, h, q, k: (HALF[q], s - 1)[1]),
}


@pytest.mark.parametrize("name", LOADS)
def test_loads_counts_the_axes_that_loads_vary_with(name: str) -> None:
    """Tiles are smaller where each score has its own."""
    sides, fn = LOADS[name]
    assert score_mod(fn).loads == sides
