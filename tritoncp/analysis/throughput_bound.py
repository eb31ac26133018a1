"""The bound of tensor-core utilisation: rates of one multiprocessor, and the cycles of a loop on it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tritoncp.analysis.disassembly import Instruction, Product, kind_of, mix


class Machine(NamedTuple):
    """One multiprocessor (AMD: compute unit) with four schedulers. The rates are from NVIDIA's whitepapers
    and the CUDA programming guide ("Arithmetic instructions"), and from AMD's CDNA3 whitepaper and ISA guide.
    Those of L2 caches are at the top of ``L2_PORT``.

    block, shared: bytes of shared memory of a program at most, and of the multiprocessor
    warps, registers, lanes: warps it holds, 32-bit registers, threads in a warp
    flops:  of 16-bit products with float32 sums, in a cycle
    l2:     bytes that it reads from the L2 cache in a cycle, if all multiprocessors read
    issue:  cycles for which an instruction takes its scheduler, by kind; "" = all other kinds
    mufu:   cycles for which an exponential takes the special function unit
    """

    block: int
    shared: int
    warps: int
    registers: int
    flops: int
    l2: float
    lanes: int = 32
    issue: dict[str, int] = {"": 1}  # noqa: RUF012 a table, never written
    mufu: int = 8


KIB = 1024
SHARED_PER_CYCLE = 128  # bytes, on every machine below
TENSOR_COLUMNS = 512
RESERVED = KIB  # of shared memory, for the system, in every program (NVIDIA)
# Bytes that one multiprocessor takes from the L2 cache in a cycle (arXiv 1804.06826, for Volta).  The caches
# of A100 and H100 give 5120 bytes a cycle to all of them together: 7219 GB/s at 1.41 GHz and 8986 at 1.755 in
# table 3 of https://pmc.ncbi.nlm.nih.gov/articles/PMC10448217, and NVIDIA's A100 whitepaper. An XCD of MI300X
# gives 2048 to 38 compute units: AMD's CDNA3 whitepaper. For other GPUs the port is the limit.
L2_PORT = 64
# CDNA: a vector instruction of 64 lanes takes a scheduler's 16 lanes four cycles, an exponential four times
# as long; matrix, scalar and memory instructions are issued beside them.
_CDNA = dict.fromkeys(("fma", "compare", "convert", "integer"), 4) | {"mufu": 16, "": 0}
MACHINES = {
    "sm_80": Machine(163 * KIB, 164 * KIB, 64, 65536, 2048, 5120 / 108),
    "sm_86": Machine(99 * KIB, 100 * KIB, 48, 65536, 1024, L2_PORT),
    "sm_90": Machine(227 * KIB, 228 * KIB, 64, 65536, 4096, 5120 / 132),
    "sm_100": Machine(227 * KIB, 228 * KIB, 64, 65536, 8192, L2_PORT),
    "gfx942": Machine(64 * KIB, 64 * KIB, 32, 4 * 512 * 64, 2048, 2048 / 38, 64, _CDNA, 0),
}


class Cycles(NamedTuple):
    """Cycles for which each part of a multiprocessor is busy with one turn of a loop, over all warps of a
    program."""

    tensor: float
    issue: float
    mufu: float
    shared: float
    l2: float = 0.0


def cycles(
    body: Sequence[Instruction], tile_products: Sequence[Product], warps: int, machine: Machine
) -> Cycles:
    """Count the cycles of one turn of a loop, from its instructions and its products (those of PTX where SASS
    does not show their shape). Instructions do not show what the L2 cache moves: see :func:`l2_bytes`."""
    groups = [(product, warps // product.warps if product.warps else 1) for product in tile_products]
    counts = mix(body)
    issued = sum(machine.issue.get(kind, machine.issue[""]) * n for kind, n in counts.items())
    moved = sum(bytes_of(x, machine.lanes) for x in body) * warps
    return Cycles(
        tensor=sum(product.flops * times for product, times in groups) / machine.flops,
        issue=issued * warps / 4,
        mufu=machine.mufu * counts.get("mufu", 0) * warps / 4,
        shared=(moved + sum(product.shared * times for product, times in groups)) / SHARED_PER_CYCLE,
    )


def bytes_of(x: Instruction, lanes: int) -> int:
    """Count the bytes that one warp's instruction moves in or out of shared memory, or of local memory, which
    the L1 cache in the same memory holds.

    >>> [bytes_of(Instruction(op, ""), 32) for op in ("LDS.128", "STL", "LDSM.16.M88.4", "LDGSTS.E.128")]
    [512, 128, 512, 512]
    >>> bytes_of(Instruction("ds_read_b128", ""), 64), bytes_of(Instruction("LDG.E.128", ""), 32)
    (1024, 0)
    """
    if matrices := re.match(r"(?:LDSM|STSM)\.16\.MT?88(?:\.(\d))?", x.op):
        return 128 * int(matrices[1] or 1)
    if wide := re.match(r"ds_(?:read|write)2?_b(\d+)", x.op):
        return lanes * int(wide[1]) // 8 * (1 + ("2_" in x.op))
    if re.match(r"LD[SL]\b|ST[SL]\b|LDGSTS", x.op):
        width = re.search(r"\.(64|128)$", x.op)
        return lanes * (int(width[1]) // 8 if width else 4)
    return 0


def l2_bytes(kernel: str, rows: int, columns: int, key_dim: int, value_dim: int) -> int:
    """Count the bytes that one turn of a loop moves between the L2 cache and a multiprocessor: keys and
    values of ``columns`` keys, in 16 bits; by keys ("dkdv", "fused"), queries and dO of ``rows`` rows, and
    what the latter adds to dQ, in float32. Programs of one multiprocessor do not share them: copies bypass
    L1.

    A forward tile does ``rows`` FLOPs for each byte: on an H100, which does 4096 in a cycle and reads 39
    bytes, 64 rows keep the tensor cores busy for 61 % of the time at most.

    >>> flops, h100 = 4 * 64 * 128 * 128, MACHINES["sm_90"]
    >>> flops / l2_bytes("forward", 64, 128, 128, 128)
    64.0
    >>> round(flops / h100.flops / (l2_bytes("forward", 64, 128, 128, 128) / h100.l2), 3)
    0.606
    """
    by_keys = kernel in ("dkdv", "fused")
    loads = 2 * (rows if by_keys else columns) * (key_dim + value_dim)
    return loads + (4 * rows * key_dim if kernel == "fused" else 0)


class Bound(NamedTuple):
    """Upper bound of the use of tensor cores. utilisation: at most; overlap: if softmax hid behind products
    completely; programs: number that share a multiprocessor; limit: the limiting resource, in words."""

    utilisation: float
    overlap: float
    programs: int
    limit: str


def hidden(body: Iterable[Instruction]) -> tuple[float, float]:
    """The shares of a loop's instructions, without products, and of its exponentials that are issued while a
    wgmma of the same warps is under way: started, in program order, and not waited for.  (One that ends a
    group has ``gsb0``; ``DEPBAR.LE gsb0, n`` waits until n groups are left.)

    >>> say = lambda *lines: [Instruction(*line.split(" ", 1)) for line in lines]
    >>> ahead = say("HGMMA.64x128x16 R24, gsb0", "HGMMA.64x128x16 R88, gsb0", "WARPGROUP.DEPBAR.LE gsb0, 0x1")
    >>> last, soft = say("WARPGROUP.DEPBAR.LE gsb0, 0x0"), say("MUFU.EX2 R1, R1")
    >>> hidden(ahead + soft + last), hidden(ahead + last + soft), hidden(say("HGMMA.64x128x16 R24") + soft)
    ((1.0, 1.0), (0.0, 0.0), (1.0, 1.0))
    """
    waiting, begun = 0, False
    issued, beside = Counter[str](), Counter[str]()
    for x in body:
        if x.op.startswith("HGMMA"):
            begun = "gsb0" not in x.operands
            waiting += not begun
        elif x.op.startswith("WARPGROUP.DEPBAR"):
            waiting = min(waiting, int(x.operands.split(",")[1], 16))
        else:
            kinds = ["", "mufu"] if kind_of(x.op) == "mufu" else [""]
            issued.update(kinds)
            beside.update(kinds if waiting or begun else ())
    return beside[""] / max(1, issued[""]), beside["mufu"] / max(1, issued["mufu"])


def bound(
    spent: Cycles,
    warps: int,
    registers: int,
    shared: int,
    machine: Machine,
    columns: int = 0,
    hidden: tuple[float, float] = (0.0, 0.0),
    turns: int = 1,
) -> Bound:
    """Bound the share of time in which one turn of the loop keeps the tensor cores busy.

    Each of Σ FLOPs / rate, Σ instructions × warps / 4 schedulers, Σ exponentials × 8 cycles × warps / 4, Σ
    bytes / 128 of shared memory and Σ bytes / rate of L2 is a lower bound of the time. A program computes one
    tile at a time: its products, then, since all its warps wait for them, its softmax, with the tensor cores
    idle (the cost that FlashAttention-3 hides: arXiv 2407.08608, section 3). So a program alone takes tensor
    + max(issue, mufu), and each of c programs beside each other at least a c-th of that, and so with groups
    of a program's warps that take ``turns``; instructions and exponentials that are ``hidden`` do not count.
    Not modelled: latencies, bank and pipe conflicts, HBM, misses and the further half of L2, clocks (L2 has
    one of its own). An upper bound, to compare variants of a kernel.

    >>> bound(Cycles(1024, 868, 528, 900), 8, 200, 150 << 10, MACHINES["sm_90"])  # flex's template, 128 x 64
    Bound(utilisation=0.541, overlap=1.0, programs=1, limit='issue after tensor; registers hold 1 program')
    """
    programs, holds = resident(warps, registers, shared, machine, columns)
    left = {"issue": (1 - hidden[0]) * spent.issue, "mufu": (1 - hidden[1]) * spent.mufu}
    soft = max(left, key=lambda name: left[name])
    alone = spent.tensor + left[soft] if left[soft] else 0.0
    times = spent._asdict() | {"": alone / (programs * turns)}
    limit = max(times, key=lambda name: times[name])
    many = f"{holds} hold{'s' * (holds[-1] != 's')} {programs} program{'s' * (programs > 1)}"
    words = {
        "tensor": "tensor cores",
        "shared": "shared memory",
        "l2": "L2",
        "": f"{soft} after tensor; {many}",
    }
    return Bound(
        round(spent.tensor / times[limit], 3),
        round(spent.tensor / max(spent), 3),
        programs,
        words.get(limit, limit),
    )


def resident(warps: int, registers: int, shared: int, machine: Machine, columns: int = 0) -> tuple[int, str]:
    """Count the programs that fit a multiprocessor together, and name the resource that limits them.

    columns: of tensor memory, which sm_100 has 512 of, that a program takes

    >>> resident(8, 190, 160 << 10, MACHINES["sm_90"]), resident(4, 128, 40 << 10, MACHINES["sm_90"])
    ((1, 'registers'), (4, 'registers'))
    """
    granule = 8  # registers of a thread are allocated in eights
    per_warp = max(1, -(-registers // granule) * granule) * machine.lanes
    # A warp's registers lie in its scheduler's quarter.
    room = {
        "registers": machine.registers // 4 // per_warp * 4 // warps,
        "shared memory": machine.shared // max(1, shared + (RESERVED if machine.lanes == 32 else 0)),
        "warps": machine.warps // warps,
        "tensor memory": TENSOR_COLUMNS // max(1, columns),
    }
    least = min(room, key=lambda name: room[name])
    return max(1, room[least]), least
