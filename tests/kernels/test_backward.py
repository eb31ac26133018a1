"""Gradients: of lse, of captures of a score_mod, in half precision, through gradcheck."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

import tritoncp
from tests.device import REPEATS, TOKENS
from tests.kernels.support.harness import F32, F64, QKV, check, close, cotangents, oracle, qkv, run, same
from tritoncp import and_masks, causal, create_block_mask, document, full_mask

CAUSAL = create_block_mask(causal(), None, None, 40, 40, BLOCK_SIZE=32)


# -- the outputs gradients start from -----------------------------------------------------------------


@pytest.mark.bar(2)
def test_a_loss_of_lse_that_is_not_smooth_at_empty_rows_leaves_no_nan() -> None:
    """d(lse^2) = 2 lse dlse is infinite if lse is: an empty row must not add it to gradients."""
    x = qkv(40)
    mask = create_block_mask(lambda b, h, q, kv: (q >= kv) & (q % 5 != 2), None, None, 40, 40, BLOCK_SIZE=32)
    leaves = [t.detach().requires_grad_() for t in x]
    out, lse = tritoncp.flex_attention(*leaves, mask, return_lse=True)
    (out.sum() + (lse**2)[lse > -math.inf].sum()).backward()
    want = [t.grad.clone() for t in leaves]
    for t in leaves:
        t.grad = None
    out, lse = tritoncp.flex_attention(*leaves, mask, return_lse=True)
    (out.sum() + (lse**2).sum()).backward()
    assert bool((lse == -math.inf).any())
    for t, g in zip(leaves, want):
        close(t.grad, g, "gradient")


@pytest.mark.parametrize("wanted", ["q", "k", "v", "kv"])
def test_gradients_of_some_inputs_only(wanted: str, engine: str) -> None:
    x = qkv(40, dtype=F64)
    dout, dlse = cotangents(x)
    leaves = [t.detach().requires_grad_(name in wanted) for t, name in zip(x, "qkv")]
    tritoncp.flex_attention(*leaves, CAUSAL).backward(dout)
    for t, want, name in zip(leaves, oracle(x, CAUSAL, start=(dout, dlse * 0)).grads, "qkv"):
        assert (t.grad is not None) == (name in wanted)
        if t.grad is not None:
            close(t.grad, want, name)


# -- captures of score_mods ---------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter evaluates hidden pairs too
def test_hidden_pairs_and_blocks_add_nothing_to_gradients_of_captures() -> None:
    """A score_mod may read past its table's end, or have an infinite slope, at masked pairs."""

    def score(table: Tensor) -> Callable[..., Tensor]:
        return lambda s, b, h, q, kv: s + table[q - kv] * torch.sqrt((q - kv).to(s.dtype))

    got = check(qkv(40), create_block_mask(lambda b, h, q, kv: q > kv, 1, 1, 40, 40, BLOCK_SIZE=32), score,
                [torch.randn(40)])  # fmt: skip
    assert got.grads[3][0] == 0


def test_gradients_of_captures_differ_between_runs_by_rounding_alone() -> None:
    """Atomics add them in any order; all other results have the same bits."""
    x, table = qkv(TOKENS, heads=4, kv_heads=2, dim=16), torch.randn(4, 33)
    mask = create_block_mask(causal(), None, None, TOKENS, TOKENS)
    start = cotangents(x)

    def score(table: Tensor) -> Callable[..., Tensor]:
        return lambda s, b, h, q, kv: s + table[h, (q - kv).clamp(-16, 16) + 16]

    first = check(x, mask, score, [table], start=start)
    for _ in range(REPEATS):
        got = run(x, mask, score, [table], start=start)
        same((*got[:3], *got.grads[:3]), (*first[:3], *first.grads[:3]))
        close(got.grads[3], first.grads[3], "table")


PAST_THE_END = {
    "window": create_block_mask(causal(), None, None, 21, 21, BLOCK_SIZE=16),
    "table": create_block_mask(
        and_masks(causal(), document(lengths=[21])), None, None, 21, 21, BLOCK_SIZE=16
    ),
    "mod": create_block_mask(lambda b, h, q, kv: (q + kv) % 3 != 1, None, None, 21, 21, BLOCK_SIZE=16),
    "bounded": full_mask(21, 21, block=16),
    "blocks that tiles do not divide": full_mask(21, 21, block=20),
}


@pytest.mark.sample(3)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter evaluates hidden pairs too
@pytest.mark.parametrize("name", PAST_THE_END)
def test_rows_past_the_end_add_nothing_to_gradients_of_captures(name: str) -> None:
    """A tile reaches past q_len and kv_len, where this score_mod is NaN."""

    def score(table: Tensor) -> Callable[..., Tensor]:
        return lambda s, b, h, q, kv: (
            s + table[kv] * torch.sqrt((20 - q).to(s.dtype)) * torch.sqrt((20 - kv).to(s.dtype))
        )

    check(qkv(21), PAST_THE_END[name], score, [torch.randn(21)])


@pytest.mark.long
@pytest.mark.bar(2)
def test_gradcheck_with_a_captured_table() -> None:
    x = [t.requires_grad_() for t in qkv(7, 9, heads=2, kv_heads=1, dtype=F64, dim=3, v_dim=2)]
    table = torch.randn(2, 16, dtype=F64, requires_grad=True)
    mask = create_block_mask(lambda b, h, q, kv: q + 2 >= kv, None, None, 7, 9, BLOCK_SIZE=16)

    def call(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return torch.tanh(s) * table[h, i - j] + table[1 - h, j]

        return tritoncp.flex_attention(q, k, v, score, mask, enable_gqa=True, return_lse=True)

    assert torch.autograd.gradcheck(call, (*x, table), fast_mode=True)


# -- programs that share a KV head --------------------------------------------------------------------


@pytest.mark.bits
def test_the_schedule_adds_partial_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    x = qkv(40, heads=2, kv_heads=1)
    start = cotangents(x)
    whole = run(x, CAUSAL, start=start)
    calls = []
    monkeypatch.setattr("tritoncp.kernels.engine.TritonEngine.split", lambda *_: calls.append(1) or 2)
    parts = run(x, CAUSAL, start=start)
    assert calls
    same(parts.grads[0], whole.grads[0])
    for a, b in zip(parts.grads[1:], whole.grads[1:]):
        close(a, b, "dkv")


# -- half precision -----------------------------------------------------------------------------------


def ulp(x: Tensor, dtype: torch.dtype) -> float:
    """Spacing of ``dtype`` at the tensor's largest value."""
    top = x.abs().max().item()
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(top))


def torchs(x: QKV, mask: tritoncp.Mask, score: Callable | None, start: tuple[Tensor, Tensor]) -> list[Tensor]:
    """out, dq, dk, dv of torch's eager flex attention in the tensors' dtype."""
    leaves = [t.detach().requires_grad_() for t in x]
    # Eager flex reads the mask_mod alone, so lists and mask_mod must say the same.
    out = flex.flex_attention(*leaves, score, mask.to_block_mask(), enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, start[0])]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("dtype", "dim", "modified"),
    [
        pytest.param(dtype, dim, modified, id=f"{dtype}-{dim}-{'alibi' if modified else 'plain'}")
        for dtype, dim, modified in (
            (torch.bfloat16, 64, False),
            (torch.bfloat16, 80, True),
            (torch.float16, 64, True),
            (torch.float16, 80, False),
        )
    ],
)
@pytest.mark.bar(1)
def test_half_precision_errs_no_more_than_twice_torch(
    dtype: torch.dtype, dim: int, modified: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)  # torch refuses the CPU, though it works
    score = (lambda s, b, h, q, kv: s - 0.1 * (h + 1) * (q - kv).abs()) if modified else None
    x = qkv(56, heads=2, kv_heads=1, dim=dim, dtype=dtype)
    mask = create_block_mask(causal(), None, None, 56, 56, BLOCK_SIZE=32)
    dout, dlse = cotangents(x)
    start = dout, dlse * 0
    got = run(x, mask, score and (lambda: score), start=start)
    want = oracle(x, mask, score and (lambda: score), start=start)
    torch_results = torchs(x, mask, score, start)
    assert got.out.dtype == dtype and got.lse.dtype == F32
    close(got.lse, want.lse, "lse", 1e-5)
    for name, actual, their, exact in zip(
        ("out", "dq", "dk", "dv"), (got.out, *got.grads), torch_results, (want.out, *want.grads)
    ):
        assert actual.dtype == dtype
        error, allowed = ((a.to(F64) - exact).abs().max().item() for a in (actual, their))
        assert error <= 2 * allowed + 2 * ulp(exact, dtype), name


def test_captures_of_float32_keep_their_precision_in_half() -> None:
    x = qkv(40, heads=2, dtype=torch.bfloat16)
    dout, dlse = cotangents(x)
    slope = torch.rand(2)

    def score(slope: Tensor) -> Callable[..., Tensor]:
        return lambda s, b, h, q, kv: s - slope[h] * (q - kv).abs()

    got, want = (f(x, CAUSAL, score, [slope], start=(dout, dlse)) for f in (run, oracle))
    assert got.grads[3].dtype == F32
    close(got.grads[3], want.grads[3], "slope", 0.02)
