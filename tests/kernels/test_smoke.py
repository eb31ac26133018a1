"""The first tests of a run on a GPU: kernels compile, launch and read the right rows."""

import pytest
import torch

import tritoncp
from tests.device import TOKENS
from tests.kernels.support.harness import MASKS, agree, cotangents, oracle, qkv, run

CALLS = {
    "no mask": (None, "full", torch.bfloat16),
    "a closed form": (tritoncp.causal(), "causal", torch.float16),
    "blocks": (MASKS["intervals"](TOKENS, 128), "intervals", torch.bfloat16),
}


@pytest.mark.parametrize("name", CALLS)
def test_attention_is_right(name: str) -> None:
    mask, dense, dtype = CALLS[name]
    x = qkv(TOKENS, heads=4, kv_heads=2, dim=128, dtype=dtype)
    start = cotangents(x)
    agree(run(x, mask, start=start), oracle(x, MASKS[dense](TOKENS), start=start))


def test_rows_are_not_mixed_up() -> None:
    """One query sees one key: out is that key's value, exactly."""
    x = qkv(TOKENS, heads=2, kv_heads=1, dim=64, dtype=torch.bfloat16)
    mask = tritoncp.create_block_mask(lambda b, h, q, kv: kv == (q * 7 + 3) % TOKENS, 1, 1, TOKENS, TOKENS)
    seen = (torch.arange(TOKENS) * 7 + 3) % TOKENS
    out = tritoncp.flex_attention(*x, mask, enable_gqa=True)
    assert torch.equal(out, x.v[:, :, seen].expand_as(x.q))
