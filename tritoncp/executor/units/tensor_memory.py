"""Tensor memory of sm_100, 128 lanes of 512 columns of 32 bits per CTA, with its shadow."""

from __future__ import annotations

from typing import Any

import numpy as np

from tritoncp.executor.commit_groups import CommitGroups
from tritoncp.executor.ctas import Ctas
from tritoncp.executor.faults import CannotContinue
from tritoncp.executor.memory.shadow import Shadow, no_accesses
from tritoncp.executor.memory.shared_memory import WRITTEN as SHARED_WRITTEN
from tritoncp.executor.threads import Access, Threads

Array = np.ndarray[Any, Any]
u1, u4 = np.uint8, np.uint32
LANES, COLUMNS = 128, 512
WRITTEN, STORING, LOADING = u1(1), u1(2), u1(4)  # flags of cells


class TensorMemory:
    """Tensor memory of all CTAs in one array [CTA, lane, column], made at the first allocation of a
    kernel."""

    def __init__(self, ctas: Ctas) -> None:
        self.ctas = ctas
        self.ready = False

    def prepare(self) -> None:
        if self.ready:
            return
        cells = self.ctas.n * LANES * COLUMNS
        self.data = np.full(cells, 0xFFFFFFFF, u4)
        self.state = np.zeros(cells, u1)
        self.shadow = no_accesses("tensor", self.ctas.clocks, cells)
        self.allocated = np.zeros((self.ctas.n, COLUMNS), bool)
        self.permit = np.ones(self.ctas.n, bool)
        self.accesses = {what: CommitGroups(self.ctas.count) for what in ("ld", "st")}  # and their cells
        self.ready = True

    def columns(self, x: Array) -> Array:
        """View an array of cells as [CTA, quarter of the lanes, lane, column]."""
        return x.reshape(self.ctas.n, 4, 32, COLUMNS)

    def shadow_columns(self) -> Shadow:
        """Return the shadow in the shape of :meth:`columns`."""
        return self.shadow.shaped(self.ctas.n, 4, 32, COLUMNS)

    # allocation

    def leaders(self, access: Access) -> Access:
        """Return the access by one thread of each warp."""
        self.need_uniform(access)
        return access.select(np.flatnonzero(access.pick(access.threads.laneid) == 0))

    @staticmethod
    def need_uniform(access: Access) -> None:
        access.threads.need_warps("an instruction of tensor memory")
        if len(access) % 32 or (access.pick(access.threads.laneid)[::32] != 0).any():
            raise CannotContinue("an aligned instruction by a part of a warp", access.site)

    def allocate(self, access: Access, at: Array, columns: int) -> None:
        """Write the first column of a free range to shared memory."""
        self.prepare()
        lead = self.leaders(access)
        if columns & (columns - 1) or not 32 <= columns <= COLUMNS:
            raise CannotContinue(
                f"tcgen05.alloc of {columns} columns, not a power of 2 from 32 on", access.site
            )
        bases = np.zeros(len(lead), u4)
        for row, cta in enumerate(lead.cta):
            if not self.permit[cta]:
                lead.select(np.full(1, row)).fault("tcgen05.alloc after its permit was given up")
            free = [c for c in range(0, COLUMNS, columns) if not self.allocated[cta, c : c + columns].any()]
            if not free:
                kind = "deadlock: tcgen05.alloc waits for tensor memory that nobody frees"
                raise CannotContinue(kind, access.site)
            base = free[-1]  # not column 0, to detect kernels that do not add the column
            self.allocated[cta, base : base + columns] = True
            self.columns(self.state)[cta, :, :, base : base + columns] = 0
            self.columns(self.data)[cta, :, :, base : base + columns] = 0xFFFFFFFF
            bases[row] = base
        shared = self.ctas.shared
        idx = shared.locate(lead, at, 4, "tcgen05.alloc")
        shared.write(lead, shared, idx, 4, bases, "tcgen05.alloc")
        shared.mark(idx, 4, SHARED_WRITTEN)  # not with a store, which would need a fence

    def free(self, access: Access, base: Array, columns: int) -> None:
        self.prepare()
        for j, one in self.leaders(access).single_threads():
            cta, b = int(one.cta[0]), int(base[j])
            if b % columns or not self.allocated[cta, b : b + columns].all():
                one.fault("tcgen05.dealloc of columns that are not allocated", None, b)
                continue
            if self.ctas.launch.check:
                self.check_free(one, np.s_[cta : cta + 1, :, :, b : b + columns])
            self.allocated[cta, b : b + columns] = False

    def check_free(self, one: Access, cells: Any) -> None:
        if (self.columns(self.state)[cells] & (STORING | LOADING)).any():
            one.fault("tcgen05.dealloc before tcgen05.wait")
        self.shadow_columns().check(one, cells, "tcgen05.dealloc", True)

    def relinquish(self, access: Access) -> None:
        self.prepare()
        self.permit[self.leaders(access).cta] = False

    def finish_program(self) -> None:
        """Report memory that is still allocated at the end of the CTAs."""
        if self.ready and self.allocated.any():
            n = int(self.allocated.any(1).sum())
            self.ctas.launch.log.add("tensor memory is not freed at the end of a program", None, n)

    # registers

    def cells(self, access: Access, address: Array, shape: str, n: int, apart: int) -> Array:
        """Return the cells [threads, n] of an access."""
        self.prepare()
        self.need_uniform(access)
        a, lane = (access.pick(x).astype(np.int64) for x in (address, access.threads.laneid))
        differ = a != np.repeat(a[::32], 32)
        access.fault("an address of tensor memory that differs inside of a warp", differ)
        quarter = access.warp % 4 * 32
        row, column = a >> 16, a & 0xFFFF
        if shape == "32x32b":
            wrong = row != quarter
            row = row + lane
        else:  # 16x32bx2: the upper half of the warp accesses cells `apart` columns further
            wrong = (row & ~16) != quarter
            row, column = row + lane % 16, column + (lane >> 4) * apart
        if access.fault("a warp's access to lanes of tensor memory of another warp", wrong, a):
            row = quarter + lane
        if access.fault("out of bounds tensor memory", column + n > COLUMNS, a):
            column = np.minimum(column, COLUMNS - n)
        span = column[:, None] + np.arange(n)
        unowned = ~self.allocated[access.cta[:, None], span]
        access.fault("access to tensor memory that is not allocated", unowned, a)
        return ((access.cta * LANES + row) * COLUMNS)[:, None] + span

    @staticmethod
    def addresses(idx: Array) -> Array:
        """Return the addresses, lane and column, of the first cells of an access [threads, n]."""
        return idx[:, 0] // COLUMNS % LANES << 16 | idx[:, 0] % COLUMNS

    def load(
        self, access: Access, address: Array, shape: str, apart: int, n: int, halves: str | None
    ) -> list[Array]:
        """Load n registers per thread.

        halves: ".pack::16b": a register gets the lower halves of two columns
        """
        if halves:
            columns = self.load(access, address, shape, apart, 2 * n, None)
            return [a & u4(0xFFFF) | b << u4(16) for a, b in zip(columns[::2], columns[1::2])]
        idx = self.cells(access, address, shape, n, apart)
        if self.ctas.launch.check and len(access):
            state = self.state[idx]
            # Triton may load before a loop that does not run, and not use the values. So a CTA that has
            # written none of these cells reads poison, without a fault; poison is visible in results.
            written = (state & WRITTEN) != 0
            has_written = np.bincount(access.cta, written.sum(1), self.ctas.n) > 0
            missing = ~written & has_written[access.cta][:, None]
            where = self.addresses(idx)
            access.fault("read of tensor memory that was never written", missing, where)
            access.fault("read of tensor memory before tcgen05.wait::st", (state & STORING) != 0, where)
            self.shadow.check(access, idx, "read", address=where)
            self.state[idx] |= LOADING
            self.accesses["ld"].add(access.lanes, idx)
        out = np.zeros((access.threads.count, n), u4)
        out[access.where] = self.data[idx]
        return list(np.ascontiguousarray(out.T))

    def store(
        self,
        access: Access,
        address: Array,
        shape: str,
        apart: int,
        values: tuple[Array, ...],
        halves: str | None,
    ) -> None:
        """Store registers. halves: ".unpack::16b": a register sets the lower halves of two columns"""
        if halves:
            values = tuple(half for v in values for half in (v & u4(0xFFFF), v >> u4(16)))
        idx = self.cells(access, address, shape, len(values), apart)
        if self.ctas.launch.check and len(access):
            busy = (self.state[idx] & (STORING | LOADING)) != 0
            access.fault("write of tensor memory before tcgen05.wait", busy, self.addresses(idx))
            self.shadow.check(access, idx, "write", True, self.addresses(idx))
            self.accesses["st"].add(access.lanes, idx)
        self.state[idx] = WRITTEN | STORING if self.ctas.launch.check else WRITTEN
        self.data[idx] = access.pick(np.stack(values, 1))
        self.ctas.progress += 1

    def wait(self, threads: Threads, what: str) -> None:
        """`tcgen05.wait::ld` or `::st`: complete the accesses of these threads."""
        self.prepare()
        for lanes, done in self.accesses[what].wait(threads.lanes, left=-1):
            tags = self.ctas.clocks.current_tags(self.ctas.cta[lanes], self.ctas.warp[lanes])
            if what == "st":
                self.state[done] &= ~STORING
                self.shadow.writer[done] = tags[:, None]
            else:
                self.state[done] &= ~LOADING
                self.shadow.note_reader(done, tags[:, None])
