"""Accesses whose address tells the space: global, shared or local memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from tritoncp.executor.address_space import LOCAL, SHARED
from tritoncp.executor.ctas import Ctas
from tritoncp.executor.threads import Threads

Array = np.ndarray[Any, Any]
u8 = np.uint64


class GenericMemory:
    """Sends each thread's access to the memory that its address names."""

    def __init__(self, ctas: Ctas) -> None:
        self.ctas = ctas

    def parts(self, address: Array, mask: Array | None) -> list[tuple[Any, Array, Array]]:
        """(memory, addresses in it, mask of the threads) of each space in use."""
        shared, local = (address & u8(SHARED)) != 0, (address & u8(LOCAL)) != 0
        every = np.ones(len(address), bool) if mask is None else mask
        spaces = (
            (self.ctas.globals, ~shared & ~local, 0),
            (self.ctas.shared, shared, SHARED),
            (self.ctas.local, local, LOCAL),
        )
        return [(m, address & ~u8(bit), here & every) for m, here, bit in spaces if (here & every).any()]

    def load(
        self, threads: Threads, address: Array, t: str, n: int, mask: Array | None, site: int
    ) -> list[Array]:
        out = [np.zeros(threads.count, t) for _ in range(n)]
        for memory, a, here in self.parts(address, mask):
            values = memory.load(threads, a, t, n, here, site)
            out = [np.where(here, new, old) for new, old in zip(values, out)]
        return out

    def store(
        self,
        threads: Threads,
        address: Array,
        t: str,
        values: tuple[Array, ...],
        mask: Array | None,
        site: int,
    ) -> None:
        for memory, a, here in self.parts(address, mask):
            memory.store(threads, a, t, values, here, site)

    def atomic(
        self,
        threads: Threads,
        address: Array,
        t: str,
        kind: str,
        operation: str,
        values: tuple[Array, ...],
        mask: Array | None,
        site: int,
    ) -> Array:
        out = np.zeros(threads.count, t)
        for memory, a, here in self.parts(address, mask):
            out = np.where(here, memory.atomic(threads, a, t, kind, operation, values, here, site), out)
        return out
