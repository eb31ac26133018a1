"""The useful work of a case, counted exactly: operations on visible pairs, and bytes that travel."""

from __future__ import annotations

from dataclasses import dataclass

from tritoncp.ops.flop_formulas import count_flops, count_pairs
from tritoncp.planning.plan import Plan
from tritoncp.planning.problem import Problem


@dataclass(frozen=True)
class UsefulWork:
    """Useful work of a rank. flops: multiplications and additions of visible pairs; wire: bytes that the rank
    sends."""

    flops: int
    wire: int


def of_plan(plan: Plan, problem: Problem, direction: str) -> UsefulWork:
    """Compute one rank's work in one pass, "forward" or "backward" (counted as five matrix products)."""
    forward = direction == "forward"
    d, e = problem.dim, problem.v_dim
    flops = count_flops(count_pairs(plan, problem.batch, problem.heads), d, e, forward)
    send = {"batch": problem.batch, "kv_heads": problem.kv_heads, "head_dim": d, "v_head_dim": e}
    send["itemsize"] = problem.torch_dtype.itemsize
    forward_bytes, total_bytes = (plan.bytes_sent(**send, backward=backward) for backward in (False, True))
    wire = forward_bytes if forward else total_bytes - forward_bytes
    return UsefulWork(flops, wire)
