"""The facts of a call that are kept with its plan are the facts of the call."""

import itertools

import pytest
import torch

from tritoncp import causal, create_block_mask, flex_attention, make_plan
from tritoncp.api import attention
from tritoncp.call.facts import Facts

S = 64
SLOPES = torch.rand(4), torch.rand(4, requires_grad=True)


def scaled(factor):
    return lambda score, b, h, q, kv: score * factor


def biased(slope):
    return lambda score, b, h, q, kv: score + slope[h] * (q - kv)


SCORES = None, scaled(2), scaled(0.5), *map(biased, SLOPES)
TILE, SINKS = {"kernel_options": {"BLOCK_M": 32}}, {"sinks": torch.ones(4)}
OPTIONS = {}, {"scale": 0.5}, TILE, {"return_lse": True}, SINKS


@pytest.fixture
def calls(monkeypatch):
    """Record the calls that reach the forward pass, each with its tensors. The pass does not run."""
    seen = []

    def keep(calls, tensors):
        seen.append((calls[0], *tensors))
        return [torch.zeros_like(tensors[0]), tensors[0].new_zeros(tensors[0].shape[:3])]

    monkeypatch.setattr(attention, "attend", keep)
    return seen


def run_kinds(plans):
    """Run calls that differ in each of their parts."""
    dtypes = torch.float32, torch.float64
    for plan, dtype, kv_heads, dim in itertools.product(plans, dtypes, (4, 2), (8, 16)):
        q, k = torch.randn(2, 4, S, dim, dtype=dtype), torch.randn(1, kv_heads, S, dim, dtype=dtype)
        for score, options in itertools.product(SCORES, OPTIONS):
            flex_attention(q, k, k[..., :8], score, plan, enable_gqa=True, **options)


def test_kept_facts_equal_the_facts_of_the_call_and_are_made_once(calls, monkeypatch):
    whole = make_plan(create_block_mask(lambda b, h, q, kv: q >= kv + b, 4, 1, S, S))
    plans = make_plan(create_block_mask(causal(), 1, 1, S, S)), *(whole.batch_rows(i, 2) for i in (0, 2))
    run_kinds(plans)
    for call, *tensors in calls:
        assert call.facts == Facts.of(call, *tensors)
    made, make = [], Facts.of
    monkeypatch.setattr(Facts, "of", lambda *arguments: made.append(arguments) or make(*arguments))
    first = [call.facts for call, *_ in calls]
    calls.clear()
    run_kinds(plans)
    assert not made and all(old is call.facts for old, (call, *_) in zip(first, calls, strict=True))
