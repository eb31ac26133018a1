"""`Threads`: a group that executes a block together; `Access`: the threads of it that execute an
instruction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tritoncp.executor.ctas import Ctas
from tritoncp.executor.faults import CannotContinue

Array = np.ndarray[Any, Any]
u4 = np.uint32


class Threads:
    """A group of threads: arrays with one element per thread, and PTX's special registers by name.

    lanes: indices of the threads, or None for all
    whole: whether every warp is complete
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
        self.whole = lanes is None or self.are_runs(32)
        self._full: dict[tuple[str, bytes], Array] = {}
        self._tags: tuple[int, Array | None] = -1, None

    def are_runs(self, n: int) -> bool:
        """Return whether the threads are complete aligned runs of n."""
        if self.count % n:
            return False
        first, last = self.lanes[::n], self.lanes[n - 1 :: n]
        return bool((first % n == 0).all() and (last - first == n - 1).all())

    def full(self, value: Any) -> Array:
        """Return an array with a constant for every thread."""
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

    def need_warps(self, what: str) -> None:
        if not self.whole:
            raise CannotContinue(f"{what} by a part of a warp")

    def need_groups(self, what: str) -> None:
        if not self.are_runs(128):
            raise CannotContinue(f"{what} by a part of a warpgroup")

    def tags(self) -> Array:
        """Return the tag of each thread's current accesses, see `Clocks`."""
        clocks = self.ctas.clocks
        if self._tags[0] != clocks.version:
            self._tags = clocks.version, clocks.current_tags(self.cta, self.warp)
        tags = self._tags[1]
        assert tags is not None
        return tags

    def access(self, mask: Array | None, site: int) -> Access:
        """Return the access of an instruction by the threads of a mask, or by all."""
        return Access(self, site, None if mask is None else np.flatnonzero(mask))


class Access:
    """The threads that execute an instruction; arrays have one element for each of them.

    site: index of the instruction, for reports
    at:   positions of the threads in their group; None: all
    """

    def __init__(self, threads: Threads, site: int, at: Array | None) -> None:
        self.threads, self.site, self.at = threads, site, at
        self.ctas = threads.ctas

    where = property(lambda self: slice(None) if self.at is None else self.at)
    cta = property(lambda self: self.pick(self.threads.cta))
    warp = property(lambda self: self.pick(self.threads.warp))
    lanes = property(lambda self: self.pick(self.threads.lanes))
    tags = property(lambda self: self.pick(self.threads.tags()))

    def __len__(self) -> int:
        return self.threads.count if self.at is None else len(self.at)

    def pick(self, x: Array) -> Array:
        """Select the elements of these threads from an array for the whole group."""
        return x if self.at is None else x[self.at]

    @property
    def positions(self) -> Array:
        return np.arange(self.threads.count) if self.at is None else self.at

    def select(self, rows: Array | None) -> Access:
        """Return the access by a selection of these threads; rows may repeat; None: all"""
        return self if rows is None else Access(self.threads, self.site, self.positions[rows])

    def single_threads(self) -> Iterator[tuple[int, Access]]:
        """Yield (position, access) of each single thread."""
        for j in self.positions:
            yield int(j), Access(self.threads, self.site, np.full(1, j))

    def times(self, n: int) -> Access:
        """Return an access with the first thread n times."""
        return Access(self.threads, self.site, np.repeat(self.positions[:1], n))

    def used_bytes(self, nbytes: int) -> Array:
        """Return a mask of the bytes of a load that the program uses, if the compiler declares it; else
        all."""
        used = self.ctas.launch.program.sites[self.site].used_bytes
        return np.ones(nbytes, bool) if used is None else (used >> np.arange(nbytes) & 1).astype(bool)

    def fault(
        self,
        kind: str,
        bad: Array | None = None,
        address: Array | int | None = None,
        tensor: str | None = None,
        text: str | Callable[[int], str] = "",
    ) -> bool:
        """Report a fault of the bad threads, or of all; return whether there are any.

        bad:     bool [threads, ...]; a thread with any true element is bad
        address: of each thread, or one for all
        text:    details, or a function that returns them for the row of the first bad thread
        """
        if not (len(self) if bad is None else bad.any()):
            return False
        rows = np.arange(len(self)) if bad is None else np.unique(np.nonzero(bad)[0])
        threads, at, first = self.threads, self.positions[rows], self.positions[rows[0]]
        near = at[threads.cta[at] == threads.cta[first]][:4]
        self.ctas.launch.log.add(
            kind,
            self.site,
            len(at),
            program=tuple(int(x[first]) for x in (threads.ctaid_x, threads.ctaid_y, threads.ctaid_z)),
            threads=tuple(dict.fromkeys(int(x) for x in threads.tid_x[near])),
            address=int(address[rows[0]]) if isinstance(address, np.ndarray) else address,
            tensor=tensor,
            text=text if isinstance(text, str) else text(int(rows[0])),
        )
        return True
