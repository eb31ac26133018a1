"""Regions of global memory: the memory of a launch's tensors, with the state of each byte."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tritoncp.executor.faults import CannotContinue
from tritoncp.executor.memory.uninitialised import pattern_of

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, Any]
# Bits 47 to 58 of a global address are the index, from 1, of the region from which the address was derived,
# so that an access outside of its tensor is detected even if it is inside of another one. 0: an address that
# was loaded from memory.
REGION_SHIFT = 47
REGION_MASK = 0xFFF
PLACE_MASK = (1 << REGION_SHIFT) - 1  # bits of the address within the process
SHARED, PARAMETER, LOCAL = 1 << 59, 1 << 60, 1 << 61
PAGE = 1 << 18  # bytes of a page; its state begins with the first access
# bytes -> NumPy type; types of 16 and 32 bytes are only copied
UNSIGNED = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16", 32: "V32"}


def tagged(address: int, region: int) -> int:
    """Return an address with the index of its region."""
    return address | (region + 1) << REGION_SHIFT


@dataclass
class Extent:
    """Memory that a launch may access: a tensor, or the compiler's scratch memory."""

    start: int
    end: int
    label: str
    tensor: torch.Tensor | None = None


def extent_of(tensor: torch.Tensor, label: str) -> Extent:
    """Return the extent from the first to the last element of a tensor."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return Extent(start, start, label, tensor)
    elements = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
    return Extent(start, start + elements * tensor.element_size(), label, tensor)


class Region:
    """A region: the union of overlapping extents, with a state of each page that was accessed.

    number: index of the region, from 0
    base:   the start rounded down to 32 bytes
    state:  [page, entry] by name, at indices of `touch`. For each granule: writers, the index + 1 of the CTA
            that wrote it; readers, likewise; tags, the tag of the last writer in its CTA (`Clocks`). For each
            byte, if needed: holes, whether it is between elements of strided tensors; unwritten, whether it
            is uninitialised
    """

    def __init__(self, extents: list[Extent], number: int, granule: int, check: bool) -> None:
        self.extents, self.number = extents, number
        self.start, self.end = extents[0].start, max(e.end for e in extents)
        self.label = "/".join(dict.fromkeys(e.label for e in extents))
        self.base = self.start & ~31
        self.nbytes = -(-(self.end - self.base) // 32) * 32
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(self.base))
        self.views = {size: raw.view(t) for size, t in UNSIGNED.items()}
        self.page = max(32, min(self.nbytes, PAGE))
        self.slots = np.full(-(-self.nbytes // self.page), -1)  # index of each page's state; -1: not accessed
        self.used = self.room = 0  # number of pages that have a state, and number of pages with room for one
        granules = np.zeros((0, self.page // granule), np.int32)
        self.state = dict.fromkeys(("writers", "readers", "tags"), granules)
        self.elements = self.find_elements()
        self.patterns = self.find_patterns() if check else []

    def touch(self, idx: Array, nbytes: int) -> Array:
        """Return the indices of units of memory in the state, which begins with the first access to a
        page."""
        if self.used == len(self.slots) == 1:
            return idx
        per_page = self.page // nbytes
        pages = idx // per_page
        slots = self.slots[pages]
        if (slots < 0).any():
            self.add(np.unique(pages[slots < 0]))
            slots = self.slots[pages]
        return slots * per_page + idx % per_page

    def add(self, pages: Array) -> None:
        """Add the state of pages before their first access."""
        first, self.used = self.used, self.used + len(pages)
        self.slots[pages] = np.arange(first, self.used)
        if self.used > self.room:
            self.room = min(max(self.used, 2 * self.room), len(self.slots))
            self.state = {name: enlarged(x, self.room) for name, x in self.state.items()}
        for slot, page in enumerate(pages.tolist(), first):
            low, high = page * self.page, min((page + 1) * self.page, self.nbytes)
            masks = {"holes": self.holes_in(low, high), "unwritten": self.unwritten_in(low, high)}
            for name, mask in masks.items():
                if mask.any():
                    marks = self.state.setdefault(name, np.zeros((self.room, self.page), bool))
                    marks[slot, : high - low] = mask

    def find_elements(self) -> list[tuple[int, Array]]:
        """Return the size and the sorted places of the elements of each tensor, if there may be holes."""
        if any(e.tensor is None or is_dense(e.tensor) for e in self.extents):
            return []
        elements = []
        for extent in self.extents:
            x = extent.tensor
            assert x is not None
            at = np.full(1, x.data_ptr() - self.base)
            for size, stride in zip(x.shape, x.stride()):
                at = (at[:, None] + np.arange(size if stride else 1) * stride * x.element_size()).reshape(-1)
            elements.append((x.element_size(), np.unique(at)))
        return elements

    def holes_in(self, low: int, high: int) -> Array:
        """Return which bytes of a part of the region lie between elements."""
        holes = np.zeros(high - low, bool)
        if self.elements:
            holes[max(0, self.start - self.base - low) : max(0, self.end - self.base - low)] = True
        for size, places in self.elements:
            first, last = np.searchsorted(places, (low - size + 1, high))
            at = (places[first:last, None] + np.arange(size) - low).reshape(-1)
            holes[at[(at >= 0) & (at < high - low)]] = False
        return holes

    def find_patterns(self) -> list[tuple[int, int, int, int]]:
        """Return (element size, pattern of uninitialised memory, start, end) of tensors that may have the
        pattern. For overlapping tensors, the widest dtype counts."""
        found = []
        for e in self.extents:
            pattern = None if e.tensor is None else pattern_of(e.tensor.dtype)
            if e.tensor is not None and pattern is not None:
                found.append((e.tensor.element_size(), pattern, e.start - self.base, e.end - self.base))
        return sorted(found)

    def unwritten_in(self, low: int, high: int) -> Array:
        """Return which bytes of a part of the region have the pattern of uninitialised memory."""
        unwritten = np.zeros(high - low, bool)
        for size, pattern, start, end in self.patterns:
            a = start + max(0, low - start) // size * size
            b = min(end, start - (start - high) // size * size)
            if a < b:
                is_pattern = np.repeat(self.views[1][a:b].view(f"u{size}") == pattern, size)
                first, last = max(a, low), min(b, high)
                unwritten[first - low : last - low] = is_pattern[first - a : last - a]
        return unwritten


def enlarged(x: Array, rows: int) -> Array:
    """Return an array with more rows, of zeros."""
    larger = np.zeros((rows, x.shape[1]), x.dtype)
    larger[: len(x)] = x
    return larger


def is_dense(x: torch.Tensor) -> bool:
    """Return whether a tensor has no gap between its elements."""
    reach = 1
    for stride, size in sorted(zip(x.stride(), x.shape)):
        if size > 1:
            if stride > reach:
                return False
            reach += (size - 1) * stride
    return True


def regions_of(extents: list[Extent], granule: int, check: bool) -> list[Region]:
    """Merge overlapping extents to regions."""
    groups: list[list[Extent]] = []
    for e in sorted(extents, key=lambda e: (e.start, e.end)):
        if groups and e.start < max(x.end for x in groups[-1]):
            groups[-1].append(e)
        else:
            groups.append([e])
    if len(groups) >= REGION_MASK:
        raise CannotContinue(f"a launch with {len(groups)} tensors, at most {REGION_MASK - 1} are told apart")
    return [Region(group, number, granule, check) for number, group in enumerate(groups)]
