"""Each case of torch's flex attention tests on both engines, against dense float64 attention.

The CPU engine runs every case; interpreted kernels run a third of the first cases of each score_mod,
mask_mod, dtype, block size and layout of heads, and `make test-all` the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import tritoncp
from tests.compat.torch_cases import CASES, F32, F64, TOLERANCE, Case, first_of_each, visible_pairs
from tests.compat.torch_mods import MASKS, SCORES, Dims
from tests.kernels.support.harness import QKV, agree, close, cotangents, oracle, run
from tests.masks.random_masks import assert_same_lists

FIRST = first_of_each(CASES)
ON_KERNELS = FIRST[::3]
REST = [case for case in CASES if case not in ON_KERNELS]


def inputs(case: Case) -> tuple[QKV, list[Any]]:
    """Make q, k and v, and the captured values."""
    x = QKV(*(torch.randn(shape, dtype=F64).to(case.dtype) for shape in case.dims.shapes()))
    captured = SCORES[case.score].captured(case.dims) if case.score else []
    wide = case.dtype if case.learned or case.dtype == F64 else F32
    return x, [t.to(wide) if t.is_floating_point() else t for t in captured]


def score_of(case: Case) -> Any:
    return SCORES[case.score].bind if case.score else None


def block_mask(case: Case, create: Callable = tritoncp.create_block_mask):
    if case.mask is None:
        return None
    mod, dims = MASKS[case.mask](case.dims), case.dims
    return create(mod, *case.lists, dims.q, dims.keys, device="cpu", BLOCK_SIZE=case.block)


def check(case: Case) -> None:
    """Assert that the call has the answer of dense float64 attention."""
    x, captured = inputs(case)
    start = cotangents(x) if case.passes == "training" else None
    visible = visible_pairs(case.mask and MASKS[case.mask](case.dims), x)
    got = run(x, block_mask(case), score_of(case), captured, start=start)
    assert (got.out.dtype, got.lse.dtype) == (case.dtype, F64 if case.dtype == F64 else F32)
    agree(got, oracle(x, visible, score_of(case), captured, start=start), TOLERANCE[case.dtype])


def names(cases: list[Case]) -> list[str]:
    return [case.name for case in cases]


@pytest.mark.parametrize("engine", ["cpu"], indirect=True)
@pytest.mark.parametrize("case", CASES, ids=names(CASES))
def test_cpu_engine(case: Case, engine: str) -> None:
    check(case)


@pytest.mark.parametrize("engine", ["kernels"], indirect=True)
@pytest.mark.parametrize("case", ON_KERNELS, ids=names(ON_KERNELS))
def test_kernels(case: Case, engine: str) -> None:
    check(case)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["kernels"], indirect=True)
@pytest.mark.parametrize("case", REST, ids=names(REST))
def test_kernels_on_the_other_cases(case: Case, engine: str) -> None:
    check(case)


@pytest.mark.parametrize("size", [32, 128, (64, 32)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_masks_have_torchs_blocks(name: str, size: int | tuple[int, int]) -> None:
    mod = MASKS[name](Dims(2, 2, 200, kv=230))
    own, torchs = (
        create(mod, 2, 2, 200, 230, device="cpu", BLOCK_SIZE=size)
        for create in (tritoncp.create_block_mask, torch_flex.create_block_mask)
    )
    assert_same_lists(own.to_block_mask(), torchs)


@pytest.mark.parametrize("case", FIRST, ids=names(FIRST))
def test_torch_gives_the_float64_answer_too(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own eager call in float64: the table means in torch what it means here."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    x, captured = inputs(case._replace(dtype=F64))
    score, mask_mod = score_of(case), case.mask and MASKS[case.mask](case.dims)
    want = oracle(x, visible_pairs(mask_mod, x), score, captured, start=None)
    mask = block_mask(case, torch_flex.create_block_mask)
    aux = torch_flex.AuxRequest(lse=True)
    score = score and score(*captured)
    out, more = torch_flex.flex_attention(*x, score, mask, enable_gqa=True, return_aux=aux)
    close(out, want.out, "out", TOLERANCE[F64])
    close(more.lse, want.lse, "lse", TOLERANCE[F64])
