"""Global memory of a launch: bounds of its tensors, and races of programs and warps in a shadow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tritoncp.executor.memory.atomics import update
from tritoncp.executor.memory.regions import (
    PLACE_MASK,
    REGION_MASK,
    REGION_SHIFT,
    UNSIGNED,
    Extent,
    Region,
    holds,
    regions_of,
    tagged,
)
from tritoncp.executor.threads import Access

Array = np.ndarray[Any, Any]
u8 = np.uint64
SHARED_READ = -2  # read by several programs
# Kinds of accesses that do not read, and those that write
BLIND, WRITES = ("store", "TMA store"), ("store", "TMA store", "TMA reduction", "atomic")


class GlobalMemory:
    """Tensors of a launch. Addresses carry the number of the region that they were derived from."""

    def __init__(self, extents: list[Extent], granule: int, check: bool) -> None:
        self.regions, self.granule, self.check = regions_of(extents, granule, check), granule, check
        self.starts = np.array([r.start for r in self.regions], u8)

    def tag(self, address: int) -> int:
        """An address that a launch passes to the kernel, with its region."""
        for region in self.regions:
            if region.start <= address < region.end or address == region.start:
                return tagged(address, region.number)
        return address

    def place(self, address: int) -> str:
        """An address in words, relative to the tensor that it was derived from."""
        place, number = address & PLACE_MASK, (address >> REGION_SHIFT & REGION_MASK) - 1
        near = next((r for r in self.regions if r.start <= place < r.end), None)
        if not 0 <= number < len(self.regions):
            return f"in {near.label}" if near else "in no tensor of the launch"
        region = self.regions[number]
        if place >= region.end:
            where = f"{place - region.end} bytes past the end"
        elif place < region.start:
            where = f"{region.start - place} bytes before the start"
        else:
            where = f"byte {place - region.start}"
        return f"{where} of {region.label}{f', in {near.label}' if near and near is not region else ''}"

    def label_of(self, address: int) -> str | None:
        number = (address >> REGION_SHIFT & REGION_MASK) - 1
        return self.regions[number].label if 0 <= number < len(self.regions) else None

    # where an access lies

    def locate(
        self, access: Access, a: Array, nbytes: int, kind: str
    ) -> Iterator[tuple[Region, Array | None, Array]]:
        """Yield (region, rows of `a` or None for all, index in units of nbytes) of what may be accessed."""
        if not len(a):
            return
        wrong = (a & u8(nbytes - 1)) != 0
        if nbytes > 1 and wrong.any():
            self.fault(access, f"misaligned global {kind} of {nbytes} bytes", a, np.flatnonzero(wrong))
            keep = np.flatnonzero(~wrong)
            for region, rows, idx in self.locate(access.some(keep), a[keep], nbytes, kind):
                yield region, keep if rows is None else keep[rows], idx
            return
        low, high = int(a.min()), int(a.max())
        number = low >> REGION_SHIFT
        if number == high >> REGION_SHIFT and 1 <= number <= len(self.regions):
            region = self.regions[number - 1]
            if region.start <= low & PLACE_MASK and (high & PLACE_MASK) + nbytes <= region.end:
                idx = ((a - u8(tagged(region.base, number - 1))) // u8(nbytes)).astype(np.int64)
                self.check_content(access, region, a, idx, nbytes, kind)
                yield region, None, idx
                return
        numbers = self.numbers(a)
        place = a & u8(PLACE_MASK)
        for n in np.unique(numbers):
            rows = np.flatnonzero(numbers == n)
            ok = np.zeros(len(rows), bool)
            if 0 <= n < len(self.regions):
                region = self.regions[n]
                ok = (place[rows] >= u8(region.start)) & (place[rows] + u8(nbytes) <= u8(region.end))
            if not ok.all():
                self.fault(access, f"out of bounds global {kind}", a, rows[~ok])
                rows = rows[ok]
            if len(rows):
                idx = ((place[rows] - u8(region.base)) // u8(nbytes)).astype(np.int64)
                self.check_content(access.some(rows), region, a[rows], idx, nbytes, kind)
                yield region, rows, idx

    def numbers(self, a: Array) -> Array:
        """Numbers of the regions of addresses; an address without one belongs where it lies."""
        numbers = (a >> u8(REGION_SHIFT)).astype(np.int64) - 1
        bare = numbers == -1
        if bare.any():
            numbers[bare] = np.searchsorted(self.starts, a[bare], side="right") - 1
        return numbers

    def fault(self, access: Access, kind: str, a: Array, bad: Array) -> None:
        """Report the rows of an access whose addresses are bad."""
        address = int(a[bad[0]])
        text = "" if kind.startswith("misaligned") else self.place(address)
        access.fault(kind, bad, address & PLACE_MASK, self.label_of(address), text)

    def check_content(
        self, access: Access, region: Region, a: Array, idx: Array, nbytes: int, kind: str
    ) -> None:
        """Report bytes between elements, and those that are read before anybody wrote them."""
        if region.holes is not None:
            bad = np.flatnonzero(region.holes.reshape(-1, nbytes)[idx].any(1))
            if len(bad):
                self.fault(access, "global access between the elements of a strided tensor", a, bad)
        if region.unwritten is None:
            return
        unwritten = region.unwritten.reshape(-1, nbytes)
        if kind not in BLIND:
            bad = np.flatnonzero((unwritten[idx] & access.used_bytes(nbytes)).any(1))
            if len(bad):
                self.fault(access, "read of global memory that was never written", a, bad)
        if kind in WRITES:
            unwritten[idx] = False

    # races

    def observe(
        self, access: Access, region: Region, idx: Array, nbytes: int, data: Array | None = None
    ) -> None:
        """Look for races of programs, and of a program's warps with a write of another, and note an access.

        data: what it writes; equal data that several warps write are no race
        """
        if not self.check or nbytes < self.granule:
            return
        k = nbytes // self.granule
        writers, readers = region.writers.reshape(-1, k), region.readers.reshape(-1, k)
        me = access.pick(access.threads.program)[:, None]
        other = writers[idx]
        bad = (other != 0) & (other != me)
        if data is not None:
            read = readers[idx]
            bad |= (read != 0) & (read != me)
        if bad.any():
            rows = np.flatnonzero(bad.any(1))
            number = int(other[rows[0]].max()) - 1
            text = f"program number {number} wrote it" if number >= 0 else "another program read it"
            self.race(access, "two programs", rows, region, data, text)
        self.observe_warps(access, region, idx, nbytes, other == me, data)
        if data is not None:
            writers[idx] = me
            region.tags.reshape(-1, k)[idx] = access.tags[:, None]
            return
        before = readers[idx]
        readers[idx] = np.where((before != 0) & (before != me), SHARED_READ, me)
        after = readers[idx]
        if (after != me).any():
            readers[idx] = np.where(after != me, SHARED_READ, after)

    def observe_warps(
        self, access: Access, region: Region, idx: Array, nbytes: int, own: Array, data: Array | None
    ) -> None:
        """Report accesses to what another warp of the program wrote, with no barrier between them."""
        if not own.any():
            return
        tags = np.where(own, region.tags.reshape(-1, own.shape[1])[idx], 0)
        late = access.ctas.clocks.unordered(tags, access.cta, access.warp)
        if late is None:
            return
        bad = late.any(1) if data is None else late.any(1) & ~holds(region.views, idx, nbytes, data)
        if bad.any():
            self.race(access, "two warps", np.flatnonzero(bad), region, data)

    def race(
        self, access: Access, whose: str, rows: Array, region: Region, data: Array | None, text: str = ""
    ) -> None:
        kind = f"race of {whose} on global memory: {'read' if data is None else 'write'}"
        access.fault(kind, rows, None, region.label, text)

    # threads

    def load(self, access: Access, address: Array, t: str, n: int) -> list[Array]:
        nbytes = int(t[1]) * n
        if access.ctas.counts is not None:
            access.ctas.counts.global_access(access, address, nbytes, "read")
        out = np.zeros(access.threads.count, UNSIGNED[nbytes])
        for region, rows, idx in self.locate(access, access.pick(address), nbytes, "load"):
            part = access.some(rows)
            self.observe(part, region, idx, nbytes)
            out[part.where] = region.views[nbytes].take(idx)
        return split(out, t, n)

    def store(self, access: Access, address: Array, values: tuple[Array, ...]) -> None:
        nbytes = values[0].itemsize * len(values)
        if access.ctas.counts is not None:
            access.ctas.counts.global_access(access, address, nbytes, "write")
        data = access.pick(joined(values))
        for region, rows, idx in self.locate(access, access.pick(address), nbytes, "store"):
            part, given = access.some(rows), data if rows is None else data[rows]
            self.observe(part, region, idx, nbytes, given)
            access.ctas.progress += not holds(region.views, idx, nbytes, given).all()
            region.views[nbytes][idx] = given
            if self.check and (lost := ~holds(region.views, idx, nbytes, given)).any():
                kind = "race on global memory: several threads write different values to one address"
                part.fault(kind, np.flatnonzero(lost), None, region.label)

    def atomic(
        self, access: Access, address: Array, t: str, kind: str, operation: str, values: tuple[Array, ...]
    ) -> Array:
        """Update memory, one thread after the other in the launch's order; return the old values."""
        nbytes = int(t[1])
        if access.ctas.counts is not None:
            access.ctas.counts.global_access(access, address, nbytes, "write")
        access = access.some(access.ctas.launch.order(len(access)))
        out = np.zeros(access.threads.count, t)
        for region, rows, idx in self.locate(access, access.pick(address), nbytes, "atomic"):
            part = access.some(rows)
            given = tuple(part.pick(v) for v in values)
            out[part.where] = old = update(region.views[nbytes].view(t), idx, kind, operation, given)
            access.ctas.progress += not np.array_equal(old, region.views[nbytes].view(t)[idx])
        return out


def split(packed: Array, t: str, n: int) -> list[Array]:
    """The n elements of each thread's vector."""
    if n == 1:
        return [packed.view(t)]
    return list(np.ascontiguousarray(packed.view(t).reshape(len(packed), n).T))


def joined(values: tuple[Array, ...]) -> Array:
    """One item for each thread's vector."""
    if len(values) == 1:
        return values[0]
    nbytes = values[0].itemsize * len(values)
    return np.stack(values, 1).reshape(-1).view(UNSIGNED[nbytes])
