"""Errors about lengths: tensors [B, S, H, D] for [B, H, S, D], and plans of masks without lengths."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask

import tritoncp

S = 32


def x(*shape):
    return torch.zeros(shape)


def mask(q_len=S, kv_len=S):
    return tritoncp.create_block_mask(tritoncp.causal(), 1, 1, q_len, kv_len, BLOCK_SIZE=16)


def plan(world_size):
    return tritoncp.make_plan(mask(), world_size=world_size)


def call(block_mask, q, k=None, v=None):
    return tritoncp.flex_attention(q, q if k is None else k, q if k is None else k, block_mask=block_mask)


def shards(block_mask, q):
    return tritoncp.simulate(2).flex_attention([q] * 2, [q] * 2, [q] * 2, block_mask=block_mask)


EXCHANGED = {  # calls, and the first tensor that is exchanged: its name, heads and rows
    "mask": (lambda: call(mask(), x(1, S, 2, 16)), "query", 32, 2),
    "torch's mask": (
        lambda: call(torch_block_mask(tritoncp.causal(), 1, 1, S, S, device="cpu"), x(1, S, 2, 16)),
        "query", 32, 2,
    ),
    "keys alone": (lambda: call(mask(), x(1, 2, S, 16), x(1, S, 2, 16)), "key", 32, 2),
    "shards of a plan": (lambda: shards(plan(2), x(1, S // 2, 4, 16)), "query", 16, 4),
    "shards of a mask": (lambda: shards(mask(), x(1, S // 2, 4, 16)), "query", 16, 4),
}  # fmt: skip


@pytest.mark.parametrize("case", EXCHANGED)
def test_exchanged_dimensions_are_named_with_the_remedy(case):
    make, name, heads, rows = EXCHANGED[case]
    with pytest.raises(ValueError, match=rf"{name} has {heads} heads and {rows} rows") as error:
        make()
    assert f"the mask is for {heads} rows: [batch, heads, sequence, head dim] is needed" in str(error.value)
    assert str(error.value).endswith(f"pass {name}.transpose(1, 2)")


OTHERS = {  # heads that are by chance as many as rows of the mask
    "whole sequences": (lambda: shards(plan(2), x(1, S // 2, S, 16)), "it was not sharded"),
    "a whole sequence each": (
        lambda: shards(mask(), x(1, S // 2, S, 16)),
        "every rank holds the whole sequence",
    ),
    "another length": (lambda: call(mask(), x(1, 4, 16, 16)), "16 rows, the mask is for 32"),
    "heads that share keys": (lambda: call(mask(), x(1, S, 16, 16), x(1, 8, 16, 16)), "without enable_gqa"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_mistakes_keep_their_messages(case):
    make, message = OTHERS[case]
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "transpose" not in str(error.value)


def test_as_many_heads_as_rows_pass():
    q = x(1, S, S, 16)
    assert call(mask(), q).shape == q.shape


WITHOUT_LENGTHS = {
    "closed form": (
        tritoncp.causal(),
        "causal() has no lengths, and a plan needs Q_LEN and KV_LEN",
        "make_plan(create_block_mask(causal(), None, None, Q_LEN, KV_LEN), mesh)",
    ),
    "documents": (
        tritoncp.causal() & tritoncp.document(lengths=[3, 5]),
        "its document mask is for 8 tokens: Q_LEN = KV_LEN = 8",
        "make_plan(create_block_mask(and_masks(causal(), document(ids=[8])), None, None, 8, 8), mesh)",
    ),
    "function": (
        lambda b, h, q, kv: q >= kv,
        "mask_mod has no lengths, and a plan needs Q_LEN and KV_LEN",
        "make_plan(create_block_mask(mask_mod, None, None, Q_LEN, KV_LEN), mesh)",
    ),
    "None": (None, "None has no lengths", "make_plan(full_mask(Q_LEN, KV_LEN), mesh)"),
}


@pytest.mark.parametrize("case", WITHOUT_LENGTHS)
@pytest.mark.parametrize("named", [False, True])
def test_a_plan_of_a_mask_without_lengths_is_refused_with_the_call_that_gives_it_lengths(case, named):
    mod, reason, remedy = WITHOUT_LENGTHS[case]
    with pytest.raises(TypeError) as error:
        tritoncp.make_plan({"layer": mod} if named else mod, world_size=2)
    assert reason in str(error.value) and str(error.value).endswith(remedy)
    assert mod is None or "create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)" in str(error.value)
