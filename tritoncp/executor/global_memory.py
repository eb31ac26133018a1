"""Global memory of a launch: its tensors in place, with bounds, and races of programs in a shadow."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tritoncp.executor.address_space import PLACE_MASK, REGION_MASK, REGION_SHIFT, tagged
from tritoncp.executor.atomics import update
from tritoncp.executor.faults import CannotContinue
from tritoncp.executor.uninitialised import pattern_of

if TYPE_CHECKING:
    import torch

    from tritoncp.executor.threads import Threads

Array = np.ndarray[Any, Any]
u8 = np.uint64
UNSIGNED = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}  # of a number of bytes; complex holds sixteen
SHARED_READ = -2  # read by several programs
# Kinds of accesses that do not read, and those that write
BLIND, WRITES = ("store", "TMA store"), ("store", "TMA store", "TMA reduction", "atomic")


@dataclass
class Extent:
    """Bytes that a launch may touch, of a tensor or of the compiler's memory."""

    start: int
    end: int
    label: str
    tensor: torch.Tensor | None = None


def extent_of(tensor: torch.Tensor, label: str) -> Extent:
    """From the first to the last element of a tensor."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return Extent(start, start, label, tensor)
    elements = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
    return Extent(start, start + elements * tensor.element_size(), label, tensor)


@dataclass
class Region:
    """Extents that overlap. `base` is the start rounded down to 16 bytes; `writers` and `readers` hold the
    program + 1 that touched each granule, `tags` its last writer there (`Clocks`); `holes` marks bytes
    between the elements of strided tensors, `unwritten` those that nobody wrote, if there are any."""

    start: int
    end: int
    label: str
    number: int
    extents: list[Extent]
    base: int = 0
    views: dict[int, Array] = field(default_factory=dict)
    writers: Array = field(default_factory=lambda: np.zeros(0, np.int32))
    readers: Array = field(default_factory=lambda: np.zeros(0, np.int32))
    tags: Array = field(default_factory=lambda: np.zeros(0, np.int32))
    holes: Array | None = None
    unwritten: Array | None = None

    def attach(self, granule: int, check: bool) -> None:
        self.base = self.start & ~15
        n = -(-(self.end - self.base) // 16) * 16
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * n).from_address(self.base))
        self.views = {size: raw.view(t) for size, t in UNSIGNED.items()}
        self.writers, self.readers, self.tags = (np.zeros(n // granule, np.int32) for _ in range(3))
        self.holes = self.find_holes(n)
        self.unwritten = self.find_unwritten(n) if check else None

    def find_holes(self, n: int) -> Array | None:
        if any(e.tensor is None or e.tensor.is_contiguous() for e in self.extents):
            return None
        holes = np.ones(n, bool)
        for extent in self.extents:
            x = extent.tensor
            assert x is not None
            at = np.full(1, x.data_ptr() - self.base)
            for size, stride in zip(x.shape, x.stride()):
                at = (at[:, None] + np.arange(size) * stride * x.element_size()).reshape(-1)
            holes[(at[:, None] + np.arange(x.element_size())).reshape(-1)] = False
        inside = holes[self.start - self.base : self.end - self.base]
        return holes if inside.any() else None

    def find_unwritten(self, n: int) -> Array | None:
        """Bytes of elements that hold the pattern of their type; where types overlap the widest decides."""
        unwritten, parts = np.zeros(n, bool), []
        for e in self.extents:
            pattern = None if e.tensor is None else pattern_of(e.tensor.dtype)
            if e.tensor is not None and pattern is not None:
                parts.append((e.tensor.element_size(), pattern, e.start - self.base, e.end - self.base))
        for size, pattern, start, end in sorted(parts):
            is_pattern = self.views[1][start:end].view(f"u{size}") == pattern
            unwritten[start:end] = np.repeat(is_pattern, size)
        return unwritten if unwritten.any() else None


def regions_of(extents: list[Extent], granule: int, check: bool) -> list[Region]:
    """Join extents that overlap."""
    regions: list[Region] = []
    for e in sorted(extents, key=lambda e: (e.start, e.end)):
        if regions and e.start < regions[-1].end:
            region = regions[-1]
            region.end = max(region.end, e.end)
            region.extents.append(e)
        else:
            regions.append(Region(e.start, e.end, "", len(regions), [e]))
    if len(regions) >= REGION_MASK:
        raise CannotContinue(
            f"a launch with {len(regions)} tensors, at most {REGION_MASK - 1} are told apart"
        )
    for region in regions:
        region.label = "/".join(dict.fromkeys(e.label for e in region.extents))
        region.attach(granule, check)
    return regions


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
        if 0 <= number < len(self.regions):
            region = self.regions[number]
            if place >= region.end:
                where = f"{place - region.end} bytes past the end"
            elif place < region.start:
                where = f"{region.start - place} bytes before the start"
            else:
                where = f"byte {place - region.start}"
            into = f", in {near.label}" if near and near is not region else ""
            return f"{where} of {region.label}{into}"
        return f"in {near.label}" if near else "in no tensor of the launch"

    def label_of(self, address: int) -> str | None:
        number = (address >> REGION_SHIFT & REGION_MASK) - 1
        return self.regions[number].label if 0 <= number < len(self.regions) else None

    # access

    def locate(
        self, threads: Threads, a: Array, at: Array | None, nbytes: int, site: int | None, kind: str
    ) -> Iterator[tuple[Region, Array | None, Array]]:
        """Yield (region, positions in `a` or None for all, index in units of nbytes) of what may be accessed.

        at: positions of the addresses among the threads, None for all
        """
        if not len(a):
            return
        wrong = (a & u8(nbytes - 1)) != 0
        if nbytes > 1 and wrong.any():
            bad = np.flatnonzero(wrong)
            self.fault(threads, f"misaligned global {kind} of {nbytes} bytes", site, a, at, bad)
            keep = np.flatnonzero(~wrong)
            for region, pos, idx in self.locate(
                threads, a[keep], keep if at is None else at[keep], nbytes, site, kind
            ):
                yield region, keep if pos is None else keep[pos], idx
            return
        low, high = int(a.min()), int(a.max())
        number = low >> REGION_SHIFT
        if number == high >> REGION_SHIFT and 1 <= number <= len(self.regions):
            region = self.regions[number - 1]
            if region.start <= low & PLACE_MASK and (high & PLACE_MASK) + nbytes <= region.end:
                idx = ((a - u8(tagged(region.base, number - 1))) // u8(nbytes)).astype(np.int64)
                self.check_content(threads, region, a, at, None, idx, nbytes, site, kind)
                yield region, None, idx
                return
        numbers = self.numbers(a)
        place = a & u8(PLACE_MASK)
        for n in np.unique(numbers):
            pos = np.flatnonzero(numbers == n)
            known = 0 <= n < len(self.regions)
            ok = np.zeros(len(pos), bool)
            if known:
                region = self.regions[n]
                ok = (place[pos] >= u8(region.start)) & (place[pos] + u8(nbytes) <= u8(region.end))
            if not ok.all():
                self.fault(threads, f"out of bounds global {kind}", site, a, at, pos[~ok])
                pos = pos[ok]
            if len(pos):
                idx = ((place[pos] - u8(region.base)) // u8(nbytes)).astype(np.int64)
                self.check_content(threads, region, a, at, pos, idx, nbytes, site, kind)
                yield region, pos, idx

    def numbers(self, a: Array) -> Array:
        """Numbers of the regions of addresses; an address without one belongs where it lies."""
        numbers = (a >> u8(REGION_SHIFT)).astype(np.int64) - 1
        bare = numbers == -1
        if bare.any():
            numbers[bare] = np.searchsorted(self.starts, a[bare], side="right") - 1
        return numbers

    def fault(
        self, threads: Threads, kind: str, site: int | None, a: Array, at: Array | None, bad: Array
    ) -> None:
        address = int(a[bad[0]])
        positions = bad if at is None else at[bad]
        text = "" if kind.startswith("misaligned") else self.place(address)
        threads.fault(kind, site, positions, address & PLACE_MASK, self.label_of(address), text)

    def check_content(
        self,
        threads: Threads,
        region: Region,
        a: Array,
        at: Array | None,
        pos: Array | None,
        idx: Array,
        nbytes: int,
        site: int | None,
        kind: str,
    ) -> None:
        """Report bytes between elements, and those that are read before anybody wrote them."""
        if region.holes is not None:
            bad = np.flatnonzero(region.holes.reshape(-1, nbytes)[idx].any(1))
            if len(bad):
                bad = bad if pos is None else pos[bad]
                what = "global access between the elements of a strided tensor"
                self.fault(threads, what, site, a, at, bad)
        if region.unwritten is not None:
            unwritten = region.unwritten.reshape(-1, nbytes)
            if kind not in BLIND:
                bad = np.flatnonzero((unwritten[idx] & threads.used_bytes(site, nbytes)).any(1))
                if len(bad):
                    bad = bad if pos is None else pos[bad]
                    self.fault(threads, "read of global memory that was never written", site, a, at, bad)
            if kind in WRITES:
                unwritten[idx] = False

    def observe(
        self,
        threads: Threads,
        region: Region,
        idx: Array,
        nbytes: int,
        at: Array | None,
        site: int | None,
        write: bool,
        data: Array | None = None,
    ) -> None:
        """Look for races of programs, and of a program's warps with a write of another, and note an access.
        Equal data that several warps write are no race."""
        if not self.check or nbytes < self.granule:
            return
        k = nbytes // self.granule
        writers, readers = region.writers.reshape(-1, k), region.readers.reshape(-1, k)
        me = (threads.program if at is None else threads.program[at])[:, None]
        other = writers[idx]
        bad = (other != 0) & (other != me)
        if write:
            read = readers[idx]
            bad |= (read != 0) & (read != me)
        if bad.any():
            self.race(threads, region, bad, other, at, site, write)
        self.observe_warps(threads, region, idx, nbytes, other == me, at, site, data)
        if write:
            writers[idx] = me
            region.tags.reshape(-1, k)[idx] = (threads.tags() if at is None else threads.tags()[at])[:, None]
            return
        before = readers[idx]
        readers[idx] = np.where((before != 0) & (before != me), SHARED_READ, me)
        after = readers[idx]
        if (after != me).any():
            readers[idx] = np.where(after != me, SHARED_READ, after)

    def observe_warps(
        self,
        threads: Threads,
        region: Region,
        idx: Array,
        nbytes: int,
        own: Array,
        at: Array | None,
        site: int | None,
        data: Array | None,
    ) -> None:
        """Report accesses to what another warp of the program wrote, with no barrier between them."""
        if not own.any():
            return
        tags = np.where(own, region.tags.reshape(-1, own.shape[1])[idx], 0)
        cta, warp = (threads.cta, threads.warp) if at is None else (threads.cta[at], threads.warp[at])
        late = threads.ctas.clocks.unordered(tags, cta, warp)
        if late is None:
            return
        bad = late.any(1) if data is None else late.any(1) & self.differ(region, idx, nbytes, data)
        if bad.any():
            kind = f"race of two warps on global memory: {'read' if data is None else 'write'}"
            rows = np.flatnonzero(bad)
            threads.fault(kind, site, rows if at is None else at[rows], None, region.label)

    def differ(self, region: Region, idx: Array, nbytes: int, data: Array) -> Array:
        """Whether each access would find other data than these."""
        if nbytes < 16:
            return region.views[nbytes][idx] != data
        return (region.views[8].reshape(-1, 2)[idx] != data.view(u8).reshape(-1, 2)).any(1)

    def check_lost(
        self,
        threads: Threads,
        region: Region,
        idx: Array,
        nbytes: int,
        given: Array,
        at: Array | None,
        site: int | None,
    ) -> None:
        """Report writes that others of the same instruction undid."""
        lost = np.flatnonzero(self.differ(region, idx, nbytes, given))
        if len(lost):
            kind = "race on global memory: several threads write different values to one address"
            threads.fault(kind, site, lost if at is None else at[lost], None, region.label)

    def race(
        self,
        threads: Threads,
        region: Region,
        bad: Array,
        other: Array,
        at: Array | None,
        site: int | None,
        write: bool,
    ) -> None:
        rows = np.flatnonzero(bad.any(1))
        kind = f"race of two programs on global memory: {'write' if write else 'read'}"
        number = int(other[rows[0]].max()) - 1
        text = f"program number {number} wrote it" if number >= 0 else "another program read it"
        threads.fault(kind, site, rows if at is None else at[rows], None, region.label, text)

    def load(
        self, threads: Threads, address: Array, t: str, n: int, mask: Array | None, site: int
    ) -> list[Array]:
        nbytes = int(t[1]) * n
        if nbytes == 32:
            self.check_32(threads, address, mask, site)
            half = self.load(threads, address, t, n // 2, mask, site)
            return [*half, *self.load(threads, address + u8(16), t, n // 2, mask, site)]
        if threads.ctas.counts is not None:
            threads.ctas.counts.global_access(threads, address, nbytes, mask, site, "read")
        at = None if mask is None else np.flatnonzero(mask)
        a = address if at is None else address[at]
        out = np.zeros(threads.count, UNSIGNED[nbytes])
        for region, pos, idx in self.locate(threads, a, at, nbytes, site, "load"):
            values = region.views[nbytes].take(idx)
            who = at if pos is None else pos if at is None else at[pos]
            self.observe(threads, region, idx, nbytes, who, site, False)
            if who is None:
                out = values
            else:
                out[who] = values
        return split(out, t, n)

    def check_32(self, threads: Threads, address: Array, mask: Array | None, site: int) -> None:
        at = threads.positions(mask)
        bad = np.flatnonzero(address[at] & u8(31))
        if len(bad):
            self.fault(threads, "misaligned global access of 32 bytes", site, address[at], at, bad)

    def store(
        self,
        threads: Threads,
        address: Array,
        t: str,
        values: tuple[Array, ...],
        mask: Array | None,
        site: int,
    ) -> None:
        nbytes = int(t[1]) * len(values)
        if nbytes == 32:
            self.check_32(threads, address, mask, site)
            half = len(values) // 2
            self.store(threads, address, t, values[:half], mask, site)
            self.store(threads, address + u8(16), t, values[half:], mask, site)
            return
        if threads.ctas.counts is not None:
            threads.ctas.counts.global_access(threads, address, nbytes, mask, site, "write")
        at = None if mask is None else np.flatnonzero(mask)
        data = joined(values)
        a, data = (address, data) if at is None else (address[at], data[at])
        for region, pos, idx in self.locate(threads, a, at, nbytes, site, "store"):
            who = at if pos is None else pos if at is None else at[pos]
            given = data if pos is None else data[pos]
            self.observe(threads, region, idx, nbytes, who, site, True, given)
            region.views[nbytes][idx] = given
            if self.check:
                self.check_lost(threads, region, idx, nbytes, given, who, site)

    def atomic(
        self,
        threads: Threads,
        address: Array,
        t: str,
        kind: str,
        operation: str,
        values: tuple[Array, ...],
        mask: Array | None,
        site: int,
    ) -> Array:
        """Update memory, one thread after the other in the launch's order; return the old values."""
        nbytes = int(t[1])
        if threads.ctas.counts is not None:
            threads.ctas.counts.global_access(threads, address, nbytes, mask, site, "write")
        at = threads.ctas.launch.shuffled(threads.positions(mask))
        out = np.zeros(threads.count, t)
        for region, pos, idx in self.locate(threads, address[at], at, nbytes, site, "atomic"):
            who = at if pos is None else at[pos]
            given = tuple(v[who] for v in values)
            out[who] = update(region.views[nbytes].view(t), idx, kind, operation, given)
        return out


def split(packed: Array, t: str, n: int) -> list[Array]:
    """The n elements of each thread's vector."""
    if n == 1:
        return [packed]
    return list(np.ascontiguousarray(packed.view(t).reshape(len(packed), n).T))


def joined(values: tuple[Array, ...]) -> Array:
    """One item for each thread's vector."""
    if len(values) == 1:
        return values[0]
    nbytes = values[0].itemsize * len(values)
    return np.stack(values, 1).reshape(-1).view(UNSIGNED[nbytes])
