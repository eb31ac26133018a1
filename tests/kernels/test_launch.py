"""Cached launches: reused for tensors of the same layouts, and only for these."""

from __future__ import annotations

import gc
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from triton.runtime.jit import mangle_type

import tritoncp
from tests.kernels.support.harness import qkv
from tritoncp import causal, create_block_mask, make_plan
from tritoncp.call import engine_factory
from tritoncp.call.engine_factory import ENGINES
from tritoncp.kernels.engine import TritonEngine
from tritoncp.kernels.layouts import layout_of, specialisation_of
from tritoncp.kernels.operands import Mods
from tritoncp.planning.step_tables import ForwardStep
from tritoncp.reference.dense import dense_attention

S = 32


def biased(bias: Tensor, shift: int) -> Any:
    return lambda s, b, h, i, j: s + bias[h, (i - j).abs() + shift]


def test_one_engine_serves_captures_of_the_same_layouts_and_no_others() -> None:
    """Values, strides, addresses, gradients and numbers change from call to call, and so do the answers."""
    x, plan = qkv(S, heads=2, dtype=torch.float64), make_plan(create_block_mask(causal(), 1, 1, S, S))
    wide = torch.randn(4 * S + 8, 2, dtype=torch.float64)
    tables = [wide.T[:, 2 : 2 * S + 2].contiguous(), wide.T, wide.flatten()[1:].view(-1)[: 8 * S].view(2, -1)]
    engines = []
    for bias in [*tables, torch.randn_like(tables[0]), tables[0].clone().requires_grad_()]:
        for shift in (1, 5):
            score = biased(bias, shift)
            got = tritoncp.flex_attention(*x, score, plan)
            want = dense_attention(*x, plan.mask, score).out
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
            engines.append(len(ENGINES.of(plan.derived)))
    assert engines == [1, 2, 3, 4, 5, 6, 6, 6, 7, 8]


@pytest.mark.long
def test_an_engine_keeps_no_captured_tensor_alive() -> None:
    x, plan = qkv(S, heads=2), make_plan(create_block_mask(causal(), 1, 1, S, S))
    bias = torch.randn(2, 2 * S, requires_grad=True)
    leaf = x.q.requires_grad_()
    tritoncp.flex_attention(leaf, x.k, x.v, biased(bias, 0), plan).sum().backward()
    memory = StorageWeakRef(bias.untyped_storage())
    del bias
    gc.collect()
    assert memory.expired() and len(ENGINES.of(plan.derived))


def test_backward_passes_of_other_cotangents_have_separate_launches() -> None:
    """Broadcast, transposed and plain gradients of the output come to one plan."""
    x, plan = qkv(S, heads=2, dtype=torch.float64), make_plan(create_block_mask(causal(), 1, 1, S, S))
    leaves = [t.requires_grad_() for t in x]
    out, lse = tritoncp.flex_attention(*leaves, plan, return_lse=True)
    want_out, want_lse, _ = dense_attention(*leaves, plan.mask)
    plain = torch.randn(out.shape, dtype=out.dtype)
    crossed = torch.randn(1, 2, out.shape[3], S, dtype=out.dtype).transpose(2, 3)
    for dout in (plain, crossed, plain[:, :, :1].expand_as(plain), plain.clone()):
        for dlse in (None, torch.randn_like(lse)):
            outputs = ((out, want_out, dout), (lse, want_lse, dlse))[: 1 if dlse is None else 2]
            got, want = (
                torch.autograd.grad(
                    [s[i] for s in outputs], leaves, [s[2] for s in outputs], retain_graph=True
                )
                for i in (0, 1)
            )
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.interpreted
def test_wrong_layouts_of_a_cached_launch_are_found_by_interpreted_kernels() -> None:
    x, plan = qkv(S, heads=2), make_plan(create_block_mask(causal(), 1, 1, S, S))
    tables = plan.tables(x.q.device, 1, 2)
    out, lse = torch.empty_like(x.q), torch.empty(1, 2, S)
    engine = TritonEngine(Mods(), 0.25, launches={})
    engine.forward(ForwardStep(*x, tables, out, lse))()
    with pytest.raises(AssertionError, match=r"forward_kernel.*layouts"):
        engine.forward(ForwardStep(x.q.transpose(1, 2), x.k, x.v, tables, out, lse))


def test_a_kernel_is_launched_as_it_was_compiled_first() -> None:
    x, plan = qkv(S, heads=2), make_plan(create_block_mask(causal(), 1, 1, S, S))
    results = torch.empty_like(x.q), torch.empty(1, 2, S)
    step = ForwardStep(*x, plan.tables(x.q.device, 1, 2), *results)
    launch = TritonEngine(Mods(), 0.25).forward(step).parts[0]
    compiled, launched = [mock.MagicMock() for _ in range(2)], launch._replace(compiled=[])
    launched.compiled.extend(compiled)
    launched()
    compiled[0].__getitem__.assert_called_once_with(launch.grid)
    compiled[0][launch.grid].assert_called_once_with(*launch.values)
    assert not compiled[1].mock_calls


def test_simulated_ranks_of_unlike_tensors_share_an_engine() -> None:
    """One rank's queries are transposed, another's are not: each has separate tables, and thus launches."""
    world = tritoncp.simulate(2)
    mask = create_block_mask(causal(), 1, 1, 64, 64, BLOCK_SIZE=16)
    plan, x = world.make_plan(mask), qkv(64, heads=2, dtype=torch.float64)
    q, k, v = (world.shard(t, plan, dim=2) for t in x)
    crossed = [q[0].transpose(1, 2).contiguous().transpose(1, 2), q[1]]
    got = world.flex_attention(crossed, k, v, plan)
    for a, b in zip(got, world.flex_attention(q, k, v, plan), strict=True):
        assert torch.equal(a, b)


@pytest.mark.long
def test_slices_of_unaligned_tensors_have_separate_launches() -> None:
    """No base lies at a multiple of 16 bytes. An all-gather in pieces computes the second head group in a
    launch of its own: it starts 12 bytes past its base, modulo 16, at a multiple for some bases only."""
    world = tritoncp.simulate(2)
    plan = world.make_plan(create_block_mask(causal(), 1, 1, S, S, BLOCK_SIZE=16), schedule="allgather")
    x = [[t.requires_grad_() for t in world.shard(torch.randn(1, 2, S, 8), plan, dim=2)] for _ in range(3)]
    leaves = [t for shards in x for t in shards]
    size, strides = x[0][0].shape, (S * 8 + 3, S * 4 + 3, 8, 1)  # a head ends 3 floats before the next

    def moved(t: Tensor, offset: int) -> Tensor:
        """t, ``offset`` floats after a multiple of 16 bytes."""
        room = torch.zeros(2 * (S * 8 + 3) + 16)
        assert room.data_ptr() % 16 == 0
        return room.as_strided_scatter(t, size, strides, offset).as_strided(size, strides, offset)

    def results(q: list[Tensor], k: list[Tensor], v: list[Tensor]) -> list[Tensor]:
        outs = world.flex_attention(q, k, v, plan)
        return [*outs, *torch.autograd.grad([out.sum() for out in outs], leaves)]

    want, aligned = results(*x), set()
    for offset in (1, 2, 1, 6):
        views = [[moved(t, offset) for t in shards] for shards in x]
        q = views[0][0]
        assert q.data_ptr() % 16 and q.stride() == strides
        aligned.add(q[:, 1:].data_ptr() % 16 == 0)
        for got, expected in zip(results(*views), want, strict=True):
            torch.testing.assert_close(got, expected)
    assert aligned == {True, False}


@pytest.mark.bar(17)
def test_kept_engines_are_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(engine_factory, "MAX_ENGINES", 3)
    plan = make_plan(create_block_mask(causal(), 1, 1, S, S))
    for heads in range(1, 7):
        x = qkv(S, heads=heads)
        tritoncp.flex_attention(*x, plan)
        assert len(ENGINES.of(plan.derived)) <= 3


def test_memory_beyond_32_bits_changes_the_layout_only_on_amd(monkeypatch: Any) -> None:
    for hip in (None, "6.4"):
        monkeypatch.setattr(torch.version, "hip", hip)
        layouts = [
            layout_of(torch.empty(size, dtype=torch.uint8, device="meta")[:1])
            for size in (9, (1 << 31) - 1, 1 << 31)
        ]
        assert layouts[0] == layouts[1] and (layouts[1] != layouts[2]) is bool(hip)


def test_integers_have_the_specialisations_of_triton() -> None:
    ends = [1, 16, 1 << 31, 1 << 63]
    numbers = [end + step for end in (*ends, -ends[2]) for step in (-1, 0, 1)]

    def compiled_for(number: int) -> tuple[Any, ...]:
        return mangle_type(number), number == 1, number % 16 == 0

    for one, other in itertools.combinations(numbers, 2):
        is_one = specialisation_of(one) == specialisation_of(other)
        assert is_one == (compiled_for(one) == compiled_for(other)), (one, other)


def test_products_of_delta_are_rounded_before_they_are_added() -> None:
    """Threads that hold copies of a row's sum store the same bits."""
    x = torch.zeros(1, 1, 8, 16)
    assert TritonEngine(Mods(), 1.0).delta(x, x, None, x[..., 0]).args["enable_fp_fusion"] is False
