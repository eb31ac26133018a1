"""Memory of each thread for itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from tritoncp.executor.ctas import Ctas
from tritoncp.executor.threads import Access

Array = np.ndarray[Any, Any]


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

    def store(self, access: Access, address: Array, t: str, values: tuple[Array, ...]) -> None:
        data = np.stack(values, 1).view(np.uint8)
        access, rows, columns = self.locate(access, address, data.shape[1])
        self.data[rows, columns] = access.pick(data)
        self.written[rows, columns] = True
        access.ctas.progress += 1
