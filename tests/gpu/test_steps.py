"""Races, order of streams and waits for the device, which the interpreter does not show; equal bits where
the documentation promises them."""

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import tritoncp
from tests.gpu.support import BF16, BLOCK, DEVICE, MASKS, ON_GPU, SCORES, N, check, normal, qkv, run, same
from tritoncp.kernels.engine import TritonEngine
from tritoncp.kernels.launch import State
from tritoncp.kernels.operands import Mods
from tritoncp.masks.closed_forms import causal
from tritoncp.masks.mask import create_block_mask
from tritoncp.planning.placement import Placement
from tritoncp.planning.plan import Plan

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


# -- steps of an engine -----------------------------------------------------------------------------------


def keys_between(plan: Plan, begin: int, end: int) -> Plan:
    """A step of the plan whose KV buffer holds only the keys [begin, end)."""
    first = [begin, *range((begin // plan.kv.block + 1) * plan.kv.block, end, plan.kv.block)]
    slots = torch.tensor([[(a - begin, a, b - a) for a, b in zip(first, [*first[1:], end])]])
    kv = Placement(plan.kv.length, plan.kv.block, (slots.int(),), (end - begin,))
    return replace(plan, kv=kv, handle=None)


def empty_like_stats(x: Tensor) -> Tensor:
    return torch.empty(x.shape[:3], dtype=torch.float32, device=DEVICE)


def test_keys_in_steps_from_state_to_state():
    """Each step leaves (acc, m, l), the next one starts from it: the float64 answer, and the same bits when
    the same steps are run again into other memory."""
    mask = MASKS["causal"]()
    x, plan = qkv(dim=128), tritoncp.make_plan(mask)
    engine = TritonEngine(Mods(), 128**-0.5)
    results = []
    for _ in range(2):
        out, lse = torch.empty_like(x.q), empty_like_stats(x.q)
        state = State(
            torch.empty(x.q.shape, dtype=torch.float32, device=DEVICE), *(empty_like_stats(x.q) for _ in "ml")
        )
        cuts = [0, BLOCK, BLOCK + 21, N]
        for i, (begin, end) in enumerate(itertools.pairwise(cuts)):
            tables = keys_between(plan, begin, end).tables(DEVICE, 1, 2)
            engine.forward(
                x.q, x.k[:, :, begin:end], x.v[:, :, begin:end], tables, out=out, lse=lse, state=state,
                load_state=i > 0, store_state=end < N,
            )()  # fmt: skip
        results.append((out, lse))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    whole = run(x, mask)
    check(x, mask, got=whole._replace(out=results[0][0], lse=results[0][1]))


def test_queries_in_chunks_give_the_same_bits():
    """Rows of a chunk cut at a block boundary: out, lse and dq are those of the whole, bit for bit; dK and dV
    added step by step are within rounding."""
    mask = create_block_mask(causal(), 1, 1, LONG, LONG, BLOCK_SIZE=BLOCK)
    x = qkv(n=LONG, dim=64)
    whole = run(x, mask)
    engine = TritonEngine(Mods(), 64**-0.5)
    plan = tritoncp.make_plan(mask)
    dk, dv = (torch.zeros(t.shape, dtype=torch.float32, device=DEVICE) for t in (x.k, x.v))
    for begin in range(0, LONG, LONG // 2 // BLOCK * BLOCK or BLOCK):
        end = min(LONG, begin + (LONG // 2 // BLOCK * BLOCK or BLOCK))
        rows = slice(begin, end)
        q, dout = x.q[:, :, rows], x.dout[:, :, rows]
        tables = queries_between(plan, begin, end).tables(DEVICE, 1, 2)
        out, lse, delta = torch.empty_like(q), empty_like_stats(q), empty_like_stats(q)
        engine.forward(q, x.k, x.v, tables, out=out, lse=lse, max_scores=empty_like_stats(q))()
        assert torch.equal(out, whole.out[:, :, rows]) and torch.equal(lse, whole.lse[:, :, rows])
        engine.delta(out, dout, x.dlse[:, :, rows].contiguous(), delta)()
        dq = torch.empty_like(q)
        engine.dq(q, x.k, x.v, dout, lse, delta, tables, dq=dq)()
        assert torch.equal(dq, whole.dq[:, :, rows])
        engine.dkdv(q, x.k, x.v, dout, lse, delta, tables, dk=dk, dv=dv, add=True)()
    check(x, mask, got=whole._replace(dk=dk.to(BF16), dv=dv.to(BF16)))


def queries_between(plan: Plan, begin: int, end: int) -> Plan:
    first = list(range(begin, end, plan.q.block))
    slots = torch.tensor([[(a - begin, a, min(plan.q.block, end - a)) for a in first]])
    q = Placement(plan.q.length, plan.q.block, (slots.int(),), (end - begin,))
    return replace(plan, q=q, handle=None)


def test_a_group_split_over_programs_sums_to_the_same():
    """Too few programs to fill the device: dK and dV come as partial sums of the group's heads."""
    mask = MASKS["causal"]()
    x = qkv(heads=8, kv_heads=1)
    check(x, mask)
    engine, plan = TritonEngine(Mods(), 64**-0.5), tritoncp.make_plan(mask)
    tables = plan.tables(DEVICE, 1, 8)
    whole = run(x, mask)
    delta = empty_like_stats(x.q)
    engine.delta(whole.out, x.dout, x.dlse, delta)()
    parts = normal(2, 1, 8, N, 64, dtype=torch.float32)
    args = (x.q, x.k, x.v, x.dout, whole.lse, delta, tables)
    engine.dkdv(*args, dk=parts[0], dv=parts[1], split=8)()
    dk, dv = parts.sum(2, keepdim=True).to(BF16)
    check(x, mask, got=whole._replace(dk=dk, dv=dv))
