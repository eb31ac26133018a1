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
# bytes -> NumPy type; those of 16 and 32 bytes are only copied
UNSIGNED = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16", 32: "V32"}


def tagged(address: int, region: int) -> int:
    """Return an address with the index of its region."""
    return address | (region + 1) << REGION_SHIFT


@dataclass
class Extent:
    """Memory that a launch may access: a tensor's, or the compiler's scratch memory."""

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
    """A region: the union of overlapping extents.

    number:    index of the region, from 0
    base:      the start rounded down to 32 bytes
    writers:   for each granule, the index + 1 of the CTA that wrote it; readers: of that which read it
    tags:      tag of each granule's last writer in its CTA (`Clocks`)
    holes:     mask of bytes between the elements of strided tensors, or None
    unwritten: mask of uninitialised bytes, or None
    """

    def __init__(self, extents: list[Extent], number: int, granule: int, check: bool) -> None:
        self.extents, self.number = extents, number
        self.start, self.end = extents[0].start, max(e.end for e in extents)
        self.label = "/".join(dict.fromkeys(e.label for e in extents))
        self.base = self.start & ~31
        n = -(-(self.end - self.base) // 32) * 32
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
        """Return the bytes of elements that have the pattern of uninitialised memory of their dtype; of
        overlapping tensors, the widest dtype counts."""
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
