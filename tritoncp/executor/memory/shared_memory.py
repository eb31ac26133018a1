"""Shared memory of CTAs, and its shadow: which bytes were written, and which agents wrote and read them.
Local memory is treated the same way, per thread."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np

from tritoncp.executor.clocks import SHIFT
from tritoncp.executor.ctas import Ctas
from tritoncp.executor.memory.memory import Memory, holds
from tritoncp.executor.memory.regions import UNSIGNED
from tritoncp.executor.memory.shadow import Shadow, no_accesses
from tritoncp.executor.threads import Access, Threads

Array = np.ndarray[Any, Any]
u1, u2, u4, u8 = np.uint8, np.uint16, np.uint32, np.uint64

# States of a byte. BY_THREADS: written by threads, so that the asynchronous proxy (TMA, wgmma, tcgen05) may
# use it only after a fence.proxy.async. MBARRIER: memory of a valid mbarrier.
UNWRITTEN, WRITTEN, ON_ITS_WAY, MBARRIER, BY_THREADS = range(5)
REASONS = {
    UNWRITTEN: "that was never written",
    ON_ITS_WAY: "whose copy is under way",
    MBARRIER: "of a valid mbarrier",
}
BUSY = {value: text for value, text in REASONS.items() if value != UNWRITTEN}


@functools.cache
def repeat_bytes(value: int, nbytes: int) -> Any:
    return np.frombuffer(bytes([value] * nbytes), UNSIGNED[nbytes])[0]


class SharedMemory(Memory):
    """Shared memory of all CTAs in one array, `size` bytes each, of which a kernel may use `used`."""

    name = "shared"
    label = None  # not of a tensor

    def __init__(self, ctas: Ctas, used: int, granule: int, owners: int) -> None:
        self.ctas, self.used, self.granule = ctas, used, granule
        self.check = ctas.launch.check
        self.size = -(-max(used, 32) // 32) * 32
        total = owners * self.size
        self.data = np.full(total, 0xFF, u1)
        self.state = np.zeros(total, u1)
        self.views = {n: self.data.view(t) for n, t in UNSIGNED.items()}
        self.states = {n: self.state.view(t) for n, t in UNSIGNED.items()}
        self.shadow = no_accesses(self.name, ctas.clocks, total // granule)
        self.by_threads = BY_THREADS if ctas.launch.has_async_proxy else WRITTEN

    def starts(self, access: Access) -> Array:
        """Return the start of the memory of each thread's CTA (or of each thread)."""
        return access.cta * self.size

    def count(self, access: Access, address: Array, nbytes: int, way: str) -> None:
        if self.ctas.counts is not None:
            self.ctas.counts.shared_access(access, address, nbytes)

    def address(self, idx: Array, nbytes: int) -> Array:
        return idx * nbytes % self.size

    def granules(self, nbytes: int) -> Shadow:
        """Return the shadow with a row of granules for each nbytes."""
        return self.shadow.shaped(-1, nbytes // self.granule)

    def places(
        self, access: Access, address: Array, nbytes: int, kind: str
    ) -> Iterable[tuple[Access, Any, Array]]:
        return [(access, self, self.locate(access, address, nbytes, kind))] if len(access) else []

    def locate(self, access: Access, address: Array, nbytes: int, kind: str) -> Array:
        """Return the index in units of nbytes; report addresses out of bounds or misaligned, and replace them
        by valid ones."""
        a = access.pick(address).astype(np.int64)
        if nbytes > 1:
            wrong = (a & (nbytes - 1)) != 0
            access.fault(f"misaligned {self.name} {kind} of {nbytes} bytes", wrong, a)
            a &= ~(nbytes - 1)
        if len(a) and (a.min() < 0 or a.max() + nbytes > self.used):
            bad, text = (a < 0) | (a + nbytes > self.used), f"{self.used} bytes are allocated"
            access.fault(f"out of bounds {self.name} {kind}", bad, a, None, text)
            a = np.clip(a, 0, max(0, self.used - nbytes)) & ~(nbytes - 1)
        return (self.starts(access) + a) // nbytes

    # checks

    def check_read(self, access: Access, place: Any, idx: Array, nbytes: int) -> None:
        """Report reads of uninitialised bytes and of copies in progress, and races; record the readers."""
        if not self.check or not len(idx):
            return
        self.check_atomic(access, place, idx, nbytes)
        if nbytes >= self.granule:
            self.granules(nbytes).check(access, idx, "read", address=self.address(idx, nbytes))
            self.granules(nbytes).note_reader(idx, access.tags[:, None])

    def check_atomic(self, access: Access, place: Any, idx: Array, nbytes: int) -> None:
        """Report atomics on uninitialised bytes. (Atomics by several warps are no race.)"""
        if not self.check:
            return
        wide = min(nbytes, 8)
        state = self.states[wide].reshape(-1, nbytes // wide)[idx]
        good = (state == repeat_bytes(WRITTEN, wide)) | (state == repeat_bytes(BY_THREADS, wide))
        if not good.all():
            state = np.where(access.used_bytes(nbytes), self.state.reshape(-1, nbytes)[idx], u1(WRITTEN))
            self.report_state(access, "read", state, self.address(idx, nbytes), REASONS)

    def report_state(
        self, access: Access, kind: str, state: Array, address: Array, reasons: dict[int, str]
    ) -> bool:
        """Report units with a byte [n, nbytes] in one of these states; return whether there are any."""
        faults = [
            access.fault(f"{kind} of {self.name} memory {text}", state == value, address)
            for value, text in reasons.items()
        ]
        return any(faults)

    def check_busy(self, access: Access, kind: str, idx: Array, nbytes: int) -> None:
        """Report writes to the destination of a copy in progress, or to an mbarrier."""
        if self.check:
            state = self.state.reshape(-1, nbytes)[idx]
            self.report_state(access, kind, state, self.address(idx, nbytes), BUSY)

    def check_race(
        self,
        access: Access,
        idx: Array,
        nbytes: int,
        kind: str,
        data: Array | None = None,
        agent: int | None = None,
    ) -> None:
        """Report races of a write. (Equal data written by several warps are no race.)"""
        if not self.check or nbytes < self.granule or not len(idx):
            return
        same = None if data is None else holds(self.views, idx, nbytes, data)
        self.granules(nbytes).check(access, idx, kind, True, self.address(idx, nbytes), agent, same)

    def check_write(
        self, access: Access, place: Any, idx: Array, nbytes: int, data: Array, kind: str
    ) -> None:
        self.check_race(access, idx, nbytes, kind, data)
        self.check_busy(access, kind, idx, nbytes)

    def note_write(self, access: Access, place: Any, idx: Array, nbytes: int) -> None:
        self.note_writer(idx, nbytes, access.tags[:, None])
        self.mark(idx, nbytes, self.by_threads)

    def note_writer(self, idx: Array, nbytes: int, tag: Array) -> None:
        if self.check and nbytes >= self.granule:
            self.granules(nbytes).writer[idx] = tag

    def mark(self, idx: Array, nbytes: int, value: int) -> None:
        self.states[nbytes][idx] = repeat_bytes(value, nbytes)

    def expect_copy(self, idx: Array, nbytes: int, tag: Array) -> None:
        """Record a copy in progress, and overwrite its destination, so that early use also changes
        results."""
        self.mark(idx, nbytes, ON_ITS_WAY)
        self.note_writer(idx, nbytes, tag)
        self.views[nbytes][idx] = repeat_bytes(0xFF, nbytes)

    # matrices

    def matrix_rows(self, access: Access, address: Array, n: int, kind: str) -> tuple[Access, Array]:
        """Return the rows of `ldmatrix` and `stmatrix`: lane 8 j + r has the address of row r of matrix j."""
        access.threads.need_warps(kind)
        access = access.select(np.flatnonzero(access.threads.laneid < 8 * n))
        self.count(access, address, 16, kind)
        return access, self.locate(access, address, 16, kind)

    def load_matrices(self, access: Access, address: Array, n: int, transposed: bool) -> list[Array]:
        """`ldmatrix`: load n matrices of 8 × 8 for each warp."""
        access, idx = self.matrix_rows(access, address, n, "ldmatrix")
        self.check_read(access, self, idx, 16)
        warps, rows = access.threads.count // 32, self.views[16].take(idx)
        if transposed:
            flipped = rows.view(u2).reshape(warps * n, 8, 8).transpose(0, 2, 1)
            out = np.ascontiguousarray(flipped).view(u4).reshape(warps, n, 32)
        else:
            out = rows.view(u4).reshape(warps, n, 32)
        return [np.ascontiguousarray(out[:, j]).reshape(-1) for j in range(n)]

    def store_matrices(
        self, access: Access, address: Array, values: tuple[Array, ...], transposed: bool
    ) -> None:
        """`stmatrix`: store matrices, the inverse of `ldmatrix`."""
        n, warps = len(values), access.threads.count // 32
        access, idx = self.matrix_rows(access, address, n, "stmatrix")
        out = np.stack([v.reshape(warps, 32) for v in values], 1)
        if transposed:
            out = np.ascontiguousarray(out.view(u2).reshape(warps * n, 8, 8).transpose(0, 2, 1))
        data = np.ascontiguousarray(out).reshape(-1).view(u1).view("c16")
        self.write(access, self, idx, 16, data, "stmatrix")

    # the asynchronous proxy

    def fence_proxy(self, threads: Threads) -> None:
        """`fence.proxy.async`: make the writes of these threads visible to TMA and tensor cores."""
        self.ctas.async_copies.fence(threads)
        warps, lanes = np.unique(threads.lanes >> 5, return_counts=True)
        self.ctas.clocks.fence(warps // self.ctas.warps, warps % self.ctas.warps, lanes == 32)

    def check_async_read(self, access: Access, idx: Array, reader: str) -> bool:
        """Report faults of a read of 16-byte units by TMA or a tensor core; return whether there are any."""
        state, address = self.state.reshape(-1, 16)[idx], self.address(idx, 16)
        faulty = self.report_state(access, f"{reader}'s read", state, address, REASONS)
        if self.granules(16).check(access, idx, f"{reader} reads", address=address):
            return True
        return self.report_unfenced(access, f"{reader}'s read", idx) or faulty

    def report_unfenced(self, access: Access, kind: str, idx: Array) -> bool:
        """Report 16-byte units that threads wrote without a fence for the asynchronous proxy."""
        by_threads = (self.state.reshape(-1, 16 // self.granule, self.granule)[idx] == BY_THREADS).any(2)
        rows = np.flatnonzero(by_threads.any(1))
        writer, part = self.granules(16).writer[idx[rows]], access.select(rows)
        unfenced = by_threads[rows] & self.ctas.clocks.unfenced(writer, part.cta, part.warp)
        kind = f"{kind} of shared memory written without fence.proxy.async"
        return part.fault(kind, unfenced, self.address(idx[rows], 16))

    def note_async_reader(self, idx: Array, clock: Array, agent: Array | int) -> None:
        """Tag 16-byte units with the asynchronous unit that reads them; the previous reader becomes the
        second reader."""
        self.granules(16).note_reader(idx, ((clock << SHIFT) | agent).astype(np.int32)[:, None])


class LocalMemory(SharedMemory):
    """Local memory of each thread."""

    name = "local"

    def starts(self, access: Access) -> Array:
        return access.lanes * self.size

    def count(self, access: Access, address: Array, nbytes: int, way: str) -> None:
        """Do nothing: local memory is not counted."""
