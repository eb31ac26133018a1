"""Exchange between the lanes of a warp, and its products of matrices, for all warps of a group of threads."""

from __future__ import annotations

from typing import Any

import numpy as np

from tritoncp.executor.arithmetic import matrices
from tritoncp.executor.arithmetic.floating import maximum, minimum
from tritoncp.executor.arithmetic.integers import COMBINE
from tritoncp.executor.faults import CannotContinue
from tritoncp.executor.threads import Threads

Array = np.ndarray[Any, Any]
LANE = np.arange(32)


def shuffle(threads: Threads, mode: str, a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    """Values of other lanes, and whether the lane asked for lies in the segment."""
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
    """Raises where an instruction names fewer members than the lanes of a warp."""
    if (members != 0xFFFFFFFF).any():
        raise CannotContinue("an exchange of a part of a warp")


def vote(threads: Threads, mode: str, a: Array) -> Array:
    threads.need_warps("vote")
    x = a.reshape(-1, 32)
    if mode == "ballot":
        return np.repeat(np.packbits(x, axis=1, bitorder="little").reshape(-1).view(np.uint32), 32)
    out = {"all": x.all(1), "any": x.any(1), "uni": x.all(1) | ~x.any(1)}[mode]
    return np.repeat(out, 32)


def reduce(threads: Threads, operation: str, a: Array, nan: bool) -> Array:
    threads.need_warps("redux")
    x = a.reshape(-1, 32)
    if a.dtype == np.float32:
        choose = minimum if operation == "min" else maximum
        while x.shape[1] > 1:
            half = x.shape[1] // 2
            x = choose(x[:, :half], x[:, half:], nan)
        return np.repeat(x[:, 0], 32)
    return np.repeat(COMBINE[operation].reduce(x, axis=1, dtype=a.dtype), 32)


def fragment_a(threads: Threads, registers: tuple[Array, ...], t: str) -> Array:
    threads.need_warps("mma")
    return matrices.fragment_a(registers, t)


def fragment_b(threads: Threads, registers: tuple[Array, ...], t: str) -> Array:
    threads.need_warps("mma")
    return matrices.fragment_b(registers, t)


def multiply(threads: Threads, to: str, a: Array, b: Array, c: tuple[Array, ...]) -> list[Array]:
    """A × B + C for each warp."""
    return matrices.add_to_result(np.matmul(a, b), to, c)


def multiply64(
    threads: Threads, a: tuple[Array, ...], b: tuple[Array, ...], c: tuple[Array, ...]
) -> list[Array]:
    """A × B + C of float64; registers of A lie in one or two groups of eight rows, those of B along K."""
    threads.need_warps("mma")
    groups, depth = len(c) // 2, len(b)
    x = np.stack([v.reshape(-1, 8, 4) for v in a], 1)  # [warps, registers, 8, 4]
    left = x.reshape(-1, depth, groups, 8, 4).transpose(0, 2, 3, 1, 4).reshape(-1, 8 * groups, 4 * depth)
    right = np.stack([v.reshape(-1, 8, 4) for v in b], 2).reshape(-1, 8, 4 * depth).transpose(0, 2, 1)
    d = np.matmul(left, right).reshape(-1, groups, 8, 4, 2)
    return [d[:, n // 2, :, :, n % 2].reshape(-1) + v for n, v in enumerate(c)]
