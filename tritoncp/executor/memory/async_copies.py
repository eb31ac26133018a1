"""`cp.async`: copies of threads from global to shared memory, in groups that they wait for."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tritoncp.executor.ctas import Ctas
from tritoncp.executor.faults import CannotContinue
from tritoncp.executor.memory.regions import UNSIGNED
from tritoncp.executor.memory.shared_memory import WRITTEN
from tritoncp.executor.threads import Access, Threads

Array = np.ndarray[Any, Any]


class Copies(NamedTuple):
    """Copies of one instruction, a row for each thread: its lane, place in shared memory, data and group, and
    whether a fence.proxy.async of the thread followed."""

    lanes: Array
    idx: Array
    data: Array
    group: Array
    fenced: Array

    def rows(self, keep: Array) -> Copies:
        return Copies(*(x[keep] for x in self))


class AsyncCopies:
    """Data are taken when a copy is issued, and lie in shared memory once its thread has waited."""

    def __init__(self, ctas: Ctas) -> None:
        self.ctas = ctas
        self.commits = np.zeros(ctas.count, np.int64)
        self.pending: list[Copies] = []

    def copy(self, access: Access, to: Array, of: Array, nbytes: int, taken: Array | None) -> None:
        """taken: bytes of each thread that are copied, all or none: then zeros."""
        counts, shared = self.ctas.counts, self.ctas.shared
        if counts is not None:
            live = access if taken is None else access.some(np.flatnonzero(access.pick(taken)))
            counts.global_access(live, of, nbytes, "read")
            counts.shared_access(access, to, nbytes)
        if not len(access):
            return
        data = self.read(access, access.pick(of), nbytes, None if taken is None else access.pick(taken))
        idx = shared.locate(access, to, nbytes, "cp.async")
        shared.check_write(access, idx, nbytes, None, "cp.async")
        shared.check_busy(access, "cp.async", idx, nbytes)
        shared.expect_copy(idx, nbytes, access.tags[:, None])
        unfenced = np.zeros(len(access), bool)
        self.pending.append(Copies(access.lanes, idx, data, self.commits[access.lanes], unfenced))

    def read(self, access: Access, of: Array, nbytes: int, taken: Array | None) -> Array:
        """The data of the threads; `of` and `taken` are theirs."""
        data, memory = np.zeros(len(access), UNSIGNED[nbytes]), self.ctas.globals
        some = np.arange(len(access)) if taken is None else np.flatnonzero(taken)
        if taken is not None and (taken[some] != nbytes).any():
            raise CannotContinue(f"cp.async of {nbytes} bytes from a source of another size", access.site)
        for region, rows, idx in memory.locate(access.some(some), of[some], nbytes, "cp.async"):
            here = some if rows is None else some[rows]
            data[here] = region.views[nbytes].take(idx)
            memory.observe(access.some(here), region, idx, nbytes)
        return data

    def commit(self, threads: Threads) -> None:
        self.commits[threads.lanes] += 1

    def fence(self, threads: Threads) -> None:
        """`fence.proxy.async` of these threads. It covers copies under way too: Triton places it before their
        wait, and CUTLASS multiplies what cp.async wrote with wgmma without any (its
        sm90_mma_multistage_gmma_ss_warpspecialized), so that hardware does not need one behind the wait."""
        for copies in self.pending:
            copies.fenced[np.isin(copies.lanes, threads.lanes)] = True

    def wait(self, threads: Threads, left: int) -> None:
        """Until at most `left` of the newest groups of each thread are under way."""
        if not self.pending:
            return
        active = np.zeros(self.ctas.count, bool)
        active[threads.lanes] = True
        keep = []
        for copies in self.pending:
            done = active[copies.lanes] & (copies.group < self.commits[copies.lanes] - left)
            if done.any():
                self.finish(copies.rows(done))
            if not done.all():
                keep.append(copies.rows(~done))
        self.pending = keep

    def finish(self, copies: Copies) -> None:
        shared, clocks, nbytes = self.ctas.shared, self.ctas.clocks, copies.data.itemsize
        shared.views[nbytes][copies.idx] = copies.data
        self.ctas.progress += 1
        shared.mark(copies.idx[copies.fenced], nbytes, WRITTEN)
        shared.mark(copies.idx[~copies.fenced], nbytes, shared.by_threads)
        tags = clocks.own_tags(self.ctas.cta[copies.lanes], self.ctas.warp[copies.lanes])
        shared.note_writer(copies.idx, nbytes, tags[:, None])
