"""`cp.async`: asynchronous copies by threads from global to shared memory, with commit groups."""

from __future__ import annotations

from typing import Any

import numpy as np

from tritoncp.executor.commit_groups import CommitGroups
from tritoncp.executor.ctas import Ctas
from tritoncp.executor.faults import CannotContinue
from tritoncp.executor.memory.regions import UNSIGNED
from tritoncp.executor.memory.shared_memory import WRITTEN
from tritoncp.executor.threads import Access, Threads

Array = np.ndarray[Any, Any]


class AsyncCopies:
    """The cp.async unit: data are read when a copy is issued, and written when its thread has waited.

    copies: commit groups, with notes for each thread: its index in shared memory, the data, and whether a
            fence.proxy.async of the thread followed
    """

    def __init__(self, ctas: Ctas) -> None:
        self.ctas = ctas
        self.copies = CommitGroups(ctas.count)

    def copy(self, access: Access, to: Array, of: Array, nbytes: int, size: Array | None) -> None:
        """Issue copies. size: bytes to read for each thread, `nbytes` or 0 (then zeros are written); None:
        all"""
        counts, shared = self.ctas.counts, self.ctas.shared
        if counts is not None:
            live = access if size is None else access.select(np.flatnonzero(access.pick(size)))
            counts.global_access(live, of, nbytes, "read")
            counts.shared_access(access, to, nbytes)
        if not len(access):
            return
        data = self.read(access, access.pick(of), nbytes, None if size is None else access.pick(size))
        idx = shared.locate(access, to, nbytes, "cp.async")
        shared.check_race(access, idx, nbytes, "cp.async")
        shared.check_busy(access, "cp.async", idx, nbytes)
        shared.expect_copy(idx, nbytes, access.tags[:, None])
        self.copies.add(access.lanes, idx, data, np.zeros(len(access), bool))

    def read(self, access: Access, of: Array, nbytes: int, size: Array | None) -> Array:
        """Return the data of the threads. of, size: address and bytes of each thread"""
        data, memory = np.zeros(len(access), UNSIGNED[nbytes]), self.ctas.globals
        rows_read = np.arange(len(access)) if size is None else np.flatnonzero(size)
        if size is not None and (size[rows_read] != nbytes).any():
            raise CannotContinue(f"cp.async of {nbytes} bytes from a source of another size", access.site)
        for region, rows, idx in memory.locate(access.select(rows_read), of[rows_read], nbytes, "cp.async"):
            valid = rows_read if rows is None else rows_read[rows]
            data[valid] = region.views[nbytes].take(idx)
            memory.observe(access.select(valid), region, idx, nbytes)
        return data

    def commit(self, threads: Threads) -> None:
        self.copies.commit(threads.lanes)

    def fence(self, threads: Threads) -> None:
        """`fence.proxy.async` of these threads. It covers copies in progress too, since hardware needs no
        fence after their wait: Triton places it before the wait, and CUTLASS has no fence between cp.async
        and wgmma (sm90_mma_multistage_gmma_ss_warpspecialized)."""
        for lanes, _, _, _, fenced in self.copies.pending:
            fenced[np.isin(lanes, threads.lanes)] = True

    def wait(self, threads: Threads, left: int) -> None:
        """Wait until at most the `left` newest groups of each thread are in progress."""
        shared, clocks = self.ctas.shared, self.ctas.clocks
        for lanes, idx, data, fenced in self.copies.wait(threads.lanes, left):
            nbytes = data.itemsize
            shared.views[nbytes][idx] = data
            self.ctas.progress += 1
            shared.mark(idx[fenced], nbytes, WRITTEN)
            shared.mark(idx[~fenced], nbytes, shared.by_threads)
            tags = clocks.current_tags(self.ctas.cta[lanes], self.ctas.warp[lanes])
            shared.note_writer(idx, nbytes, tags[:, None])
