"""Tensor memory of sm_100: 128 lanes of 512 columns of 32 bits for each CTA, with its shadow."""

from __future__ import annotations

from typing import Any

import numpy as np

from tritoncp.executor.ctas import Ctas
from tritoncp.executor.faults import CannotContinue
from tritoncp.executor.threads import Threads

Array = np.ndarray[Any, Any]
u1, u4, u8 = np.uint8, np.uint32, np.uint64
LANES, COLUMNS = 128, 512
WRITTEN, STORING, LOADING = u1(1), u1(2), u1(4)  # flags of a cell


class TensorMemory:
    """Cells of all CTAs in one array, by CTA, lane and column; made when a kernel allocates some."""

    def __init__(self, ctas: Ctas) -> None:
        self.ctas = ctas
        self.ready = False

    def prepare(self) -> None:
        if self.ready:
            return
        cells = self.ctas.n * LANES * COLUMNS
        self.data = np.full(cells, 0xFFFFFFFF, u4)
        self.state = np.zeros(cells, u1)
        self.writer, self.reader, self.reader2 = (np.zeros(cells, np.int32) for _ in range(3))
        self.allocated = np.zeros((self.ctas.n, COLUMNS), bool)
        self.permit = np.ones(self.ctas.n, bool)
        self.stores: list[tuple[Array, Array]] = []  # lanes and cells, until tcgen05.wait
        self.loads: list[tuple[Array, Array]] = []
        self.ready = True

    def columns(self, x: Array) -> Array:
        """An array of cells by CTA, quarter of the lanes, lane and column."""
        return x.reshape(self.ctas.n, 4, 32, COLUMNS)

    # allocation

    def leaders(self, threads: Threads, mask: Array | None) -> Array:
        """Positions of one thread of each warp that takes part."""
        threads.need_warps("tcgen05.alloc")
        lead = threads.laneid == 0
        if mask is not None:
            self.need_uniform(mask)
            lead = lead & mask
        return np.flatnonzero(lead)

    @staticmethod
    def need_uniform(mask: Array) -> None:
        rows = mask.reshape(-1, 32)
        if (rows.any(1) != rows.all(1)).any():
            raise CannotContinue("an aligned instruction by a part of a warp")

    def allocate(self, threads: Threads, at: Array, columns: int, mask: Array | None, site: int) -> None:
        """Write the first column of a free range to shared memory."""
        self.prepare()
        lead = self.leaders(threads, mask)
        if columns & (columns - 1) or not 32 <= columns <= COLUMNS:
            raise CannotContinue(f"tcgen05.alloc of {columns} columns", site)
        value = np.zeros(threads.count, u4)
        for j in lead:
            cta, where = threads.cta[j], lead[lead == j]
            if not self.permit[cta]:
                threads.fault("tcgen05.alloc after its permit was given up", site, where)
            free = [c for c in range(0, COLUMNS, columns) if not self.allocated[cta, c : c + columns].any()]
            if not free:
                raise CannotContinue(
                    "deadlock: tcgen05.alloc waits for tensor memory that nobody frees", site
                )
            base = free[-1]  # not column 0, so that a kernel that does not add it is seen
            self.allocated[cta, base : base + columns] = True
            self.columns(self.state)[cta, :, :, base : base + columns] = 0
            self.columns(self.data)[cta, :, :, base : base + columns] = 0xFFFFFFFF
            value[j] = base
        only = np.zeros(threads.count, bool)
        only[lead] = True
        self.ctas.shared.store(threads, at.astype(u8), "u4", (value,), only, site)

    def free(self, threads: Threads, base: Array, columns: int, mask: Array | None, site: int) -> None:
        self.prepare()
        for j in self.leaders(threads, mask):
            cta, b, where = threads.cta[j], int(base[j]), np.full(1, j)
            if b % columns or not self.allocated[cta, b : b + columns].all():
                threads.fault("tcgen05.dealloc of columns that are not allocated", site, where, b)
                continue
            if self.ctas.launch.check:
                self.check_free(threads, j, np.s_[cta, :, :, b : b + columns], site)
            self.allocated[cta, b : b + columns] = False

    def check_free(self, threads: Threads, j: int, cells: Any, site: int) -> None:
        where = np.full(1, j)
        if (self.columns(self.state)[cells] & (STORING | LOADING)).any():
            threads.fault("tcgen05.dealloc before tcgen05.wait", site, where)
        for shadow in (self.writer, self.reader, self.reader2):
            tags = self.columns(shadow)[cells].reshape(1, -1)
            late = self.ctas.clocks.unordered(tags, threads.cta[where], threads.warp[where])
            if late is not None:
                name = self.ctas.clocks.agent_name(int(tags[late][0]))
                threads.fault(
                    "tcgen05.dealloc that does not wait for the last access", site, where, text=name
                )
                return

    def relinquish(self, threads: Threads, mask: Array | None, site: int) -> None:
        self.prepare()
        for j in self.leaders(threads, mask):
            self.permit[threads.cta[j]] = False

    def finish_program(self) -> None:
        """Report what is left at the end of the CTAs."""
        if self.ready and self.allocated.any():
            n = int(self.allocated.any(1).sum())
            self.ctas.launch.log.add("tensor memory is not freed at the end of a program", None, n)

    # registers

    def cells(
        self, threads: Threads, address: Array, shape: str, n: int, apart: int, mask: Array | None, site: int
    ) -> tuple[Array, Array]:
        """Positions of the threads that take part, and their cells [threads, n]."""
        self.prepare()
        threads.need_warps("tcgen05.ld")
        rows = address.reshape(-1, 32)
        differ = np.flatnonzero((rows != rows[:, :1]).any(1))
        if len(differ):
            threads.fault("an address of tensor memory that differs inside of a warp", site, differ * 32)
        if mask is not None:
            self.need_uniform(mask)
        at = threads.positions(mask)
        a, lane = address[at].astype(np.int64), threads.laneid[at].astype(np.int64)
        quarter = threads.warp[at] % 4 * 32
        row, column = a >> 16, a & 0xFFFF
        if shape == "32x32b":
            wrong = row != quarter
            row = row + lane
        else:  # 16x32bx2: the upper half of the warp lies `apart` columns on
            wrong = (row & ~16) != quarter
            row, column = row + lane % 16, column + (lane >> 4) * apart
        if wrong.any():
            kind = "a warp's access to lanes of tensor memory of another warp"
            threads.fault(kind, site, at[wrong], int(a[wrong][0]))
            row = quarter + lane
        if column.max(initial=0) + n > COLUMNS:
            threads.fault("out of bounds tensor memory", site, at[:1], int(column.max()))
            column = np.minimum(column, COLUMNS - n)
        span = column[:, None] + np.arange(n)
        unowned = ~self.allocated[threads.cta[at][:, None], span].all(1)
        if unowned.any():
            kind = "access to tensor memory that is not allocated"
            threads.fault(kind, site, at[unowned], int(a[unowned][0]))
        return at, ((threads.cta[at] * LANES + row) * COLUMNS)[:, None] + span

    def report(
        self,
        threads: Threads,
        kind: str,
        bad: Array,
        at: Array,
        idx: Array,
        site: int,
        tags: Array | None = None,
    ) -> None:
        rows = np.flatnonzero(bad.any(1))
        cell = int(idx[rows[0]][bad[rows[0]]][0])
        text = f"lane {cell // COLUMNS % LANES}, column {cell % COLUMNS}"
        if tags is not None:
            name = self.ctas.clocks.agent_name(int(tags[rows[0]][bad[rows[0]]][0]))
            text += f", {name}"
            kind += " tcgen05.mma" if name == "tcgen05.mma" else " another warp"
        threads.fault(kind, site, at[rows], None, None, text)

    def load(
        self, threads: Threads, address: Array, shape: str, n: int, apart: int, mask: Array | None, site: int
    ) -> list[Array]:
        """Columns of each thread. That they are used before tcgen05.wait::ld is found in the program."""
        at, idx = self.cells(threads, address, shape, n, apart, mask, site)
        if self.ctas.launch.check and len(at):
            state = self.state[idx]
            missing = (state & WRITTEN) == 0
            if missing.any():
                self.report(threads, "read of tensor memory that was never written", missing, at, idx, site)
            if (state & STORING).any():
                kind = "read of tensor memory before tcgen05.wait::st"
                self.report(threads, kind, (state & STORING) != 0, at, idx, site)
            self.check(threads, "read of tensor memory after the write of", self.writer, at, idx, site)
            self.state[idx] |= LOADING
            self.loads.append((threads.lanes[at], idx))
        out = np.zeros((threads.count, n), u4)
        out[at] = self.data[idx]
        return list(np.ascontiguousarray(out.T))

    def store(
        self,
        threads: Threads,
        address: Array,
        shape: str,
        n: int,
        apart: int,
        values: tuple[Array, ...],
        mask: Array | None,
        site: int,
    ) -> None:
        at, idx = self.cells(threads, address, shape, n, apart, mask, site)
        if self.ctas.launch.check and len(at):
            busy = (self.state[idx] & (STORING | LOADING)) != 0
            if busy.any():
                self.report(threads, "write of tensor memory before tcgen05.wait", busy, at, idx, site)
            for shadow in (self.writer, self.reader, self.reader2):
                self.check(threads, "write of tensor memory after the access of", shadow, at, idx, site)
            self.stores.append((threads.lanes[at], idx))
        self.state[idx] = WRITTEN | STORING if self.ctas.launch.check else WRITTEN
        self.data[idx] = np.stack(values, 1)[at]

    def load_pairs(
        self, threads: Threads, address: Array, shape: str, n: int, apart: int, mask: Array | None, site: int
    ) -> list[Array]:
        """`.pack::16b`: the lower halves of two columns make a register."""
        columns = self.load(threads, address, shape, 2 * n, apart, mask, site)
        low = u4(0xFFFF)
        return [(a & low) | (b << u4(16)) for a, b in zip(columns[::2], columns[1::2])]

    def store_pairs(
        self,
        threads: Threads,
        address: Array,
        shape: str,
        n: int,
        apart: int,
        values: tuple[Array, ...],
        mask: Array | None,
        site: int,
    ) -> None:
        """`.unpack::16b`: a register makes the lower halves of two columns."""
        halves = tuple(half for v in values for half in (v & u4(0xFFFF), v >> u4(16)))
        self.store(threads, address, shape, 2 * n, apart, halves, mask, site)

    def check(self, threads: Threads, kind: str, shadow: Array, at: Array, idx: Array, site: int) -> None:
        tags = shadow[idx]
        late = self.ctas.clocks.unordered(tags, threads.cta[at], threads.warp[at])
        if late is not None:
            self.report(threads, kind, late, at, idx, site, tags)

    def wait(self, threads: Threads, what: str) -> None:
        """`tcgen05.wait::ld` or `::st`: the accesses of these threads are done."""
        self.prepare()
        operations = self.loads if what == "ld" else self.stores
        active = np.zeros(self.ctas.count, bool)
        active[threads.lanes] = True
        keep = []
        for lanes, idx in operations:
            mine = active[lanes]
            done = idx[mine]
            tags = self.ctas.clocks.own_tags(self.ctas.cta[lanes[mine]], self.ctas.warp[lanes[mine]])
            if what == "st":
                self.state[done] &= ~STORING
                self.writer[done] = tags[:, None]
            else:
                self.state[done] &= ~LOADING
                before = self.reader[done]
                other = (before ^ tags[:, None]) & 63 != 0
                self.reader2[done] = np.where(other & (before != 0), before, self.reader2[done])
                self.reader[done] = tags[:, None]
            if not mine.all():
                keep.append((lanes[~mine], idx[~mine]))
        operations[:] = keep
