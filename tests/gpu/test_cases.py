"""Any call is dense attention, on the GPU: every value of each factor of the grammar of tests/cases.py, on
one device and in simulated worlds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cases import LAYOUTS, PASSES, Case, answers, call, case_of, expected, tensors, tolerance
from tests.gpu.support import BF16, DEVICE, FP16, FP32, ON_GPU
from tests.zoo import MASKS

pytestmark = pytest.mark.filterwarnings("ignore:in natural order")
N = 517 if ON_GPU else 40  # no multiple of any block
ROUNDS = 3  # through the masks
FACTORS: dict[str, Any] = {
    "mask": tuple(name for name in MASKS if name != "sorted noise"),  # which sorts for every pair
    "score": ("none", "softcap", "by row", "hides", "slopes", "distances", "temperature", "bias of keys"),
    "schedule": ("auto", "allgather", "ring", "fetch", "ulysses", "ulysses+ring"),
    "world, balancer": ((1, None), (2, "ptrr"), (3, "ptrr"), (4, "head_tail"), (8, "contiguous")),
    "loss": PASSES,
    "dtype": (BF16, FP16, FP32),
    "heads, group": ((2, 1), (1, 8), (2, 3), (1, 14 if ON_GPU else 5)),
    "batch, first_row": ((1, 0), (2, 0), (3, 1)),
    "length, kv_length": ((N, N), (N // 3, N), (16, N), (N, N // 3), (1, N), (17, 17)),
    "dims": ((64, 64), (128, 128), (16, 16), (192, 128), (256, 256), (96, 96), (40, 24), (80, 80), (64, 128)),
    "block": (128, (128, 64), (100, 48)),
    "own_lists": ((False, False), (True, False), (False, True)),
    "layout": LAYOUTS,
    "sinks": (False, True),
    "scale": (None, 0.3, -0.2, 0.0),
    "options": (
        {},
        {"BLOCK_N": 32},
        {"num_warps": 8, "num_stages": 1},
        {"USE_TMA": False},
        {"SPLIT_KV": 3, "PACK_GQA": True},
    ),
}

CASES = [
    case_of({name: values[i % len(values)] for name, values in FACTORS.items()}, i)
    for i in range(ROUNDS * len(FACTORS["mask"]))
]


@pytest.mark.parametrize("case", CASES, ids=[f"{case.mask[0]}-{case.score}-{case.world}" for case in CASES])
def test_every_factor(case: Case) -> None:
    leaves = {
        name: x.detach().to(DEVICE).requires_grad_(x.requires_grad) for name, x in tensors(case).items()
    }
    want = expected(case)
    for name, value in answers(case, leaves, call).items():
        exact, statistic = want[name], name in ("lse", "max_scores")
        assert value.shape == exact.shape and value.device.type == DEVICE.type, name
        limit = 10 * tolerance(FP32, name) if statistic else 4 * tolerance(case.dtype, name)
        torch.testing.assert_close(
            value.double().cpu() / scale_of(exact), exact / scale_of(exact), rtol=0, atol=limit, msg=name
        )


def scale_of(x: torch.Tensor) -> float:
    """Return the largest finite value, at least 1."""
    return max([1.0, *x[x.isfinite()].abs().flatten().tolist()])
