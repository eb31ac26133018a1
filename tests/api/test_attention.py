"""Tests of the public call: both argument shapes, every keyword of torch's, every kind of mask."""

import inspect
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

import tritoncp
from tests.kernels.support.harness import F32, F64, QKV, close, cotangents, oracle, qkv, same
from tritoncp import create_block_mask
from tritoncp.kernels import options

pytestmark = [
    pytest.mark.usefixtures("cpu_engine"),  # unless a test asks for kernels
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:return_lse is deprecated"),
]


def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & ((q - kv) % 3 != 1)


def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return s - 0.1 * (h + 1) * (q - kv).abs() + b


TORCHS = flex.create_block_mask(mask_mod, None, None, 40, 40, device="cpu", BLOCK_SIZE=32)
MASK = create_block_mask(mask_mod, None, None, 40, 40, BLOCK_SIZE=32)


def tensors(**kw: Any) -> QKV:
    return qkv(40, **{"heads": 2, "kv_heads": 1, "batch": 2, "dtype": F64, **kw})


@pytest.mark.sample(1)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_kernel_option_that_only_torch_has_warns_once(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It warns at the line of the call; torch's default value does not warn."""
    monkeypatch.setattr(options, "_warned", set())
    torch.compiler.reset()

    def attend(x: Tensor, given: dict[str, Any]) -> Tensor:
        return tritoncp.flex_attention(x, x, x, kernel_options=given)

    call = torch.compile(attend, backend="eager", fullgraph=True) if compiled else attend
    asked = {"BACKEND": "FLASH", "fwd_kpack": 2, "PRESCALE_QK": True, "WRITE_DQ": False}
    default = {"BACKEND": "AUTO", "PRESCALE_QK": False, "WRITE_DQ": True}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for given in (default, asked, asked):
            call(torch.ones(1, 1, 16, 16), given)
    about = [one for one in caught if "kernel option" in str(one.message)]
    assert sorted(str(one.message).split()[2] for one in about) == [
        "BACKEND='FLASH'", "PRESCALE_QK=True", "WRITE_DQ=False", "fwd_kpack=2",
    ]  # fmt: skip
    line = attend.__code__.co_firstlineno + 1
    assert compiled or {(one.filename, one.lineno) for one in about} == {(__file__, line)}


# -- torch's call -------------------------------------------------------------------------------------


def test_the_signature_is_torchs_with_further_arguments() -> None:
    torch_parameters, own_parameters = (
        inspect.signature(f).parameters for f in (flex.flex_attention, tritoncp.flex_attention)
    )
    for (name, their), (own, our) in zip(torch_parameters.items(), own_parameters.items()):
        assert (name, their.kind, their.default) == (own, our.kind, our.default)
    assert all(
        p.kind is inspect.Parameter.KEYWORD_ONLY for p in [*own_parameters.values()][len(torch_parameters) :]
    )


AUX = flex.AuxRequest
CALLS: dict[str, tuple[tuple, dict[str, Any]]] = {
    "nothing": ((), {}),
    "score_mod": ((score_mod,), {}),
    "score_mod and mask": ((score_mod, TORCHS), {}),
    "no score_mod": ((None, TORCHS), {}),
    "everything in place": ((score_mod, TORCHS, 0.3, True, True), {}),
    "by name": ((), {"score_mod": score_mod, "block_mask": TORCHS, "scale": 0.2, "return_lse": True}),
    "a scale of one": ((), {"scale": 1, "block_mask": TORCHS}),
    "lse": ((), {"return_aux": AUX(lse=True), "block_mask": TORCHS}),
    "aux of nothing": ((), {"return_aux": AUX(), "block_mask": TORCHS}),
    "options": ((), {"kernel_options": {"BLOCK_M": 16, "BLOCK_N": 32}, "block_mask": TORCHS}),
}

ON_ENGINES = [*(("cpu", name) for name in CALLS), ("kernels", "score_mod and mask"), ("kernels", "options")]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("engine", "name"), ON_ENGINES, indirect=["engine"])
def test_torchs_call_gives_torchs_answer(name: str, engine: str) -> None:
    """The result is a tensor, (out, lse), or (out, AuxOutput), whose fields that were not requested are
    None."""
    args, kw = CALLS[name]
    x = tensors()
    kw = {**kw, "enable_gqa": True} if len(args) < 4 else kw
    want, got = (f(*x, *args, **kw) for f in (flex.flex_attention, tritoncp.flex_attention))
    assert type(got) is type(want)
    want, got = ((y,) if isinstance(y, Tensor) else (y[0], *y[1:]) for y in (want, got))
    for a, b in zip(got, want, strict=True):
        if isinstance(a, flex.AuxOutput):
            assert (a.lse is None) == (b.lse is None) and a.max_scores is b.max_scores is None
            a, b = a.lse, b.lse
        if a is not None:
            assert a.dtype == F64  # lse too: float64 for float64 inputs
            close(a, b.to(F64), name, 1e-6 if b.dtype == F32 else 1e-12)


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("top", [False, True])
def test_aux_holds_the_requested_fields(lse: bool, top: bool) -> None:
    x = tensors(dtype=F32)
    out, aux = tritoncp.flex_attention(*x, MASK, enable_gqa=True, return_aux=AUX(lse=lse, max_scores=top))
    want = oracle(x, MASK, start=cotangents(x))
    close(out, want.out, "out")
    for request, got, exact in ((lse, aux.lse, want.lse), (top, aux.max_scores, want.max_scores)):
        assert (got is not None) == request
        if got is not None:
            assert got.dtype == F32
            close(got, exact, "aux")


# -- the drop-in's call -------------------------------------------------------------------------------

SAME_MASK = {
    "torch's BlockMask": TORCHS,
    "compact mask": MASK,
    "plan": tritoncp.make_plan(MASK),
    "plan of torch's": tritoncp.make_plan(TORCHS),
    "there and back": MASK.to_block_mask(),
}


@pytest.mark.parametrize("name", SAME_MASK)
def test_a_mask_may_stand_in_fourth_or_fifth_place(name: str) -> None:
    mask, x = SAME_MASK[name], tensors(kv_heads=2, batch=1)
    want = tritoncp.flex_attention(*x, MASK)
    close(want, oracle(x, MASK, start=cotangents(x)).out, "out")
    calls: list[tuple[tuple, dict[str, Any]]] = [
        ((mask,), {}),
        ((mask, None), {}),
        ((None, mask), {}),
        ((), {"block_mask": mask}),
        ((mask,), {"mesh": None}),
    ]
    for args, kw in calls:
        same(tritoncp.flex_attention(*x, *args, **kw), want)


# -- nothing remembered, nothing changed --------------------------------------------------------------


def test_a_call_edits_no_input_and_returns_new_tensors() -> None:
    x = tensors()
    copies = [t.clone() for t in x]
    out, lse = tritoncp.flex_attention(*x, MASK, enable_gqa=True, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(x, copies))
    assert out.is_contiguous() and lse.is_contiguous()
    assert not {out.data_ptr(), lse.data_ptr()} & {t.data_ptr() for t in x}


def test_inference_mode_and_no_grad_leave_no_graph() -> None:
    x = QKV(*(t.requires_grad_() for t in tensors(kv_heads=2, batch=1)))
    want = tritoncp.flex_attention(*x, MASK)
    assert want.requires_grad
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            got = tritoncp.flex_attention(*x, MASK)
        assert not got.requires_grad
        same(got.clone(), want.detach())


@pytest.mark.bar(16)
def test_masks_and_plans_of_an_evaluation_under_inference_mode_serve_training() -> None:
    """Autograd saves the mask, the plan and the caches of an evaluation in a later training step."""
    x = tensors(kv_heads=2, batch=1)
    with torch.inference_mode():
        mask = tritoncp.create_block_mask(tritoncp.causal(), None, None, 40, 40, BLOCK_SIZE=8)
        plan, dealt = tritoncp.make_plan(mask), tritoncp.make_plan(mask, world_size=2)
        tritoncp.flex_attention(*x, mask)
        slopes, positions = tritoncp.alibi(2), tritoncp.positions(dealt)
    reference = tritoncp.create_block_mask(tritoncp.causal(), None, None, 40, 40, BLOCK_SIZE=8)
    leaves = [t.clone().requires_grad_() for t in x]
    want = torch.autograd.grad(tritoncp.flex_attention(*leaves, slopes, reference).sum(), leaves)
    for used in (mask, plan):
        grads = torch.autograd.grad(tritoncp.flex_attention(*leaves, slopes, used).sum(), leaves)
        for got, expected in zip(grads, want, strict=True):
            same(got, expected)
    table = torch.nn.Embedding(40, 4)
    table(positions).sum().backward()
    whole = torch.ones(1, 40, requires_grad=True)
    tritoncp.shard(whole, dealt, dim=1).sum().backward()
    assert whole.grad is not None and whole.grad.sum() == (positions >= 0).sum()
