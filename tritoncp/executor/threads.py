"""The threads that execute a block together: all of some CTAs, or a part of them."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from tritoncp.executor.ctas import Ctas
from tritoncp.executor.faults import CannotContinue

Array = np.ndarray[Any, Any]
u4 = np.uint32


class Threads:
    """Arrays with one element per thread, in the order of threads; special registers of PTX by their names.

    lanes: numbers of the threads within their CTAs, or None for all
    whole: every warp is complete
    """

    def __init__(self, ctas: Ctas, lanes: Array | None) -> None:
        self.ctas = ctas
        self.lanes = np.arange(ctas.count) if lanes is None else lanes
        self.count = len(self.lanes)
        pick = slice(None) if lanes is None else lanes
        self.tid_x, self.cta, self.warp = ctas.tid[pick], ctas.cta[pick], ctas.warp[pick]
        self.ctaid_x, self.ctaid_y, self.ctaid_z = (x[pick] for x in ctas.ids)
        self.program = ctas.program[pick]
        self.laneid = self.tid_x & u4(31)
        self.warpid = self.tid_x >> u4(5)
        self.shared_base = self.cta * ctas.shared.size
        self.whole = lanes is None or self.are_runs(32)
        self._full: dict[tuple[str, bytes], Array] = {}
        self._tags: tuple[int, Array | None] = -1, None

    def are_runs(self, n: int) -> bool:
        """Whether the threads are complete aligned runs of n."""
        if self.count % n:
            return False
        first, last = self.lanes[::n], self.lanes[n - 1 :: n]
        return bool((first % n == 0).all() and (last - first == n - 1).all())

    def full(self, value: Any) -> Array:
        """A constant for every thread."""
        key = value.dtype.char, value.tobytes()
        if key not in self._full:
            self._full[key] = np.full(self.count, value)
        return self._full[key]

    tid_y = tid_z = property(lambda self: self.full(u4(0)))
    ntid_x = property(lambda self: self.full(u4(self.ctas.threads)))
    ntid_y = ntid_z = property(lambda self: self.full(u4(1)))
    nwarpid = property(lambda self: self.full(u4(self.ctas.warps)))
    nctaid_x = property(lambda self: self.full(u4(self.ctas.launch.grid[0])))
    nctaid_y = property(lambda self: self.full(u4(self.ctas.launch.grid[1])))
    nctaid_z = property(lambda self: self.full(u4(self.ctas.launch.grid[2])))

    @cached_property
    def _elected(self) -> Array:
        return self.full(u4(self.ctas.launch.elected_lane))

    def elected(self) -> Array:
        """The lane that leads its warp: any may, a launch with a seed draws one."""
        self.need_warps("elect")
        return self._elected

    def need_warps(self, what: str) -> None:
        if not self.whole:
            raise CannotContinue(f"{what} by a part of a warp")

    def need_groups(self, what: str) -> None:
        if not self.are_runs(128):
            raise CannotContinue(f"{what} by a part of a warpgroup")

    def positions(self, mask: Array | None) -> Array:
        return np.arange(self.count) if mask is None else np.flatnonzero(mask)

    def tags(self) -> Array:
        """The key of each thread's accesses in `Clocks`."""
        clocks = self.ctas.clocks
        if self._tags[0] != clocks.version:
            self._tags = clocks.version, clocks.own_tags(self.cta, self.warp)
        tags = self._tags[1]
        assert tags is not None
        return tags

    def used_bytes(self, site: int | None, nbytes: int) -> Array:
        """Which bytes of an access the program uses, where the compiler says so: else all."""
        used = None if site is None else self.ctas.launch.program.sites[site].used_bytes
        return np.ones(nbytes, bool) if used is None else (used >> np.arange(nbytes) & 1).astype(bool)

    def fault(
        self,
        kind: str,
        site: int | None,
        positions: Array,
        address: int | None = None,
        tensor: str | None = None,
        text: str = "",
        count: int | None = None,
    ) -> None:
        """Report a fault of the threads at these positions."""
        first = positions[0]
        near = positions[self.cta[positions] == self.cta[first]][:4]
        program = tuple(int(x[first]) for x in (self.ctaid_x, self.ctaid_y, self.ctaid_z))
        threads = tuple(dict.fromkeys(int(x) for x in self.tid_x[near]))
        n = len(positions) if count is None else count
        self.ctas.launch.log.add(kind, site, n, program, threads, address, tensor, text)
