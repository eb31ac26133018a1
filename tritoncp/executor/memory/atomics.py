"""Atomic updates of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tritoncp.executor.arithmetic.floating import arithmetic16, ftz
from tritoncp.executor.arithmetic.integers import COMBINE

Array = np.ndarray[Any, Any]
UPDATES: dict[str, Callable[[Any, Any], Any]] = {
    **COMBINE,
    "exch": lambda old, new: new,
    "inc": lambda old, new: np.where(old >= new, 0, old + np.uint32(1)).astype("u4"),
    "dec": lambda old, new: np.where((old == 0) | (old > new), new, old - np.uint32(1)).astype("u4"),
}


def update(memory: Array, idx: Array, kind: str, operation: str, values: tuple[Array, ...]) -> Array:
    """Update memory[idx] by values, equal indices one after another; return the old values.

    kind:   PTX type, or "f32 flushed"
    values: one array; for "cas" the expected and the new values
    """
    old = np.empty(len(idx), memory.dtype)
    left = np.arange(len(idx))
    while len(left):  # each round updates the first occurrence of every index
        _, first = np.unique(idx[left], return_index=True)
        now = left[first]
        old[now] = memory[idx[now]]
        memory[idx[now]] = combine(old[now], kind, operation, *(v[now] for v in values))
        left = np.delete(left, first)
    return old


def combine(old: Array, kind: str, operation: str, *values: Array) -> Array:
    if operation == "cas":
        return np.where(old == values[0], values[1], old)
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        return arithmetic16("add", kind, old, values[0])
    if kind == "f32 flushed":
        return ftz(ftz(old) + ftz(values[0]))
    return UPDATES[operation](old, values[0])
