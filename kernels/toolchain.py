"""Triton's compiler and ptxas, the assembler behind it: which ones are in use, and their known faults.

Nothing here compiles or launches a kernel.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

UNSAFE = "TRITONCP_UNSAFE_FUSED"  # environment variable: 1 allows the fused backward pass everywhere
BUNDLED = "bundled with Triton"
# Environment variables that name another ptxas: for GPUs before sm_100, and from there on.
PTXAS_PATHS = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")
# Faults of ptxas in kernels for sm_90: the first version without it, and the kernels that it assembles wrong.
HOPPER_FAULTS = (
    ((13, 1), "some kernels of four warps (flash-linear-attention#1262)"),
    ((13, 3), "some products whose left operand lies in registers (triton#9433)"),
)


class Ptxas(NamedTuple):
    """The assembler of an architecture's kernels.

    origin: "bundled with Triton", or the environment variable that names the path
    """

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
        """The environment variable that puts another ptxas in its place.

        >>> Ptxas("12.9.86", "/triton/bin/ptxas-blackwell", BUNDLED).variable
        'TRITON_PTXAS_BLACKWELL_PATH'
        """
        return PTXAS_PATHS["blackwell" in Path(self.path).name] if self.origin == BUNDLED else self.origin


def ptxas_for(arch: str) -> Ptxas:
    """The ptxas that Triton runs for ``arch``. Raises LookupError, which says why, where there is none."""
    if not arch.startswith("sm_"):
        raise LookupError(f"{arch} has no ptxas: it assembles for NVIDIA's GPUs alone")
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
    said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    number = re.search(r"\bV(\d+\.\d+\.\d+)", said) or re.search(r"\brelease (\d+\.\d+)", said)
    if number is None:
        raise OSError(f"{path} --version names no version")
    return number[1]


def ptxas_faults(arch: str, version: str) -> Iterator[str]:
    """The kernels for ``arch`` that this version of ptxas is known to assemble wrong, and the cure's version.

    >>> list(ptxas_faults("sm_90", "13.1.80"))
    ['some products whose left operand lies in registers (triton#9433), right from 13.3 on']
    >>> list(ptxas_faults("sm_100", "12.8.93"))
    []
    """
    for (major, minor), kernels in HOPPER_FAULTS if arch == "sm_90" else ():
        if _numbers(version) < (major, minor):
            yield f"{kernels}, right from {major}.{minor} on"


def multiplies_transposed(arch: str) -> bool:
    """Whether this Triton compiles products of a transposed register tile right for ``arch``.

    Triton before 3.7.1 does not on sm_90: where wgmma's left operand is the transposed result of another
    product, the answer is wrong without an error (flash-linear-attention#640; #983 names 3.4 to 3.7.0,
    triton#6124 already 3.2).  Reported for 16-bit tiles; the guard holds for every dtype, since products in
    tf32 are wgmma's as well.

    Products of the kernels with such an operand:

    - dQ, dK/dV and fused kernels with FLIP: P and dS are the transposed result of ``tiles.inner``;
    - the fused kernel, with FLIP or without: dS is transposed for dQ.

    All other transposed operands are loads, which wgmma reads from shared memory: the right operands of
    ``tiles.inner``, and K in ``gluon``.  The forward kernels never pass FLIP; the permutations in
    ``forward.rescaled`` move an accumulator, no operand.
    """
    if arch != "sm_90":
        return True  # without Triton too, where the eager engine runs
    import triton

    return _numbers(triton.__version__) >= (3, 7, 1)


def transposed_fault(arch: str) -> str | None:
    """Why kernels for ``arch`` may not multiply transposed register tiles, and the cure; None if they may."""
    if multiplies_transposed(arch):
        return None
    import triton

    return (
        f"Triton {triton.__version__} miscompiles its transposed products for {arch}: gradients may be "
        "wrong without an error (flash-linear-attention#640). Install triton 3.7.1 or newer"
    )


def fused_fault(arch: str) -> str | None:
    """The same for the fused backward kernel, which TRITONCP_UNSAFE_FUSED=1 allows all the same."""
    return None if os.environ.get(UNSAFE) == "1" else transposed_fault(arch)


@lru_cache
def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version.

    >>> _numbers("3.7.1+git12"), _numbers("3.8.0rc1"), _numbers("13.1")
    ((3, 7, 1), (3, 8, 0), (13, 1))
    """
    leading = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, leading[0].split("."))) if leading else ()


def broken_ptxas_paths() -> Iterator[str]:
    """A line for each environment variable that names a ptxas which does not run."""
    for name in PTXAS_PATHS:
        if path := os.environ.get(name):
            try:
                _version(path)
            except (OSError, subprocess.SubprocessError) as error:
                yield f"{name}={path} names no ptxas that runs ({error}): name another one, or unset {name}"


def bundled_ptxas() -> list[Ptxas]:
    """Every ptxas that Triton brings and that runs here."""
    import triton

    folder = Path(triton.__file__).parent / "backends/nvidia/bin"
    tools = []
    for path in sorted(folder.glob("ptxas*")):
        try:
            tools.append(Ptxas(_version(str(path)), str(path), BUNDLED))
        except (OSError, subprocess.SubprocessError):
            continue
    return tools
