"""Real ranks, each in a separate process: cases of PyTorch's matrix, and further rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.cases import Case, expected
from tests.multiprocess import ranks
from tests.multiprocess.case_on_ranks import check_ranks, on_rank
from tritoncp.distributed.schedules import SCHEDULES

F64 = torch.float64
CLOSE = {"atol": 2e-6, "rtol": 1e-5}
GRADS_CLOSE = {"atol": 5e-6, "rtol": 1e-5}  # compared with float32, which rounds alike


@pytest.mark.long
@pytest.mark.parametrize(
    ("mask", "batch", "balancer"),
    [
        ("causal", 1, "head_tail"),
        pytest.param("causal documents of rows", 2, "ptrr", marks=pytest.mark.long),
    ],
)
def test_interpreted_kernels_on_ranks_are_right_in_float32(mask: str, batch: int, balancer: str) -> None:
    """As in PyTorch's ``test/distributed/tensor/test_attention.py``: heads of 32, out and lse within
    atol 2e-6 and rtol 1e-5. tests/test_fuzz.py draws other cases in simulated worlds."""
    case = Case(
        (mask, 4), world=2, balancer=balancer, batch=batch, heads=2, length=512, kv_length=512,
        dims=(32, 32), dtype=torch.float32, block=128,
    )  # fmt: skip
    want = expected(case)
    for got in ranks.run(2, on_rank, case, lambda group: group, timeout=900):
        for name, exact in want.items():
            close = GRADS_CLOSE if name.startswith("gradient") else CLOSE
            torch.testing.assert_close(got[name].double(), exact, **close, msg=name)


CASES = {
    "documents": Case(
        ("causal documents of rows", 6), "distances", "auto", 2, "ptrr", batch=2, heads=2, group=4
    ),
    "bits": Case(("bits", 0), "alibi", "auto", 3, "locality", heads=2, group=2, own_lists=(True, True)),
    "hidden rows": Case(("hidden rows", 2), "of documents", "auto", 4, "head_tail"),
}


@pytest.mark.sample(1)
@pytest.mark.usefixtures("cpu_engine")
@pytest.mark.parametrize(("name", "dtype"), zip(CASES, (torch.bfloat16, F64, torch.float32)), ids=str)
@pytest.mark.bar(12)
def test_processes_have_the_results_of_the_reference(name: str, dtype: torch.dtype) -> None:
    check_ranks(*(replace(CASES[name], schedule=schedule, dtype=dtype) for schedule in SCHEDULES))
