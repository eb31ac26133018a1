"""Tests of the operations that torch's FlopCounterMode counts: the products of visible pairs."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as torch_flex
from torch.utils.flop_counter import FlopCounterMode

import tritoncp
from tritoncp import causal, create_block_mask, simulate
from tritoncp.ops import engine_factory

S, D, E, BATCH, HEADS = 96, 16, 8, 2, 4


@pytest.fixture(autouse=True)
def eager_engine(monkeypatch):
    """Use the eager engine: the counter sees ops, not kernels."""
    monkeypatch.setattr(engine_factory, "uses_triton", lambda device: False)


def qkv(s: int = S, batch: int = BATCH):
    shapes = (HEADS, D), (2, D), (2, E)
    return [torch.randn(batch, heads, s, width, requires_grad=True) for heads, width in shapes]


def count(call):
    """Return the operations of a call's forward and backward pass."""
    with FlopCounterMode(display=False) as forward:
        outs = call()
    loss = sum(out.sum() for out in (outs if isinstance(outs, list) else [outs]))
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


def expected(pairs: int):
    return 2 * pairs * (D + E), 2 * pairs * (3 * D + 2 * E)


def attend(q, k, v, mask=None, **options):
    return tritoncp.flex_attention(q, k, v, block_mask=mask, enable_gqa=True, **options)


def test_without_a_mask_the_counts_are_torchs(monkeypatch):
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    x = qkv()
    with FlopCounterMode(display=False) as counter:
        torch_flex.flex_attention(*[t.detach() for t in x], enable_gqa=True)
    backward = torch.utils.flop_counter.sdpa_backward_flop_count(
        (BATCH, HEADS, S, E), (BATCH, HEADS, S, D), (BATCH, HEADS, S, D), (BATCH, HEADS, S, E)
    )
    assert count(lambda: attend(*x)) == (counter.get_total_flops(), backward)


MODS = {
    "causal": causal(),
    "code": lambda b, h, q, kv: (q - kv) % 3 == h,
    "batch": lambda b, h, q, kv: q + b >= kv,
    "empty": lambda b, h, q, kv: q < 0,
}


@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("fake", [False, True])
def test_visible_pairs_count(name, fake):
    mask = create_block_mask(MODS[name], BATCH, HEADS, S, S, BLOCK_SIZE=32)
    pairs = int(mask.to_dense(BATCH, HEADS).sum())
    if not fake:
        assert count(lambda: attend(*qkv(), mask)) == expected(pairs)
        return
    with FakeTensorMode():
        x = [torch.empty_like(t, requires_grad=True) for t in map(torch.empty, [t.shape for t in qkv()])]
        assert count(lambda: attend(*x, mask)) == expected(pairs)


def test_a_closed_form_counts_at_the_calls_lengths():
    pairs = BATCH * HEADS * S * (S + 1) // 2
    assert count(lambda: attend(*qkv(), causal())) == expected(pairs)
    x = [t.detach().to("meta").requires_grad_() for t in qkv()]
    assert count(lambda: attend(*x, causal())) == expected(pairs)


def test_micro_batches_count_their_own_rows():
    mask = create_block_mask(MODS["batch"], 4, 1, S, S, BLOCK_SIZE=32)
    dense = mask.to_dense(4, HEADS)
    for first in (0, 2):
        call = partial(attend, *qkv(), mask, batch_offset=first)
        assert count(call) == expected(int(dense[first : first + 2].sum()))


@pytest.mark.parametrize("schedule", ["ring", "allgather", "fetch", "ulysses"])
def test_ranks_count_the_pairs_of_their_own_queries(schedule):
    """A world of ranks in one process counts all pairs; a plan's view counts those of its rank."""
    world = simulate(2)
    mask = create_block_mask(causal(), 1, 1, S, S, BLOCK_SIZE=16)
    plan = world.make_plan(mask, schedule=schedule, balancer=None)
    xs = [[t.detach().requires_grad_() for t in world.shard(x, plan, dim=2)] for x in qkv()]
    total = BATCH * HEADS * S * (S + 1) // 2
    counts = count(lambda: list(world.flex_attention(*xs, plan, enable_gqa=True)))
    assert counts == expected(total)


def test_compiled_calls_are_counted():
    torch._dynamo.reset()
    fast = torch.compile(attend, backend="aot_eager", fullgraph=True)
    x = qkv()
    fast(*x, causal())
    assert count(lambda: fast(*x, causal())) == expected(BATCH * HEADS * S * (S + 1) // 2)


@pytest.mark.parametrize("first", ["tritoncp", "torch.utils.flop_counter"])
def test_either_order_of_imports(first):
    """The counter's module loads Triton, which importing tritoncp must not; its formulas register later."""
    code = f"""
import sys, torch, {first}
import tritoncp
assert {first == "tritoncp"} == ("torch.utils.flop_counter" not in sys.modules)
from torch.utils.flop_counter import FlopCounterMode
x = torch.randn(1, 2, 32, 16)
with FlopCounterMode(display=False) as counter:
    tritoncp.flex_attention(x, x, x)
assert counter.get_total_flops() == 4 * 2 * 32 * 32 * 16
assert "tritoncp.forward" in str(counter.get_flop_counts()["Global"])
"""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
