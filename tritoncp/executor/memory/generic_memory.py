"""Local memory of threads, and accesses whose address tells the space: global, shared or local memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from tritoncp.executor.ctas import Ctas
from tritoncp.executor.memory.regions import LOCAL, SHARED
from tritoncp.executor.threads import Access

Array = np.ndarray[Any, Any]
u8 = np.uint64


class LocalMemory:
    """Bytes [thread, address], and whether they are written."""

    def __init__(self, ctas: Ctas, nbytes: int) -> None:
        self.data = np.zeros((ctas.count, nbytes), np.uint8)
        self.written = np.zeros((ctas.count, nbytes), bool)

    def locate(self, access: Access, address: Array, nbytes: int) -> tuple[Access, Array, Array]:
        """The access without what is out of bounds, and rows and columns of its bytes."""
        a = access.pick(address).astype(np.int64)
        bad = (a < 0) | (a + nbytes > self.data.shape[1])
        if bad.any():
            access.fault("out of bounds local access", np.flatnonzero(bad), int(a[bad][0]))
            access, a = access.some(np.flatnonzero(~bad)), a[~bad]
        return access, access.lanes[:, None], a[:, None] + np.arange(nbytes)

    def load(self, access: Access, address: Array, t: str, n: int) -> list[Array]:
        nbytes = int(t[1]) * n
        out = np.zeros((access.threads.count, nbytes), np.uint8)
        access, rows, columns = self.locate(access, address, nbytes)
        fresh = np.flatnonzero(~self.written[rows, columns].all(1))
        if len(fresh):
            access.fault("read of local memory that was never written", fresh)
        out[access.where] = self.data[rows, columns]
        return list(np.ascontiguousarray(out.view(t).T))

    def store(self, access: Access, address: Array, values: tuple[Array, ...]) -> None:
        data = np.stack(values, 1).view(np.uint8)
        access, rows, columns = self.locate(access, address, data.shape[1])
        new = access.pick(data)
        access.ctas.progress += not np.array_equal(self.data[rows, columns], new)
        self.data[rows, columns] = new
        self.written[rows, columns] = True


class GenericMemory:
    """Sends each thread's access to the memory that its address names."""

    def __init__(self, ctas: Ctas) -> None:
        self.ctas = ctas

    def parts(self, access: Access, address: Array) -> list[tuple[Any, Access, Array]]:
        """(memory, access of its threads, addresses in it) of each space in use."""
        shared, local = (address & u8(SHARED)) != 0, (address & u8(LOCAL)) != 0
        spaces = (
            (self.ctas.globals, ~shared & ~local, 0),
            (self.ctas.shared, shared, SHARED),
            (self.ctas.local, local, LOCAL),
        )
        parts = [(m, access.some(np.flatnonzero(access.pick(here))), bit) for m, here, bit in spaces]
        return [(m, part, address & ~u8(bit)) for m, part, bit in parts if len(part)]

    def load(self, access: Access, address: Array, t: str, n: int) -> list[Array]:
        out = [np.zeros(access.threads.count, t) for _ in range(n)]
        for memory, part, a in self.parts(access, address):
            for old, new in zip(out, memory.load(part, a, t, n)):
                old[part.at] = new[part.at]
        return out

    def store(self, access: Access, address: Array, values: tuple[Array, ...]) -> None:
        for memory, part, a in self.parts(access, address):
            memory.store(part, a, values)

    def atomic(
        self, access: Access, address: Array, t: str, kind: str, operation: str, values: tuple[Array, ...]
    ) -> Array:
        out = np.zeros(access.threads.count, t)
        for memory, part, a in self.parts(access, address):
            out[part.at] = memory.atomic(part, a, t, kind, operation, values)[part.at]
        return out
