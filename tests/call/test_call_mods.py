"""Tests of mods that cannot be translated: a mask_mod becomes a bitmap, a score_mod raises an error."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
import triton
import triton.language as tl
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask

import tritoncp
from tests.kernels.support.harness import agree, cotangents, oracle, over_ranks, qkv
from tritoncp import make_plan, mods
from tritoncp.call import call_mods
from tritoncp.call.call_mods import tabulate, translate_mask
from tritoncp.core.records import replace
from tritoncp.reference.dense import dense_attention

S = 44  # neither the q block nor the kv block divides it
BLOCK = (16, 12)  # a kv block that is no multiple of 8 bits
IDS = torch.arange(S).fmod(7).sort().values
SUMS = torch.cumsum(IDS, 0)
NOISE = torch.rand(2, 4, S, generator=torch.Generator().manual_seed(3))


def by_sort(b, h, q, kv):
    return (SUMS.sort().values[q] - SUMS.sort().values[kv]) % 3 != 1


def by_batch_and_head(b, h, q, kv):
    return torch.cat([NOISE, NOISE], 2).sort(2).values[b, h, q + kv] > 0.4


def inputs(batch=2, heads=4, kv_heads=2, dtype=torch.float32):
    shapes = ((batch, heads, S, 16), (batch, kv_heads, S, 16), (batch, kv_heads, S, 24))
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def check_ranks(mask, world_size, balancer, heads=4):
    """Check that outputs and gradients of simulated ranks equal the dense reference."""
    x = qkv(S, batch=2, heads=heads, kv_heads=heads // 2, v_dim=24)
    plan, start = make_plan(mask, world_size=world_size, balancer=balancer), cotangents(x)
    agree(over_ranks(x, plan, start=start), oracle(x, plan.mask, start=start))


def block_mask(mod):
    return tritoncp.create_block_mask(mod, 1, 1, S, S, BLOCK_SIZE=BLOCK)


@pytest.mark.sample(1)
def test_a_mask_listed_for_one_head_is_evaluated_for_every_head_and_batch_row(engine):
    check_ranks(block_mask(by_batch_and_head), 2, "ptrr", heads=2)


def test_bits_of_a_ranks_blocks_equal_the_mask():
    plan = make_plan(block_mask(by_sort), world_size=3, rank=1)
    look_up = tabulate(plan, [1], 1, 1)
    q, kv = torch.meshgrid(torch.arange(S), torch.arange(S), indexing="ij")
    rows, cols = q // BLOCK[0], kv // BLOCK[1]
    own = (plan.mask.runs.to_kinds()[0, 0] == 0)[rows, cols] & (plan.owners[0] == 1)[rows]
    at = own.nonzero(as_tuple=True)
    zero = torch.zeros_like(at[0])
    assert torch.equal(look_up(zero, zero, *at), by_sort(zero, zero, *at)) and own.any()
    bits = inspect.getclosurevars(look_up).nonlocals["bits"]
    assert len(bits) == len(torch.unique(rows[at] * 100 + cols[at]))


@pytest.mark.usefixtures("cpu_engine")
def test_bits_are_made_once_for_a_plan(monkeypatch):
    evaluations = []
    monkeypatch.setattr(call_mods, "tabulate", lambda *args: evaluations.append(args) or tabulate(*args))
    plan = make_plan(block_mask(by_sort), world_size=1)
    q, k, v = inputs()
    first = tritoncp.flex_attention(q, k, v, plan, enable_gqa=True)
    second = tritoncp.flex_attention(q, k, v, plan, enable_gqa=True)
    assert len(evaluations) == 1 and torch.equal(first, second)
    assert translate_mask(plan, q) is translate_mask(plan, q)


@pytest.mark.usefixtures("cpu_engine")
def test_all_ranks_of_a_simulated_world_have_bits_even_if_rank_0_needs_none():
    def late(b, h, q, kv):
        return (q < 16) | (SUMS.sort().values[q] % 5 > SUMS.sort().values[kv] % 4)

    check_ranks(block_mask(late), 3, None)


def test_an_untranslatable_score_mod_names_operation_line_and_the_way_out():
    def bias(score, b, h, q, kv):
        return score + torch.sort(NOISE[0, 0]).values[q]  # the error names this line

    q, k, v = inputs()
    line = bias.__code__.co_firstlineno + 1
    message = rf"aten\.sort.* at {re.escape(__file__)}:{line} .*\n.*@triton\.jit.*from_triton"
    with pytest.raises(mods.Untranslatable, match=message):
        tritoncp.flex_attention(q, k, v, bias, enable_gqa=True)


@triton.jit
def jit_dilated(b, h, q_idx, kv_idx, caps):
    return (q_idx >= kv_idx) & ((q_idx - kv_idx) % tl.cast(caps[0], tl.int32) == 0)


@pytest.mark.parametrize("kind", ["torch", "compact"])
def test_a_hand_written_mask_runs_unchanged(kind):
    step = 3
    lists = torch_block_mask(
        lambda b, h, q, kv: (q >= kv) & ((q - kv) % step == 0), 1, 1, S, S, device="cpu", BLOCK_SIZE=16
    )
    expected = tritoncp.from_block_mask(lists)
    lists.mask_mod = mods.Mod.from_triton(jit_dilated, captures=[step])
    mask = lists if kind == "torch" else replace(expected, mask_mod=lists.mask_mod, interval=None)
    q, k, v = (x.detach() for x in inputs(1, 2, 1))
    for _ in range(2):
        out = tritoncp.flex_attention(q, k, v, mask, enable_gqa=True)
        oracle = dense_attention(q.double(), k.double(), v.double(), expected)
        torch.testing.assert_close(out.double(), oracle.out, atol=2e-6, rtol=1e-5)
    lists.mask_mod = mods.Mod.from_triton(jit_dilated, captures=[2])
    if kind == "torch":  # other numbers, other plan
        assert not torch.equal(out, tritoncp.flex_attention(q, k, v, mask, enable_gqa=True))
