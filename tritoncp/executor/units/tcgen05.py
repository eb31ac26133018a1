"""`tcgen05.mma`: matrix products of sm_100's tensor core, for which CTAs wait by mbarriers.

A product is computed when it is issued. A warp may use the result, or overwrite the operands, after the
commit that covers it: the tensor core is an agent of the clocks, and a commit passes its clock to the
mbarrier.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tritoncp.executor.arithmetic.warps import NBYTES, decode
from tritoncp.executor.clocks import SHIFT
from tritoncp.executor.ctas import Ctas
from tritoncp.executor.faults import CannotContinue
from tritoncp.executor.threads import Access
from tritoncp.executor.units.mbarriers import Key
from tritoncp.executor.units.operands import read_operand
from tritoncp.executor.units.tensor_memory import COLUMNS, LOADING, STORING, WRITTEN

Array = np.ndarray[Any, Any]
u8 = np.uint64
TYPES = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": {0: "e4m3", 1: "e5m2"},
    "i8": {0: "u8", 1: "s8"},
}  # kind -> types by field of an instruction descriptor
SWIZZLES = {0: 0, 2: 3, 4: 2, 6: 1}  # mode of a matrix descriptor -> swizzle


class ProductShape(NamedTuple):
    """The fields of an instruction descriptor."""

    m: int
    n: int
    k: int
    a: str
    b: str
    flip_a: bool
    flip_b: bool
    result: str  # "f16", in the lower halves of columns; "f32"; "s32"


def shape_of(descriptor: int, kind: str, site: int) -> ProductShape:
    def bits(low: int, n: int) -> int:
        return descriptor >> low & ((1 << n) - 1)

    results = {2: "s32"} if kind == "i8" else {0: "f16", 1: "f32"}
    if kind not in TYPES or bits(0, 4) or bits(13, 2) or bits(30, 2) or bits(4, 2) not in results:
        raise CannotContinue(f"tcgen05.mma.kind::{kind} with descriptor {descriptor:#x}", site)
    types, m, n = TYPES[kind], bits(24, 5) * 16, bits(17, 6) * 8
    if m not in (64, 128) or n % (8 if m == 64 else 16) or not 8 <= n <= 256:
        raise CannotContinue(f"tcgen05.mma of {m} × {n}", site)
    if bits(7, 3) not in types or bits(10, 3) not in types:
        raise CannotContinue(f"tcgen05.mma.kind::{kind} of types {bits(7, 3)} and {bits(10, 3)}", site)
    a, b = types[bits(7, 3)], types[bits(10, 3)]
    result = results[bits(4, 2)]
    if result == "f16" and (kind == "tf32" or "bf16" in (a, b)):
        raise CannotContinue(f"tcgen05.mma of {a} with a float16 result", site)
    return ProductShape(m, n, 32 // NBYTES[a], a, b, bool(bits(15, 1)), bool(bits(16, 1)), result)


class Tcgen05:
    """The tensor core of sm_100.

    opened:  for each CTA, clock of the products since the last commit, 0 without any
    commits: for each CTA, in order: (clock, offset of the mbarrier)
    """

    def __init__(self, ctas: Ctas) -> None:
        self.ctas = ctas
        self.opened = np.zeros(ctas.n, np.int32)
        self.commits: dict[int, list[tuple[int, int]]] = {}

    def multiply(
        self,
        access: Access,
        d: Array,
        a: Array,
        in_tensor_memory: bool,
        b: Array,
        descriptor: Array,
        keep: Array,
        kind: str,
    ) -> None:
        """Issue products by one thread of each CTA. CTAs whose products have equal shapes are computed
        together."""
        self.ctas.tensor.prepare()
        cta, first = np.unique(access.cta, return_index=True)
        if len(cta) != len(access):
            access.fault("tcgen05.mma issued by several threads of a program")
            access = access.select(first)
        if not len(access):
            return
        d, a, b, descriptor, keep = (access.pick(x) for x in (d, a, b, descriptor, keep))
        layouts = [x >> u8(46) for x in ((b,) if in_tensor_memory else (a, b))]
        places = a if in_tensor_memory else np.zeros(len(a))
        forms = np.stack([d, places, descriptor, keep, *layouts], 1).astype(np.int64)
        for one in np.unique(forms, axis=0):
            equal = np.flatnonzero((forms == one).all(1))
            left = int(one[1]) if in_tensor_memory else a[equal]
            shape = shape_of(int(one[2]), kind, access.site)
            self.product(access.select(equal), int(one[0]), left, b[equal], shape, bool(one[3]))

    def product(
        self, access: Access, d: int, a: int | Array, b: Array, shape: ProductShape, keep: bool
    ) -> None:
        cta, tensor = access.cta, self.ctas.tensor
        fresh = cta[self.opened[cta] == 0]
        if len(fresh):
            self.opened[fresh] = self.ctas.clocks.start(fresh, self.ctas.clocks.tensor)
        if isinstance(a, int):
            left = self.stored_operand(access, a, d, shape)
        else:
            left = self.operand(access, a, shape.m, shape.k, shape.a, shape.flip_a)
        right = self.operand(access, b, shape.n, shape.k, shape.b, shape.flip_b)
        if self.ctas.counts is not None:
            self.ctas.counts.product(2 * shape.m * shape.n * shape.k * len(cta))
        cells = self.cells(access, d, shape.n, shape.m, "the result")
        out = np.matmul(left, right.transpose(0, 2, 1)).reshape(len(cta), 4, shape.m // 4, shape.n)
        if self.ctas.launch.check:
            self.check_result(access, cells, keep)
        if shape.result == "f16":
            data = tensor.columns(tensor.data)
            before = data[cells].astype("u2").view("f2") if keep else np.float16(0)
            data[cells] = (before + out).astype("f2").view("u2")
        elif shape.result == "s32":  # `out` is exact: at most 32 products of 16 bits
            data = tensor.columns(tensor.data.view("i4"))
            data[cells] = data[cells] + out.astype("i4") if keep else out.astype("i4")
        else:
            data = tensor.columns(tensor.data.view("f4"))
            data[cells] = data[cells] + out if keep else out
        tensor.columns(tensor.state)[cells] = WRITTEN
        self.ctas.progress += 1

    def cells(self, access: Access, address: int, n: int, rows: int, what: str) -> Any:
        """Return the index of cells of tensor memory [CTAs, 4, rows / 4, n]."""
        cta, lane, column = access.cta, address >> 16, address & 0xFFFF
        if lane not in ((0,) if rows == 128 else (0, 16)):
            access.fault(f"{what} of tcgen05.mma at lane {lane}", None, address)
            lane = 0
        if column + n > COLUMNS:
            access.fault(f"{what} of tcgen05.mma out of bounds of tensor memory", None, address)
            column = COLUMNS - n
        if not self.ctas.tensor.allocated[cta, column : column + n].all():
            access.fault(f"{what} of tcgen05.mma in memory that is not allocated", None, address)
        first, last = int(cta[0]), int(cta[-1])
        part = slice(first, last + 1) if last - first + 1 == len(cta) else cta
        return part, slice(None), slice(lane, lane + rows // 4), slice(column, column + n)

    def check_result(self, access: Access, cells: Any, keep: bool) -> None:
        tensor = self.ctas.tensor
        state = tensor.columns(tensor.state)[cells]
        if keep and not (state & WRITTEN).all():
            access.fault("tcgen05.mma adds to tensor memory that was never written")
        if (state & (STORING | LOADING)).any():
            access.fault("tcgen05.mma to tensor memory before tcgen05.wait")
        shadow, own = tensor.shadow_columns(), self.ctas.clocks.tensor
        shadow.check(access, cells, "the result of tcgen05.mma", True, own=own)
        shadow.writer[cells] = self.tags(access.cta)

    def tags(self, cta: Array) -> Array:
        return ((self.opened[cta] << SHIFT) | np.int32(self.ctas.clocks.tensor))[:, None, None, None]

    def stored_operand(self, access: Access, a: int, d: int, shape: ProductShape) -> Array:
        """Read operand A [CTAs, M, K] from tensor memory."""
        if shape.flip_a:
            raise CannotContinue("a transposed operand in tensor memory", access.site)
        if shape.m == 64 and (a ^ d) >> 16 & 16:
            access.fault("operand A and the result of tcgen05.mma in different halves of the lanes")
        tensor, nbytes = self.ctas.tensor, NBYTES[shape.a]
        cells = self.cells(access, a, shape.k * nbytes // 4, shape.m, "operand A")
        if self.ctas.launch.check:
            state = tensor.columns(tensor.state)[cells]
            if not (state & WRITTEN).all():
                access.fault("operand A of tcgen05.mma was never written")
            if (state & STORING).any():
                access.fault("operand A of tcgen05.mma before tcgen05.wait::st")
            shadow, own = tensor.shadow_columns(), self.ctas.clocks.tensor
            shadow.check(access, cells, "operand A of tcgen05.mma", own=own)
            shadow.note_reader(cells, self.tags(access.cta))
        raw = np.ascontiguousarray(tensor.columns(tensor.data)[cells])
        return decode(shape.a, raw.reshape(-1).view(f"u{nbytes}")).reshape(-1, shape.m, shape.k)

    def operand(self, access: Access, d: Array, rows: int, k: int, t: str, transposed: bool) -> Array:
        """Read an operand [CTAs, rows, K] from shared memory."""
        high = int(d[0] >> u8(46))
        if high & 7 != 1 or high >> 3 & 7 or high >> 6 & 0x1FF or high >> 15 not in SWIZZLES:
            raise CannotContinue(f"a tcgen05 descriptor {int(d[0]):#x}", access.site)
        clock, agent, swizzle = self.opened[access.cta], self.ctas.clocks.tensor, SWIZZLES[high >> 15]
        return read_operand([access], d, swizzle, rows, k, t, transposed, "tcgen05.mma", clock, agent)

    # completion

    def commit(self, access: Access, address: Array) -> None:
        """Register an arrival at an mbarrier for when the products so far are complete."""
        for j, one in access.single_threads():
            cta, offset = int(one.cta[0]), int(address[j])
            self.ctas.mbarriers.find(one, (cta, offset))
            clock = int(self.opened[cta]) or int(self.ctas.clocks.last[cta, self.ctas.clocks.tensor])
            self.opened[cta] = 0
            self.commits.setdefault(cta, []).append((clock, offset))
            self.ctas.progress += 1  # also without a product before it: it ends in an arrival

    def will_arrive(self, key: Key) -> bool:
        return any(offset == key[1] for _, offset in self.commits.get(key[0], ()))

    def finish(self, key: Key) -> None:
        """Complete the products committed to an mbarrier, and all earlier commits."""
        cta = key[0]
        todo = self.commits.get(cta, [])
        count = max((n + 1 for n, (_, offset) in enumerate(todo) if offset == key[1]), default=0)
        for clock, offset in todo[:count]:
            b = self.ctas.mbarriers.barriers.get((cta, offset))
            if b is None:
                continue
            rows = np.zeros_like(b.arriving)
            rows[0, self.ctas.clocks.tensor] = clock
            b.arrive(1, rows)
            if b.left < 0:
                self.ctas.launch.log.add("more arrivals at an mbarrier than it counts", None, address=offset)
            self.ctas.progress += 1
            b.advance()
        del todo[:count]

    def finish_program(self) -> None:
        """Report products without a wait at the end of the CTAs."""
        log = self.ctas.launch.log
        if self.opened.any():
            log.add(
                "tcgen05.mma without a commit at the end of a program", None, int((self.opened > 0).sum())
            )
        left = [(cta, offset) for cta, todo in self.commits.items() for _, offset in todo]
        if left:
            kind = "commit of tcgen05.mma that nobody waits for at the end of a program"
            log.add(kind, None, len(left), address=left[0][1])
