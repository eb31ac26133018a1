"""The fused backward pass: dQ from the loop of dK/dV, for every order of its programs."""

import pytest
import torch

from tests.device import LONG, ON_GPU, REPEATS
from tests.kernels.support.harness import (
    MASKS,
    QKV,
    agree,
    check,
    cotangents,
    engine_of,
    oracle,
    qkv,
    run,
    same,
    transposed_products,
)


@pytest.mark.sample(2)
@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("name", MASKS)
def test_gradients(name: str, tma: bool) -> None:
    """Cases have rows that see no key, ragged ends, two pieces of channels, and grouped heads."""
    x = qkv(50, batch=2, heads=2, kv_heads=1, dim=40, v_dim=16)
    with transposed_products():
        check(x, MASKS[name](50), FUSED_BACKWARD=True, USE_TMA=tma)


def test_programs_that_add_to_the_same_rows_lose_no_addend() -> None:
    """Sums agree with those of separate kernels up to rounding, every time."""
    n = LONG // 2
    x = qkv(n, heads=4, dim=64 if ON_GPU else 16)
    mask, start = MASKS["causal"](n, 128 if ON_GPU else 16), cotangents(x)
    want = run(x, mask, start=start)
    with transposed_products():
        for _ in range(REPEATS):
            agree(run(x, mask, start=start, FUSED_BACKWARD=True), want)


@pytest.mark.bits
def test_deterministic_wins_over_fused() -> None:
    x = qkv(50)
    assert engine_of(x, FUSED_BACKWARD=True).fused and not engine_of(x).fused
    assert not engine_of(x, FUSED_BACKWARD=True, deterministic=True).fused
    start = cotangents(x)
    plain, fused_run = (
        run(x, MASKS["full"](50), start=start, deterministic=True, FUSED_BACKWARD=fused)
        for fused in (False, True)
    )
    same(fused_run, plain)


@pytest.mark.bar(6)
def test_keys_past_the_end_add_nothing() -> None:
    """Their rows in a tile have score 0, whose exponential overflows next to scores around -300."""
    x = qkv(50)
    x, start = QKV(x.q.abs() + 1, torch.full_like(x.k, -40), x.v), cotangents(x)
    for name in MASKS:
        mask = MASKS[name](50)
        with transposed_products():
            agree(run(x, mask, start=start, FUSED_BACKWARD=True), oracle(x, mask, start=start), 1e-3)
