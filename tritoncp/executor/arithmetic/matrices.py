"""Elements of tensor-core operands: their bits as numbers, and where registers of a warp hold them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tritoncp.executor.arithmetic.floating import tf32_of, widen

Array = np.ndarray[Any, Any]
NBYTES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
FP8 = {
    name: torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    for name, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2))
}


def decode(t: str, raw: Array) -> Array:
    """Unsigned integers of the width of a type to float32."""
    if t == "tf32":
        return tf32_of(raw)
    if t in FP8:
        return FP8[t][raw]
    if t in ("s8", "u8"):
        return raw.view("i1" if t == "s8" else "u1").astype(np.float32)
    return widen(t, raw)


def fragment_a(registers: tuple[Array, ...], t: str) -> Array:
    """[warps, 16, K] of operand A, two rows of eight and K in turns."""
    warps = len(registers[0]) // 32
    x = np.empty((warps, 2, 8, len(registers) // 2, 4), np.uint32)  # row / 8, row % 8, K, K
    for j, v in enumerate(registers):
        x[:, j & 1, :, j >> 1, :] = v.reshape(warps, 8, 4)
    return decode(t, x.reshape(-1).view(f"u{NBYTES[t]}")).reshape(warps, 16, -1)


def fragment_b(registers: tuple[Array, ...], t: str) -> Array:
    """[warps, K, 8] of operand B."""
    warps = len(registers[0]) // 32
    x = np.empty((warps, 8, len(registers), 4), np.uint32)
    for j, v in enumerate(registers):
        x[:, :, j, :] = v.reshape(warps, 8, 4)
    return decode(t, x.reshape(-1).view(f"u{NBYTES[t]}")).reshape(warps, 8, -1).transpose(0, 2, 1)


def add_to_result(product: Array, to: str, summands: tuple[Array, ...] | None) -> list[Array]:
    """Registers of a [warps, 16, N] product, plus an accumulator's: float32, int32 or pairs of float16."""
    warps, _, n = product.shape
    d = product.reshape(warps, 2, 8, n // 8, 4, 2)
    if to == "f16":
        pairs = [d[:, j & 1, :, j >> 1] for j in range(n // 4)]
        if summands:
            pairs = [p + c.view(np.float16).reshape(p.shape) for p, c in zip(pairs, summands)]
        return [p.reshape(-1).astype(np.float16).view(np.uint32) for p in pairs]
    columns = [d[:, j >> 1 & 1, :, j >> 2, :, j & 1].reshape(-1) for j in range(n // 2)]
    if to == "s32 saturated" and summands:
        exact = [c.astype(np.int64) + s for c, s in zip(columns, summands)]
        return [np.clip(c, -(2**31), 2**31 - 1).astype(np.int32) for c in exact]
    if to.startswith("s32"):
        columns = [c.astype(np.int32) for c in columns]
    return [x + c for x, c in zip(columns, summands)] if summands else columns
