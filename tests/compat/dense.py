"""Dense attention in float64 with torch's masks, and the comparison of a call with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from tritoncp.reference.dense import dense_attention

Mod = Callable[..., Tensor]
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
# Largest error over the largest value: a few units of the dtype's precision.
TOLERANCE = {F16: 4e-3, BF16: 3e-2, F32: 2e-5, F64: 1e-11}


class Answer(NamedTuple):
    """Results of a call; ``grads``: of q, k, v, then of the captured tensors."""

    out: Tensor
    lse: Tensor
    grads: tuple[Tensor, ...] = ()


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (out [B, Hq, Q, Dv], lse [B, Hq, Q]) in the dtype of q, with the mask as torch evaluates it."""
    sizes = *q.shape[:3], k.shape[2]
    visible = mask_mod and flex.create_mask(mask_mod, *sizes, device="cpu")
    out, lse, _ = dense_attention(q, k, v, visible, score_mod, scale=scale)
    return out, lse


def exact(
    tensors: Sequence[Tensor],
    bind: Callable[..., Mod] | None,
    captured: Sequence[Tensor],
    mask_mod: Mod | None,
    start: Sequence[Tensor] | None,
    scale: float | None = None,
) -> Answer:
    """The float64 answer, with gradients of q, k, v and the captured tensors that require them.

    start: the gradients of out and lse, None for no backward pass.
    """
    q, k, v = leaves = [x.detach().to(F64).requires_grad_() for x in tensors]
    bound = [
        x.detach().to(F64).requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in captured
    ]
    out, lse = attend(q, k, v, bind and bind(*bound), mask_mod, scale)
    wanted = [*leaves, *(x for x in bound if x.requires_grad)]
    return answer(out, lse, wanted, start)


def answer(out: Tensor, lse: Tensor, wanted: Sequence[Tensor], start: Sequence[Tensor] | None) -> Answer:
    """Results with the gradients of ``wanted``, zeros for a tensor that the results do not depend on."""
    if start is None:
        return Answer(out.detach(), lse.detach())
    seeds = [start[0].to(out.dtype), start[1].to(lse.dtype)]
    grads = torch.autograd.grad([out, lse], wanted, seeds, allow_unused=True)
    return Answer(
        out.detach(),
        lse.detach(),
        tuple(torch.zeros_like(x) if g is None else g for g, x in zip(grads, wanted)),
    )


def agree(got: Answer, want: Answer, dtype: torch.dtype, factor: float = 1) -> None:
    """Assert that each result has the precision of the call's dtype, infinities and shapes included."""
    names = "out", "lse", "dq", "dk", "dv", *(f"captured {i}" for i in range(9))
    assert len(got.grads) == len(want.grads)
    for name, a, b in zip(names, (*got[:2], *got.grads), (*want[:2], *want.grads)):
        assert a.shape == b.shape, name
        a, infinite = a.detach().to(F64), b.isinf()
        assert torch.equal(a[infinite], b[infinite]), f"infinities of {name}"
        error = (a - b)[~infinite].abs()
        allowed = (
            factor * TOLERANCE[dtype] * max(1.0, float(b[~infinite].abs().max()) if error.numel() else 1.0)
        )
        assert not error.numel() or float(error.max()) <= allowed, f"{name} is {float(error.max()):.3g} off"


def check(
    call: Callable[..., tuple[Tensor, Tensor]],
    x: Sequence[Tensor],
    bind: Callable[..., Mod] | None = None,
    captured: Sequence[Tensor] = (),
    mask_mod: Mod | None = None,
) -> None:
    """Assert that ``call`` of q, k and v returns (out, lse) of dense attention, and that gradients agree."""
    out, lse = call(*x)
    start = [torch.randn(out.shape, dtype=F64).to(out.dtype), torch.randn(lse.shape, dtype=lse.dtype)]
    leaves = [*x, *(t for t in captured if t.requires_grad)]
    agree(answer(out, lse, leaves, start), exact(x, bind, captured, mask_mod, start), x[0].dtype)
