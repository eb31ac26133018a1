"""The useful work of a case, counted exactly: floating-point operations, memory bytes, wire bytes.

Only visible pairs count, and each tensor once. Additional work of a kernel (masked halves of tiles, repeated
reads of K, scores that a second backward kernel recomputes) shows as distance to the bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tritoncp.ops.flop_formulas import count_flops, count_pairs
from tritoncp.planning.plan import Plan


@dataclass(frozen=True)
class Shape:
    """Sizes of a call: batch rows, query and key heads, head dims of keys and values, bytes per element."""

    batch: int
    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    itemsize: int = 2


@dataclass(frozen=True)
class Work:
    """Useful work of a rank. flops: multiplications and additions of visible pairs; hbm: bytes read and
    written once; wire: bytes that the rank sends."""

    flops: int
    hbm: int
    wire: int

    def bound_ms(self, flops_per_s: float, bytes_per_s: float) -> float:
        """Return the least time on a device with these rates, in milliseconds.

        >>> Work(flops=10**12, hbm=10**9, wire=0).bound_ms(1e15, 4e12)
        1.0
        """
        return 1e3 * max(self.flops / flops_per_s, self.hbm / bytes_per_s)


def of_plan(plan: Plan, shape: Shape, direction: str) -> Work:
    """Compute one rank's work in one pass, "forward" or "backward" (counted as five matrix products)."""
    forward = direction == "forward"
    d, e = shape.dim, shape.v_dim
    flops = count_flops(count_pairs(plan, shape.batch, shape.heads), d, e, forward)
    send = {"batch": shape.batch, "kv_heads": shape.kv_heads, "head_dim": d, "v_head_dim": e}
    forward_bytes = plan.bytes_sent(**send, itemsize=shape.itemsize, backward=False)
    total_bytes = plan.bytes_sent(**send, itemsize=shape.itemsize, backward=True)
    return Work(
        flops, _hbm_bytes(plan, shape, forward), forward_bytes if forward else total_bytes - forward_bytes
    )


def _hbm_bytes(plan: Plan, shape: Shape, forward: bool) -> int:
    """Count the bytes of every tensor once; of K and V the blocks that some local query sees."""
    d, e, size = shape.dim, shape.v_dim, shape.itemsize
    valid = int(plan.valid.sum()) * (shape.batch // plan.valid.shape[0])
    q_rows, kv_rows = valid * shape.heads, _count_kv_rows(plan, shape)
    if forward:
        return q_rows * ((d + e) * size + 4) + kv_rows * (d + e) * size
    grad = size if plan.world_size == 1 else 4
    return q_rows * (2 * (d + e) * size + 4) + kv_rows * (d + e) * (size + grad)


def _count_kv_rows(plan: Plan, shape: Shape) -> int:
    """Count the key rows, over batch and key heads, in blocks that some query of this rank sees."""
    tables = plan.tables("cpu", shape.batch, shape.heads)
    touched = tables.col_ptr[..., 2] > tables.col_ptr[..., 0]  # [Bm, Hm, KV slots]
    if touched.shape[1] > 1:
        touched = touched.unflatten(1, (shape.kv_heads, -1)).any(2)
    rows = touched * tables.kv_slots[:, None, :, 2].to(torch.int64)
    return int(rows.sum()) * (shape.batch // rows.shape[0]) * (shape.kv_heads // rows.shape[1])
