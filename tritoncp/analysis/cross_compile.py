"""Cross-compilation of a kernel launch for a GPU that this machine lacks.

Triton's `JITFunction.warmup` derives the signature from the arguments of the launch, with a stub of its
driver that names the GPU: the compiled kernel is the one that a launch on that GPU would use.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class DriverStub(NamedTuple):
    """The part of Triton's driver that compilation needs, for an absent GPU."""

    target: Any

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> Any:
        return self.target

    def get_current_stream(self, device: Any) -> int:
        return 0


# Architectures with default tiles, for which Triton compiles.
TARGETS = (
    *("sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121"),
    *("gfx90a", "gfx942", "gfx950"),
)


def check_target(arch: str) -> None:
    """Raise ValueError for an architecture that is not in TARGETS."""
    if arch not in TARGETS:
        raise ValueError(f"architecture {arch!r} is unknown; pass one of {', '.join(TARGETS)}")


def target_of(arch: str) -> Any:
    """Return Triton's GPUTarget of an architecture: sm_90, gfx942, ..."""
    from triton.backends.compiler import GPUTarget

    if arch.startswith("gfx"):
        return GPUTarget("hip", arch, 64)
    return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)


def compile_launch(launch: Any, arch: str) -> Any:
    """Compile a launch to Triton's kernel object, with the text of every stage and metadata."""
    from triton.runtime.driver import driver

    driver.set_active(DriverStub(target_of(arch)))
    return launch.kernel.warmup(grid=launch.grid, **(launch.config.compiler() | launch.args))
