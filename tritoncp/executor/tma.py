"""TMA: copies of boxes between global and shared memory by tensor maps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tritoncp.executor.address_space import PARAMETER
from tritoncp.executor.atomics import update
from tritoncp.executor.clocks import SHIFT
from tritoncp.executor.ctas import Ctas
from tritoncp.executor.faults import CannotContinue
from tritoncp.executor.global_memory import UNSIGNED, Region
from tritoncp.executor.mbarriers import Key, Mbarrier
from tritoncp.executor.operands import swizzled
from tritoncp.executor.shared_memory import BUSY, ON_ITS_WAY, WRITTEN
from tritoncp.executor.threads import Threads

Array = np.ndarray[Any, Any]
u1, u8 = np.uint8, np.uint64
# By tensormap.replace.elemtype: NumPy type of elements, PTX type of their sums, NaN of what lies outside
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


@dataclass
class TensorMap:
    """A descriptor, outermost dimension first.

    base:    address, with its region
    strides: in bytes
    kind:    of elements, see `ELEMENTS`
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

    def addresses(self, coordinates: list[int]) -> tuple[Array, Array]:
        """Addresses of a box's elements, and which lie inside of the tensor; innermost coordinate first."""
        address, ok = np.full(1, self.base, np.int64), np.ones(1, bool)
        for n, stride, extent, first in zip(self.box, self.strides, self.shape, reversed(coordinates)):
            c = first + np.arange(n)
            address = (address[:, None] + c * stride).reshape(-1)
            ok = (ok[:, None] & (c >= 0) & (c < extent)).reshape(-1)
        return address.astype(u8), ok


class Tma:
    """Loads are there once their mbarrier is looked at twice, see `Mbarriers.wait`.

    arriving: data of loads under way by mbarrier: (units, data, bytes, clock)
    """

    def __init__(self, ctas: Ctas) -> None:
        self.ctas = ctas
        self.arriving: dict[Key, list[tuple[Array, Array, int, int]]] = {}
        self.drafts: dict[Key, dict[tuple[str, int], int]] = {}
        self.commits = np.zeros(ctas.count, np.int64)
        self.stores: list[tuple[int, int, int]] = []  # lane, group, clock

    # descriptors

    def map_of(self, handle: int, site: int) -> TensorMap:
        launch = self.ctas.launch
        if handle in launch.tensor_maps:
            return launch.tensor_maps[handle]
        if handle & PARAMETER and (handle >> 16) & 0xFFFF in launch.parameter_maps:
            return launch.parameter_maps[(handle >> 16) & 0xFFFF]
        raise CannotContinue("a tensor map that nobody wrote", site, f"address {handle:#x}")

    def replace(
        self,
        threads: Threads,
        at: Array,
        name: str,
        dimension: int,
        value: Array,
        mask: Array | None,
        site: int,
    ) -> None:
        """Set a field of a tensor map in shared memory."""
        for j in threads.positions(mask):
            key = int(threads.cta[j]), int(at[j])
            self.drafts.setdefault(key, {})[name, dimension] = int(value[j])

    def publish(self, threads: Threads, to: Array, of: Array, mask: Array | None, site: int) -> None:
        """Copy a tensor map from shared to global memory."""
        at = threads.positions(mask)
        for key, handle in {(int(threads.cta[j]), int(of[j])): int(to[j]) for j in at}.items():
            self.ctas.launch.tensor_maps[handle] = self.built(self.drafts.get(key, {}), site)

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
            nan = bool(field.get(("fill_mode", 0), 0))
            return TensorMap(
                field["global_address", 0], shape, strides, box, kind, field["swizzle_mode", 0], nan
            )
        except KeyError as e:
            raise CannotContinue("a tensor map without a field", site, str(e)) from None

    def box(
        self, threads: Threads, j: int, shared: int, tensor_map: TensorMap, site: int
    ) -> tuple[Array, int] | None:
        """Indices of the 16-byte units of a box at an address of shared memory, and its bytes."""
        nbytes = int(np.prod(tensor_map.box)) * tensor_map.element
        at = np.full(1, j)
        if tensor_map.swizzle and tensor_map.box[-1] * tensor_map.element > 16 << tensor_map.swizzle:
            raise CannotContinue("a TMA box wider than its swizzle", site)
        if shared % 128:
            threads.fault("TMA at an offset of shared memory that is no multiple of 128", site, at, shared)
        if shared + nbytes > self.ctas.shared.used:
            text = f"{self.ctas.shared.used} bytes are allocated"
            threads.fault("out of bounds shared TMA", site, at, shared + nbytes, None, text)
            return None
        offset = swizzled(shared + np.arange(0, nbytes, 16), tensor_map.swizzle)
        return (int(threads.cta[j]) * self.ctas.shared.size + offset) // 16, nbytes

    # copies

    def load(
        self,
        threads: Threads,
        to: Array,
        handles: Array,
        coordinates: tuple[Array, ...],
        barrier: Array,
        mask: Array | None,
        site: int,
    ) -> None:
        for j in threads.positions(mask):
            tensor_map = self.map_of(int(handles[j]), site)
            address, ok = tensor_map.addresses([int(c[j]) for c in coordinates])
            if self.ctas.counts is not None:
                self.ctas.counts.box(threads, j, address, ok, tensor_map.element, site, "read")
            data = self.read(threads, j, address, ok, tensor_map, site)
            placed = self.box(threads, j, int(to[j]), tensor_map, site)
            if placed is None:
                continue
            key = int(threads.cta[j]), int(barrier[j])
            self.ctas.mbarriers.find(threads, key, site, np.full(1, j))
            self.begin(threads, j, placed[0], data.view(u1).view("c16"), placed[1], key, site)

    def read(
        self, threads: Threads, j: int, address: Array, ok: Array, tensor_map: TensorMap, site: int
    ) -> Array:
        size = tensor_map.element
        fill = ELEMENTS[tensor_map.kind][2] if tensor_map.fill_nan else 0
        data = np.full(len(address), fill, f"u{size}")
        rows = np.flatnonzero(ok)
        at = np.full(len(rows), j)
        memory = self.ctas.globals
        for region, pos, idx in memory.locate(threads, address[rows], at, size, site, "TMA load"):
            here = rows if pos is None else rows[pos]
            data[here] = region.views[size].take(idx)
            self.observe(threads, j, region, idx, size, site)
        return data

    def observe(
        self,
        threads: Threads,
        j: int,
        region: Region,
        idx: Array,
        size: int,
        site: int,
        data: Array | None = None,
    ) -> None:
        """Look for races of an access to elements; of those smaller than granules, where they fill one."""
        memory = self.ctas.globals
        if size < memory.granule:
            per = memory.granule // size
            units, counts = np.unique(idx // per, return_counts=True)
            units, whole = units[counts == per], np.isin(idx // per, units[counts == per])
            if data is not None:
                data = data[whole][np.argsort(idx[whole])].view(UNSIGNED[memory.granule])
            idx, size = units, memory.granule
        at = np.full(len(idx), j)
        memory.observe(threads, region, idx, size, at, site, data is not None, data)

    def begin(
        self, threads: Threads, j: int, units: Array, data: Array, nbytes: int, key: Key, site: int
    ) -> None:
        shared, clocks = self.ctas.shared, self.ctas.clocks
        at = np.full(len(units), j)
        shared.check_write(threads, units, 16, at, site, None, "TMA load", clocks.copy)
        if self.ctas.launch.check:
            state = shared.state.reshape(-1, 16)[units]
            shared.report_state(threads, state, units, 16, at, "TMA load", site, BUSY)
            shared.report_unfenced(threads, state, units, at, "TMA load", site)
        clock = int(clocks.start(key[0], clocks.copy))
        shared.note_writer(units, 16, np.int32(clock << SHIFT | clocks.copy))
        shared.mark(units, 16, ON_ITS_WAY)
        shared.poison(units, 16)
        self.arriving.setdefault(key, []).append((units, data, nbytes, clock))

    def finish_loads(self, key: Key, barrier: Mbarrier) -> None:
        """Data of loads lie in shared memory, and their bytes arrive at the mbarrier."""
        for units, data, nbytes, clock in self.arriving.pop(key, ()):
            self.ctas.shared.views[16][units] = data
            self.ctas.shared.mark(units, 16, WRITTEN)
            barrier.nbytes -= nbytes
            known = barrier.arriving[0]
            known[self.ctas.clocks.copy] = max(known[self.ctas.clocks.copy], clock)
            self.ctas.progress += 1

    def store(
        self,
        threads: Threads,
        handles: Array,
        coordinates: tuple[Array, ...],
        source: Array,
        operation: str | None,
        mask: Array | None,
        site: int,
    ) -> None:
        for j in threads.positions(mask):
            tensor_map = self.map_of(int(handles[j]), site)
            address, ok = tensor_map.addresses([int(c[j]) for c in coordinates])
            if self.ctas.counts is not None:
                self.ctas.counts.box(threads, j, address, ok, tensor_map.element, site, "write")
            placed = self.box(threads, j, int(source[j]), tensor_map, site)
            if placed is None:
                continue
            data = self.taken(threads, j, placed[0], tensor_map.element, site)
            self.write(threads, j, address, ok, data, operation, tensor_map, site)

    def taken(self, threads: Threads, j: int, units: Array, size: int, site: int) -> Array:
        """Read shared memory for a store, which goes on reading until it is waited for."""
        shared, clocks = self.ctas.shared, self.ctas.clocks
        if self.ctas.launch.check:
            shared.check_async_read(threads, units, np.full(len(units), j), "TMA store", site)
            lane = int(threads.lanes[j])
            clock = int(clocks.start(int(threads.cta[j]), clocks.bulk))
            shared.note_async_reader(units, np.full(len(units), clock), clocks.bulk)
            self.stores.append((lane, int(self.commits[lane]), clock))
        return shared.views[16].take(units).view(UNSIGNED[size])

    def write(
        self,
        threads: Threads,
        j: int,
        address: Array,
        ok: Array,
        data: Array,
        operation: str | None,
        tensor_map: TensorMap,
        site: int,
    ) -> None:
        t, kind, _ = ELEMENTS[tensor_map.kind]
        size, rows = tensor_map.element, np.flatnonzero(ok)
        at, memory = np.full(len(rows), j), self.ctas.globals
        way = "TMA reduction" if operation else "TMA store"
        for region, pos, idx in memory.locate(threads, address[rows], at, size, site, way):
            here = rows if pos is None else rows[pos]
            if operation is None:
                self.observe(threads, j, region, idx, size, site, data[here])
                region.views[size][idx] = data[here]
            else:
                update(region.views[size].view(t), idx, kind, operation, (data[here].view(t),))

    def finish_program(self) -> None:
        """Report copies that nobody waits for at the end of the CTAs, when others take their memory."""
        loads = sum(map(len, self.arriving.values()))
        for what, left in (("load", loads), ("store", len(self.stores))):
            if left:
                kind = f"TMA {what} that nobody waits for at the end of a program"
                self.ctas.launch.log.add(kind, None, left)

    def commit(self, threads: Threads, mask: Array | None) -> None:
        self.commits[threads.lanes[threads.positions(mask)]] += 1

    def wait(self, threads: Threads, left: int, mask: Array | None) -> None:
        """Until at most `left` of the newest groups of each thread still read shared memory."""
        active = set(threads.lanes[threads.positions(mask)].tolist()) if self.stores else set()
        keep, clocks = [], self.ctas.clocks
        for lane, group, clock in self.stores:
            if lane in active and group < self.commits[lane] - left:
                warp = self.ctas.warp[lane : lane + 1]
                clocks.learn(int(self.ctas.cta[lane]), warp, clocks.bulk, clock)
            else:
                keep.append((lane, group, clock))
        self.stores = keep
