"""Helpers of the tests on a real GPU: sizes, tensors, and the rule for rounding.

Nothing here insists on a GPU. `TRITON_INTERPRET=1 pytest --noconftest tests/gpu` runs the same tests on
interpreted kernels and smaller shapes, which shows that the tests themselves are sound.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.kernels.support import harness
from tests.kernels.support.harness import QKV, Results, ScoreOf
from tritoncp import Mask, and_masks, causal, document, full_mask, prefix_lm, sliding_window
from tritoncp.masks import create_block_mask
from tritoncp.reference.dense import allowed_error, eager_attention, largest_error

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
FP16, FP32 = torch.float16, torch.float32
BF16 = torch.bfloat16 if ON_GPU else FP16  # the interpreter truncates to bfloat16
N = 1000 if ON_GPU else 150  # no multiple of any block
BLOCK = 128 if ON_GPU else 64


def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=FP32).to(dtype)


def qkv(n: int = N, kv: int | None = None, **sizes: Any) -> QKV:
    """Draw unit-normal q, k and v on the device: by default two heads of 64, which share keys."""
    sizes = {"heads": 2, "kv_heads": 1, "dim": 64, "dtype": BF16} | sizes
    return QKV(*(x.to(DEVICE) for x in harness.qkv(n, kv, **sizes)))


# -- masks ----------------------------------------------------------------------------------------------


def block_mask(mod: Callable[..., Tensor], n: int = N, batch: int = 1, heads: int = 1) -> Mask:
    return create_block_mask(mod, batch, heads, n, n, DEVICE, BLOCK)


def documents(n: int) -> Any:
    lengths = [n // 3, 2, n // 5]
    ids = torch.arange(4).repeat_interleave(torch.tensor([*lengths, n - sum(lengths)]))
    return and_masks(causal(), document(ids=ids.to(DEVICE)))


def some_rows(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """A mask with single rows, and blocks of rows, that see no key."""
    return (q >= kv) & (q % 5 != 2) & ((q < BLOCK) | (q >= 2 * BLOCK))


def random_bits(n: int, heads: int) -> Callable[..., Tensor]:
    table = torch.rand(heads, n, n, device=DEVICE) < 0.3
    return lambda b, h, q, kv: table[h, q, kv]


MASKS: dict[str, Callable[[], Mask]] = {
    "full": lambda: full_mask(N, N, block=BLOCK),
    "causal": lambda: block_mask(causal()),
    "window": lambda: block_mask(sliding_window(BLOCK + 30, 7)),
    "documents": lambda: block_mask(documents(N)),
    "prefix": lambda: block_mask(prefix_lm(BLOCK + 11)),
    "dilated": lambda: block_mask(lambda b, h, q, kv: (q >= kv) & ((q - kv) % 3 == 0)),
    "random": lambda: block_mask(random_bits(N, 2), heads=2),
    "empty rows": lambda: block_mask(some_rows),
}


def relative(table: Tensor) -> Callable[..., Tensor]:
    """A score_mod that reads a bias [heads, 33] of each distance."""
    return lambda s, b, h, q, kv: s + table[h, (q - kv).clamp(-16, 16) + 16]


# -- runs -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Raise where the host waits for the device."""
    if ON_GPU:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if ON_GPU:
            torch.cuda.set_sync_debug_mode("default")


def start_of(x: QKV) -> tuple[Tensor, Tensor]:
    """Return gradients of out and lse to start from, the same for all calls of these shapes."""
    generator, shape = torch.Generator().manual_seed(1), x.q.shape[:3]
    dout = torch.randn(*shape, x.v.shape[3], generator=generator)
    return dout.to(x.q), torch.randn(shape, generator=generator).to(DEVICE)


def run(x: QKV, mask: Any, score: ScoreOf | None = None, captured: Sequence[Tensor] = (), *,
        passes: int = 2, **options: Any) -> Results:  # fmt: skip
    """Run the public call; with one pass it compiles no backward kernel."""
    return harness.run(x, mask, score, captured, start=start_of(x) if passes == 2 else None, **options)


def check(x: QKV, mask: Mask, score: ScoreOf | None = None, captured: Sequence[Tensor] = (), *,
          got: Results | None = None, start: harness.Start = None, passes: int = 2,
          **options: Any) -> Results:  # fmt: skip
    """Compare a call with float64 attention, see :func:`close`. The kernels' statistics are float32."""
    got = got or run(x, mask, score, captured, passes=passes, **options)
    dout, dlse = start = start or start_of(x)
    visible = mask.to_dense(x.q.shape[0], x.q.shape[1]).to(DEVICE)
    want = harness.oracle(x, visible, score, captured, start=start)
    leaves = [t.detach().requires_grad_() for t in captured]
    other = eager_attention(*x, mask, dout, dlse, score and score(*leaves), leaves)
    names = ("out", "dq", "dk", "dv", *(f"captured {i}" for i in range(len(captured))))
    others = (other.out, other.dq, other.dk, other.dv, *other.captured)
    for name, a, b, c in zip(names, (got.out, *got.grads), (want.out, *want.grads), others):
        close(name, a, b, c)
    for name in ("lse", "max_scores"):
        torch.testing.assert_close(
            getattr(got, name).double(), getattr(want, name), atol=1e-4, rtol=1e-5, msg=name
        )
    return got


def close(name: str, got: Tensor, want: Tensor, other: Tensor) -> None:
    """Assert errors within :func:`tritoncp.reference.dense.allowed_error` of float64."""
    assert got.shape == want.shape and got.dtype == other.dtype, name
    error, allowed = largest_error(got, want), allowed_error(other, want)
    assert error <= allowed, f"{name}: {error:.3g} off, allowed {allowed:.3g}"


def same(got: Results, want: Results) -> None:
    """Assert that results, and gradients of q, k and v, are equal bit for bit."""
    harness.same([*got[:3], *got.grads[:3]], [*want[:3], *want.grads[:3]])
