"""Tests with NaN and scores of any size, on both engines: lse agrees with out, and gradients are bounded."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.cases import Case, call, dense, tensors

pytestmark = pytest.mark.usefixtures("engine", "in_pieces")


def case_of(schedule: str = "one device", **fields: Any) -> Case:
    """Make a causal call in which single queries and the last block of them see no key. Its scale is no power
    of two, so that log2 units round."""
    ranks: dict[str, Any] = {"schedule": schedule, "world": 3, "balancer": "ptrr"}
    fields = {"dtype": torch.float32, **fields} | (ranks if schedule != "one device" else {})
    return Case(("hidden rows", 16), length=48, kv_length=48, dims=(8, 8), **fields)


PLACES = [  # of NaN
    pytest.param(engine, where, score, marks=[pytest.mark.long] * (engine == "kernels" and where in "qk"))
    for engine in ("cpu", "kernels")
    for where, score in (("q", "softcap"), ("k", "none"), ("q and k", "softcap"))
]


@pytest.mark.sample(6)
@pytest.mark.parametrize(("engine", "where", "score"), PLACES, indirect=["engine"])
@pytest.mark.parametrize("schedule", ["one device", "allgather", "ring", "fetch", "ulysses"])
def test_a_nan_is_in_every_answer_that_saw_it(schedule: str, where: str, score: str, engine: str) -> None:
    """On a GPU, unlike the CPU, a maximum drops NaN."""
    case = case_of(schedule, score=score)
    q, k, v = tensors(case).values()
    with torch.no_grad():
        if "q" in where:
            q[0, 0, 20] = math.nan
        if "k" in where:
            k[0, 1, 18] = math.nan
    got, want = call(case, q, k, v), dense(case, q.double(), k.double(), v.double())
    for name, a, b in zip(("out", "lse", "max_scores"), got, want, strict=True):
        assert bool(b.isnan().any()) and torch.equal(a.isnan(), b.isnan()), name
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert bool((got[1][~case.visible().any(-1)] == -math.inf).all())  # saw no key


def test_an_infinite_score_is_a_nan_in_out_and_lse_of_its_row() -> None:
    case = case_of()
    q, k, v = tensors(case).values()
    with torch.no_grad():
        k[0, 1, 5, 3] = math.inf
    out, lse, top = call(case, q, k, v)
    infinite = torch.zeros(lse.shape, dtype=torch.bool)
    infinite[:, 1] = case.visible()[:, 1, :, 5] & (q[:, 1, :, 3] > 0)
    seen = infinite | (top == -math.inf)
    assert infinite.any() and torch.equal(top == math.inf, infinite)
    assert torch.equal(lse.isnan(), infinite) and torch.equal(out.isnan().all(-1), infinite)
    assert bool(lse[~seen].isfinite().all())


def test_programs_that_share_keys_hand_a_nan_on() -> None:
    case = case_of(options={"SPLIT_KV": 2, "BLOCK_M": 16, "BLOCK_N": 16})
    q, k, v = tensors(case).values()
    with torch.no_grad():
        k[0, 1, 5] = math.nan
    for a, b in zip(call(case, q, k, v), dense(case, q, k, v), strict=True):
        assert torch.equal(a.isnan(), b.isnan())


def test_gradients_of_rows_with_a_nan_are_nan() -> None:
    """They are NaN although the gradient of out is finite."""
    q, k, v = tensors(case_of()).values()
    with torch.no_grad():
        q[0, 0, 20] = math.nan
    dq, dk, dv = torch.autograd.grad(call(case_of(), q, k, v)[0].sum(), (q, k, v))
    assert bool(dq[0, 0, 20].isnan().all()) and not bool(dq[0, 0, :20].isnan().any())
    for grad in (dk, dv):
        assert bool(grad[0, 0, :16].isnan().all()) and not bool(grad[0, 1].isnan().any())


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1e8, 1e12])
@pytest.mark.bar(5)
def test_no_probability_exceeds_one_however_large_scores_are(size: float, dtype: torch.dtype) -> None:
    """The forward pass is exact; for scores beyond the fractional digits of float32, gradients are bounded by
    the gradients for probabilities that are all one."""
    case = case_of(size=size, dtype=dtype)
    q, k, v = tensors(case).values()
    got, want = call(case, q, k, v), dense(case, q.double(), k.double(), v.double())
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(got[0].double(), want[0], **near)
    torch.testing.assert_close(got[1].double(), want[1], rtol=1e-5, atol=0)
    dout = torch.randn_like(got[0])
    dq, dk, dv = torch.autograd.grad(got[0], (q, k, v), dout)
    assert all(bool(x.isfinite().all()) for x in (dq, dk, dv))
    most = case.visible().mT.double() @ dout.abs().double()  # of all queries that see a key
    assert bool((dv.double().abs() <= most * 1.01 + 1e-6).all())
