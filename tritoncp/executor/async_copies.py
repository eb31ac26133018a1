"""`cp.async`: copies of threads from global to shared memory, in groups that they wait for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tritoncp.executor.ctas import Ctas
from tritoncp.executor.global_memory import UNSIGNED
from tritoncp.executor.shared_memory import BUSY, ON_ITS_WAY, WRITTEN
from tritoncp.executor.threads import Threads

Array = np.ndarray[Any, Any]


@dataclass
class Copies:
    """Copies of one instruction, a row for each thread: its lane, place in shared memory, data and group, and
    whether a fence.proxy.async of the thread followed."""

    lanes: Array
    idx: Array
    data: Array
    nbytes: int
    group: Array
    fenced: Array

    def rows(self, keep: Array) -> Copies:
        rows = (x[keep] for x in (self.group, self.fenced))
        return Copies(self.lanes[keep], self.idx[keep], self.data[keep], self.nbytes, *rows)


class AsyncCopies:
    """Data are taken when a copy is issued, and lie in shared memory once its thread has waited."""

    def __init__(self, ctas: Ctas) -> None:
        self.ctas = ctas
        self.commits = np.zeros(ctas.count, np.int64)
        self.pending: list[Copies] = []

    def copy(
        self,
        threads: Threads,
        to: Array,
        of: Array,
        nbytes: int,
        taken: Array | None,
        mask: Array | None,
        site: int,
    ) -> None:
        """taken: bytes of each thread that are copied, the others become zero."""
        counts, shared = self.ctas.counts, self.ctas.shared
        if counts is not None:
            live = mask if taken is None else taken != 0 if mask is None else mask & (taken != 0)
            counts.global_access(threads, of, nbytes, live, site, "read")
            counts.shared_access(threads, to, nbytes, mask, site)
        at = threads.positions(mask)
        if not len(at):
            return
        data = self.read(threads, of, nbytes, taken, at, site)
        idx = shared.locate(threads, to, nbytes, at, site, "cp.async")
        shared.check_write(threads, idx, nbytes, at, site, None, "cp.async")
        if self.ctas.launch.check:
            state = shared.state.reshape(-1, nbytes)[idx]
            shared.report_state(threads, state, idx, nbytes, at, "cp.async", site, BUSY)
        shared.mark(idx, nbytes, ON_ITS_WAY)
        shared.poison(idx, nbytes)
        shared.note_writer(idx, nbytes, threads.tags()[at][:, None])
        lanes = threads.lanes[at]
        unfenced = np.zeros(len(lanes), bool)
        self.pending.append(Copies(lanes, idx, data, nbytes, self.commits[lanes], unfenced))

    def read(
        self, threads: Threads, of: Array, nbytes: int, taken: Array | None, at: Array, site: int
    ) -> Array:
        """The data of the threads at these positions."""
        data = np.zeros(len(at), UNSIGNED[nbytes])
        sizes = np.full(len(at), nbytes) if taken is None else taken[at]
        if (sizes > nbytes).any():
            bad = at[sizes > nbytes]
            threads.fault(f"cp.async of {nbytes} bytes with a larger source", site, bad)
        for size in np.unique(sizes[sizes > 0]):
            rows = np.flatnonzero(sizes == size)
            step = nbytes if size >= nbytes else 1
            for part in range(0, min(int(size), nbytes), step):
                here = at[rows]
                address = of[here] + np.uint64(part)
                located = self.ctas.globals.locate(threads, address, here, step, site, "cp.async")
                for region, pos, idx in located:
                    r = rows if pos is None else rows[pos]
                    values = region.views[step].take(idx)
                    if step == nbytes:
                        data[r] = values
                        self.ctas.globals.observe(threads, region, idx, nbytes, at[r], site, False)
                    else:
                        data.view(np.uint8).reshape(-1, nbytes)[r, part] = values
        return data

    def commit(self, threads: Threads) -> None:
        self.commits[threads.lanes] += 1

    def fence(self, threads: Threads) -> None:
        """`fence.proxy.async` of these threads. It covers copies under way too: Triton places it before their
        wait, and CUTLASS multiplies what cp.async wrote with wgmma without any (its
        sm90_mma_multistage_gmma_ss_warpspecialized), so that hardware does not need one behind the wait."""
        for copies in self.pending:
            copies.fenced |= np.isin(copies.lanes, threads.lanes)

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
        shared, clocks = self.ctas.shared, self.ctas.clocks
        shared.views[copies.nbytes][copies.idx] = copies.data
        shared.mark(copies.idx[copies.fenced], copies.nbytes, WRITTEN)
        shared.mark(copies.idx[~copies.fenced], copies.nbytes, shared.by_threads)
        tags = clocks.own_tags(self.ctas.cta[copies.lanes], self.ctas.warp[copies.lanes])
        shared.note_writer(copies.idx, copies.nbytes, tags[:, None])
