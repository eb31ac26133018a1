"""Shared memory of some CTAs, and its shadow: which bytes are written, by whom, read by whom."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tritoncp.executor.clocks import SHIFT, note_readers
from tritoncp.executor.ctas import Ctas
from tritoncp.executor.memory.atomics import update
from tritoncp.executor.memory.global_memory import joined, split
from tritoncp.executor.memory.regions import UNSIGNED, holds
from tritoncp.executor.threads import Access, Threads

Array = np.ndarray[Any, Any]
u1, u2, u4, u8 = np.uint8, np.uint16, np.uint32, np.uint64

# States of a byte. BY_THREADS is a write that the asynchronous proxy (TMA, wgmma, tcgen05) may use behind a
# fence.proxy.async only. MBARRIER is the memory of an mbarrier that is valid.
UNWRITTEN, WRITTEN, ON_ITS_WAY, MBARRIER, BY_THREADS = range(5)
REASONS = {
    UNWRITTEN: "that was never written",
    ON_ITS_WAY: "whose copy is under way",
    MBARRIER: "of a valid mbarrier",
}
BUSY = {value: text for value, text in REASONS.items() if value != UNWRITTEN}


@functools.cache
def in_every_byte(value: int, nbytes: int) -> Any:
    return np.frombuffer(bytes([value] * nbytes), UNSIGNED[nbytes])[0]


class SharedMemory:
    """One array for the memory of all CTAs, `size` bytes each, of which a kernel may use `used`."""

    def __init__(self, ctas: Ctas, used: int, granule: int) -> None:
        self.ctas, self.used, self.granule = ctas, used, granule
        self.check = ctas.launch.check
        self.size = -(-max(used, 32) // 32) * 32
        total = ctas.n * self.size
        self.data = np.full(total, 0xFF, u1)
        self.state = np.zeros(total, u1)
        self.views = {n: self.data.view(t) for n, t in UNSIGNED.items()}
        self.states = {n: self.state.view(t) for n, t in UNSIGNED.items()}
        cells = total // granule
        # Tags of the last writer, the last reader, and another reader before that one
        self.writer, self.reader, self.reader2 = (np.zeros(cells, np.int32) for _ in range(3))
        self.by_threads = BY_THREADS if ctas.launch.has_async_proxy else WRITTEN

    def rows(self, shadow: Array, nbytes: int) -> Array:
        """A shadow as rows of the granules of nbytes."""
        return shadow.reshape(-1, nbytes // self.granule)

    def locate(self, access: Access, address: Array, nbytes: int, kind: str) -> Array:
        """Index in units of nbytes; what is out of bounds or misaligned is reported, and moved inside."""
        a = access.pick(address).astype(np.int64)
        wrong = a & (nbytes - 1)
        if nbytes > 1 and wrong.any():
            bad = np.flatnonzero(wrong)
            access.fault(f"misaligned shared {kind} of {nbytes} bytes", bad, int(a[bad[0]]))
            a &= ~(nbytes - 1)
        if len(a) and (a.min() < 0 or a.max() + nbytes > self.used):
            bad = np.flatnonzero((a < 0) | (a + nbytes > self.used))
            text = f"{self.used} bytes are allocated"
            access.fault(f"out of bounds shared {kind}", bad, int(a[bad[0]]), None, text)
            a = np.clip(a, 0, max(0, self.used - nbytes)) & ~(nbytes - 1)
        return (access.pick(access.threads.shared_base) + a) // nbytes

    # checks

    def fault(self, access: Access, kind: str, bad: Array, idx: Array, nbytes: int, text: str = "") -> None:
        """Report the rows of an access whose units of nbytes are bad."""
        access.fault(kind, bad, int(idx[bad[0]]) * nbytes % self.size, None, text)

    def check_read(self, access: Access, idx: Array, nbytes: int) -> None:
        """Of threads: bytes that nobody wrote, copies under way, and races; note the readers."""
        if not self.check or not len(idx):
            return
        self.check_state(access, idx, nbytes)
        if nbytes < self.granule:
            return
        writer = self.rows(self.writer, nbytes)[idx]
        late = self.ctas.clocks.unordered(writer, access.cta, access.warp)
        if late is not None:
            self.race(access, "read after the write of", writer, late, idx, nbytes)
        self.note_readers(idx, nbytes, access.tags[:, None])

    def check_state(self, access: Access, idx: Array, nbytes: int) -> None:
        wide = min(nbytes, 8)
        state = self.states[wide].reshape(-1, nbytes // wide)[idx]
        if ((state == in_every_byte(WRITTEN, wide)) | (state == in_every_byte(BY_THREADS, wide))).all():
            return
        state = np.where(access.used_bytes(nbytes), self.state.reshape(-1, nbytes)[idx], u1(WRITTEN))
        self.report_state(access, "read", state, idx, nbytes, REASONS)

    def report_state(
        self, access: Access, kind: str, state: Array, idx: Array, nbytes: int, reasons: dict[int, str]
    ) -> bool:
        """Report units of which a byte [n, nbytes] is in one of these states; whether there are any."""
        faulty = False
        for value, text in reasons.items():
            bad = np.flatnonzero((state == value).any(1))
            if len(bad):
                self.fault(access, f"{kind} of shared memory {text}", bad, idx, nbytes)
                faulty = True
        return faulty

    def check_busy(self, access: Access, kind: str, idx: Array, nbytes: int) -> None:
        """Report a write to where a copy is under way, or an mbarrier lies."""
        if self.check:
            self.report_state(access, kind, self.state.reshape(-1, nbytes)[idx], idx, nbytes, BUSY)

    def note_readers(self, idx: Array, nbytes: int, tag: Array) -> None:
        note_readers(self.rows(self.reader, nbytes), self.rows(self.reader2, nbytes), idx, tag)

    def race(self, access: Access, kind: str, tags: Array, late: Array, idx: Array, nbytes: int) -> None:
        bad = np.flatnonzero(late.any(1))
        name = self.ctas.clocks.agent_name(int(tags[bad[0]][late[bad[0]]][0]))
        unit = "another warp" if name.startswith("warp") else name.split(" of ")[0]
        text = f"warp {int(access.warp[bad[0]])} does not wait for {name}"
        self.fault(access, f"race on shared memory: {kind} {unit}", bad, idx, nbytes, text)

    def check_write(
        self,
        access: Access,
        idx: Array,
        nbytes: int,
        data: Array | None = None,
        kind: str = "write",
        agent: int | None = None,
    ) -> None:
        """Races of a write. Equal data that several warps write at once are none."""
        if not self.check or nbytes < self.granule or not len(idx):
            return
        clocks = self.ctas.clocks
        writer = self.rows(self.writer, nbytes)[idx]
        late = clocks.unordered(writer, access.cta, access.warp, agent)
        if late is not None and data is not None:
            late &= ~holds(self.views, idx, nbytes, data)[:, None]
        if late is not None and late.any():
            self.race(access, f"{kind} after the write of", writer, late, idx, nbytes)
        for shadow in (self.reader, self.reader2):
            reader = self.rows(shadow, nbytes)[idx]
            late = clocks.unordered(reader, access.cta, access.warp)
            if late is not None:
                self.race(access, f"{kind} after the read of", reader, late, idx, nbytes)
                break

    def note_writer(self, idx: Array, nbytes: int, tag: Array) -> None:
        if self.check and nbytes >= self.granule:
            self.rows(self.writer, nbytes)[idx] = tag

    def mark(self, idx: Array, nbytes: int, value: int) -> None:
        self.states[nbytes][idx] = in_every_byte(value, nbytes)

    def expect_copy(self, idx: Array, nbytes: int, tag: Array) -> None:
        """Note a copy that is about to write, and overwrite its bytes, so that results show their use too."""
        self.mark(idx, nbytes, ON_ITS_WAY)
        self.note_writer(idx, nbytes, tag)
        self.views[nbytes][idx] = in_every_byte(0xFF, nbytes)

    # threads

    def load(self, access: Access, address: Array, t: str, n: int) -> list[Array]:
        nbytes = int(t[1]) * n
        if self.ctas.counts is not None:
            self.ctas.counts.shared_access(access, address, nbytes)
        idx = self.locate(access, address, nbytes, "load")
        self.check_read(access, idx, nbytes)
        out = np.zeros(access.threads.count, UNSIGNED[nbytes])
        out[access.where] = self.views[nbytes].take(idx)
        return split(out, t, n)

    def store(self, access: Access, address: Array, values: tuple[Array, ...]) -> None:
        nbytes = values[0].itemsize * len(values)
        if self.ctas.counts is not None:
            self.ctas.counts.shared_access(access, address, nbytes)
        idx = self.locate(access, address, nbytes, "store")
        self.write(access, idx, nbytes, access.pick(joined(values)), "write")

    def write(self, access: Access, idx: Array, nbytes: int, data: Array, kind: str) -> None:
        if not len(idx):
            return
        self.check_write(access, idx, nbytes, data, kind)
        self.check_busy(access, kind, idx, nbytes)
        self.ctas.progress += not holds(self.views, idx, nbytes, data).all()
        self.views[nbytes][idx] = data
        if self.check and not (same := holds(self.views, idx, nbytes, data)).all():
            kind = "race on shared memory: several threads write different values to one address"
            self.fault(access, kind, np.flatnonzero(~same), idx, nbytes)
        self.note_writer(idx, nbytes, access.tags[:, None])
        self.mark(idx, nbytes, self.by_threads)

    def atomic(
        self, access: Access, address: Array, t: str, kind: str, operation: str, values: tuple[Array, ...]
    ) -> Array:
        """Atomics of several warps are no race; with other accesses they are."""
        nbytes = int(t[1])
        access = access.some(self.ctas.launch.order(len(access)))
        out = np.zeros(access.threads.count, t)
        if not len(access):
            return out
        idx = self.locate(access, address, nbytes, "atomic")
        if self.check:
            self.check_state(access, idx, nbytes)
        given = tuple(access.pick(v) for v in values)
        out[access.where] = old = update(self.views[nbytes].view(t), idx, kind, operation, given)
        self.ctas.progress += not np.array_equal(old, self.views[nbytes].view(t)[idx])
        self.mark(idx, nbytes, WRITTEN)
        return out

    def matrix_rows(self, access: Access, address: Array, n: int, kind: str) -> tuple[Access, Array]:
        """Rows of `ldmatrix` and `stmatrix`: lane 8 j + r has the address of row r of matrix j."""
        access.threads.need_warps(kind)
        access = access.some(np.flatnonzero(access.threads.laneid < 8 * n))
        if self.ctas.counts is not None:
            self.ctas.counts.shared_access(access, address, 16)
        return access, self.locate(access, address, 16, kind)

    def load_matrices(self, access: Access, address: Array, n: int, transposed: bool) -> list[Array]:
        """`ldmatrix`: n matrices of 8 × 8 for each warp."""
        access, idx = self.matrix_rows(access, address, n, "ldmatrix")
        self.check_read(access, idx, 16)
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
        """`stmatrix`, the inverse of `ldmatrix`."""
        n, warps = len(values), access.threads.count // 32
        access, idx = self.matrix_rows(access, address, n, "stmatrix")
        out = np.stack([v.reshape(warps, 32) for v in values], 1)
        if transposed:
            out = np.ascontiguousarray(out.view(u2).reshape(warps * n, 8, 8).transpose(0, 2, 1))
        data = np.ascontiguousarray(out).reshape(-1).view(u1).view("c16")
        self.write(access, idx, 16, data, "stmatrix")

    # the asynchronous proxy

    def fence_proxy(self, threads: Threads) -> None:
        """`fence.proxy.async`: what these threads wrote is visible to TMA and tensor cores."""
        self.ctas.async_copies.fence(threads)
        warps, lanes = np.unique(threads.lanes >> 5, return_counts=True)
        self.ctas.clocks.fence(warps // self.ctas.warps, warps % self.ctas.warps, lanes == 32)

    def check_async_read(self, access: Access, idx: Array, reader: str) -> bool:
        """Look for faults of a read of 16-byte units by TMA or a tensor core; whether there are any."""
        state = self.state.reshape(-1, 16)[idx]
        faulty = self.report_state(access, f"{reader}'s read", state, idx, 16, REASONS)
        writer = self.rows(self.writer, 16)[idx]
        late = self.ctas.clocks.unordered(writer, access.cta, access.warp)
        if late is not None:
            self.race(access, f"{reader} reads after the write of", writer, late, idx, 16)
            return True
        return self.report_unfenced(access, f"{reader}'s read", idx) or faulty

    def report_unfenced(self, access: Access, kind: str, idx: Array) -> bool:
        """Report 16-byte units that threads wrote without a fence for the asynchronous proxy."""
        by_threads = self.state.reshape(-1, 16 // self.granule, self.granule)[idx] == BY_THREADS
        rows = np.flatnonzero(by_threads.any((1, 2)))
        unfenced = self.ctas.clocks.unfenced(
            self.rows(self.writer, 16)[idx[rows]], access.cta[rows], access.warp[rows]
        )
        bad = rows[(unfenced & by_threads[rows].any(2)).any(1)]
        if len(bad):
            self.fault(access, f"{kind} of shared memory written without fence.proxy.async", bad, idx, 16)
        return len(bad) > 0

    def note_async_reader(self, idx: Array, clock: Array, agent: Array | int) -> None:
        """Tag 16-byte units with a unit that reads them; a reader before it stays known as the second one."""
        self.note_readers(idx, 16, ((clock << SHIFT) | agent).astype(np.int32)[:, None])
