"""Tests of masks without lengths: the BlockMask that torch makes where no mask is given."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask, _create_empty_block_mask, noop_mask

import tritoncp
from tritoncp import simulate

S = 140


def qkv():
    return [torch.randn(2, heads, S, 16) for heads in (4, 4, 4)]


def one_block(mask_mod) -> BlockMask:
    """Make a mask for any lengths, as torch's empty mask, with a mask_mod."""
    lists = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=1 << 30, mask_mod=mask_mod, seq_lengths=(1, 1))


MASKS = {
    "empty": lambda: _create_empty_block_mask(torch.empty(1), torch.empty(1)),
    "noop": lambda: torch_flex.create_block_mask(noop_mask, 1, 1, S, S, "cpu"),
    "mask_mod": lambda: one_block(lambda b, h, q, kv: q + h >= kv),
}

CALLS = [
    *((name, compiled, "cpu") for name in MASKS for compiled in (False, True)),
    ("mask_mod", False, "kernels"),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "compiled", "engine"), CALLS, indirect=["engine"])
@pytest.mark.usefixtures("eager_flex")
def test_torchs_answer(name, compiled, engine):
    torch._dynamo.reset()
    call = tritoncp.flex_attention
    call = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    x, mask = qkv(), MASKS[name]()
    out = call(*x, block_mask=mask)
    torch.testing.assert_close(out, torch_flex.flex_attention(*x, block_mask=mask), rtol=1e-5, atol=1e-5)
    if name != "mask_mod":
        assert torch.equal(out, call(*x))


@pytest.mark.usefixtures("cpu_engine")
@pytest.mark.parametrize("name", MASKS)
def test_ranks_in_natural_order_have_torchs_answer(name):
    world, x, mask = simulate(2), qkv(), MASKS[name]()
    outs = world.flex_attention(*[t.chunk(2, 2) for t in x], block_mask=mask)
    torch.testing.assert_close(
        torch.cat(outs, 2), tritoncp.flex_attention(*x, block_mask=mask), rtol=1e-5, atol=1e-5
    )


def test_a_plan_needs_lengths():
    for name in ("empty", "mask_mod"):
        with pytest.raises(TypeError, match="no lengths"):
            tritoncp.make_plan(MASKS[name](), world_size=2)
