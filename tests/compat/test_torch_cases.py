"""Each case of torch's flex attention tests on both engines, against dense float64 attention.

The CPU engine runs every case; interpreted kernels run a third of the first cases of each score_mod,
mask_mod, dtype, block size and layout of heads, and `make test-all` the others.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

import tritoncp
from tests.compat.dense import F32, F64, Answer, agree, answer, exact
from tests.compat.torch_cases import CASES, Case, first_of_each
from tests.compat.torch_mods import MASKS, SCORES

FIRST = first_of_each(CASES)
ON_KERNELS = FIRST[::3]
REST = [case for case in CASES if case not in ON_KERNELS]


def inputs(case: Case) -> tuple[list[Tensor], list[Tensor], list[Tensor] | None]:
    """(q, k and v; captured tensors; gradients of out and lse, None without a backward pass)."""
    q, k, v = (torch.randn(shape, dtype=F64).to(case.dtype) for shape in case.dims.shapes())
    captured = SCORES[case.score].captured(case.dims) if case.score else []
    wide = case.dtype if case.learned or case.dtype == F64 else F32
    captured = [x.to(wide) if x.is_floating_point() else x for x in captured]
    if case.passes == "inference":
        return [q, k, v], captured, None
    start = (
        torch.randn(*q.shape[:3], v.shape[3], dtype=F64).to(case.dtype),
        torch.randn(q.shape[:3], dtype=F64),
    )
    return [q, k, v], captured, [start[0], start[1].to(F32 if case.dtype != F64 else F64)]


def block_mask(case: Case, create: Callable = tritoncp.create_block_mask):
    if case.mask is None:
        return None
    mod, dims = MASKS[case.mask](case.dims), case.dims
    return create(mod, *case.lists, dims.q, dims.keys, device="cpu", BLOCK_SIZE=case.block)


def run(case: Case) -> tuple[Answer, Answer]:
    """(the call's answer, the float64 answer)."""
    tensors, captured, start = inputs(case)
    form = SCORES[case.score] if case.score else None
    mask_mod = MASKS[case.mask](case.dims) if case.mask else None
    bound = [x.requires_grad_(case.learned and x.is_floating_point()) for x in captured]
    want = exact(tensors, form and form.bind, bound, mask_mod, start)
    leaves = [x.requires_grad_(start is not None) for x in tensors]
    out, lse = tritoncp.flex_attention(
        *leaves,
        form and form.bind(*bound),
        block_mask(case),
        enable_gqa=leaves[0].shape[1] != leaves[1].shape[1],
        return_lse=True,
    )
    assert (out.dtype, lse.dtype) == (case.dtype, F64 if case.dtype == F64 else F32)
    return answer(out, lse, [*leaves, *(x for x in bound if x.requires_grad)], start), want


def names(cases: list[Case]) -> list[str]:
    return [case.name for case in cases]


@pytest.mark.parametrize("engine", ["cpu"], indirect=True)
@pytest.mark.parametrize("case", CASES, ids=names(CASES))
def test_cpu_engine(case: Case, engine: str) -> None:
    agree(*run(case), case.dtype)


@pytest.mark.parametrize("engine", ["kernels"], indirect=True)
@pytest.mark.parametrize("case", ON_KERNELS, ids=names(ON_KERNELS))
def test_kernels(case: Case, engine: str) -> None:
    agree(*run(case), case.dtype)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["kernels"], indirect=True)
@pytest.mark.parametrize("case", REST, ids=names(REST))
def test_kernels_on_the_other_cases(case: Case, engine: str) -> None:
    agree(*run(case), case.dtype)


@pytest.mark.parametrize("case", FIRST, ids=names(FIRST))
def test_torch_gives_the_float64_answer_too(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own eager call in float64: the table means in torch what it means here."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    tensors, captured, _ = inputs(case._replace(dtype=F64))
    form = SCORES[case.score] if case.score else None
    mask_mod = MASKS[case.mask](case.dims) if case.mask else None
    want = exact(tensors, form and form.bind, captured, mask_mod, None)
    out, aux = torch_flex.flex_attention(
        *tensors,
        form and form.bind(*captured),
        block_mask(case, torch_flex.create_block_mask),
        enable_gqa=True,
        return_aux=torch_flex.AuxRequest(lse=True),
    )
    agree(Answer(out, aux.lse), want, F64)
