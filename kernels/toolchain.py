"""Versions of Triton's compiler and of ptxas, its assembler, and their known faults. Compiles no kernel."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from tritoncp.core.environment import UNSAFE_FUSED

BUNDLED = "bundled with Triton"
# Environment variables that name another ptxas. Triton reads the second for sm_100 and newer, and since 3.9
# also for sm_90; `ptxas_for` asks Triton.
PTXAS_PATHS = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")
# Faults of ptxas in kernels for sm_90: the first version without the fault, and the kernels that the fault
# breaks.
HOPPER_FAULTS = (
    ((13, 1), "some kernels of four warps (flash-linear-attention#1262)"),
    ((13, 3), "some products whose left operand lies in registers (triton#9433)"),
)


class Ptxas(NamedTuple):
    """A ptxas. origin: "bundled with Triton", or the environment variable that names its path."""

    version: str
    path: str
    origin: str

    def __str__(self) -> str:
        """
        >>> str(Ptxas("13.1.80", "/usr/local/cuda/bin/ptxas", "TRITON_PTXAS_PATH"))
        '13.1.80, TRITON_PTXAS_PATH: /usr/local/cuda/bin/ptxas'
        """
        return f"{self.version}, {self.origin}: {self.path}"

    @property
    def variable(self) -> str:
        """The environment variable that replaces this ptxas.

        >>> Ptxas("12.9.86", "/triton/bin/ptxas-blackwell", BUNDLED).variable
        'TRITON_PTXAS_BLACKWELL_PATH'
        """
        return PTXAS_PATHS["blackwell" in Path(self.path).name] if self.origin == BUNDLED else self.origin


def ptxas_for(arch: str) -> Ptxas:
    """Return the ptxas that Triton runs for ``arch``. Raises LookupError with the reason if there is none."""
    if not arch.startswith("sm_"):
        raise LookupError(f"ptxas assembles only for NVIDIA's GPUs, not for {arch}")
    try:
        from triton.backends.nvidia.compiler import get_ptxas
    except ImportError as error:
        raise LookupError(f"Triton's compiler for NVIDIA's GPUs is not installed: {error}") from error
    try:
        path = get_ptxas(int(arch.removeprefix("sm_"))).path
        version = _version(path)
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        raise LookupError(f"no ptxas runs for {arch}: {error}") from error
    origin = next((name for name in PTXAS_PATHS if os.environ.get(name) == path), BUNDLED)
    return Ptxas(version, path, origin)


@lru_cache
def _version(path: str) -> str:
    """Ask a ptxas for its version."""
    text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    number = re.search(r"\bV(\d+\.\d+\.\d+)", text) or re.search(r"\brelease (\d+\.\d+)", text)
    if number is None:
        raise OSError(f"{path} --version prints no version")
    return number[1]


def ptxas_faults(arch: str, version: str) -> Iterator[str]:
    """List the known faults of a ptxas version: the ``arch`` kernels that it assembles wrong, and the fixed
    version.

    >>> list(ptxas_faults("sm_90", "13.1.80"))
    ['some products whose left operand lies in registers (triton#9433), right from 13.3 on']
    >>> list(ptxas_faults("sm_100", "12.8.93"))
    []
    """
    for (major, minor), kernels in HOPPER_FAULTS if arch == "sm_90" else ():
        if version_numbers(version) < (major, minor):
            yield f"{kernels}, right from {major}.{minor} on"


def multiplies_transposed(arch: str) -> bool:
    """Return whether products of a transposed register tile are right on GPUs of ``arch`` with this Triton.

    With Triton 3.4 to 3.7.0 they are reported wrong on Hopper, without an error: where wgmma's left operand
    is the transposed result of another product (flash-linear-attention#640, #983; triton#6124 names 3.2).
    The guard covers every dtype, since tf32 products run on wgmma too.

    The PTX of these products is right.  Of 126 chained products (a b^T)^T c that 3.6.0 compiled,
    ``tritoncp.executor`` ran 97 to the exact result and none to a wrong one; it refused the same 29 as of
    3.7.1.  In the kernel of #640 it finds one fault of 3.6.0, the loop of asynchronous copies of
    `fences_async_copies`, and none in its transposed products (``tests/executor/compiled/test_mutants.py``).
    Besides, ptxas before 13.3, which both versions contain, may reuse registers of wgmma's left operand too
    early (triton#9433, triton#11781).  Which fault #640 saw, a GPU has to show: until then the guard stays.

    Kernels with such products:

    - dQ, dK/dV and fused with FLIP: P and dS are the transposed result of ``scores.dot_nt``;
    - fused, with or without FLIP: dS is transposed for dQ.

    All other transposed operands are loads, which wgmma reads from shared memory: the right operands of
    ``scores.dot_nt``, and K in ``gluon``.  The forward kernels never use FLIP; ``forward.rescale`` permutes
    an accumulator, not an operand.
    """
    if arch != "sm_90":
        return True  # before the import, which fails where only the CPU engine is installed
    import triton

    return version_numbers(triton.__version__) >= (3, 7, 1)


def fences_async_copies() -> bool:
    """Return whether this Triton orders a loop's ``cp.async`` copies before the reads of wgmma and
    tcgen05.mma.

    These read shared memory through the async proxy, so that a ``fence.proxy.async`` has to follow the wait
    for a copy (PTX ISA, "Async proxy").  Triton before 3.7.1 puts that fence before the loop, where nothing
    has arrived (triton#9610; wrong results on B200: pytorch#181248).  ``tritoncp.executor`` reports it of
    code that 3.6.0 compiles.  Copies by tensor descriptor are written through the async proxy; with one stage
    there are no asynchronous copies.
    """
    import triton

    return version_numbers(triton.__version__) >= (3, 7, 1)


@lru_cache
def keeps_pending_kernels() -> bool:
    """Return whether a launch finds a kernel that a thread of Triton's `AsyncCompileMode` is compiling.
    Triton 3.6 would compile it a second time."""
    import triton

    return version_numbers(triton.__version__) >= (3, 7)


def flips_right(arch: str, rows: int) -> bool:
    """Return whether Triton compiles FLIP right for ``arch`` if the transposed scores have ``rows`` rows.

    wgmma takes 64 rows. With fewer rows, Triton computes the scores by mma.sync, and multiplies the result
    with the same tile of Q, K or dO by wgmma. It waits for all but the last of these products, and the next
    copy of the loop overwrites the tile that the last one still reads (3.6.0 and 3.7.1, found by
    ``tritoncp.executor``).
    """
    return multiplies_transposed(arch) and (arch != "sm_90" or rows >= 64)


def transposed_fault(arch: str) -> str | None:
    """Return why kernels for ``arch`` may not multiply transposed register tiles, with the remedy; None if
    they may."""
    if multiplies_transposed(arch):
        return None
    import triton

    return (
        f"Triton {triton.__version__} is reported to compute wrong gradients on {arch} by transposed "
        "products, without an error (flash-linear-attention#640). Install triton 3.7.1 or newer"
    )


def fused_fault(arch: str) -> str | None:
    """Return why the fused backward kernel may not run; None if it may, or if TRITONCP_UNSAFE_FUSED=1."""
    return None if UNSAFE_FUSED.read() else transposed_fault(arch)


@lru_cache
def version_numbers(version: str) -> tuple[int, ...]:
    """Parse the leading numbers of a version.

    >>> version_numbers("3.7.1+git12"), version_numbers("3.8.0rc1"), version_numbers("13.1")
    ((3, 7, 1), (3, 8, 0), (13, 1))
    """
    leading = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, leading[0].split("."))) if leading else ()


def broken_ptxas_paths() -> Iterator[str]:
    """List the environment variables that name a ptxas that does not run, each as a line with the remedy."""
    for name in PTXAS_PATHS:
        if path := os.environ.get(name):
            try:
                _version(path)
            except (OSError, subprocess.SubprocessError) as error:
                yield f"{name}={path}: this ptxas does not run ({error}); set another path, or unset {name}"
