"""Tests of the operations that torch's FlopCounterMode counts: the products of visible pairs."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._higher_order_ops.flex_attention import flex_attention as torch_forward
from torch._higher_order_ops.flex_attention import flex_attention_backward as torch_backward
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import tritoncp
from tests.cases import Case
from tests.command_process import run_code
from tests.zoo import MASKS
from tritoncp import Selection, SelectionAuxRequest, causal, create_block_mask, simulate

S, D, E, BATCH, HEADS = 96, 16, 8, 2, 4

pytestmark = pytest.mark.usefixtures("cpu_engine")


def qkv(kv_heads: int = 2):
    shapes = (HEADS if kv_heads > 1 else 1, D), (kv_heads, D), (kv_heads, E)
    return [torch.randn(BATCH, heads, S, width, requires_grad=True) for heads, width in shapes]


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


def test_counts_of_calls_without_a_mask_are_torchs():
    """The formulas that torch registers for its attention, which has as many key heads as query heads."""
    q, k, v = (t.expand(-1, HEADS, -1, -1) for t in qkv(kv_heads=1))
    out = torch.empty(BATCH, HEADS, S, E)
    wants = (
        flop_registry[torch_forward](q, k, v),
        flop_registry[torch_backward](q, k, v, out, out[..., 0], out),
    )
    assert count(lambda: attend(*qkv())) == wants


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", [*MASKS, "nothing"])
@pytest.mark.parametrize("fake", [False, True])
def test_only_visible_pairs_count(name, fake):
    case = Case(("not", ("everything", 0)) if name == "nothing" else (name, 5), batch=BATCH, heads=HEADS,
                length=S, kv_length=S, block=32)  # fmt: skip
    mask, pairs = case.block_mask(), int(case.visible().sum())
    if not fake:
        assert count(lambda: attend(*qkv(), mask)) == expected(pairs)
        return
    with FakeTensorMode():
        x = [torch.empty_like(t, requires_grad=True) for t in map(torch.empty, [t.shape for t in qkv()])]
        assert count(lambda: attend(*x, mask)) == expected(pairs)


def test_closed_forms_count_at_the_calls_lengths_and_every_pair_counts_where_a_mask_has_no_values():
    pairs = BATCH * HEADS * S * (S + 1) // 2
    assert count(lambda: attend(*qkv(), causal())) == expected(pairs)
    x = [t.detach().to("meta").requires_grad_() for t in qkv()]
    assert count(lambda: attend(*x, causal())) == expected(pairs)
    lists = torch_block_mask(lambda b, h, q, kv: q >= kv, 1, 1, S, S, "cpu").to("meta")
    assert count(lambda: attend(*x, lists)) == expected(BATCH * HEADS * S * S)


@pytest.mark.parametrize(("count_of_row", "block_size"), [(0, 1), (5, 1), (2, 16), (S, 1)])
def test_of_a_query_as_many_visible_keys_count_as_it_may_select(count_of_row, block_size):
    mask = create_block_mask(causal(), 1, 1, S, S, BLOCK_SIZE=32)
    blocks = S // block_size
    indices = torch.arange(count_of_row).clamp(max=blocks - 1).expand(BATCH, 1, S, -1)
    call = partial(attend, *qkv(), mask, selected=Selection(indices, block_size))
    most = count_of_row * block_size
    assert count(call) == expected(BATCH * HEADS * sum(min(i + 1, most) for i in range(S)))


def test_probabilities_of_selected_keys_count_as_the_scores_that_they_are_made_of():
    indices, aux = torch.arange(6).expand(BATCH, 1, S, -1), SelectionAuxRequest(probabilities=True)
    call = partial(attend, *qkv(), causal(), selected=Selection(indices))
    pairs = BATCH * HEADS * sum(min(i + 1, 6) for i in range(S))
    forward, backward = expected(pairs)
    assert count(lambda: call(return_aux=aux)[0]) == (forward + 2 * pairs * D, backward)


def test_flops_of_a_micro_batch_are_counted_for_its_rows():
    mask = create_block_mask(lambda b, h, q, kv: q + b >= kv, 4, 1, S, S, BLOCK_SIZE=32)
    dense = mask.to_dense(4, HEADS)
    for first in (0, 2):
        call = partial(attend, *qkv(), mask, batch_offset=first)
        assert count(call) == expected(int(dense[first : first + 2].sum()))


@pytest.mark.parametrize("schedule", ["ring", "allgather", "fetch", "ulysses"])
def test_flops_of_a_rank_are_counted_for_its_queries(schedule):
    """The ranks of a world in one process, whose tensors have no values, count all pairs together."""
    world = simulate(2)
    mask = create_block_mask(causal(), 1, 1, S, S, BLOCK_SIZE=16)
    plan = world.make_plan(mask, schedule=schedule, balancer=None)
    xs = [[t.detach().to("meta").requires_grad_() for t in world.shard(x, plan, dim=2)] for x in qkv()]
    total = BATCH * HEADS * S * (S + 1) // 2
    counts = count(lambda: list(world.flex_attention(*xs, plan, enable_gqa=True)))
    assert counts == expected(total)


def test_compiled_calls_are_counted():
    torch._dynamo.reset()
    fast = torch.compile(attend, backend="aot_eager")  # fullgraph=True is an error under any such mode
    x = qkv()
    fast(*x, causal())
    assert count(lambda: fast(*x, causal())) == expected(BATCH * HEADS * S * (S + 1) // 2)


@pytest.mark.long
def test_formulas_register_after_either_import():
    """The counter's module loads Triton, which importing tritoncp must not; its formulas register later."""
    run_code("""
import sys, torch, tritoncp
from tritoncp import flex_attention
assert "torch.utils.flop_counter" not in sys.modules
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask
from torch.utils.flop_counter import FlopCounterMode
x = torch.randn(1, 2, 32, 16)
with FlopCounterMode(display=False) as counter:
    flex_attention(x, x, x)
assert counter.get_total_flops() == 4 * 2 * 32 * 32 * 16
""")
