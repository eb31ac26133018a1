"""The state of CTAs that run together: their threads, and the memories and units that generated code
calls."""

from __future__ import annotations

from typing import Any

import numpy as np

from tritoncp.executor.clocks import Clocks

Array = np.ndarray[Any, Any]
u4 = np.uint32


class Ctas:
    """`n` CTAs of a launch, with `count` threads in all; `launch.build_ctas` adds their memories and units.

    program:  index of each thread's CTA in the grid, from 1
    progress: counts events for which a thread may poll: changes of memory, arrivals
    """

    globals: Any
    shared: Any
    local: Any
    generic: Any
    async_copies: Any
    mbarriers: Any
    tma: Any
    wgmma: Any
    tensor: Any
    tcgen05: Any

    def __init__(self, launch: Any, programs: Array) -> None:
        self.launch, self.threads, self.n = launch, launch.threads, len(programs)
        self.warps = -(-self.threads // 32)
        self.count = self.n * self.threads
        number = np.repeat(programs, self.threads)
        self.program = (number + 1).astype(np.int32)
        gx, gy, _ = launch.grid
        self.ids = tuple(x.astype(u4) for x in (number % gx, number // gx % gy, number // (gx * gy)))
        self.tid = np.tile(np.arange(self.threads, dtype=u4), self.n)
        self.cta = np.repeat(np.arange(self.n), self.threads)
        self.warp = (self.tid >> u4(5)).astype(np.int64)
        self.clocks = Clocks(self.n, self.warps)
        self.counts = launch.counts
        self.progress = 0
