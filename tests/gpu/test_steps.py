"""Races, order of streams and waits for the device, which the interpreter does not show; equal bits where
the documentation promises them."""

import contextlib
from collections.abc import Iterator

import pytest
import torch

from tests.gpu.support import BLOCK, MASKS, ON_GPU, SCORES, check, qkv, run, same
from tritoncp.masks.closed_forms import causal
from tritoncp.masks.mask import create_block_mask

LONG = 4096 if ON_GPU else 192
REPEATS = 25 if ON_GPU else 2


@pytest.fixture(autouse=True)
def by_the_rule(monkeypatch):
    """Ignore measured tiles, since bits are compared with those of engines without them."""
    monkeypatch.setenv("TRITONCP_CONFIG_DIR", "-")


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


@pytest.mark.bar(11)
def test_many_runs_give_the_same_bits():
    mask = create_block_mask(causal(), 1, 1, LONG, LONG, BLOCK_SIZE=BLOCK)
    x = qkv(n=LONG, heads=8, kv_heads=2, dim=128)
    first = run(x, mask)
    for _ in range(REPEATS):
        same(run(x, mask), first)


def test_gradients_of_captured_tensors_do_not_depend_on_the_run():
    """Gradients of captures agree up to rounding: atomics add them in any order."""
    score = SCORES["relative"]
    captured = score.captured(8)
    x, mask = qkv(heads=8, kv_heads=2), MASKS["causal"]()
    first = check(x, mask, score, captured)
    for _ in range(3):
        second = run(x, mask, score, captured)
        same(second, first)
        torch.testing.assert_close(second.captured, first.captured, rtol=1e-4, atol=1e-3)


def test_a_second_call_makes_nobody_wait():
    mask = MASKS["documents"]()
    x = qkv()
    first = run(x, mask)
    with no_waiting():
        second = run(x, mask)
    same(second, first)


def test_another_stream_sees_its_own_work():
    x, mask = qkv(), MASKS["causal"]()
    first = run(x, mask)
    if not ON_GPU:
        return same(run(x, mask), first)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        late = x._replace(q=x.q * 1.0)
        second = run(late, mask)
    torch.cuda.current_stream().wait_stream(stream)
    return same(second, first)
