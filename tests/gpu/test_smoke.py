"""The first tests of a GPU run: kernels compile, launch and read the right rows."""

import pytest
import torch

from tests.gpu.support import BF16, FP16, MASKS, N, block_mask, check, qkv, run
from tritoncp import causal


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_causal_attention_is_right(dtype):
    check(qkv(heads=4, kv_heads=2, dim=128, dtype=dtype), MASKS["causal"]())


def test_the_drop_in_takes_a_closed_form_and_no_mask_at_all():
    x = qkv(dim=128)
    check(x, MASKS["causal"](), got=run(x, causal()))
    check(x, MASKS["full"](), got=run(x, None))


def test_rows_are_not_mixed_up():
    """One query sees one key: out is that key's value, exactly."""
    x = qkv()
    mask = block_mask(lambda b, h, q, kv: kv == (q * 7 + 3) % N)
    at = (torch.arange(N, device=x.q.device) * 7 + 3) % N
    assert torch.equal(run(x, mask).out, x.v[:, :, at].expand_as(x.q))
