"""Warp-level operations: shuffles, votes, reductions, and matrix products with their register layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tritoncp.executor.arithmetic.floating import extremum, tf32_of, widen
from tritoncp.executor.arithmetic.integers import COMBINE
from tritoncp.executor.faults import CannotContinue
from tritoncp.executor.threads import Threads

Array = np.ndarray[Any, Any]
LANE = np.arange(32)
NBYTES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
FP8 = {
    name: torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).float().numpy()
    for name, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2))
}


def shuffle(threads: Threads, mode: str, a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    """`shfl`: return (values of other lanes, whether the source lane is in the segment)."""
    threads.need_warps("shfl")
    x = a.reshape(-1, 32)
    if np.ndim(b) == 0 and np.ndim(c) == 0:
        lane, inside = source_lanes(mode, np.asarray(int(b)), np.asarray(int(c)))
        return x[:, lane].reshape(-1), np.broadcast_to(inside, x.shape).reshape(-1)
    bb, cc = (np.broadcast_to(v, a.shape).reshape(-1, 32).astype(np.int64) for v in (b, c))
    lane, inside = source_lanes(mode, bb, cc)
    return np.take_along_axis(x, lane, 1).reshape(-1), inside.reshape(-1)


def source_lanes(mode: str, b: Array, c: Array) -> tuple[Array, Array]:
    segment, clamp = (c >> 8) & 31, c & 31
    low, top = LANE & segment, (LANE & segment) | (clamp & ~segment)
    b = b & 31
    lane = {"bfly": LANE ^ b, "up": LANE - b, "down": LANE + b, "idx": low | (b & ~segment & 31)}[mode]
    inside = lane >= top if mode == "up" else lane <= top
    return np.where(inside, lane, LANE), inside


def need_every_lane(members: Array) -> None:
    """Raise CannotContinue if a member mask lacks lanes of a warp."""
    if (members != 0xFFFFFFFF).any():
        raise CannotContinue("an exchange of a part of a warp")


def vote(threads: Threads, mode: str, a: Array) -> Array:
    threads.need_warps("vote")
    x = a.reshape(-1, 32)
    if mode == "ballot":
        return np.repeat(np.packbits(x, axis=1, bitorder="little").reshape(-1).view(np.uint32), 32)
    out = {"all": x.all(1), "any": x.any(1), "uni": x.all(1) | ~x.any(1)}[mode]
    return np.repeat(out, 32)


def reduce(threads: Threads, operation: str, a: Array, magnitude: bool, nan: bool) -> Array:
    threads.need_warps("redux")
    x = np.abs(a.reshape(-1, 32)) if magnitude else a.reshape(-1, 32)
    if a.dtype == np.float32:
        while x.shape[1] > 1:
            half = x.shape[1] // 2
            x = extremum(operation, x[:, :half], x[:, half:], nan)
        return np.repeat(x[:, 0], 32)
    return np.repeat(COMBINE[operation].reduce(x, axis=1, dtype=a.dtype), 32)


def elect(threads: Threads) -> tuple[Array, Array]:
    """`elect.sync`: return (elected lane of each warp, whether a thread is it). Any lane may be elected; with
    a seed, a launch draws one."""
    threads.need_warps("elect")
    lane = threads.full(np.uint32(threads.ctas.launch.elected_lane))
    return lane, threads.laneid == lane


def decode(t: str, raw: Array) -> Array:
    """Convert elements of type t, stored as unsigned integers, to float32."""
    if t == "tf32":
        return tf32_of(raw)
    if t in FP8:
        return FP8[t][raw]
    if t in ("s8", "u8"):
        return raw.view("i1" if t == "s8" else "u1").astype(np.float32)
    return widen(t, raw)


def fragment_a(registers: tuple[Array, ...], t: str) -> Array:
    """Return operand A [warps, 16, K] from its registers, which alternate between the halves of rows and of
    K."""
    warps = len(registers[0]) // 32
    x = np.empty((warps, 2, 8, len(registers) // 2, 4), np.uint32)  # row / 8, row % 8, K, K
    for j, v in enumerate(registers):
        x[:, j & 1, :, j >> 1, :] = v.reshape(warps, 8, 4)
    return decode(t, x.reshape(-1).view(f"u{NBYTES[t]}")).reshape(warps, 16, -1)


def fragment_b(registers: tuple[Array, ...], t: str) -> Array:
    """Return operand B [warps, K, 8] from its registers."""
    warps = len(registers[0]) // 32
    x = np.empty((warps, 8, len(registers), 4), np.uint32)
    for j, v in enumerate(registers):
        x[:, :, j, :] = v.reshape(warps, 8, 4)
    return decode(t, x.reshape(-1).view(f"u{NBYTES[t]}")).reshape(warps, 8, -1).transpose(0, 2, 1)


def add_to_result(product: Array, to: str, summands: tuple[Array, ...] | None) -> list[Array]:
    """Return the registers of a product [warps, 16, N] plus an accumulator: float32, int32 or pairs of
    float16."""
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


def multiply64(
    threads: Threads, a: tuple[Array, ...], b: tuple[Array, ...], c: tuple[Array, ...]
) -> list[Array]:
    """Return A × B + C in float64. Registers of A are in one or two groups of eight rows, registers of B
    along K."""
    threads.need_warps("mma")
    groups, depth = len(c) // 2, len(b)
    x = np.stack([v.reshape(-1, 8, 4) for v in a], 1)  # [warps, registers, 8, 4]
    left = x.reshape(-1, depth, groups, 8, 4).transpose(0, 2, 3, 1, 4).reshape(-1, 8 * groups, 4 * depth)
    right = np.stack([v.reshape(-1, 8, 4) for v in b], 2).reshape(-1, 8, 4 * depth).transpose(0, 2, 1)
    d = np.matmul(left, right).reshape(-1, groups, 8, 4, 2)
    return [d[:, n // 2, :, :, n % 2].reshape(-1) + v for n, v in enumerate(c)]
