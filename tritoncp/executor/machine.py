"""Builds the memories and units of CTAs."""

from __future__ import annotations

from typing import Any

import numpy as np

from tritoncp.executor.ctas import Ctas
from tritoncp.executor.memory.async_copies import AsyncCopies
from tritoncp.executor.memory.generic_memory import GenericMemory
from tritoncp.executor.memory.local_memory import LocalMemory
from tritoncp.executor.memory.shared_memory import SharedMemory
from tritoncp.executor.units.mbarriers import Mbarriers
from tritoncp.executor.units.tcgen05 import Tcgen05
from tritoncp.executor.units.tensor_memory import TensorMemory
from tritoncp.executor.units.tma import Tma
from tritoncp.executor.units.wgmma import Wgmma


def build_ctas(launch: Any, programs: np.ndarray[Any, Any]) -> Ctas:
    """Make CTAs for programs of these numbers."""
    ctas = Ctas(launch, programs)
    ctas.globals = launch.memory
    ctas.shared = SharedMemory(ctas, launch.shared_bytes, launch.granule)
    ctas.local = LocalMemory(ctas, launch.local_bytes)
    ctas.generic = GenericMemory(ctas)
    ctas.async_copies = AsyncCopies(ctas)
    ctas.mbarriers = Mbarriers(ctas)
    ctas.tma = Tma(ctas)
    ctas.wgmma = Wgmma(ctas)
    ctas.tensor = TensorMemory(ctas)
    ctas.tcgen05 = Tcgen05(ctas)
    return ctas


def finish(ctas: Ctas) -> None:
    """Look for what a program must not leave behind."""
    if ctas.launch.check:
        for unit in (ctas.tma, ctas.wgmma, ctas.tensor, ctas.tcgen05):
            unit.finish_program()
