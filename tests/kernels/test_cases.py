"""Any call on the kernels is dense attention: every value of each factor, and every pair of values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cases import FACTORS, PASSES, Case, case_of, check, named, of_torch, pairs, spread
from tests.device import ON_GPU

pytestmark = [pytest.mark.filterwarnings("ignore:.*in natural order"), pytest.mark.usefixtures("in_pieces")]
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"USE_TMA": True},
    {"FUSED_BACKWARD": True},
    {"PACK_GQA": True, "SPLIT_KV": 2},
    {"FLIP": True, "maxnreg": 128},  # a limit on registers, which no answer depends on
    {"FLIP": True, "FUSED_BACKWARD": True},
    dict.fromkeys(("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"), 16),
    {"FUSED_BACKWARD": True, "USE_TMA": True, "PACK_GQA": True, "SPLIT_KV": 3, "BLOCK_N": 16},
)
INTERPRETED: dict[str, Any] = {
    "world": (2, 1, 3),
    "length, kv_length": ((24, 24), (19, 30), (30, 19)),
    "heads, group": ((2, 1), (1, 3)),
    "batch, first_row": ((1, 0), (2, 0), (2, 1)),
    "loss": PASSES[1:],  # tests/kernels has calls without a backward pass
    "dims": ((40, 8), (3, 16), (16, 1), (1, 24)),  # two of the head dims have two pieces
    "options": OPTIONS,
}
N = 517  # no multiple of any block
OF_GPUS: dict[str, Any] = {
    "mask": tuple(name for name in FACTORS["mask"] if name != "sorted noise"),  # which sorts for every pair
    "world": (1, 2, 3, 4, 8),
    "length, kv_length": ((N, N), (N // 3, N), (16, N), (N, N // 3), (1, N), (17, 17)),
    "heads, group": ((2, 1), (1, 8), (2, 3), (1, 14)),
    "batch, first_row": ((1, 0), (2, 0), (3, 1)),
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
    "dims": ((64, 64), (128, 128), (16, 16), (192, 128), (256, 256), (96, 96), (40, 24), (80, 80), (64, 128)),
    "block": (128, (128, 64), (100, 48)),
    "options": ({}, {"BLOCK_N": 32}, {"num_warps": 8, "num_stages": 1}, {"USE_TMA": False},
                {"SPLIT_KV": 3, "PACK_GQA": True}),
}  # fmt: skip
SIZES = FACTORS | (OF_GPUS if ON_GPU else INTERPRETED)
EACH = spread(SIZES | {"world": (2, 1)}, len(FACTORS["mask"]) * (3 if ON_GPU else 1))
OF_TORCH = of_torch(SIZES, world=(1,), **({"dims": ((64, 64),)} if ON_GPU else {}))  # some in float64
APART = ("mask", "score")  # these two need most of the rows, since they are paired with each other


@pytest.mark.sample(60 if ON_GPU else 30)
@pytest.mark.parametrize("case", named([*EACH, *OF_TORCH]))
def test_every_factor(case: Case) -> None:
    check(case)


@pytest.mark.long
@pytest.mark.parametrize("case", named([case_of(row, seed) for seed, row in enumerate(pairs(SIZES, APART))]))
@pytest.mark.bar(1)
def test_every_pair_of_factors(case: Case) -> None:
    check(case)


@pytest.mark.nightly
@pytest.mark.parametrize("case", named([case_of(row, seed) for seed, row in enumerate(pairs(SIZES))]))
def test_every_pair_of_factors_and_every_mask_with_every_score(case: Case) -> None:
    check(case)
