"""One launch of a compiled kernel: its grid, memory, parameters and faults."""

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
THREADS_AT_ONCE = 8192  # so many that NumPy's calls cost little beside their work
SHARED_AT_ONCE = 16 << 20  # bytes


@dataclass(frozen=True)
class Settings:
    """How launches are executed, see `device.compiled_kernels`."""

    seed: int | None = None
    count: bool = False
    raise_faults: bool = True
    check: bool = True


class GridExecution:
    """Executes a program on a grid.

    elected_lane: that `elect.sync` names
    random:       decides the order of programs, warps and atomics, if there is a seed
    step:         threads that stay together under a seed: warps, or warpgroups where the code needs them
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
            raise ValueError(f"a program of {self.threads} threads, the executor runs whole warps of 32")
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
        """The order in which n threads update memory, None for their own."""
        return None if self.random is None else self.random.permutation(n)

    def run(self, parameters: Sequence[int | TensorMap]) -> None:
        """Execute all programs. Parameters are their bits, or tensor maps.

        Raises:
            CannotContinue: after which results are undefined; the fault is in the log.
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
    """Bytes of the smallest access to a space, at most 4: what its shadow tells apart."""
    smallest = 4
    for o in opcodes:
        parts = o.split(".")
        generic = not {"global", "shared", "shared::cta", "local", "param", "const"} & set(parts)
        here = space in parts or space + "::cta" in parts or generic
        if parts[0] in ("ld", "st", "atom", "red") and here and parts[-1] in WIDTHS:
            vector = next((int(p[1:]) for p in parts if p in ("v2", "v4", "v8")), 1)
            smallest = min(smallest, WIDTHS[parts[-1]] // 8 * vector)
    return smallest


def build_ctas(launch: GridExecution, programs: Array) -> Ctas:
    """Make CTAs for programs of these numbers."""
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
