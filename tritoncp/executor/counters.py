"""Exact counts of a launch: warp instructions by kind and source line, memory transactions by address."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import Any

import numpy as np

from tritoncp.executor.program import PtxProgram
from tritoncp.executor.ptx.instruction import Instruction
from tritoncp.executor.threads import Access, Threads

Array = np.ndarray[Any, Any]
SECTOR, BANKS, WAVEFRONT = 32, 32, 128  # in bytes, words, bytes
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
    """Return the kind of an instruction, roughly its pipe. (ptxas removes many of the kind "move".)"""
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
    """Return the FLOPs of a matrix product for one warp, 0 where its shape is no part of the instruction."""
    shape = re.search(r"m(\d+)n(\d+)k(\d+)", i.opcode)
    if not shape or kind_of(i) != "mma":
        return 0
    m, n, k = map(int, shape.groups())
    return 2 * m * n * k // (4 if i.parts[0] == "wgmma" else 1)


class LaunchCounts:
    """The counts of one launch.

    warps, lanes:  number of warps and lanes that executed each block
    memory:        sums over accesses by (space, site): requests, lanes, nbytes, units (sectors of global
                   memory, wavefronts of shared memory), and the min units possible for these bytes
    sectors:       sectors of global memory, read and written
    operand_bytes: bytes of shared memory that tensor cores read by descriptors
    described_flops: FLOPs of products whose shape is no part of the instruction: tcgen05.mma
    """

    def __init__(self, program: PtxProgram) -> None:
        self.program = program
        blocks = len(program.kernel.blocks)
        self.warps, self.lanes = [0] * blocks, [0] * blocks
        self.memory: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
        self.sectors: dict[str, list[Array]] = {"read": [], "write": []}
        self.operand_bytes = self.described_flops = 0

    # called by the executor

    def block(self, n: int, threads: Threads) -> None:
        self.warps[n] += threads.count // 32 if threads.whole else len(np.unique(threads.lanes >> 5))
        self.lanes[n] += threads.count

    def operand(self, nbytes: int) -> None:
        self.operand_bytes += nbytes

    def product(self, flops: int) -> None:
        self.described_flops += flops

    def add(
        self, space: str, access: Access, requests: int, lanes: int, nbytes: int, units: int, least: int
    ) -> None:
        self.memory[space, access.site].update(
            requests=requests, lanes=lanes, nbytes=nbytes, units=units, least=least
        )

    def warp_addresses(self, access: Access, address: Array) -> Array:
        """Return addresses [warps, 32] of the participating warps, -1 for lanes that do not participate."""
        threads = access.threads
        a: Array = np.full(threads.count, -1, np.int64)
        a[access.where] = access.pick(address).astype(np.int64)
        if threads.whole:
            a = a.reshape(-1, 32)
        else:
            warps, row = np.unique(threads.lanes >> 5, return_inverse=True)
            full = np.full((len(warps), 32), -1, np.int64)
            full[row, threads.lanes & 31] = a
            a = full
        return a[(a >= 0).any(1)]

    def global_access(self, access: Access, address: Array, nbytes: int, way: str) -> None:
        a = self.warp_addresses(access, address)
        if not len(a):
            return
        sectors = np.sort(np.where(a < 0, -1, a // SECTOR), 1)
        new = first_of_each(sectors)
        items = first_of_each(np.sort(np.where(a < 0, -1, a // nbytes), 1))  # shared addresses count once
        least = int((-(-items.sum(1) * nbytes // SECTOR)).sum())
        lanes = int((a >= 0).sum())
        self.add("global", access, len(a), lanes, lanes * nbytes, int(new.sum()), least)
        self.sectors[way].append(np.unique(sectors[new]))

    def shared_access(self, access: Access, address: Array, nbytes: int) -> None:
        """Count wavefronts: for each 128 bytes of lanes, the max number of different words in one bank."""
        a = self.warp_addresses(access, address)
        if not len(a):
            return
        unit = max(4, nbytes)
        groups = WAVEFRONT // unit  # number of bank groups, and of lanes per wavefront
        words = np.sort(np.where(a < 0, -1, a // unit).reshape(-1, groups), 1)
        new = first_of_each(words)
        row, _ = np.nonzero(new)
        bank = row * groups + words[new] % groups
        conflicts = np.bincount(bank, minlength=len(words) * groups).reshape(len(words), groups).max(1)
        once = first_of_each(np.sort(np.where(a < 0, -1, a // unit), 1)).sum(1)
        lanes = int((a >= 0).sum())
        least = int((-(-once * unit // WAVEFRONT)).sum())
        self.add("shared", access, len(a), lanes, lanes * nbytes, int(conflicts.sum()), least)

    def box(self, access: Access, address: Array, ok: Array, element: int, way: str) -> None:
        """Count a TMA copy, which one thread issues."""
        sectors = np.unique(address[ok].astype(np.int64) // SECTOR)
        nbytes, whole = int(ok.sum()) * element, len(address) * element
        wavefronts = -(-whole // WAVEFRONT)
        self.add("global", access, 1, 1, nbytes, len(sectors), -(-nbytes // SECTOR))
        self.add("shared", access, 1, 1, whole, wavefronts, wavefronts)
        self.sectors[way].append(sectors)

    # results

    def kinds(self) -> Counter[str]:
        """Return warp instructions by kind, FLOPs of matrix products, and special functions by name."""
        out: Counter[str] = Counter(flops=self.described_flops)
        for block, warps in zip(self.program.kernel.blocks, self.warps):
            for i in block.instructions:
                out[kind_of(i)] += warps
                out["flops"] += flops_of(i) * warps
                if i.parts[0] in SPECIAL_FUNCTIONS:
                    out[i.parts[0]] += warps
        return out

    def totals(self) -> dict[str, int]:
        """Return all counts of the launch by name."""
        kinds = self.kinds()
        out = {kind: kinds[kind] for kind in (*KINDS, "flops", "ex2")}
        out["instructions"] = sum(kinds[kind] for kind in KINDS if kind != "move")
        sizes = [len(block.instructions) for block in self.program.kernel.blocks]
        out["slots"] = 32 * sum(w * n for w, n in zip(self.warps, sizes))
        out["active"] = sum(lanes * n for lanes, n in zip(self.lanes, sizes))
        for space in ("global", "shared"):
            rows = [x for (where, _), x in self.memory.items() if where == space]
            out |= {
                f"{space} {name}": sum(x[name] for x in rows)
                for name in ("requests", "nbytes", "units", "least")
            }
        out["operand bytes"] = self.operand_bytes
        for way, sectors in self.sectors.items():
            out[f"distinct sectors {way}"] = len(np.unique(np.concatenate(sectors))) if sectors else 0
        return out


def first_of_each(rows: Array) -> Array:
    """Return where each number >= 0 occurs first in sorted rows."""
    new = rows >= 0
    new[:, 1:] &= rows[:, 1:] != rows[:, :-1]
    return new
