"""Real ranks, each with its own process: PyTorch's context-parallel matrix, and rows of our own.

The matrix is that of PyTorch's ``test/distributed/tensor/test_attention.py``: two ranks, float32, eight
heads of 32, out and lse within atol 2e-6 and rtol 1e-5.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tritoncp
from tests.cases import Case
from tests.multiprocess import ranks
from tests.multiprocess.case_on_ranks import check_ranks
from tritoncp import Mask, and_masks, causal, create_block_mask, document
from tritoncp.distributed.schedules import SCHEDULES
from tritoncp.reference.dense import dense_attention

F64 = torch.float64
CLOSE = {"atol": 2e-6, "rtol": 1e-5}
GRADS_CLOSE = {"atol": 5e-6, "rtol": 1e-5}  # theirs are compared with float32, whose rounding they share
BALANCERS = (None, "head_tail", "ptrr")


def documents(batch: int, length: int, count: int = 28) -> list[list[int]]:
    """``count`` document lengths for each batch row."""
    g = torch.Generator().manual_seed(10)
    rows = []
    for _ in range(batch):
        cuts = [0, *sorted(torch.randperm(length - 1, generator=g)[: count - 1].add(1).tolist()), length]
        rows.append([b - a for a, b in itertools.pairwise(cuts)])
    return rows


def mask_of(kind: str, batch: int, length: int) -> Mask:
    if kind == "causal":
        return create_block_mask(causal(), 1, 1, length, length)
    mod = and_masks(causal(), document(lengths=documents(batch, length)))
    return create_block_mask(mod, batch, 1, length, length)


def one_rank(group: Any, qkv: list[Tensor], mask: Mask, balancer: str | None) -> list[Tensor]:
    """A training step's attention on this rank; everything back in global order, on every rank alike."""
    plan = tritoncp.make_plan(mask, group, balancer=balancer)
    qkv = [x.detach().requires_grad_() for x in qkv]
    q, k, v = (tritoncp.shard(x, plan, dim=2, side=side) for x, side in zip(qkv, ("q", "kv", "kv")))
    out, lse = tritoncp.flex_attention(q, k, v, None, plan, return_lse=True, mesh=group)
    whole = [tritoncp.unshard(x.detach(), plan, group, dim=2) for x in (out, lse)]
    out.sum().backward()
    for x in qkv:  # zeros but for the own positions
        torch.distributed.all_reduce(x.grad, group=group)
    return whole + [x.grad for x in qkv]


def check(kind: str, batch: int, length: int, balancer: str | None) -> None:
    qkv = [torch.rand(batch, 8, length, 32, requires_grad=True) for _ in range(3)]  # uniform, as theirs
    mask = mask_of(kind, batch, length)
    double = [x.detach().double().requires_grad_() for x in qkv]
    dense = dense_attention(*double, mask)
    want = [dense.out, dense.lse, *torch.autograd.grad(dense.out.sum(), double)]
    for answers in ranks.run(2, one_rank, qkv, mask, balancer, timeout=900):
        for place, (actual, right) in enumerate(zip(answers, want, strict=True)):
            torch.testing.assert_close(
                actual.double(), right.detach(), **(CLOSE if place < 2 else GRADS_CLOSE)
            )


PRODUCT = [
    *itertools.product(["causal"], (1, 8), (512, 2048), BALANCERS),
    *itertools.product(["documents"], (2, 4, 8), (512, 2048), BALANCERS),
]
MARKS = pytest.mark.long, pytest.mark.nightly  # by the time of interpreted kernels
FAST = [("causal", 1, 512, "head_tail"), ("documents", 2, 512, "ptrr")]


@pytest.mark.parametrize(
    ("kind", "batch", "length", "balancer"),
    [pytest.param(*row, marks=[] if row in FAST else [MARKS[row[1] * row[2] > 4096]]) for row in PRODUCT],
)
def test_pytorchs_matrix(kind: str, batch: int, length: int, balancer: str | None) -> None:
    check(kind, batch, length, balancer)


CASES = {
    "documents": Case(
        ("causal documents of rows", 6), "distances", "auto", 2, "ptrr", batch=2, heads=2, group=4
    ),
    "bits": Case(("bits", 0), "alibi", "auto", 3, "locality", heads=2, group=2, own_lists=(True, True)),
    "hidden rows": Case(("hidden rows", 2), "of documents", "auto", 4, "head_tail"),
}


@pytest.mark.usefixtures("cpu_engine")
@pytest.mark.filterwarnings("ignore:.*heads cannot be divided")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("name", "dtype"), zip(CASES, (torch.bfloat16, F64, torch.float32)), ids=str)
@pytest.mark.bar(12)
def test_processes_answer_as_the_oracle(name: str, dtype: torch.dtype, schedule: str) -> None:
    check_ranks(replace(CASES[name], schedule=schedule, dtype=dtype))
