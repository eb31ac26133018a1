"""The useful work of a case, counted exactly: floating-point operations, memory bytes, wire bytes.

Only visible pairs count, and each tensor once. Additional work of a kernel (masked halves of tiles, repeated
reads of K, scores that a second backward kernel recomputes) shows as distance to the bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tritoncp.ops.flop_formulas import count_flops, count_pairs
from tritoncp.planning.plan import Plan
from tritoncp.planning.problem import Problem


@dataclass(frozen=True)
class Work:
    """Useful work of a rank. flops: multiplications and additions of visible pairs; hbm: bytes read and
    written once; wire: bytes that the rank sends."""

    flops: int
    hbm: int
    wire: int


def of_plan(plan: Plan, problem: Problem, direction: str) -> Work:
    """Compute one rank's work in one pass, "forward" or "backward" (counted as five matrix products)."""
    forward = direction == "forward"
    d, e = problem.dim, problem.v_dim
    flops = count_flops(count_pairs(plan, problem.batch, problem.heads), d, e, forward)
    send = {"batch": problem.batch, "kv_heads": problem.kv_heads, "head_dim": d, "v_head_dim": e}
    send["itemsize"] = problem.torch_dtype.itemsize
    forward_bytes, total_bytes = (plan.bytes_sent(**send, backward=backward) for backward in (False, True))
    wire = forward_bytes if forward else total_bytes - forward_bytes
    return Work(flops, _hbm_bytes(plan, problem, forward), wire)


def _hbm_bytes(plan: Plan, problem: Problem, forward: bool) -> int:
    """Count the bytes of every tensor once; of K and V the blocks that some local query sees."""
    d, e, size = problem.dim, problem.v_dim, problem.torch_dtype.itemsize
    valid = int(plan.valid.sum()) * (problem.batch // plan.valid.shape[0])
    q_rows, kv_rows = valid * problem.heads, _count_kv_rows(plan, problem)
    if forward:
        return q_rows * ((d + e) * size + 4) + kv_rows * (d + e) * size
    grad = size if plan.world_size == 1 else 4
    return q_rows * (2 * (d + e) * size + 4) + kv_rows * (d + e) * (size + grad)


def _count_kv_rows(plan: Plan, problem: Problem) -> int:
    """Count the key rows, over batch and key heads, in blocks that some query of this rank sees."""
    tables = plan.tables("cpu", problem.batch, problem.heads)
    touched = tables.col_ptr[..., 2] > tables.col_ptr[..., 0]  # [Bm, Hm, KV slots]
    if touched.shape[1] > 1:
        touched = touched.unflatten(1, (problem.kv_heads, -1)).any(2)
    rows = touched * tables.kv_slots[:, None, :, 2].to(torch.int64)
    return int(rows.sum()) * (problem.batch // rows.shape[0]) * (problem.kv_heads // rows.shape[1])
