"""The way in which Triton kernels run on CPU tensors: executed as compiled for a GPU, or interpreted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_executed: list[str] = []  # architectures of active executors, the innermost last


def cpu_target() -> str | None:
    """Return how Triton kernels run on CPU tensors: compiled for an architecture and executed ("sm_90"),
    "interpreter" with TRITON_INTERPRET=1, or None: not at all."""
    return executed_target() or ("interpreter" if os.environ.get("TRITON_INTERPRET", "0") == "1" else None)


def executed_target() -> str | None:
    """Return the architecture for which kernels are compiled and executed on the CPU; None: they are not."""
    return _executed[-1] if _executed else None


@contextmanager
def execute_for(architecture: str) -> Iterator[None]:
    """Context in which calls on CPU tensors execute kernels compiled for an architecture."""
    _executed.append(architecture)
    try:
        yield
    finally:
        _executed.pop()
