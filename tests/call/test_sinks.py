"""Tests of sinks: a sink equals an extra key with the logit as score and value zero, visible to all
queries."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.cases import Case, agree, answers, call, check, tensors
from tritoncp.reference.dense import dense_attention


def one_more_key(case: Case, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> list[Tensor]:
    k, v = (torch.cat([x, x.new_zeros(*x.shape[:2], 1, x.shape[3])], 2) for x in (k, v))
    visible = torch.cat([case.visible(), torch.ones(*case.sizes[:3], 1, dtype=torch.bool)], 3)
    score = lambda s, b, h, q_idx, kv: torch.where(kv == case.kv_length, sinks[h], s)  # noqa: E731
    return list(dense_attention(q, k, v, visible, score))


@pytest.mark.sample(2)
@pytest.mark.usefixtures("cpu_engine")
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("mask", ["causal documents of rows", "bits", "hidden rows"])
def test_a_sink_acts_as_one_more_key(mask: str, world: int) -> None:
    case = Case((mask, 1), world=world, batch=2, heads=2, group=4, sinks=True)
    got, want = (answers(case, tensors(case), function) for function in (call, one_more_key))
    del got["max_scores"], want["max_scores"]  # a sink does not count as a score
    agree(case, got, want)


@pytest.mark.long
@pytest.mark.usefixtures("cpu_engine")
def test_a_compiled_call_takes_sinks() -> None:
    check(Case(sinks=True, compiled=True))


def test_a_sink_that_is_minus_infinity_takes_nothing() -> None:
    case = Case(("hidden rows", 1), dims=(16, 16), dtype=torch.float32)
    out, lse, _ = call(case, **tensors(case), sinks=torch.full((2,), -torch.inf))
    want, want_lse, _ = call(case, **tensors(case))
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
