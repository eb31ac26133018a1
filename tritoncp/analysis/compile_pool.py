"""Compilation of kernel launches for GPUs that this machine lacks, in processes without TRITON_INTERPRET,
and reports of the compiled kernels: registers, spills, shared memory, matrix instructions and TMA.

Triton's `JITFunction.warmup` derives the signature from the arguments of the launch, with a stub of its
driver that names the GPU: the compiled kernel is the one that a launch on that GPU would use.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Generator, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tritoncp.analysis.jobs import Job
from tritoncp.analysis.launches import launch_of
from tritoncp.call.engine_factory import name_functions
from tritoncp.core.environment import OFFLINE_LOG
from tritoncp.core.processes import Lost, WorkerPool

MATRIX = re.compile(r"\b(HGMMA|UTC\w*MMA|HMMA|DMMA|v_mfma)")  # matrix product instructions


class Compilers(WorkerPool):
    """Pool of compiler processes, which are reused, since they take seconds to start.

    processes: number of processes; default: one for each core
    timeout:   seconds for one job
    """

    def __init__(self, processes: int | None = None, timeout: float = 300.0) -> None:
        super().__init__(report_jobs, processes, setup=set_up, timeout=timeout, without="TRITON_INTERPRET")

    def compile_jobs(self, jobs: Iterable[Job]) -> Generator[tuple[Job, dict[str, Any]]]:
        """Yield (job, report) in the order of completion. Closing the generator kills running jobs. A report
        is the result of :func:`report_kernel`, or ``{"failed": why}`` if the compiler raises, dies or exceeds
        the timeout, which does not affect other jobs."""
        for job, answer in self.run([job] for job in jobs):
            yield job, {"failed": answer.why} if isinstance(answer, Lost) else answer


def set_up() -> None:
    """Set up a compiler process: discard the compilers' output unless TRITONCP_OFFLINE_LOG=1. (Reports have
    the error messages.)"""
    if not OFFLINE_LOG.read():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.dup2(2, 1)
    name_functions()


def report_jobs(jobs: Iterable[Job]) -> Iterator[dict[str, Any]]:
    """Compile jobs in a compiler process, in which Triton was imported without TRITON_INTERPRET."""
    for job in jobs:
        try:
            yield report_kernel(job)
        except Exception as error:  # any compiler error is a result, and other jobs continue
            yield {"failed": f"{type(error).__name__}: {str(error).strip()[:500]}"}


def compile_launch(launch: Any, arch: str) -> Any:
    """Compile a launch to Triton's kernel object, with the text of every stage and metadata."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    is_amd = arch.startswith("gfx")
    target = GPUTarget("hip", arch, 64) if is_amd else GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: target,
            get_current_stream=lambda device: 0,
        )
    )
    return launch.kernel.warmup(grid=launch.grid, **(launch.config.compiler() | launch.args))


def report_kernel(job: Job) -> dict[str, Any]:
    """Compile a job and return its resources as JSON values.

    registers, spill_bytes: per thread (kernels have no arrays, so all thread-local memory is spilled
        registers); shared_bytes: per CTA; tensor_columns: columns of sm_100's tensor memory; matrix:
        instruction of matrix products, "" for none; tma: number of bulk tensor copies
    """
    launch = launch_of(job)
    if job.config and job.config.USE_TMA > launch.config.USE_TMA:
        raise ValueError("these tensors' strides rule out tensor descriptors")
    kernel = compile_launch(launch, job.arch)
    resources = read_amd(kernel.asm["amdgcn"]) if "amdgcn" in kernel.asm else read_nvidia(kernel.asm["cubin"])
    return {
        "config": asdict(launch.config),
        **resources,
        "shared_bytes": kernel.metadata.shared,
        "tensor_columns": getattr(kernel.metadata, "tmem_size", None) or 0,
    }


def read_nvidia(cubin: bytes) -> dict[str, Any]:
    """Read registers, spill_bytes, matrix and tma from a cubin, by Triton's cuobjdump."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-sass", "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (_number(rf"\b{name}:(\d+)", text) for name in ("REG", "STACK", "LOCAL"))
    return {"registers": registers, "spill_bytes": stack + local, **_units(text)}


def read_amd(text: str) -> dict[str, Any]:
    """Read registers, spill_bytes, matrix and tma from AMD assembly. (Scalar registers spill into lanes of
    vector registers, not into memory.)"""
    names = "vgpr_count", "private_segment_fixed_size", "vgpr_spill_count"
    registers, fixed, spilled = (_number(rf"\.{name}:\s*(\d+)", text) for name in names)
    return {"registers": registers, "spill_bytes": fixed + spilled, **_units(text)}


def _units(text: str) -> dict[str, Any]:
    """Return the matrix instruction and the number of bulk copies in machine code.

    >>> _units("UTMALDG.4D [UR8] ; HGMMA.64x128x16.F32.BF16 R24 ;")
    {'matrix': 'HGMMA', 'tma': 1}
    """
    units = sorted(set(MATRIX.findall(text)))
    return {"matrix": ", ".join(units), "tma": len(re.findall(r"\bUTMALDG", text))}


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    assert match, f"no match of {pattern!r} in the output of the compiler's tools"
    return int(match[1])
