"""Tests of argument checks: each message names the argument that was passed and the remedy."""

from __future__ import annotations

import re

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest

import tritoncp
from tests.api.mistakes import MISTAKES, TYPE_ERRORS, S, whole, x
from tritoncp import causal
from tritoncp.api.attention import flex_attention
from tritoncp.api.plans import make_plan


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_raises_an_error_with_a_remedy(name):
    make, arguments, advice = MISTAKES[name]
    with pytest.raises(TypeError if name in TYPE_ERRORS else ValueError) as caught:
        make()
    text = " ".join(str(caught.value).split())
    assert re.search(arguments, text) and re.search(advice, text), text


AFTER_A_GOOD_CALL = {
    "heads that share keys": {"k": x(1, 1, S, 16), "v": x(1, 1, S, 16)},
    "another dtype": {"k": x(dtype=torch.float64)},
    "another length": {"q": x(1, 2, S // 2, 16)},
    "another batch": {"k": x(3, 2, S, 16), "v": x(3, 2, S, 16)},
    "values of other heads": {"v": x(1, 1, S, 16)},
    "an empty head": {"q": x(1, 2, S, 0)},
    "one dimension fewer": {"q": x(2, S, 16)},
    "no tensor": {"k": [1.0]},
    "logits for other heads": {"sinks": x(3)},
    "logits that are no tensor": {"sinks": [0.0, 0.0]},
    "both ways to lse": {"return_lse": True, "return_aux": AuxRequest(lse=True)},
    "aux as a flag": {"return_aux": True},
    "another layout": {"q": x().to_sparse()},
    "a subclass": {"q": torch.nn.Parameter(x(1, 2, S, 264))},
}


@pytest.mark.usefixtures("cpu_engine")
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("name", AFTER_A_GOOD_CALL)
def test_a_valid_call_does_not_admit_an_invalid_one(name, planned):
    """Checks are skipped only for calls equal to one that passed; other calls raise the same errors as
    before."""
    mask, wrong = whole(), dict(AFTER_A_GOOD_CALL[name])
    arguments = [wrong.pop(which, x()) for which in "qkv"]
    with pytest.raises((TypeError, ValueError)) as first:
        flex_attention(*arguments, make_plan(mask) if planned else mask, **wrong)
    mask = make_plan(mask) if planned else mask
    for _ in range(2):
        flex_attention(x(), x(), x(), mask)
        flex_attention(x(), x(1, 1, S, 16), x(1, 1, S, 16), mask, enable_gqa=True, sinks=x(2))
        flex_attention(x(), x(), x(), mask, return_aux=AuxRequest(lse=True))
        with pytest.raises(type(first.value), match=re.escape(str(first.value))):
            flex_attention(*arguments, mask, **wrong)


@pytest.mark.usefixtures("cpu_engine")
def test_valid_calls_pass():
    """The valid counterpart of each mistake is accepted."""
    q, k = torch.randn(2, 4, S, 16), torch.randn(1, 2, S, 16)
    out = flex_attention(q, k, k, whole(), enable_gqa=True)  # keys of one batch row serve both
    both = k.expand(2, -1, -1, -1)
    assert torch.equal(out, flex_attention(q, both, both, whole(), enable_gqa=True))
    assert torch.equal(out, flex_attention(q, both, both, None, whole(), enable_gqa=True))
    assert torch.equal(out, flex_attention(q, both, both, causal(), enable_gqa=True))
    heads_as_rows = torch.randn(1, S, S, 16)
    assert flex_attention(heads_as_rows, heads_as_rows, heads_as_rows, whole()).shape == heads_as_rows.shape
    same = flex_attention(q, both, both, whole(), enable_gqa=True, positions=torch.arange(S))
    assert torch.equal(out, same)
    score = flex_attention(q, both, both, lambda s, b, h, q, kv, scale=1: s * scale, whole(), enable_gqa=True)
    torch.testing.assert_close(out, score)


def test_the_warning_about_order_shows_the_line_of_the_call():
    world, mask = tritoncp.simulate(2), tritoncp.create_block_mask(causal(), 1, 1, 512, 512)
    x = [torch.ones(1, 1, 256, 16)] * 2
    with pytest.warns(UserWarning, match="places blocks in ptrr order") as record:
        world.flex_attention(x, x, x, world.make_plan(mask))
    (warning,) = [warning for warning in record if "places blocks" in str(warning.message)]
    assert warning.filename == __file__
