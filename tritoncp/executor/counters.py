"""Exact counts of what a launch executes: warp instructions by kind and source line, memory by address."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tritoncp.executor.ctas import Ctas
from tritoncp.executor.memory.address_space import PLACE_MASK
from tritoncp.executor.memory.global_memory import GlobalMemory
from tritoncp.executor.program import Program
from tritoncp.executor.ptx.instruction import Barrier, FallThrough, Instruction
from tritoncp.executor.threads import Access, Threads

Array = np.ndarray[Any, Any]
SECTOR, BANKS, WAVEFRONT = 32, 32, 128  # bytes, words, bytes
SPECIAL_FUNCTIONS = frozenset(("ex2", "lg2", "rcp", "sqrt", "rsqrt", "sin", "cos", "tanh"))
KINDS = (
    *("mma", "mufu", "fp32", "int", "predicate", "branch", "convert", "shuffle"),
    *("ld.shared", "st.shared", "ldmatrix", "ld.global", "st.global", "atomic", "cp.async", "tma"),
    *("barrier", "move", "other"),
)
INTEGERS = frozenset(f"{s}{n}" for s in "usb" for n in (8, 16, 32, 64))
FLOATS = frozenset(("f32", "f32x2", "bf16x2", "f16x2", "bf16", "f16", "f64"))
OF_OPERATION = {
    **dict.fromkeys(("ldmatrix", "stmatrix"), "ldmatrix"),
    **dict.fromkeys(("atom", "red"), "atomic"),
    **dict.fromkeys(("shfl", "redux", "vote", "match"), "shuffle"),
    **dict.fromkeys(("setp", "selp"), "predicate"),
    **dict.fromkeys(("bra", "brx", "ret", "exit"), "branch"),
    **dict.fromkeys(("mov", "cvta"), "move"),
    **dict.fromkeys(
        ("bar", "barrier", "mbarrier", "fence", "membar", "elect", "tensormap", "griddepcontrol"), "barrier"
    ),
    "mma": "mma",
}


def kind_of(i: Instruction) -> str:
    """The pipe, roughly, that an instruction occupies; "move" is mostly gone after ptxas."""
    p = i.parts
    operation, t = p[0], p[-1]
    if operation in OF_OPERATION:
        return OF_OPERATION[operation]
    if operation == "wgmma":
        return "mma" if p[1] == "mma_async" else "barrier"
    if operation == "tcgen05":
        return "mma" if p[1] == "mma" else "other" if p[1] in ("ld", "st") else "barrier"
    if operation in SPECIAL_FUNCTIONS or (operation == "div" and t == "f32"):
        return "mufu"
    if operation in ("ld", "st"):
        space = next((s for s in ("shared", "global", "param") if s in p or s + "::cta" in p), "other")
        return "move" if space == "param" else f"{operation}.{space}" if space != "other" else "other"
    if operation == "cp":
        waits = p[-1] in ("commit_group", "wait_group", "wait_all")
        return "tma" if "bulk" in p else "barrier" if waits else "cp.async"
    if operation == "cvt":
        return "move" if {p[-1], p[-2]} <= INTEGERS else "convert"
    if t == "pred":
        return "predicate"
    return "fp32" if t in FLOATS else "int"


def flops_of(i: Instruction) -> int:
    """Of one warp that executes a product of matrices."""
    shape = re.search(r"m(\d+)n(\d+)k(\d+)", i.opcode)
    if not shape or kind_of(i) != "mma":
        return 0
    m, n, k = map(int, shape.groups())
    return 2 * m * n * k // (4 if i.parts[0] == "wgmma" else 1)


@dataclass
class Traffic:
    """Sums over the memory accesses of instructions.

    units: sectors of global memory, or wavefronts of shared memory
    least: what the same bytes need at best
    """

    requests: int = 0
    lanes: int = 0
    nbytes: int = 0
    units: int = 0
    least: int = 0

    def add(self, requests: int, lanes: int, nbytes: int, units: int, least: int) -> None:
        self.requests += requests
        self.lanes += lanes
        self.nbytes += nbytes
        self.units += units
        self.least += least


class LaunchCounts:
    """The counts of one launch.

    warps, lanes:  that executed each block
    memory:        accesses by (space, site)
    tensors:       sectors by (tensor, "read" or "write"): of every request, and once a program
    operand_bytes: of shared memory that tensor cores read by descriptors
    """

    def __init__(
        self,
        program: Program,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        memory: GlobalMemory,
    ) -> None:
        self.name, self.grid, self.threads = program.kernel.name, grid, threads
        self.shared_bytes, self.program = shared_bytes, program
        self.regions, self.numbers = memory.regions, memory.numbers
        blocks = len(program.kernel.blocks)
        self.warps, self.lanes = [0] * blocks, [0] * blocks
        self.memory: dict[tuple[str, int], Traffic] = defaultdict(Traffic)
        self.tensors: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self.distinct: dict[tuple[int, str], Array] = {}
        self.touched: dict[tuple[int, str], Array] = {}
        self.operand_bytes = 0

    # what the executor reports

    def block(self, n: int, threads: Threads) -> None:
        whole = threads.whole
        self.warps[n] += threads.count // 32 if whole else len(np.unique(threads.lanes >> 5))
        self.lanes[n] += threads.count

    def operand(self, nbytes: int) -> None:
        self.operand_bytes += nbytes

    def by_warp(self, access: Access, address: Array) -> tuple[Array, Array]:
        """Addresses [warps, 32], -1 where a lane takes no part, of warps that take part; their CTAs."""
        threads = access.threads
        a: Array = np.full(threads.count, -1, np.int64)
        a[access.where] = access.pick(address).astype(np.int64)
        if threads.whole:
            a, cta = a.reshape(-1, 32), threads.cta[::32]
        else:
            warps, row = np.unique(threads.lanes >> 5, return_inverse=True)
            full = np.full((len(warps), 32), -1, np.int64)
            full[row, threads.lanes & 31] = a
            a, cta = full, warps * 32 // self.threads
        some = (a >= 0).any(1)
        return (a, cta) if some.all() else (a[some], cta[some])

    def global_access(self, access: Access, address: Array, nbytes: int, way: str) -> None:
        a, cta = self.by_warp(access, address)
        if not len(a):
            return
        sectors = np.sort(np.where(a < 0, -1, a // SECTOR), 1)
        new = first_of_each(sectors)
        items = first_of_each(
            np.sort(np.where(a < 0, -1, a // nbytes), 1)
        )  # lanes that share need bytes once
        least = int((-(-items.sum(1) * nbytes // SECTOR)).sum())
        lanes = int((a >= 0).sum())
        self.memory["global", access.site].add(len(a), lanes, lanes * nbytes, int(new.sum()), least)
        row, _ = np.nonzero(new)
        self.touch(access.ctas, sectors[new], cta[row], way)

    def touch(self, ctas: Ctas, sectors: Array, cta: Array, way: str) -> None:
        """Note sectors, which keep the regions of their addresses."""
        numbers = self.numbers((sectors * SECTOR).astype(np.uint64))
        for n in np.unique(numbers):
            if not 0 <= n < len(self.regions):
                continue
            region, mine = self.regions[n], numbers == n
            first = region.start // SECTOR
            at = (sectors[mine] & (PLACE_MASK // SECTOR)) - first
            size = -(-region.end // SECTOR) - first
            ok = (at >= 0) & (at < size)
            at, owner = at[ok], cta[mine][ok]
            key = int(n), way
            if key not in self.touched:
                self.touched[key] = np.zeros((ctas.n, size), bool)
            self.touched[key][owner, at] = True
            self.tensors[region.label, way]["sectors"] += len(at)

    def finish(self, ctas: Ctas) -> None:
        """Sum up the CTAs that ran together."""
        for (n, way), bits in self.touched.items():
            self.tensors[self.regions[n].label, way]["by CTA"] += int(bits.sum())
            total = self.distinct.setdefault((n, way), np.zeros(bits.shape[1], bool))
            total |= bits.any(0)
        self.touched = {}

    def shared_access(self, access: Access, address: Array, nbytes: int) -> None:
        """Wavefronts: 128 bytes of lanes at a time, each as often as words of one bank differ."""
        a, _ = self.by_warp(access, address)
        if not len(a):
            return
        unit = max(4, nbytes)
        groups = WAVEFRONT // unit  # of banks, and lanes at a time
        words = np.sort(np.where(a < 0, -1, a // unit).reshape(-1, groups), 1)
        new = first_of_each(words)
        row, _ = np.nonzero(new)
        bank = row * groups + words[new] % groups
        conflicts = np.bincount(bank, minlength=len(words) * groups).reshape(len(words), groups).max(1)
        once = first_of_each(np.sort(np.where(a < 0, -1, a // unit), 1)).sum(1)
        lanes = int((a >= 0).sum())
        least = int((-(-once * unit // WAVEFRONT)).sum())
        self.memory["shared", access.site].add(len(a), lanes, lanes * nbytes, int(conflicts.sum()), least)

    def box(self, access: Access, address: Array, ok: Array, element: int, way: str) -> None:
        """A copy by TMA that one thread issues."""
        sectors = np.unique(address[ok].astype(np.int64) // SECTOR)
        nbytes, whole = int(ok.sum()) * element, len(address) * element
        self.memory["global", access.site].add(1, 1, nbytes, len(sectors), -(-nbytes // SECTOR))
        self.memory["shared", access.site].add(1, 1, whole, -(-whole // WAVEFRONT), -(-whole // WAVEFRONT))
        self.touch(access.ctas, sectors, np.full(len(sectors), access.cta[0]), way)

    # results

    def instructions(self) -> Iterator[tuple[Instruction, str, int, int]]:
        """Yield (instruction, kind, warps, lanes) of what was executed."""
        for block, warps, lanes in zip(self.program.kernel.blocks, self.warps, self.lanes):
            if warps:
                for i in block.instructions:
                    yield i, kind_of(i), warps, lanes

    def kinds(self) -> Counter[str]:
        """Warp instructions by kind, products' flops, and special functions by name."""
        out: Counter[str] = Counter()
        for i, kind, warps, _ in self.instructions():
            out[kind] += warps
            out["flops"] += flops_of(i) * warps
            if i.parts[0] in SPECIAL_FUNCTIONS:
                out[i.parts[0]] += warps
        for block, warps in zip(self.program.kernel.blocks, self.warps):
            if not isinstance(block.end, FallThrough):
                out["barrier" if isinstance(block.end, Barrier) else "branch"] += warps
        return out

    def lines(self, kinds: set[str] | None = None) -> Counter[str]:
        """Warp instructions by source line, of some kinds, or of all but moves."""
        out: Counter[str] = Counter()
        for i, kind, warps, _ in self.instructions():
            if kind in kinds if kinds is not None else kind != "move":
                out[i.source] += warps
        return out

    def accesses(self, space: str) -> list[tuple[str, str, Traffic]]:
        """(source line, opcode, traffic) of a space, "global" or "shared"; the most units first."""
        out: dict[tuple[str, str], Traffic] = defaultdict(Traffic)
        for (where, site), x in self.memory.items():
            if where == space:
                i = self.program.sites[site]
                out[i.source, i.opcode].add(x.requests, x.lanes, x.nbytes, x.units, x.least)
        return sorted(((*k, x) for k, x in out.items()), key=lambda row: -row[2].units)

    def totals(self) -> dict[str, int]:
        """All counts of the launch by name."""
        kinds = self.kinds()
        out = {kind: kinds[kind] for kind in (*KINDS, "flops", "ex2")}
        out["instructions"] = sum(kinds[kind] for kind in KINDS if kind != "move")
        sizes = [block.size for block in self.program.kernel.blocks]
        out["slots"] = 32 * sum(w * n for w, n in zip(self.warps, sizes))
        out["active"] = sum(lanes * n for lanes, n in zip(self.lanes, sizes))
        for space in ("global", "shared"):
            rows = [x for (where, _), x in self.memory.items() if where == space]
            for name in ("requests", "nbytes", "units", "least"):
                out[f"{space} {name}"] = sum(getattr(x, name) for x in rows)
        out["operand bytes"] = self.operand_bytes
        for way in ("read", "write"):
            rows_of = [c for (_, w), c in self.tensors.items() if w == way]
            out[f"sectors {way}"] = sum(c["sectors"] for c in rows_of)
            out[f"CTA sectors {way}"] = sum(c["by CTA"] for c in rows_of)
            out[f"distinct sectors {way}"] = sum(
                int(x.sum()) for (_, w), x in self.distinct.items() if w == way
            )
        return out


def first_of_each(rows: Array) -> Array:
    """Where sorted rows have a number >= 0 for the first time."""
    new = rows >= 0
    new[:, 1:] &= rows[:, 1:] != rows[:, :-1]
    return new
