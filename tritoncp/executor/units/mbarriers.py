"""mbarriers: arrivals, expected bytes, phases, and the vector clocks that waiting warps acquire."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tritoncp.executor.ctas import Ctas
from tritoncp.executor.faults import CannotContinue
from tritoncp.executor.memory.shared_memory import MBARRIER, UNWRITTEN
from tritoncp.executor.threads import Access

Array = np.ndarray[Any, Any]
Key = tuple[int, int]  # (CTA, offset in its shared memory)


@dataclass
class Mbarrier:
    """An mbarrier. arriving: joined clocks of this phase's arrivals; done: joined clocks of earlier
    phases."""

    expected: int
    left: int  # number of missing arrivals
    initialiser: tuple[int, int]  # (warp, its clock)
    arriving: Array
    done: Array
    nbytes: int = 0  # bytes expected from copies
    phase: int = 0
    waiters: dict[int, int] = field(default_factory=dict)  # warp -> clock
    looked: set[int] = field(default_factory=set)  # warps whose first test failed

    def arrive(self, count: int, row: Array) -> None:
        self.left -= count
        np.maximum(self.arriving, row, out=self.arriving)

    def advance(self) -> None:
        """Start the next phase if this one is complete."""
        if self.left == 0 and self.nbytes == 0:
            self.left, self.phase = self.expected, self.phase + 1
            np.maximum(self.done, self.arriving, out=self.done)


class Mbarriers:
    """All mbarriers of some CTAs, and the asynchronous operations that will arrive at them."""

    def __init__(self, ctas: Ctas) -> None:
        self.ctas = ctas
        self.barriers: dict[Key, Mbarrier] = {}

    def keys(self, access: Access, address: Array) -> Iterator[tuple[Key, Access]]:
        """Yield (key of a barrier, access of the threads with its address)."""
        codes = access.cta.astype(np.int64) << 32 | access.pick(address).astype(np.int64)
        for code in np.unique(codes):
            yield (int(code) >> 32, int(code) & 0xFFFFFFFF), access.select(np.flatnonzero(codes == code))

    def initialise(self, access: Access, address: Array, count: Array) -> None:
        clocks = self.ctas.clocks
        for key, part in self.keys(access, address):
            if key in self.barriers or len(part) > 1:
                part.fault("mbarrier initialised again", None, key[1])
            warp, n = int(part.warp[0]), int(part.pick(count)[0])
            nothing = np.zeros_like(clocks.rows[0, 0])
            now = int(clocks.last[key[0], warp])
            self.barriers[key] = Mbarrier(n, n, (warp, now), nothing, nothing.copy())
            self.write(part, address, MBARRIER)

    def write(self, access: Access, address: Array, state: int) -> None:
        """Record that a thread writes the memory of a barrier."""
        shared, one = self.ctas.shared, access.select(np.zeros(1, int))
        idx = shared.locate(one, address, 8, "mbarrier")
        shared.check_race(one, idx, 8, "mbarrier")
        shared.note_writer(idx, 8, one.tags[:, None])
        shared.mark(idx, 8, state)

    def invalidate(self, access: Access, address: Array) -> None:
        clocks = self.ctas.clocks
        for key, part in self.keys(access, address):
            b = self.barriers.pop(key, None)
            if b is None or len(part) > 1:
                part.fault("mbarrier invalidated that is not initialised", None, key[1])
            if b is None:
                continue
            self.write(part, address, UNWRITTEN)
            if self.is_awaited(key):
                part.fault("mbarrier invalidated while asynchronous work will arrive at it", None, key[1])
            warp = int(part.warp[0])
            knows = clocks.knows[key[0], warp]
            if self.ctas.launch.check and any(w != warp and knows[w] < c for w, c in b.waiters.items()):
                kind = "mbarrier invalidated before a barrier follows another warp's wait"
                part.fault(kind, None, key[1])

    def is_awaited(self, key: Key) -> bool:
        """Return whether asynchronous operations in progress will arrive at a barrier."""
        return bool(self.ctas.tma.arriving.get(key)) or self.ctas.tcgen05.will_arrive(key)

    def find(self, access: Access, key: Key) -> Mbarrier:
        """Return a barrier; report threads that are not ordered after its initialisation."""
        b = self.barriers.get(key)
        if b is None:
            raise CannotContinue("mbarrier used that is not initialised", access.site, f"offset {key[1]}")
        if self.ctas.launch.check:
            warp, clock = b.initialiser
            knows = self.ctas.clocks.knows[key[0], access.warp, warp]
            kind = "mbarrier used by another warp before a barrier follows its initialisation"
            access.fault(kind, (knows < clock) & (access.warp != warp), key[1])
        return b

    def arrive(self, access: Access, address: Array, count: Array, nbytes: Array | None) -> None:
        for key, part in self.keys(access, address):
            b = self.find(part, key)
            if nbytes is not None:
                b.nbytes += int(part.pick(nbytes).sum())
            for warp in np.unique(part.warp):
                b.arrive(0, self.ctas.clocks.release(key[0], int(warp)))
            b.arrive(int(part.pick(count).sum()), b.arriving)
            if b.left < 0:
                part.fault("more arrivals at an mbarrier than it counts", None, key[1])
            b.advance()
            self.ctas.progress += 1

    def wait(self, access: Access, address: Array, parity: Array) -> Array:
        """Return whether the phase of a parity is complete.

        The first test by each warp fails, and asynchronous operations complete at the second test. This
        exposes kernels that do not repeat the test until it succeeds, and use incomplete data.
        """
        out = np.zeros(access.threads.count, bool)
        for key, part in self.keys(access, address):
            b = self.find(part, key)
            if self.ctas.launch.check:
                part = self.retesting_threads(b, part)
            if not len(part):
                continue
            self.ctas.tma.finish_loads(key, b)
            self.ctas.tcgen05.finish(key)
            b.advance()
            out[part.where] = passed = (b.phase & 1) != (part.pick(parity) & 1)
            self.learn(key, b, np.unique(part.warp[passed]), np.unique(part.warp))
        return out

    def retesting_threads(self, b: Mbarrier, access: Access) -> Access:
        """Return the threads whose warps have tested before."""
        first = [w for w in np.unique(access.warp).tolist() if w not in b.looked]
        self.ctas.progress += len(first)
        b.looked.update(first)
        return access.select(np.flatnonzero(~np.isin(access.warp, first))) if first else access

    def learn(self, key: Key, b: Mbarrier, passed: Array, looking: Array) -> None:
        clocks = self.ctas.clocks
        if not self.ctas.launch.check:
            return
        b.waiters.update((int(w), int(clocks.last[key[0], w])) for w in looking)
        if len(passed):
            b.looked.difference_update(passed.tolist())
            clocks.acquire(key[0], passed, b.done)
