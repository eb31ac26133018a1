"""Global memory of a launch: checks of tensor bounds, and of races between CTAs and warps by a shadow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tritoncp.executor.memory.memory import Memory, holds
from tritoncp.executor.memory.regions import (
    PLACE_MASK,
    REGION_MASK,
    REGION_SHIFT,
    Extent,
    Region,
    regions_of,
    tagged,
)
from tritoncp.executor.threads import Access

Array = np.ndarray[Any, Any]
u8 = np.uint64
SHARED_READ = -2  # the reader that stands for several CTAs
# Kinds of accesses that do not read, and kinds that write
BLIND, WRITES = ("store", "TMA store"), ("store", "TMA store", "TMA reduction", "atomic")


class GlobalMemory(Memory):
    """The tensors of a launch. An address includes the index of the region from which it was derived."""

    name = "global"

    def __init__(self, extents: list[Extent], granule: int, check: bool) -> None:
        self.regions, self.granule, self.check = regions_of(extents, granule, check), granule, check
        self.starts = np.array([r.start for r in self.regions], u8)

    def tag(self, address: int) -> int:
        """Return a kernel argument's address with the index of its region."""
        for region in self.regions:
            if region.start <= address < region.end or address == region.start:
                return tagged(address, region.number)
        return address

    def place(self, address: int) -> str:
        """Format an address relative to the tensor from which it was derived."""
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

    # locations of accesses

    def places(
        self, access: Access, address: Array, nbytes: int, kind: str
    ) -> Iterator[tuple[Access, Region, Array]]:
        for region, rows, idx in self.locate(access, access.pick(address), nbytes, kind):
            yield access.select(rows), region, idx

    def count(self, access: Access, address: Array, nbytes: int, way: str) -> None:
        if access.ctas.counts is not None:
            access.ctas.counts.global_access(access, address, nbytes, way)

    def locate(
        self, access: Access, a: Array, nbytes: int, kind: str
    ) -> Iterator[tuple[Region, Array | None, Array]]:
        """Yield (region, rows of `a` or None for all, index in units of nbytes) of valid accesses; report the
        others."""
        if not len(a):
            return
        wrong = (a & u8(nbytes - 1)) != 0
        if nbytes > 1 and wrong.any():
            self.fault(access, f"misaligned global {kind} of {nbytes} bytes", a, wrong)
            keep = np.flatnonzero(~wrong)
            for region, rows, idx in self.locate(access.select(keep), a[keep], nbytes, kind):
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
            inside = ok = numbers == n
            if 0 <= n < len(self.regions):
                region = self.regions[n]
                ok = inside & (place >= u8(region.start)) & (place + u8(nbytes) <= u8(region.end))
            else:
                ok = np.zeros(len(a), bool)
            self.fault(access, f"out of bounds global {kind}", a, inside & ~ok)
            rows = np.flatnonzero(ok)
            if len(rows):
                idx = ((place[rows] - u8(region.base)) // u8(nbytes)).astype(np.int64)
                self.check_content(access.select(rows), region, a[rows], idx, nbytes, kind)
                yield region, rows, idx

    def numbers(self, a: Array) -> Array:
        """Return the indices of the regions of addresses. An address without an index is looked up by its
        value."""
        numbers = (a >> u8(REGION_SHIFT)).astype(np.int64) - 1
        bare = numbers == -1
        if bare.any():
            numbers[bare] = np.searchsorted(self.starts, a[bare], side="right") - 1
        return numbers

    def fault(self, access: Access, kind: str, a: Array, bad: Array) -> None:
        """Report the threads of an access that have bad addresses."""
        if bad.any():
            address = int(a[np.nonzero(bad)[0][0]])
            text = "" if kind.startswith("misaligned") else self.place(address)
            access.fault(kind, bad, address & PLACE_MASK, self.label_of(address), text)

    def check_content(
        self, access: Access, region: Region, a: Array, idx: Array, nbytes: int, kind: str
    ) -> None:
        """Report accesses to bytes between elements, and reads of uninitialised bytes."""
        at = region.touch(idx, nbytes)
        if "holes" in region.state:
            bad = region.state["holes"].reshape(-1, nbytes)[at]
            self.fault(access, "global access between the elements of a strided tensor", a, bad)
        if "unwritten" not in region.state:
            return
        unwritten = region.state["unwritten"].reshape(-1, nbytes)
        if kind not in BLIND:
            bad = unwritten[at] & access.used_bytes(nbytes)
            self.fault(access, "read of global memory that was never written", a, bad)
        if kind in WRITES:
            unwritten[at] = False

    # races

    def check_atomic(self, access: Access, region: Region, idx: Array, nbytes: int) -> None:
        """Do nothing: CTAs and warps may update the same address."""

    def note_write(self, access: Access, region: Region, idx: Array, nbytes: int) -> None:
        """Do nothing: the check has recorded the writer."""

    def observe(
        self,
        access: Access,
        region: Region,
        idx: Array,
        nbytes: int,
        data: Array | None = None,
        kind: str = "",
    ) -> None:
        """Record an access, and report races between CTAs, and between warps of a CTA.

        data: values to write; several warps may write equal values
        """
        if not self.check or nbytes < self.granule:
            return
        k, at = nbytes // self.granule, region.touch(idx, nbytes)
        writers, readers, tags = (region.state[x].reshape(-1, k) for x in ("writers", "readers", "tags"))
        me = access.pick(access.threads.program)[:, None]
        other = writers[at]
        bad = (other != 0) & (other != me)
        if data is not None:
            read = readers[at]
            bad |= (read != 0) & (read != me)
        way = "read" if data is None else "write"
        race = f"race of two programs on global memory: {way}"
        access.fault(race, bad, None, region.label, lambda row: program_text(int(other[row].max())))
        # between warps of the CTA
        late = access.ctas.clocks.unordered(np.where(other == me, tags[at], 0), access.cta, access.warp)
        if late is not None:
            same = False if data is None else holds(region.views, idx, nbytes, data)
            race = f"race of two warps on global memory: {way}"
            access.fault(race, late.any(1) & ~np.asarray(same), None, region.label)
        if data is not None:
            writers[at] = me
            tags[at] = access.tags[:, None]
            return
        before = readers[at]
        readers[at] = np.where((before != 0) & (before != me), SHARED_READ, me)
        after = readers[at]
        if (after != me).any():
            readers[at] = np.where(after != me, SHARED_READ, after)

    check_read = check_write = observe


def program_text(writer: int) -> str:
    return f"program number {writer - 1} wrote it" if writer > 0 else "another program read it"
