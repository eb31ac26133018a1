"""mbarriers: arrivals, bytes that are awaited, phases, and what their waiters learn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tritoncp.executor.ctas import Ctas
from tritoncp.executor.faults import CannotContinue
from tritoncp.executor.shared_memory import MBARRIER, UNWRITTEN
from tritoncp.executor.threads import Threads

Array = np.ndarray[Any, Any]
Key = tuple[int, int]  # CTA and offset in its shared memory


@dataclass
class Mbarrier:
    """arriving: what this phase's arrivals know; done: what those of the phases before knew, see `Clocks`."""

    expected: int
    left: int  # arrivals
    initialiser: tuple[int, int]  # warp and its clock
    arriving: Array
    done: Array
    nbytes: int = 0  # awaited from copies
    phase: int = 0
    waiters: dict[int, int] = field(default_factory=dict)  # clocks by warp
    looked: set[int] = field(default_factory=set)  # warps that found nothing yet

    def arrive(self, count: int, row: Array) -> None:
        self.left -= count
        np.maximum(self.arriving, row, out=self.arriving)

    def advance(self) -> None:
        """Begin the next phase, if this one is complete."""
        if self.left == 0 and self.nbytes == 0:
            self.left, self.phase = self.expected, self.phase + 1
            np.maximum(self.done, self.arriving, out=self.done)


class Mbarriers:
    """All mbarriers of some CTAs, and the work of asynchronous units that will arrive at them."""

    def __init__(self, ctas: Ctas) -> None:
        self.ctas = ctas
        self.barriers: dict[Key, Mbarrier] = {}

    def keys(self, threads: Threads, address: Array, mask: Array | None) -> Iterator[tuple[Key, Array]]:
        """Yield each barrier with the positions of the threads that name it."""
        at = threads.positions(mask)
        codes = threads.cta[at].astype(np.int64) << 32 | address[at].astype(np.int64)
        for code in np.unique(codes):
            yield (int(code) >> 32, int(code) & 0xFFFFFFFF), at[codes == code]

    def initialise(
        self, threads: Threads, address: Array, count: Array, mask: Array | None, site: int
    ) -> None:
        clocks = self.ctas.clocks
        for key, at in self.keys(threads, address, mask):
            if key in self.barriers or len(at) > 1:
                threads.fault("mbarrier initialised again", site, at, key[1])
            self.check_offset(threads, key, at, site)
            warp, n = int(threads.warp[at[0]]), int(count[at[0]])
            nothing = np.zeros_like(clocks.rows[0, 0])
            now = int(clocks.last[key[0], warp])
            self.barriers[key] = Mbarrier(n, n, (warp, now), nothing, nothing.copy())
            self.mark(key, MBARRIER)

    def mark(self, key: Key, value: int) -> None:
        start = key[0] * self.ctas.shared.size + key[1]
        self.ctas.shared.state[start : start + 8] = value

    def check_offset(self, threads: Threads, key: Key, at: Array, site: int) -> None:
        if key[1] % 8:
            threads.fault("misaligned mbarrier", site, at, key[1])
        if key[1] + 8 > self.ctas.shared.used:
            threads.fault("out of bounds mbarrier", site, at, key[1])

    def invalidate(self, threads: Threads, address: Array, mask: Array | None, site: int) -> None:
        clocks = self.ctas.clocks
        for key, at in self.keys(threads, address, mask):
            b = self.barriers.pop(key, None)
            if b is None or len(at) > 1:
                threads.fault("mbarrier invalidated that is not initialised", site, at, key[1])
            if b is None:
                continue
            self.mark(key, UNWRITTEN)
            if self.is_awaited(key):
                kind = "mbarrier invalidated while asynchronous work will arrive at it"
                threads.fault(kind, site, at, key[1])
            warp = int(threads.warp[at[0]])
            knows = clocks.knows[key[0], warp]
            if self.ctas.launch.check and any(w != warp and knows[w] < c for w, c in b.waiters.items()):
                kind = "mbarrier invalidated before a barrier follows another warp's wait"
                threads.fault(kind, site, at, key[1])

    def is_awaited(self, key: Key) -> bool:
        """Whether asynchronous work under way will arrive at a barrier."""
        return bool(self.ctas.tma.arriving.get(key)) or self.ctas.tcgen05.will_arrive(key)

    def find(self, threads: Threads, key: Key, site: int, at: Array | None = None) -> Mbarrier:
        """The barrier, whose initialisation all these threads must know of."""
        b = self.barriers.get(key)
        if b is None:
            raise CannotContinue("mbarrier used that is not initialised", site, f"offset {key[1]}")
        if self.ctas.launch.check and at is not None:
            warp, clock = b.initialiser
            knows = self.ctas.clocks.knows[key[0], threads.warp[at], warp]
            late = (knows < clock) & (threads.warp[at] != warp)
            if late.any():
                kind = "mbarrier used by another warp before a barrier follows its initialisation"
                threads.fault(kind, site, at[late], key[1])
        return b

    def arrive(
        self,
        threads: Threads,
        address: Array,
        count: Array,
        nbytes: Array | None,
        mask: Array | None,
        site: int,
    ) -> None:
        for key, at in self.keys(threads, address, mask):
            b = self.find(threads, key, site, at)
            if nbytes is not None:
                b.nbytes += int(nbytes[at].sum())
            for warp in np.unique(threads.warp[at]):
                b.arrive(0, self.ctas.clocks.release(key[0], int(warp)))
            b.arrive(int(count[at].sum()), b.arriving)
            if b.left < 0:
                threads.fault("more arrivals at an mbarrier than it counts", site, at, key[1])
            b.advance()
            self.ctas.progress += 1

    def wait(self, threads: Threads, address: Array, parity: Array, mask: Array | None, site: int) -> Array:
        """Whether the phase of a parity is complete.

        The first look of each warp finds nothing, and asynchronous work ends at the second one, so that a
        kernel that does not look until the phase changes is seen to use what is not there yet.
        """
        out = np.zeros(threads.count, bool)
        for key, at in self.keys(threads, address, mask):
            b = self.find(threads, key, site, at)
            if self.ctas.launch.check:
                at = self.second_looks(b, threads, at)
            if not len(at):
                continue
            self.ctas.tma.finish_loads(key, b)
            self.ctas.tcgen05.finish(key)
            b.advance()
            out[at] = (b.phase & 1) != (parity[at] & 1)
            self.learn(key, b, np.unique(threads.warp[at[out[at]]]), np.unique(threads.warp[at]))
        return out

    def second_looks(self, b: Mbarrier, threads: Threads, at: Array) -> Array:
        """The positions whose warps have looked before."""
        warps = threads.warp[at]
        first = [w for w in np.unique(warps).tolist() if w not in b.looked]
        self.ctas.progress += len(first)
        b.looked.update(first)
        return at[~np.isin(warps, first)] if first else at

    def learn(self, key: Key, b: Mbarrier, passed: Array, looking: Array) -> None:
        clocks = self.ctas.clocks
        if not self.ctas.launch.check:
            return
        b.waiters.update((int(w), int(clocks.last[key[0], w])) for w in looking)
        if len(passed):
            b.looked.difference_update(passed.tolist())
            clocks.acquire(key[0], passed, b.done)
