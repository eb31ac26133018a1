"""Comparison of contenders with a float32 reference, before they are timed."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from tritoncp.mods.tracing import Mod, vmapped
from tritoncp.perf.problem import Problem
from tritoncp.perf.suite.baselines import Inputs
from tritoncp.reference.dense import dense_attention

# Allowed ‖actual − reference‖ / ‖reference‖ of a whole tensor, and of the worst 128 rows of a head.
# A correct kernel is near the rounding of its inputs' dtype; one wrong tile is far outside.
TOLERANCE = {
    torch.bfloat16: (1e-2, 4e-2),
    torch.float16: (2e-3, 1e-2),
    torch.float32: (2e-5, 2e-4),
}
ROWS = 128
_CHUNK = 1 << 26  # max scores in memory at a time


class Answer(NamedTuple):
    """Reference results, float32 or float64, each [batch, heads, seq, dim]."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def reference(problem: Problem, tensors: Inputs) -> Answer:
    """Compute dense attention in float32 (float64 on a CPU), a few rows of one KV head at a time.

    Every row must see a key, as in every mask of the table.
    """
    device = tensors.q.device
    wide_dtype = torch.float64 if device.type == "cpu" else torch.float32
    mod, score, sinks = problem.closed_form(device), problem.score_mod(device), problem.sinks(device)
    q, k, v, dout = (x.detach().to(wide_dtype) for x in (tensors.q, tensors.k, tensors.v, tensors.dout))
    answer = Answer(torch.empty_like(dout), *(torch.zeros_like(x) for x in (q, k, v)))
    group = problem.heads // problem.kv_heads
    rows = max(1, min(problem.seq, _CHUNK // (group * problem.seq)))
    keys, zero = torch.arange(problem.seq, device=device), torch.zeros((), dtype=torch.int64, device=device)
    for b, head in itertools.product(range(problem.batch), range(problem.kv_heads)):
        heads = slice(head * group, (head + 1) * group)
        key, value = (x[b : b + 1, head : head + 1].clone().requires_grad_() for x in (k, v))
        for start in range(0, problem.rows, rows):
            at = slice(start, min(start + rows, problem.rows))
            visible = None
            if mod is not None:  # [rows, S]; no mask reads h
                visible = vmapped(mod, (None, None, None, 0), (None, None, 0, None))(
                    zero + b, zero, keys[at], keys
                )
            query = q[b : b + 1, heads, at].clone().requires_grad_()
            out = dense_attention(
                query, key, value, visible, score and _shifted(score, b, heads.start, start),
                sinks=None if sinks is None else sinks[heads].to(wide_dtype),
            ).out  # fmt: skip
            grads = torch.autograd.grad(out, (query, key, value), dout[b : b + 1, heads, at])
            answer.out[b, heads, at], answer.dq[b, heads, at] = out.detach()[0], grads[0][0]
            answer.dk[b, head] += grads[1][0, 0]
            answer.dv[b, head] += grads[2][0, 0]
    return answer


def _shifted(score: Mod, b: int, h: int, row: int) -> Mod:
    """Return a score_mod for a slice of a tensor that begins at these indices."""
    return lambda x, _, head, q_idx, kv_idx: score(x, torch.full_like(head, b), head + h, q_idx + row, kv_idx)


def find_fault(name: str, actual: Tensor, expected: Tensor, dtype: torch.dtype) -> str | None:
    """Describe the errors of a tensor, if they exceed the tolerance of a dtype: the error of the whole
    tensor, and of its worst block of ROWS rows. Any NaN makes both NaN, which no tolerance accepts."""
    difference, size = (
        x.to(expected.dtype).square().sum(-1) for x in (actual.to(expected.dtype) - expected, expected)
    )  # [B, H, S]
    short = -difference.shape[-1] % ROWS
    blocks = [
        torch.nn.functional.pad(x, (0, short)).unflatten(-1, (-1, ROWS)).sum(-1) for x in (difference, size)
    ]
    ratios = difference.sum() / size.sum(), (blocks[0] / blocks[1]).amax()
    whole, worst = (float(ratio.sqrt()) for ratio in ratios)
    if whole <= TOLERANCE[dtype][0] and worst <= TOLERANCE[dtype][1]:
        return None
    return f"{name} is off by {whole:.3g}, its worst rows by {worst:.3g}"
