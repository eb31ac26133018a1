"""`cp.async`: copies of threads from global to shared memory, in groups that they wait for."""

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
    """Data are taken when a copy is issued, and lie in shared memory once its thread has waited.

    copies: notes of each thread are its place in shared memory, the data, and whether a fence.proxy.async of
            the thread followed
    """

    def __init__(self, ctas: Ctas) -> None:
        self.ctas = ctas
        self.copies = CommitGroups(ctas.count)

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
        shared.check_race(access, idx, nbytes, "cp.async")
        shared.check_busy(access, "cp.async", idx, nbytes)
        shared.expect_copy(idx, nbytes, access.tags[:, None])
        self.copies.add(access.lanes, idx, data, np.zeros(len(access), bool))

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
        self.copies.commit(threads.lanes)

    def fence(self, threads: Threads) -> None:
        """`fence.proxy.async` of these threads. It covers copies under way too: Triton places it before their
        wait, and CUTLASS multiplies what cp.async wrote with wgmma without any (its
        sm90_mma_multistage_gmma_ss_warpspecialized), so that hardware does not need one behind the wait."""
        for lanes, _, _, _, fenced in self.copies.pending:
            fenced[np.isin(lanes, threads.lanes)] = True

    def wait(self, threads: Threads, left: int) -> None:
        """Until at most `left` of the newest groups of each thread are under way."""
        shared, clocks = self.ctas.shared, self.ctas.clocks
        for lanes, idx, data, fenced in self.copies.wait(threads.lanes, left):
            nbytes = data.itemsize
            shared.views[nbytes][idx] = data
            self.ctas.progress += 1
            shared.mark(idx[fenced], nbytes, WRITTEN)
            shared.mark(idx[~fenced], nbytes, shared.by_threads)
            tags = clocks.own_tags(self.ctas.cta[lanes], self.ctas.warp[lanes])
            shared.note_writer(idx, nbytes, tags[:, None])
