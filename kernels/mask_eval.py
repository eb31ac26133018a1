"""Evaluation of a mask_mod on pairs of tokens on a GPU, to classify the blocks of a mask."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def pairs_kernel(
    visible,  # uint8 [N, I, J]
    b,  # int64 [N]
    h,
    q,  # int64 [N, I]
    kv,  # int64 [N, J]
    caps,
    I: tl.constexpr,
    J: tl.constexpr,
    MASK_MOD: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """Evaluate the mask_mod on a tile of pairs; pairs with a negative index are not visible."""
    i_n = tl.program_id(0).to(tl.int64)
    o_i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    o_j = tl.program_id(2) * BLOCK_J + tl.arange(0, BLOCK_J)
    i_b = tl.load(b + i_n).to(tl.int32)
    i_h = tl.load(h + i_n).to(tl.int32)
    o_q = tl.load(q + i_n * I + o_i, mask=o_i < I, other=0).to(tl.int32)[:, None]
    o_kv = tl.load(kv + i_n * J + o_j, mask=o_j < J, other=0).to(tl.int32)[None, :]
    m_visible = MASK_MOD(i_b, i_h, o_q, o_kv, caps) & (o_q >= 0) & (o_kv >= 0)
    # the comparisons broadcast a scalar result of MASK_MOD to a tile
    p_visible = visible + i_n * I * J + o_i[:, None] * J + o_j[None, :]
    tl.store(p_visible, m_visible.to(tl.uint8), mask=(o_i < I)[:, None] & (o_j < J)[None, :])


def make_evaluator(mask_mod: Any, caps: tuple[Any, ...], device: torch.device) -> Callable[..., Tensor]:
    """Make evaluate(b [n], h [n], q [n, i], kv [n, j]) -> bool [n, i, j]: int64 indices and the result on the
    CPU.

    mask_mod: the jit function; caps: its captures, on `device`.
    """

    def evaluate(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        n, i, j = *q.shape, kv.shape[1]
        visible = torch.empty(n, i, j, dtype=torch.uint8, device=device)
        index = (t.contiguous().to(device) for t in (b, h, q, kv))
        block_i, block_j = (min(64, triton.next_power_of_2(size)) for size in (i, j))
        grid = n, triton.cdiv(i, block_i), triton.cdiv(j, block_j)
        if visible.numel():
            pairs_kernel[grid](visible, *index, caps, i, j, mask_mod, block_i, block_j)
        return visible.cpu().bool()

    return evaluate
