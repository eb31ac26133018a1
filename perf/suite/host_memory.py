"""Peak memory of a piece of host code."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path


def start_peak() -> int | None:
    """Start to measure the peak resident memory of this process; return its current memory in bytes. None if
    the system does not tell it: on other systems than Linux, and if /proc cannot be written.

    Python's tracemalloc does not count allocations of torch; the high-water mark of resident memory counts
    all, once the allocator has returned its free memory.
    """
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        return _read_bytes("VmRSS")
    except (OSError, AttributeError):  # AttributeError: a C library without malloc_trim
        return None


def peak_since(start: int | None) -> int | None:
    """Return the peak bytes of the process since :func:`start_peak` returned ``start``, minus ``start``; None
    if it was None."""
    return None if start is None else max(0, _read_bytes("VmHWM") - start)


def _read_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) * 1024
