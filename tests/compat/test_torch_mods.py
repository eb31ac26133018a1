"""Score_mods and mask_mods of torch's flex attention tests on both engines, against dense float64 attention.

The CPU engine runs two calls of each; interpreted kernels run half of these, and `make test-all` the others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

import tritoncp
from tests.cases import Case, agree, answers, check, expected, named, spread, tensors
from tests.compat.torch_mods import FLOAT64, MASKS, SCORES
from tests.masks.random_masks import assert_same_lists
from tests.zoo import Sizes

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
FACTORS: dict[str, Any] = {
    "score": tuple(SCORES),
    "mask": tuple(MASKS),
    "dtype": (F32, F16, BF16, F64),
    "heads, group": ((2, 1), (2, 2), (1, 4)),
    "batch, first_row": ((1, 0), (2, 0), (3, 0)),
    "lengths": ((64, 64), (48, 48), (32, 64), (53, 53)),
    "dims": ((16, 16), (16, 32), (32, 16), (4, 4)),
    "block": (32, 16, (16, 32), (32, 16), 128),
    "own_lists": ((False, False), (True, False), (True, True)),
    "layout": ("dense", "one row of keys"),
    "loss": ("out and lse", "forward"),
}
CASES = [
    replace(case, dtype=F64) if case.score in FLOAT64 else case for case in spread(FACTORS, 2 * len(SCORES))
]


@pytest.mark.parametrize("engine", ["cpu"], indirect=True)
@pytest.mark.parametrize("case", named(CASES))
def test_cpu_engine(case: Case, engine: str) -> None:
    check(case)


@pytest.mark.parametrize("engine", ["kernels"], indirect=True)
@pytest.mark.parametrize("case", named(CASES[::2]))
def test_kernels(case: Case, engine: str) -> None:
    check(case)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["kernels"], indirect=True)
@pytest.mark.parametrize("case", named(CASES[1::2]))
def test_kernels_on_the_other_cases(case: Case, engine: str) -> None:
    check(case)


@pytest.mark.parametrize("size", [32, 128, (64, 32)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_masks_have_torchs_blocks(name: str, size: int | tuple[int, int]) -> None:
    mod = MASKS[name](Sizes(2, 2, 200, 230), 0).mod
    own, torchs = (
        create(mod, 2, 2, 200, 230, device="cpu", BLOCK_SIZE=size)
        for create in (tritoncp.create_block_mask, torch_flex.create_block_mask)
    )
    assert_same_lists(own.to_block_mask(), torchs)


def call_torch(case: Case, q: Tensor, k: Tensor, v: Tensor, learned: Any = None) -> list[Tensor]:
    mask = torch_flex.create_block_mask(case.rule.mod, *case.sizes, device="cpu", BLOCK_SIZE=case.block)
    aux, score = torch_flex.AuxRequest(lse=True), case.score_mod(learned)
    out, more = torch_flex.flex_attention(q, k, v, score, mask, enable_gqa=True, return_aux=aux)
    return [out, more.lse, torch.zeros_like(more.lse)]  # torch has no max_scores on CPU


@pytest.mark.parametrize("case", named(CASES[::2]))
def test_torch_gives_the_float64_answer_too(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own eager call in float64: the table means in torch what it means here."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    case = replace(case, dtype=F64, loss="forward")
    got, want = answers(case, tensors(case), call_torch), expected(case)
    agree(case, got | {"max_scores": want["max_scores"]}, want)
