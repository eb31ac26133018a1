"""The reference against torch's eager flex attention, and against itself if torch has no equivalent."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from tritoncp import causal, create_block_mask, sliding_window
from tritoncp.reference.dense import dense_attention

F64 = torch.float64
TOL = {"atol": 1e-12, "rtol": 1e-12}


def tensors(*shapes: tuple[int, ...], grad: bool = True) -> list[Tensor]:
    g = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [torch.randn(s, generator=g, dtype=F64).requires_grad_(grad) for s in shapes]


BIAS = torch.randn(4, 64, generator=torch.Generator().manual_seed(1), dtype=F64)
SCORE_MODS = {
    "none": None,
    "alibi": lambda s, b, h, q, kv: s - 0.1 * (h + 1) * (q - kv).abs(),
    "softcap": lambda s, b, h, q, kv: 3 * torch.tanh(s / 3) + b,
    "table": lambda s, b, h, q, kv: s + BIAS[h, q - kv],  # negative indices wrap
}


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", SCORE_MODS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    "mod", [flex.noop_mask, causal(), sliding_window(9, 4)], ids=["noop", "causal", "window"]
)
def test_dense_attention_is_torchs_eager_flex_attention(name: str, kv_heads: int, mod) -> None:
    q, k, v = tensors((2, 4, 33, 8), (2, kv_heads, 40, 8), (2, kv_heads, 40, 5), grad=False)
    bm = flex.create_block_mask(mod, None, None, 33, 40, device="cpu", BLOCK_SIZE=16)
    aux = flex.AuxRequest(lse=True)
    want, more = flex.flex_attention(q, k, v, SCORE_MODS[name], bm, 0.3, enable_gqa=True, return_aux=aux)
    got = dense_attention(q, k, v, create_block_mask(mod, None, None, 33, 40), SCORE_MODS[name], scale=0.3)
    torch.testing.assert_close(got.out, want, **TOL)
    torch.testing.assert_close(got.lse, more.lse.to(F64), **TOL)


@pytest.mark.parametrize("name", SCORE_MODS)
def test_statistics_equal_a_loop_over_pairs(name: str) -> None:
    """Pair by pair in plain Python: torch has no max_scores on the CPU."""
    q, k, v = tensors((2, 4, 5, 3), (2, 2, 6, 3), (2, 2, 6, 2), grad=False)
    score_mod = SCORE_MODS[name] or (lambda s, *_: s)
    got = dense_attention(q, k, v, create_block_mask(sliding_window(2), None, None, 5, 6), score_mod)
    for b, h, i in product(range(2), range(4), range(5)):
        pairs = [
            score_mod(q[b, h, i] @ k[b, h // 2, j] / math.sqrt(3), b, h, torch.tensor(i), torch.tensor(j))
            for j in range(max(0, i - 2), i + 1)
        ]
        scores = torch.stack(pairs)
        torch.testing.assert_close(got.max_scores[b, h, i], scores.max(), **TOL)
        torch.testing.assert_close(got.lse[b, h, i], scores.exp().sum().log(), **TOL)


@pytest.mark.long
def test_gradients_of_inputs_and_captures_are_right() -> None:
    q, k, v, table = tensors((1, 2, 5, 3), (1, 1, 6, 3), (1, 1, 6, 2), (2, 11))
    mask = create_block_mask(sliding_window(3, 1), None, None, 5, 6)

    def run(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        got = dense_attention(q, k, v, mask, lambda s, b, h, q, kv: s * table[h, q - kv] + table[h, kv])
        assert not got.max_scores.requires_grad
        return got.out, got.lse

    assert torch.autograd.gradcheck(run, (q, k, v, table))


def test_rows_that_see_nothing_are_zero_and_never_nan() -> None:
    q, k, v, table = tensors((1, 2, 6, 4), (1, 2, 8, 4), (1, 2, 8, 4), (8,))
    visible = torch.rand(6, 8, generator=torch.Generator().manual_seed(0)) < 0.5
    visible[[0, 3]] = False
    blind = torch.tensor([0, 3, 5])  # the mask hides rows 0 and 3, the score_mod all of row 5

    def hide_row_5(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return torch.where(q == 5, -math.inf, s + table[kv])

    got = dense_attention(q, k, v, visible, hide_row_5)
    (got.out.sum() + got.lse[got.lse > -math.inf].sum()).backward()
    assert bool((got.out[:, :, blind] == 0).all())
    assert bool(
        (got.lse[:, :, blind] == -math.inf).all() and (got.max_scores[:, :, blind] == -math.inf).all()
    )
    assert bool((q.grad[:, :, blind] == 0).all())
    assert all(bool(x.grad.isfinite().all()) for x in (q, k, v, table))
    visible_keys = torch.tensor([1, 2, 4])
    assert bool(got.lse[:, :, visible_keys].isfinite().all())
    assert bool((q.grad[:, :, visible_keys] != 0).any())


def test_a_score_mod_is_never_called_on_hidden_pairs() -> None:
    """log(q - kv) has no gradient where kv >= q, and the table ends where the mask does."""
    q, k, v, table = tensors((1, 1, 7, 4), (1, 1, 7, 4), (1, 1, 7, 4), (7,))
    strictly_causal = torch.ones(7, 7).tril(-1).bool()
    got = dense_attention(
        q, k, v, strictly_causal, lambda s, b, h, q, kv: s + torch.log((q - kv).to(F64)) + table[q - kv]
    )
    got.out.sum().backward()
    assert all(bool(x.grad.isfinite().all()) for x in (q, k, v, table))
    assert table.grad[0] == 0


def test_a_mask_listed_for_one_batch_row_asks_its_mask_mod_about_each() -> None:
    q, k, v = tensors((3, 2, 16, 4), (1, 2, 16, 4), (1, 2, 16, 4), grad=False)
    mod = lambda b, h, q, kv: q >= kv + 4 * b + h  # noqa: E731
    mask = create_block_mask(mod, None, None, 16, 16, BLOCK_SIZE=16)
    got = dense_attention(q, k, v, mask)
    want = dense_attention(q, k, v, flex.create_mask(mod, 3, 2, 16, 16, device="cpu"))
    torch.testing.assert_close(got, want, **TOL)
    assert not torch.equal(got.lse[0], got.lse[1])
