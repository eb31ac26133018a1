"""Shared memory of some CTAs, and its shadow: which bytes are written, by whom, read by whom."""

from __future__ import annotations

from typing import Any

import numpy as np

from tritoncp.executor.atomics import update
from tritoncp.executor.clocks import SHIFT
from tritoncp.executor.ctas import Ctas
from tritoncp.executor.global_memory import UNSIGNED, joined, split
from tritoncp.executor.threads import Threads

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
EVERY = {n: np.frombuffer(bytes([1] * n), UNSIGNED[n])[0] for n in (1, 2, 4, 8)}  # 1 in every byte


def in_every_byte(value: int, nbytes: int) -> Any:
    return type(EVERY[nbytes])(int(EVERY[nbytes]) * value)


class SharedMemory:
    """One array for the memory of all CTAs, `size` bytes each, of which a kernel may use `used`."""

    def __init__(self, ctas: Ctas, used: int, granule: int) -> None:
        self.ctas, self.used, self.granule = ctas, used, granule
        self.size = -(-max(used, 16) // 16) * 16
        total = ctas.n * self.size
        self.data = np.full(total, 0xFF, u1)
        self.state = np.zeros(total, u1)
        self.views = {n: self.data.view(t) for n, t in UNSIGNED.items()}
        self.states = {n: self.state.view(t) for n, t in UNSIGNED.items() if n < 16}
        cells = total // granule
        # Tags of the last writer, the last reader, and another reader before that one
        self.writer, self.reader, self.reader2 = (np.zeros(cells, np.int32) for _ in range(3))
        self.by_threads = BY_THREADS if ctas.launch.has_async_proxy else WRITTEN

    def rows(self, shadow: Array, nbytes: int) -> Array:
        """A shadow as rows of the granules of nbytes."""
        return shadow.reshape(-1, nbytes // self.granule)

    def offset(self, index: int, nbytes: int) -> int:
        return int(index) * nbytes % self.size

    def locate(
        self, threads: Threads, address: Array, nbytes: int, at: Array | None, site: int | None, kind: str
    ) -> Array:
        """Index in units of nbytes; what is out of bounds or misaligned is reported, and moved inside."""
        a = (address if at is None else address[at]).astype(np.int64)
        wrong = a & (nbytes - 1)
        if nbytes > 1 and wrong.any():
            bad = np.flatnonzero(wrong)
            self.fault(threads, f"misaligned shared {kind} of {nbytes} bytes", site, at, bad, int(a[bad[0]]))
            a &= ~(nbytes - 1)
        if len(a) and (a.min() < 0 or a.max() + nbytes > self.used):
            bad = np.flatnonzero((a < 0) | (a + nbytes > self.used))
            text = f"{self.used} bytes are allocated"
            self.fault(threads, f"out of bounds shared {kind}", site, at, bad, int(a[bad[0]]), text)
            a = np.clip(a, 0, max(0, self.used - nbytes)) & ~(nbytes - 1)
        base = threads.shared_base if at is None else threads.shared_base[at]
        return (base + a) // nbytes

    def fault(
        self,
        threads: Threads,
        kind: str,
        site: int | None,
        at: Array | None,
        bad: Array,
        address: int | None = None,
        text: str = "",
    ) -> None:
        threads.fault(kind, site, bad if at is None else at[bad], address, None, text)

    # checks

    def check_read(self, threads: Threads, idx: Array, nbytes: int, at: Array | None, site: int) -> None:
        """Of threads: bytes that nobody wrote, copies under way, and races; note the readers."""
        if not self.ctas.launch.check or not len(idx):
            return
        self.check_state(threads, idx, nbytes, at, site)
        if nbytes < self.granule:
            return
        cta, warp = (threads.cta, threads.warp) if at is None else (threads.cta[at], threads.warp[at])
        tag = (threads.tags() if at is None else threads.tags()[at])[:, None]
        writer = self.rows(self.writer, nbytes)[idx]
        late = self.ctas.clocks.unordered(writer, cta, warp)
        if late is not None:
            self.race(threads, "read after the write of", writer, late, idx, nbytes, at, site)
        self.note_readers(idx, nbytes, tag)

    def check_state(self, threads: Threads, idx: Array, nbytes: int, at: Array | None, site: int) -> None:
        units, wide = (self.states[8].reshape(-1, 2), 8) if nbytes == 16 else (self.states[nbytes], nbytes)
        state = units[idx]
        fine = (state == in_every_byte(WRITTEN, wide)) | (state == in_every_byte(BY_THREADS, wide))
        if fine.all():
            return
        raw = np.where(threads.used_bytes(site, nbytes), self.state.reshape(-1, nbytes)[idx], u1(WRITTEN))
        self.report_state(threads, raw, idx, nbytes, at, "read", site)

    def report_state(
        self,
        threads: Threads,
        state: Array,
        idx: Array,
        nbytes: int,
        at: Array | None,
        access: str,
        site: int,
        reasons: dict[int, str] = REASONS,
    ) -> bool:
        """Report bytes [n, nbytes] in a state that an access must not find; whether there are any."""
        faulty = False
        for value, text in reasons.items():
            bad = np.flatnonzero((state == value).any(1))
            if len(bad):
                offset = self.offset(idx[bad[0]], nbytes)
                self.fault(threads, f"{access} of shared memory {text}", site, at, bad, offset)
                faulty = True
        return faulty

    def note_readers(self, idx: Array, nbytes: int, tag: Array) -> None:
        reader, reader2 = self.rows(self.reader, nbytes), self.rows(self.reader2, nbytes)
        before = reader[idx]
        reader[idx] = tag
        many = (before != 0) & (before != tag) & ((before ^ tag) & 63 != 0)
        if many.any():
            i, j = np.nonzero(many)
            reader2[idx[i], j] = before[i, j]
        lost = reader[idx] != tag  # several warps read one cell at once
        if lost.any():
            i, j = np.nonzero(lost)
            reader2[idx[i], j] = np.broadcast_to(tag, lost.shape)[i, j]

    def race(
        self,
        threads: Threads,
        kind: str,
        tags: Array,
        late: Array,
        idx: Array,
        nbytes: int,
        at: Array | None,
        site: int | None,
    ) -> None:
        bad = np.flatnonzero(late.any(1))
        first = bad[0]
        other = int(tags[first][late[first]][0])
        name = self.ctas.clocks.agent_name(other)
        unit = "another warp" if name.startswith("warp") else name.split(" of ")[0]
        warp = int(threads.warp[first if at is None else at[first]])
        text = f"warp {warp} does not wait for {name}"
        offset = self.offset(idx[first], nbytes)
        self.fault(threads, f"race on shared memory: {kind} {unit}", site, at, bad, offset, text)

    def check_write(
        self,
        threads: Threads,
        idx: Array,
        nbytes: int,
        at: Array | None,
        site: int,
        data: Array | None = None,
        kind: str = "write",
        agent: int | None = None,
    ) -> None:
        """Races of a write. Equal data that several warps write at once are none."""
        if not self.ctas.launch.check or nbytes < self.granule or not len(idx):
            return
        clocks = self.ctas.clocks
        cta, warp = (threads.cta, threads.warp) if at is None else (threads.cta[at], threads.warp[at])
        writer = self.rows(self.writer, nbytes)[idx]
        late = clocks.unordered(writer, cta, warp, agent)
        if late is not None and data is not None:
            late &= ~self.same(idx, nbytes, data)[:, None]
        if late is not None and late.any():
            self.race(threads, f"{kind} after the write of", writer, late, idx, nbytes, at, site)
        for shadow in (self.reader, self.reader2):
            reader = self.rows(shadow, nbytes)[idx]
            late = clocks.unordered(reader, cta, warp)
            if late is not None:
                self.race(threads, f"{kind} after the read of", reader, late, idx, nbytes, at, site)
                break

    def same(self, idx: Array, nbytes: int, data: Array) -> Array:
        if nbytes < 16:
            return self.views[nbytes][idx] == data
        return (self.views[8].reshape(-1, 2)[idx] == data.view(u8).reshape(-1, 2)).all(1)

    def note_writer(self, idx: Array, nbytes: int, tag: Array) -> None:
        if self.ctas.launch.check and nbytes >= self.granule:
            self.rows(self.writer, nbytes)[idx] = tag

    def mark(self, idx: Array, nbytes: int, value: int) -> None:
        if nbytes == 16:
            self.states[8].reshape(-1, 2)[idx] = in_every_byte(value, 8)
        else:
            self.states[nbytes][idx] = in_every_byte(value, nbytes)

    def poison(self, idx: Array, nbytes: int) -> None:
        """Overwrite what a copy is about to write, so that a use of it is seen in results too."""
        if nbytes == 16:
            self.views[8].reshape(-1, 2)[idx] = ~u8(0)
        else:
            self.views[nbytes][idx] = in_every_byte(0xFF, nbytes)

    # threads

    def load(
        self, threads: Threads, address: Array, t: str, n: int, mask: Array | None, site: int
    ) -> list[Array]:
        nbytes = int(t[1]) * n
        if self.ctas.counts is not None:
            self.ctas.counts.shared_access(threads, address, nbytes, mask, site)
        at = None if mask is None else np.flatnonzero(mask)
        idx = self.locate(threads, address, nbytes, at, site, "load")
        self.check_read(threads, idx, nbytes, at, site)
        values = self.views[nbytes].take(idx)
        if at is not None:
            out = np.zeros(threads.count, UNSIGNED[nbytes])
            out[at] = values
            values = out
        return split(values, t, n)

    def store(
        self,
        threads: Threads,
        address: Array,
        t: str,
        values: tuple[Array, ...],
        mask: Array | None,
        site: int,
    ) -> None:
        nbytes = int(t[1]) * len(values)
        if self.ctas.counts is not None:
            self.ctas.counts.shared_access(threads, address, nbytes, mask, site)
        at = None if mask is None else np.flatnonzero(mask)
        data = joined(values)
        idx = self.locate(threads, address, nbytes, at, site, "store")
        self.write(threads, idx, nbytes, at, site, data if at is None else data[at], "write")

    def write(
        self, threads: Threads, idx: Array, nbytes: int, at: Array | None, site: int, data: Array, kind: str
    ) -> None:
        if not len(idx):
            return
        self.check_write(threads, idx, nbytes, at, site, data, kind)
        if self.ctas.launch.check:
            state = self.state.reshape(-1, nbytes)[idx]
            self.report_state(threads, state, idx, nbytes, at, kind, site, BUSY)
        self.views[nbytes][idx] = data
        if self.ctas.launch.check:
            lost = np.flatnonzero(~self.same(idx, nbytes, data))
            if len(lost):
                kind = "race on shared memory: several threads write different values to one address"
                self.fault(threads, kind, site, at, lost, self.offset(idx[lost[0]], nbytes))
        self.note_writer(idx, nbytes, (threads.tags() if at is None else threads.tags()[at])[:, None])
        self.mark(idx, nbytes, self.by_threads)

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
        """Atomics of several warps are no race; with other accesses they are."""
        nbytes = int(t[1])
        at = self.ctas.launch.shuffled(threads.positions(mask))
        out = np.zeros(threads.count, t)
        if not len(at):
            return out
        idx = self.locate(threads, address, nbytes, at, site, "atomic")
        if self.ctas.launch.check:
            self.check_state(threads, idx, nbytes, at, site)
        out[at] = update(self.views[nbytes].view(t), idx, kind, operation, tuple(v[at] for v in values))
        self.mark(idx, nbytes, WRITTEN)
        return out

    def load_matrices(
        self, threads: Threads, address: Array, n: int, transposed: bool, site: int
    ) -> list[Array]:
        """`ldmatrix`: n matrices of 8 × 8 for each warp; lane 8 j + r has the address of row r of j."""
        threads.need_warps("ldmatrix")
        mask = None if n == 4 else threads.laneid < 8 * n
        if self.ctas.counts is not None:
            self.ctas.counts.shared_access(threads, address, 16, mask, site)
        at = None if mask is None else np.flatnonzero(mask)
        idx = self.locate(threads, address, 16, at, site, "ldmatrix")
        self.check_read(threads, idx, 16, at, site)
        warps, rows = threads.count // 32, self.views[16].take(idx)
        if transposed:
            flipped = rows.view(u2).reshape(warps * n, 8, 8).transpose(0, 2, 1)
            out = np.ascontiguousarray(flipped).view(u4).reshape(warps, n, 32)
        else:
            out = rows.view(u4).reshape(warps, n, 32)
        return [np.ascontiguousarray(out[:, j]).reshape(-1) for j in range(n)]

    def store_matrices(
        self, threads: Threads, address: Array, values: tuple[Array, ...], transposed: bool, site: int
    ) -> None:
        """`stmatrix`, the inverse of `ldmatrix`."""
        threads.need_warps("stmatrix")
        n, warps = len(values), threads.count // 32
        mask = None if n == 4 else threads.laneid < 8 * n
        if self.ctas.counts is not None:
            self.ctas.counts.shared_access(threads, address, 16, mask, site)
        out = np.stack([v.reshape(warps, 32) for v in values], 1)
        if transposed:
            out = np.ascontiguousarray(out.view(u2).reshape(warps * n, 8, 8).transpose(0, 2, 1))
        data = np.ascontiguousarray(out).reshape(-1).view(u1).view("c16")
        at = None if mask is None else np.flatnonzero(mask)
        idx = self.locate(threads, address, 16, at, site, "stmatrix")
        self.write(threads, idx, 16, at, site, data, "stmatrix")

    # the asynchronous proxy

    def fence_proxy(self, threads: Threads) -> None:
        """`fence.proxy.async`: what these threads wrote is visible to TMA and tensor cores."""
        self.ctas.async_copies.fence(threads)
        warps, lanes = np.unique(threads.lanes >> 5, return_counts=True)
        self.ctas.clocks.fence(warps // self.ctas.warps, warps % self.ctas.warps, lanes == 32)

    def check_async_read(self, threads: Threads, idx: Array, at: Array, reader: str, site: int) -> bool:
        """Look for faults of a read of 16-byte units that TMA or a tensor core does for the threads at these
        positions; whether there are any."""
        state = self.state.reshape(-1, 16)[idx]
        faulty = self.report_state(threads, state, idx, 16, at, f"{reader}'s read", site)
        writer = self.rows(self.writer, 16)[idx]
        late = self.ctas.clocks.unordered(writer, threads.cta[at], threads.warp[at])
        if late is not None:
            self.race(threads, f"{reader} reads after the write of", writer, late, idx, 16, at, site)
            return True
        return self.report_unfenced(threads, state, idx, at, f"{reader}'s read", site) or faulty

    def report_unfenced(
        self, threads: Threads, state: Array, idx: Array, at: Array, access: str, site: int
    ) -> bool:
        """Report 16-byte units that threads wrote without a fence for the asynchronous proxy."""
        rows = np.flatnonzero((state == BY_THREADS).any(1))
        writer, cta, warp = (
            self.rows(self.writer, 16)[idx[rows]],
            threads.cta[at[rows]],
            threads.warp[at[rows]],
        )
        bad = rows[self.ctas.clocks.unfenced(writer, cta, warp).any(1)]
        if len(bad):
            kind = f"{access} of shared memory written without fence.proxy.async"
            self.fault(threads, kind, site, at, bad, self.offset(idx[bad[0]], 16))
        return len(bad) > 0

    def note_async_reader(self, idx: Array, clock: Array, agent: int) -> None:
        """Tag 16-byte units with a unit that reads them; a reader before it stays known as the second one."""
        self.note_readers(idx, 16, ((clock << SHIFT) | agent).astype(np.int32)[:, None])


class LocalMemory:
    """Memory of each thread for itself."""

    def __init__(self, ctas: Ctas, nbytes: int) -> None:
        self.data = np.zeros((ctas.count, nbytes), u1)
        self.written = np.zeros((ctas.count, nbytes), bool)

    def locate(
        self, threads: Threads, address: Array, nbytes: int, mask: Array | None, site: int
    ) -> tuple[Array, Array, Array]:
        """Positions of threads, their rows, and columns of their bytes; what is out of bounds is left out."""
        at = threads.positions(mask)
        a = address[at].astype(np.int64)
        bad = (a < 0) | (a + nbytes > self.data.shape[1])
        if bad.any():
            threads.fault("out of bounds local access", site, at[bad], int(a[bad][0]))
            at, a = at[~bad], a[~bad]
        return at, threads.lanes[at][:, None], a[:, None] + np.arange(nbytes)

    def load(
        self, threads: Threads, address: Array, t: str, n: int, mask: Array | None, site: int
    ) -> list[Array]:
        nbytes = int(t[1]) * n
        out = np.zeros((threads.count, nbytes), u1)
        at, rows, columns = self.locate(threads, address, nbytes, mask, site)
        fresh = ~self.written[rows, columns].all(1)
        if fresh.any():
            threads.fault("read of local memory that was never written", site, at[fresh])
        out[at] = self.data[rows, columns]
        return list(np.ascontiguousarray(out.view(t).T))

    def store(
        self,
        threads: Threads,
        address: Array,
        t: str,
        values: tuple[Array, ...],
        mask: Array | None,
        site: int,
    ) -> None:
        data = np.stack(values, 1).view(u1)
        at, rows, columns = self.locate(threads, address, data.shape[1], mask, site)
        self.data[rows, columns] = data[at]
        self.written[rows, columns] = True
