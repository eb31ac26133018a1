"""Comparison of contenders with a float32 reference, before they are timed."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tritoncp.core.tracing import Mod, vmapped
from tritoncp.perf.suite.baselines import Inputs
from tritoncp.planning.problem import Problem

# Allowed ‖actual − reference‖ / ‖reference‖: of a whole tensor, and of its worst 128 rows of a head.
# A correct kernel is near the rounding of its inputs' dtype; one wrong tile is far outside.
TOLERANCE = {
    torch.bfloat16: (1e-2, 4e-2),
    torch.float16: (2e-3, 1e-2),
    torch.float32: (2e-5, 2e-4),
}
ROWS = 128
_CHUNK = 1 << 28  # scores in memory at a time


class Answer(NamedTuple):
    """Reference results, float32 or float64, each [batch, heads, seq, dim]."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class RelativeErrors(NamedTuple):
    """Relative errors of one tensor: of the whole tensor, and of its worst block of ROWS rows."""

    whole: float
    worst: float


def reference(problem: Problem, tensors: Inputs) -> Answer:
    """Compute dense attention in float32 (float64 on a CPU), a few rows of one key head at a time.

    Every row must see a key, as in every mask of the table.
    """
    device = tensors.q.device
    wide_dtype = torch.float64 if device.type == "cpu" else torch.float32
    mod, score, sinks = problem.plain_mod(device), problem.score_mod(device), problem.sinks(device)
    q, k, v, dout = (x.detach().to(wide_dtype) for x in (tensors.q, tensors.k, tensors.v, tensors.dout))
    answer = Answer(torch.empty_like(dout), *(torch.zeros_like(x) for x in (q, k, v)))
    group = problem.heads // problem.kv_heads
    rows = max(1, min(problem.seq, _CHUNK // (group * problem.seq)))
    for b in range(problem.batch):
        for head in range(problem.kv_heads):
            group_heads = slice(head * group, (head + 1) * group)
            key, value = (x[b, head].clone().requires_grad_() for x in (k, v))
            for start in range(0, problem.rows, rows):
                at = slice(start, min(start + rows, problem.rows))
                query = q[b, group_heads, at].clone().requires_grad_()
                logits = None if sinks is None else sinks[group_heads].to(wide_dtype)
                out = _attend(query, key, value, mod, score, b, group_heads.start, start, logits)
                grads = torch.autograd.grad(out, (query, key, value), dout[b, group_heads, at])
                answer.out[b, group_heads, at], answer.dq[b, group_heads, at] = out.detach(), grads[0]
                answer.dk[b, head] += grads[1]
                answer.dv[b, head] += grads[2]
    return answer


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mod: Mod | None,
    score: Mod | None,
    b: int,
    h: int,
    start: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend q [G, rows, D], from head h and row start on, to k [S, D] and v [S, E]; sinks [G]."""
    scores = q @ k.T / math.sqrt(q.shape[-1])
    device = q.device
    index = (
        torch.tensor(b, device=device),
        torch.arange(h, h + q.shape[0], device=device),
        torch.arange(start, start + q.shape[1], device=device),
        torch.arange(k.shape[0], device=device),
    )
    over = ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None))
    if score is not None:
        scores = vmapped(score, *((0, *level) for level in over))(scores, *index)
    if mod is not None:
        visible = vmapped(mod, *over[:2])(index[0], index[1][0], *index[2:])  # [rows, S]; no mask reads h
        scores = scores.masked_fill(~visible, -math.inf)
    if sinks is not None:  # one more key, whose value is zero
        extra = sinks[:, None, None].expand(-1, q.shape[1], 1)
        return torch.cat([scores, extra], -1).softmax(-1)[..., :-1] @ v
    return scores.softmax(-1) @ v


def errors(actual: Tensor, expected: Tensor) -> RelativeErrors:
    """Compute the relative errors of a tensor; any NaN makes both NaN, which no tolerance accepts."""
    difference, size = (
        x.to(expected.dtype).square().sum(-1) for x in (actual.to(expected.dtype) - expected, expected)
    )  # [B, H, S]
    short = -difference.shape[-1] % ROWS
    blocks = [
        torch.nn.functional.pad(x, (0, short)).unflatten(-1, (-1, ROWS)).sum(-1) for x in (difference, size)
    ]
    worst = (blocks[0] / blocks[1]).amax()
    return RelativeErrors(float((difference.sum() / size.sum()).sqrt()), float(worst.sqrt()))


def acceptable(error: RelativeErrors, dtype: torch.dtype) -> bool:
    """Whether errors are within the tolerance of a dtype."""
    whole, worst = TOLERANCE[dtype]
    return error.whole <= whole and error.worst <= worst
