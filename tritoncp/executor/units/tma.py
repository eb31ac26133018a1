"""TMA: copies of boxes between global and shared memory, by tensor maps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tritoncp.executor.clocks import SHIFT
from tritoncp.executor.commit_groups import CommitGroups
from tritoncp.executor.ctas import Ctas
from tritoncp.executor.faults import CannotContinue
from tritoncp.executor.memory.atomics import update
from tritoncp.executor.memory.regions import PARAMETER, UNSIGNED, Region
from tritoncp.executor.memory.shared_memory import WRITTEN
from tritoncp.executor.threads import Access
from tritoncp.executor.units.mbarriers import Key, Mbarrier
from tritoncp.executor.units.operands import swizzled

Array = np.ndarray[Any, Any]
u8 = np.uint64
# tensormap.replace.elemtype -> NumPy type of elements, PTX type of their sums, NaN for elements out of bounds
ELEMENTS = {
    0: ("u1", "u8", 0),
    1: ("u2", "u16", 0),
    2: ("u4", "u32", 0),
    3: ("i4", "s32", 0),
    4: ("u8", "u64", 0),
    5: ("i8", "s64", 0),
    6: ("u2", "f16", 0x7FFF),
    7: ("f4", "f32", 0x7FFFFFFF),
    9: ("f8", "f64", 0x7FFFFFFFFFFFFFFF),
    10: ("u2", "bf16", 0x7FFF),
}

MODES = (("interleave_layout", 0), ("swizzle_mode", 0), ("fill_mode", 0))  # none if memory is 0


@dataclass
class TensorMap:
    """A tensor map, outermost dimension first.

    base:    address, with its region
    strides: in bytes
    kind:    type of elements, see `ELEMENTS`
    swizzle: 0 none, 1 of 32 bytes, 2 of 64, 3 of 128
    """

    base: int
    shape: list[int]
    strides: list[int]
    box: list[int]
    kind: int
    swizzle: int
    fill_nan: bool = False

    @property
    def element(self) -> int:
        return int(ELEMENTS[self.kind][0][1])

    @property
    def nbytes(self) -> int:
        """Bytes of a box."""
        return int(np.prod(self.box)) * self.element

    def addresses(self, coordinates: list[int]) -> tuple[Array, Array]:
        """Return (addresses of a box's elements, whether they are inside the tensor). coordinates: innermost
        first"""
        address, ok = np.full(1, self.base, np.int64), np.ones(1, bool)
        for n, stride, extent, first in zip(self.box, self.strides, self.shape, reversed(coordinates)):
            c = first + np.arange(n)
            address = (address[:, None] + c * stride).reshape(-1)
            ok = (ok[:, None] & (c >= 0) & (c < extent)).reshape(-1)
        return address.astype(u8), ok


class Box(NamedTuple):
    """A box that one thread copies: addresses of its elements, whether each is inside the tensor, and its
    16-byte units of shared memory."""

    one: Access
    map: TensorMap
    address: Array
    ok: Array
    units: Array


class Tma:
    """The TMA unit. Loads complete at the second test of their mbarrier, see `Mbarriers.wait`.

    arriving: mbarrier -> loads in progress: (units, data, bytes, clock)
    """

    def __init__(self, ctas: Ctas) -> None:
        self.ctas = ctas
        self.arriving: dict[Key, list[tuple[Array, Array, int, int]]] = {}
        self.drafts: dict[Key, dict[tuple[str, int], int]] = {}
        self.stores = CommitGroups(ctas.count)  # the notes are clocks

    # descriptors

    def map_of(self, handle: int, site: int) -> TensorMap:
        launch = self.ctas.launch
        if handle in launch.tensor_maps:
            return launch.tensor_maps[handle]
        if handle & PARAMETER and (handle >> 16) & 0xFFFF in launch.parameter_maps:
            return launch.parameter_maps[(handle >> 16) & 0xFFFF]
        raise CannotContinue("a tensor map that nobody wrote", site, f"address {handle:#x}")

    def replace(self, access: Access, at: Array, name: str, dimension: int, value: Array) -> None:
        """Set a field of a tensor map in shared memory."""
        for j in access.positions:
            key = int(access.threads.cta[j]), int(at[j])
            self.drafts.setdefault(key, {})[name, dimension] = int(value[j])

    def publish(self, access: Access, to: Array, of: Array, nbytes: int) -> None:
        """Copy a tensor map from shared to global memory."""
        if nbytes != 128:
            raise CannotContinue(f"a tensor map of {nbytes} bytes", access.site)
        cta, shared = access.threads.cta, self.ctas.shared
        for key, handle in {(int(cta[j]), int(of[j])): int(to[j]) for j in access.positions}.items():
            start = key[0] * shared.size + key[1]
            zeroed = not shared.views[1][start : start + nbytes].any()
            field = (dict.fromkeys(MODES, 0) if zeroed else {}) | self.drafts.get(key, {})
            self.ctas.launch.tensor_maps[handle] = self.built(field, access.site)

    def built(self, field: dict[tuple[str, int], int], site: int) -> TensorMap:
        try:
            rank = field["rank", 0] + 1
            dims = range(rank - 1, -1, -1)
            kind = field["elemtype", 0]
            if kind not in ELEMENTS:
                raise CannotContinue(f"a tensor map of element type {kind}", site)
            element = int(ELEMENTS[kind][0][1])
            if any(field["element_stride", d] != 1 for d in dims) or field["interleave_layout", 0]:
                raise CannotContinue("a tensor map with strides of elements", site)
            strides = [field["global_stride", d - 1] if d else element for d in dims]
            shape, box = ([field[name, d] for d in dims] for name in ("global_dim", "box_dim"))
            modes = field["swizzle_mode", 0], bool(field["fill_mode", 0])
            return TensorMap(field["global_address", 0], shape, strides, box, kind, *modes)
        except KeyError as e:
            raise CannotContinue("a tensor map without a field", site, str(e)) from None

    def boxes(
        self, access: Access, handles: Array, coordinates: tuple[Array, ...], shared: Array, way: str
    ) -> Iterator[Box]:
        """Yield the box of each thread. handles: of tensor maps; shared: addresses in shared memory"""
        for j, one in access.single_threads():
            tensor_map = self.map_of(int(handles[j]), access.site)
            address, ok = tensor_map.addresses([int(c[j]) for c in coordinates])
            if self.ctas.counts is not None:
                self.ctas.counts.box(one, address, ok, tensor_map.element, way)
            units = self.units_of(one, int(shared[j]), tensor_map)
            if units is not None:
                yield Box(one, tensor_map, address, ok, units)

    def units_of(self, one: Access, shared: int, tensor_map: TensorMap) -> Array | None:
        """Return the indices of a box's 16-byte units at an address of shared memory; None after a fault."""
        memory, nbytes = self.ctas.shared, tensor_map.nbytes
        if tensor_map.swizzle and tensor_map.box[-1] * tensor_map.element > 16 << tensor_map.swizzle:
            raise CannotContinue("a TMA box wider than its swizzle", one.site)
        if shared % 128:
            one.fault("TMA at an offset of shared memory that is no multiple of 128", None, shared)
        if shared + nbytes > memory.used:
            text = f"{memory.used} bytes are allocated"
            one.fault("out of bounds shared TMA", None, shared + nbytes, None, text)
            return None
        offset = swizzled(shared + np.arange(0, nbytes, 16), tensor_map.swizzle)
        return (int(one.cta[0]) * memory.size + offset) // 16

    # copies

    def load(
        self, access: Access, to: Array, handles: Array, coordinates: tuple[Array, ...], barrier: Array
    ) -> None:
        for box in self.boxes(access, handles, coordinates, to, "read"):
            key = int(box.one.cta[0]), int(barrier[box.one.positions[0]])
            self.ctas.mbarriers.find(box.one, key)
            self.begin(box, self.read(box).view("c16"), key)

    def read(self, box: Box) -> Array:
        size, memory = box.map.element, self.ctas.globals
        fill = ELEMENTS[box.map.kind][2] if box.map.fill_nan else 0
        data = np.full(len(box.address), fill, f"u{size}")
        inside = np.flatnonzero(box.ok)
        access = box.one.times(len(inside))
        for region, rows, idx in memory.locate(access, box.address[inside], size, "TMA load"):
            data[inside if rows is None else inside[rows]] = region.views[size].take(idx)
            self.observe(box.one, region, idx, size)
        return data

    def observe(self, one: Access, region: Region, idx: Array, size: int, data: Array | None = None) -> None:
        """Report races of an access to elements; if elements are smaller than granules, only for full
        granules."""
        memory = self.ctas.globals
        if size < memory.granule:
            per = memory.granule // size
            units, counts = np.unique(idx // per, return_counts=True)
            units, whole = units[counts == per], np.isin(idx // per, units[counts == per])
            if data is not None:
                data = data[whole][np.argsort(idx[whole])].view(UNSIGNED[memory.granule])
            idx, size = units, memory.granule
        memory.observe(one.times(len(idx)), region, idx, size, data)

    def begin(self, box: Box, data: Array, key: Key) -> None:
        """Start a load."""
        shared, clocks, units = self.ctas.shared, self.ctas.clocks, box.units
        access = box.one.times(len(units))
        shared.check_race(access, units, 16, "TMA load", None, clocks.copy)
        shared.check_busy(access, "TMA load", units, 16)
        if self.ctas.launch.check:
            shared.report_unfenced(access, "TMA load", units)
        clock = int(clocks.start(key[0], clocks.copy))
        shared.expect_copy(units, 16, np.int32(clock << SHIFT | clocks.copy))
        self.arriving.setdefault(key, []).append((units, data, box.map.nbytes, clock))
        self.ctas.progress += 1  # for warps that tested the mbarrier since the bytes were expected

    def finish_loads(self, key: Key, barrier: Mbarrier) -> None:
        """Complete loads: write their data to shared memory, and count their bytes at the mbarrier."""
        for units, data, nbytes, clock in self.arriving.pop(key, ()):
            self.ctas.shared.views[16][units] = data
            self.ctas.shared.mark(units, 16, WRITTEN)
            barrier.nbytes -= nbytes
            knows = barrier.arriving[0]
            knows[self.ctas.clocks.copy] = max(knows[self.ctas.clocks.copy], clock)
            self.ctas.progress += 1

    def store(
        self,
        access: Access,
        handles: Array,
        coordinates: tuple[Array, ...],
        source: Array,
        operation: str | None = None,
    ) -> None:
        for box in self.boxes(access, handles, coordinates, source, "write"):
            self.write(box, self.read_shared(box.one, box.units, box.map.element), operation)

    def read_shared(self, one: Access, units: Array, size: int) -> Array:
        """Read shared memory for a store; until a wait, the store counts as still reading."""
        shared, clocks = self.ctas.shared, self.ctas.clocks
        if self.ctas.launch.check:
            shared.check_async_read(one.times(len(units)), units, "TMA store")
            clock = clocks.start(one.cta, clocks.bulk)
            shared.note_async_reader(units, np.repeat(clock, len(units)), clocks.bulk)
            self.stores.add(one.lanes, clock)
        return shared.views[16].take(units).view(UNSIGNED[size])

    def write(self, box: Box, data: Array, operation: str | None) -> None:
        t, kind, _ = ELEMENTS[box.map.kind]
        size, memory, inside = box.map.element, self.ctas.globals, np.flatnonzero(box.ok)
        access, way = box.one.times(len(inside)), "TMA reduction" if operation else "TMA store"
        self.ctas.progress += 1
        for region, rows, idx in memory.locate(access, box.address[inside], size, way):
            values = data[inside if rows is None else inside[rows]]
            if operation is None:
                self.observe(box.one, region, idx, size, values)
                region.views[size][idx] = values
            else:
                update(region.views[size].view(t), idx, kind, operation, (values.view(t),))

    def finish_program(self) -> None:
        """Report copies without a wait at the end of the CTAs, when their memory is reused."""
        loads = sum(map(len, self.arriving.values()))
        for what, left in (("load", loads), ("store", len(self.stores.pending))):
            if left:
                kind = f"TMA {what} that nobody waits for at the end of a program"
                self.ctas.launch.log.add(kind, None, left)

    def commit(self, access: Access) -> None:
        self.stores.commit(access.lanes)

    def wait(self, access: Access, left: int) -> None:
        """Wait until at most the `left` newest groups of each thread still read shared memory."""
        clocks = self.ctas.clocks
        for lanes, clock in self.stores.wait(access.lanes, left):
            clocks.learn(int(self.ctas.cta[lanes[0]]), self.ctas.warp[lanes], clocks.bulk, int(clock[0]))
