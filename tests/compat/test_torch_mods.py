"""Score_mods and mask_mods of torch's flex attention tests: torch's blocks and answers; tests/test_fuzz.py
has the answers of both engines."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

import tritoncp
from tests.cases import Case, agree, answers, expected, named, tensors
from tests.compat.torch_mods import MASKS, SCORES
from tests.masks.random_masks import assert_same_lists
from tests.zoo import Sizes


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


CASES = [
    Case((mask, 0), score, batch=2, heads=2, group=2, loss="forward")
    for mask, score in zip(cycle(MASKS), SCORES)
]


@pytest.mark.parametrize("case", named(CASES))
def test_torch_gives_the_float64_answer_too(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own eager call in float64: the table means in torch what it means here."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    got, want = answers(case, tensors(case), call_torch), expected(case)
    agree(case, got | {"max_scores": want["max_scores"]}, want)
