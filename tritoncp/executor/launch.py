"""Execution of one launch of a compiled kernel: grid, memory, parameters and faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tritoncp.executor.counters import LaunchCounts
from tritoncp.executor.ctas import Ctas
from tritoncp.executor.faults import CannotContinue, FaultLog
from tritoncp.executor.memory.async_copies import AsyncCopies
from tritoncp.executor.memory.global_memory import GlobalMemory
from tritoncp.executor.memory.memory import GenericMemory
from tritoncp.executor.memory.regions import Extent
from tritoncp.executor.memory.shared_memory import LocalMemory, SharedMemory
from tritoncp.executor.program import PtxProgram
from tritoncp.executor.ptx.instruction import WIDTHS
from tritoncp.executor.scheduler import Scheduler
from tritoncp.executor.units.mbarriers import Mbarriers
from tritoncp.executor.units.tcgen05 import Tcgen05
from tritoncp.executor.units.tensor_memory import TensorMemory
from tritoncp.executor.units.tma import TensorMap, Tma
from tritoncp.executor.units.wgmma import Wgmma

Array = np.ndarray[Any, Any]
THREADS_AT_ONCE = 8192  # number of threads that run together, which makes the overhead of NumPy calls small
SHARED_AT_ONCE = 16 << 20  # max bytes of shared memory of CTAs that run together


@dataclass(frozen=True)
class Settings:
    """Settings of launches, as in `device.compiled_kernels`."""

    seed: int | None = None
    count: bool = False
    raise_faults: bool = True
    check: bool = True


class GridExecution:
    """Execution of a compiled kernel on a grid.

    elected_lane: lane that `elect.sync` returns
    random:       generator for the order of CTAs, warps and atomics, if there is a seed
    step:         number of threads that stay together under a seed: a warp, or a warpgroup if the code needs
                  it
    """

    def __init__(
        self,
        program: PtxProgram,
        grid: tuple[int, int, int],
        threads: int,
        dynamic_shared: int,
        extents: list[Extent],
        settings: Settings,
    ) -> None:
        self.program, self.grid, self.check = program, grid, settings.check
        self.threads = program.kernel.threads or threads
        if self.threads % 32:
            raise ValueError(f"a CTA has {self.threads} threads; a multiple of 32 is needed: whole warps")
        opcodes = [i.opcode for block in program.kernel.blocks for i in block.instructions]
        self.shared_bytes = dynamic_shared + sum(n for _, n in program.kernel.shared.values())
        self.local_bytes = max((a + n for a, n in program.kernel.local.values()), default=0)
        self.granule = smallest_access(opcodes, "shared")
        self.has_async_proxy = any(
            o.startswith(("wgmma.mma", "cp.async.bulk", "tcgen05.mma")) for o in opcodes
        )
        constants = [
            Extent(data.ctypes.data, data.ctypes.data + n, name)
            for name, (data, n) in program.constants.items()
        ]
        self.memory = GlobalMemory([*extents, *constants], smallest_access(opcodes, "global"), self.check)
        self.log = FaultLog(program.kernel.name, program.sites)
        self.counts = LaunchCounts(program) if settings.count else None
        self.tensor_maps: dict[int, TensorMap] = {}
        self.parameter_maps: dict[int, TensorMap] = {}
        self.random = None if settings.seed is None else np.random.default_rng(settings.seed)
        self.elected_lane = 0 if self.random is None else int(self.random.integers(32))
        grouped = any(o.startswith(("wgmma", "setmaxnreg")) for o in opcodes)
        self.step = 128 if grouped else 32

    def order(self, n: int) -> Array | None:
        """Return the order in which n threads update memory; None: by index."""
        return None if self.random is None else self.random.permutation(n)

    def run(self, parameters: Sequence[int | TensorMap]) -> None:
        """Execute all CTAs. parameters: their bits, or tensor maps

        Raises:
            CannotContinue: for a fault after which results are undefined; it is in the log.
        """
        self.parameter_maps = {n: p for n, p in enumerate(parameters) if isinstance(p, TensorMap)}
        raw = [b"" if isinstance(p, TensorMap) else p.to_bytes(8, "little") for p in parameters]

        def parameter(position: int, offset: int, t: str) -> Any:
            data = raw[position][offset : offset + int(t[1])]
            return np.frombuffer(data, t)[0]

        addresses = {
            name: self.memory.tag(data.ctypes.data) for name, (data, _) in self.program.constants.items()
        }
        functions = self.program.functions(addresses)
        total = self.grid[0] * self.grid[1] * self.grid[2]
        order = np.arange(total) if self.random is None else self.random.permutation(total)
        at_once = max(1, min(THREADS_AT_ONCE // self.threads, SHARED_AT_ONCE // max(1, self.shared_bytes)))
        for i, text in self.program.early:
            self.log.add(text, i)
        with np.errstate(all="ignore"):
            for first in range(0, total, at_once):
                ctas = build_ctas(self, order[first : first + at_once])
                try:
                    Scheduler(ctas, functions, parameter).run()
                except CannotContinue as e:
                    self.log.add(e.kind, e.site, text=e.text)
                    raise
                if self.check:
                    for unit in (ctas.tma, ctas.wgmma, ctas.tensor, ctas.tcgen05):
                        unit.finish_program()


def smallest_access(opcodes: list[str], space: str) -> int:
    """Return the bytes of the smallest access to a space, up to 4: the granule of its shadow."""
    smallest = 4
    for o in opcodes:
        parts = o.split(".")
        generic = not {"global", "shared", "shared::cta", "local", "param", "const"} & set(parts)
        is_access = space in parts or space + "::cta" in parts or generic
        if parts[0] in ("ld", "st", "atom", "red") and is_access and parts[-1] in WIDTHS:
            vector = next((int(p[1:]) for p in parts if p in ("v2", "v4", "v8")), 1)
            smallest = min(smallest, WIDTHS[parts[-1]] // 8 * vector)
    return smallest


def build_ctas(launch: GridExecution, programs: Array) -> Ctas:
    """Make the state of the CTAs with these indices in the grid."""
    ctas = Ctas(launch, programs)
    ctas.globals = launch.memory
    ctas.shared = SharedMemory(ctas, launch.shared_bytes, launch.granule, ctas.n)
    ctas.local = LocalMemory(ctas, launch.local_bytes, launch.granule, ctas.count)
    ctas.generic = GenericMemory(ctas)
    ctas.async_copies = AsyncCopies(ctas)
    ctas.mbarriers = Mbarriers(ctas)
    ctas.tma = Tma(ctas)
    ctas.wgmma = Wgmma(ctas)
    ctas.tensor = TensorMemory(ctas)
    ctas.tcgen05 = Tcgen05(ctas)
    return ctas
