"""The executor as Triton's device, within a `with` statement."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import triton
from triton.runtime.driver import driver as drivers

from tritoncp.core.environment import execute_for
from tritoncp.executor.driver import ExecutorDriver, LaunchRecord
from tritoncp.executor.faults import Fault
from tritoncp.executor.launch import Settings
from tritoncp.executor.memory.uninitialised import filled_allocations

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100")


class ExecutorDevice(NamedTuple):
    """The result of `compiled_kernels`: records of launches in order, and their faults."""

    architecture: str
    launches: list[LaunchRecord]
    faults: list[Fault]


@contextmanager
def compiled_kernels(
    architecture: str,
    seed: int | None = None,
    count: bool = False,
    raise_faults: bool = True,
    check: bool = True,
) -> Iterator[ExecutorDevice]:
    """Execute compiled Triton kernels on CPU tensors, instruction by instruction.

    Triton specialises, compiles and launches as with a GPU; the PTX is executed with NumPy, with an array
    element for each thread. Within the context `torch.empty` and similar functions fill memory with a
    pattern, NaN in floating-point types, to detect kernels that read uninitialised memory.

    Args:
        architecture: "sm_80", "sm_86", "sm_89", "sm_90" or "sm_100".
        seed: shuffles the order of CTAs, warps and atomics, and draws the lane that a warp elects.
        count: record counts of executed instructions and memory transactions in `device.launches`.
        raise_faults: raise the faults of a launch at its end. A fault after which the launch cannot continue
            is always raised.
        check: check for faults other than out-of-bounds accesses; without, launches take about half the time.

    Yields:
        The device: records of its launches, and faults.

    Raises:
        RuntimeError: Triton was imported with TRITON_INTERPRET=1.
        ExecutionFault: a launch had faults.
        UnsupportedInstruction: a kernel has an instruction that the executor does not know.

    Example:
        >>> import torch, triton, triton.language as tl
        >>> @triton.jit
        ... def double(x, y, n, BLOCK: tl.constexpr):
        ...     i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        ...     tl.store(y + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)
        >>> x, y = torch.arange(100.0), torch.empty(100)
        >>> with compiled_kernels("sm_90") as device:
        ...     compiled = double[(2,)](x, y, 100, 64)
        >>> torch.equal(y, 2 * x), len(device.launches), device.faults
        (True, 1, [])
    """
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture {architecture!r} is unknown; pass one of {', '.join(ARCHITECTURES)}")
    if not isinstance(triton.language.zeros, triton.JITFunction):
        raise RuntimeError(
            "Triton was imported with TRITON_INTERPRET=1, under which kernels are not compiled: unset it "
            "before Triton is imported"
        )
    capability = int(re.sub(r"\D", "", architecture))
    new = ExecutorDriver(capability, Settings(seed, count, raise_faults, check))
    before = drivers._active
    new.start()
    drivers.set_active(new)
    try:
        with execute_for(architecture), filled_allocations():
            yield ExecutorDevice(architecture, new.launches, new.faults)
    finally:
        drivers._active = before
        new.stop()
