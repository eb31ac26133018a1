"""Reads the inner loops of a compiled kernel from machine code, and bounds the use of tensor cores by them.

Three dialects, one reading: SASS (NVIDIA's machine code), PTX (where SASS lacks the size of a tcgen05
product) and AMD's assembly are lists of instructions with jumps; a loop is a jump back to an instruction that
every path into the loop passes ("natural loop").
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Instruction(NamedTuple):
    """op: mnemonic with its suffixes; target: index of the instruction a jump goes to; ends: nothing falls
    through to the next instruction."""

    op: str
    operands: str
    target: int | None = None
    ends: bool = False


Code = Sequence[Instruction]

_SASS = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z]\w*(?:\.\w+)*)\s*([^;]*);")
_PTX = re.compile(r"\s*(@!?%p\w+\s+)?([a-z][\w.:]*)\s*([^;]*);")
_GCN = re.compile(r"(\t)([a-z]+_\w+)[ \t]*([^;]*)")
_JUMPS = ("BRA", "JMP", "CALL")  # ptxas calls what never returns where a jump would not reach
_LABEL = re.compile(r"(\$L\w+|\.L\w+):")


def sass(text: str) -> list[Instruction]:
    """Parse the instructions in the output of ``cuobjdump -sass`` for one kernel."""
    found = [match.groups() for match in map(_SASS.match, text.splitlines()) if match]
    places = {int(place, 16): i for i, (place, *_) in enumerate(found)}
    code = []
    for _, guard, op, operands in found:
        address = re.search(r"0x([0-9a-f]+)\s*$", operands) if op.startswith(_JUMPS) else None
        always = guard is None and (address is None or address.start() == 0)
        target = places.get(int(address[1], 16)) if address else None
        code.append(
            Instruction(op, operands, target, always and op.startswith(("BRA", "BRX", "JMP", "EXIT", "RET")))
        )
    return code


def ptx(text: str) -> list[Instruction]:
    """Instructions of a PTX module. Labels inside inline assembly are not followed."""
    return _labelled(text, _PTX, jumps=("bra.uni", "bra"), last=("ret", "exit", "brx"))


def gcn(text: str) -> list[Instruction]:
    """Instructions of AMD assembly."""
    return _labelled(text, _GCN, jumps=("s_branch", "s_cbranch"), last=("s_endpgm",))


def _labelled(
    text: str, line_of: re.Pattern[str], jumps: tuple[str, ...], last: tuple[str, ...]
) -> list[Instruction]:
    places: dict[str, int] = {}
    found: list[tuple[str, str, str]] = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            places[label[1]] = len(found)
        elif match := line_of.match(line):
            guard, op, operands = match.groups()
            found.append(((guard or "").strip(), op, operands.strip()))
    code = []
    for guard, op, operands in found:
        target = places.get(operands) if op.startswith(jumps) else None
        leaves = op.startswith(last) or (target is not None and not op.startswith("s_cbranch"))
        code.append(Instruction(op, operands, target, leaves and not guard))
    return code


def loops(code: Code) -> list[list[Instruction]]:
    """Find the bodies of natural loops: from a header, which every path from the first instruction into the
    loop passes, to the jumps back to it.  Code that waits at the end of the kernel and jumps back in is no
    loop. A jump by a table (BRX), whose targets the text lacks, leads to all otherwise unreachable code.

    >>> jump = lambda target: Instruction("BRA", "", target, ends=False)
    >>> a, b, c, d = (Instruction(name, "") for name in "abcd")
    >>> [[x.op for x in body] for body in loops([a, b, c, jump(2), jump(1), d])]
    [['c', 'BRA'], ['b', 'c', 'BRA', 'BRA']]
    """
    after: list[list[int]] = [
        [i + 1] * (not x.ends and i + 1 < len(code)) + ([x.target] if x.target is not None else [])
        for i, x in enumerate(code)
    ]
    for table in [i for i, x in enumerate(code) if x.op.lower().startswith("brx")]:
        after[table] += _entries(code, after)
    before: list[list[int]] = [[] for _ in code]
    for i, successors in enumerate(after):
        for successor in successors:
            before[successor].append(i)
    reachable = _reach(after, 0, None)
    bodies = []
    for head in sorted({x.target for x in code if x.target is not None}):
        elsewhere = _reach(after, 0, head)
        back = [i for i in before[head] if i in reachable and i not in elsewhere]
        if back:
            body = reachable & {head}.union(*(_reach(before, i, head) for i in back))
            bodies.append(_in_order(code, body, max(back)))
    return [[code[i] for i in body] for body in sorted(bodies, key=len)]


def _entries(code: Code, after: list[list[int]]) -> list[int]:
    """Find the first instructions of code that is reachable by a table of jumps alone."""
    reachable = _reach(after, 0, None)
    behind = [i for i, x in enumerate(code[:-1], 1) if x.ends and i not in reachable]
    reach = {i: _reach(after, i, None) for i in behind}
    return [i for i in behind if not any(i in reach[j] and j not in reach[i] for j in behind)]


def _in_order(code: Code, body: set[int], back: int) -> list[int]:
    """Order the instructions of a loop: those behind the jump back to its beginning stand where they are
    entered."""
    order: list[int] = []
    for i in sorted(body):
        if i <= back:
            order.append(i)
            at = code[i].target
            while at is not None and at > back and at in body and at not in order:
                order.append(at)
                at = None if code[at].ends else at + 1
    return order + sorted(body - set(order))


def _reach(edges: list[list[int]], start: int, without: int | None) -> set[int]:
    """Find the instructions that are reachable from ``start`` by paths that avoid one instruction."""
    seen, todo = set(), [start]
    while todo:
        at = todo.pop()
        if at not in seen and at != without:
            seen.add(at)
            todo += edges[at]
    return seen


def innermost(code: Code, *kinds: str) -> list[list[Instruction]]:
    """Find the loops that hold instructions of these kinds (default: "tensor") and no smaller such loop;
    shortest first."""
    wanted = {*(kinds or ("tensor",))}
    holding = [body for body in loops(code) if any(kind_of(x.op) in wanted for x in body)]
    ids = [set(map(id, body)) for body in holding]
    return [body for body, own in zip(holding, ids) if not any(other < own for other in ids)]


def shortest(code: Code, body: Sequence[Instruction]) -> list[Instruction]:
    """Find the path around a loop with the fewest instructions, without optional code.

    >>> code = [Instruction(op, "") for op in "abc"] + [Instruction("BRA", "", 0)]
    >>> code[0] = Instruction("BRA", "", 2)
    >>> [x.op for x in shortest(code, code)]
    ['BRA', 'c', 'BRA']
    """
    own = set(map(id, body))
    inside = {i for i, x in enumerate(code) if id(x) in own}
    (head,) = (i for i in inside if code[i] is body[0])
    came: dict[int, int] = {}
    todo = [head]
    for at in todo:
        x = code[at]
        for to in ([] if x.ends else [at + 1]) + ([] if x.target is None else [x.target]):
            if to == head:
                way = [at]
                while way[-1] != head:
                    way.append(came[way[-1]])
                return [code[i] for i in reversed(way)]
            if to in inside and to not in came:
                came[to] = at
                todo.append(to)
    return list(body)


def meeting(body: Iterable[Instruction]) -> int:
    """Count the warps of a loop with specialised warps by the threads of its barriers; one without a barrier.

    >>> meeting([Instruction("BAR.SYNC.DEFER_BLOCKING", "0x2, 0x80")]), meeting([])
    (4, 1)
    """
    threads = (re.search(r", 0x(\w+)", x.operands) for x in body if x.op.startswith("BAR.SYNC"))
    return max((int(found[1], 16) // 32 for found in threads if found), default=1)


# The first pattern that an instruction's name begins with says its kind. "convert" and "compare" run on the
# same pipes as integers do on most GPUs, and are kept apart because softmax has a fixed number of each.
KINDS = {
    "tensor": r"[HIQD]G?MMA|UTC\w*MMA|wgmma\.mma|tcgen05\.mma|mma\.sync|v_mfma",
    "mufu": r"MUFU|v_(exp|log|rcp|rsq|sqrt|sin|cos)_",
    "fma": r"F(ADD|MUL|FMA)|H(ADD|MUL|FMA)2|D(ADD|MUL|FMA)|v_(pk_)?(fma|fmac|mad|mac|mul|add|sub)_f",
    "compare": r"F(MNMX|SEL|SET|SETP|CHK)|v_(pk_)?(max|min|med3|cmp|cmpx|cndmask)",
    "convert": r"F2F|[FI]2|I2FP|v_cvt",
    "spill": r"LDL|STL|scratch_",
    "memory": r"LD|ST[GSMT]|ST\b|RED|ATOM|UTMA|UBLKCP|SHFL|ds_|buffer_|global_|flat_",
    "barrier": r"BAR|B?SYNC|DEPBAR|WARP|SYNCS|UTCBAR|FENCE|MEMBAR|CCTL|ERRBAR|NANOSLEEP|s_barrier|s_waitcnt",
    "integer": r"IMAD|IADD|IMNMX|VI|LEA|LOP|SHF|SHL|SHR|ISETP|ISET|IABS|SEL|PRMT|MOV|CS2R|P2R|R2P|PLOP|SGXT|"
    r"POPC|FLO|BMSK|BREV|v_",
}
_KINDS = [(kind, re.compile(pattern)) for kind, pattern in KINDS.items()]


def kind_of(op: str) -> str:
    """Classify an instruction: a key of KINDS, or "other": jumps, scalar and uniform instructions.

    >>> [kind_of(op) for op in ("HGMMA.64x128x16.F32.BF16", "LDGDEPBAR", "LDSM.16.M88.4", "IMAD.MOV.U32")]
    ['tensor', 'barrier', 'memory', 'integer']
    >>> [kind_of(op) for op in ("v_mfma_f32_32x32x8_bf16", "v_max3_f32", "ds_read_b128", "BRA", "STL.64")]
    ['tensor', 'compare', 'memory', 'other', 'spill']
    """
    if op == "LDGDEPBAR":
        return "barrier"
    return next((kind for kind, pattern in _KINDS if pattern.match(op)), "other")


def mix(body: Iterable[Instruction]) -> dict[str, int]:
    """Count the instructions of each kind."""
    counts = Counter(kind_of(x.op) for x in body)
    return {kind: counts[kind] for kind in (*KINDS, "other") if counts[kind]}


class Product(NamedTuple):
    """One tensor-core instruction: [m, k] times [k, n].

    warps:  how many warps issue it together
    shared: bytes it reads from shared memory, for all of them
    """

    m: int
    n: int
    k: int
    warps: int
    shared: int = 0

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k


def products(body: Iterable[Instruction]) -> list[Product]:
    """Read the matrix products of 16-bit numbers in a loop.

    A wgmma takes its right side, and its left side too unless that is a register, from shared memory; so does
    tcgen05. Its shape is in its instruction descriptor (PTX ISA, table "Instruction descriptor for
    .kind::f16": N / 8 in bits 17 to 22, M / 16 in bits 24 to 28), a constant moved to a register before.

    >>> products(sass("  /*0010*/  HGMMA.64x128x16.F32.BF16 R88, R152, gdesc[UR8].tnspB, R88 ;"))
    [Product(m=64, n=128, k=16, warps=4, shared=4096)]
    >>> products(ptx("mov.b32 %r1, 135267472; \\n tcgen05.mma.kind::f16 [ %r5 + 0 ], %rd1, %rd2, %r1, %p2;"))
    [Product(m=128, n=64, k=16, warps=0, shared=6144)]
    """
    found = []
    constants: dict[str, int] = {}
    for x in body:
        if x.op == "mov.b32" and (moved := re.fullmatch(r"(%\w+), (\d+)", x.operands)):
            constants[moved[1]] = int(moved[2])
        elif shape := re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", x.op):
            m, n, k = map(int, shape.groups())
            left = m if "gdesc" in x.operands.split(",")[1] else 0
            found.append(Product(m, n, k, 4, 2 * k * (left + n)))
        elif shape := re.match(r"HMMA\.(16)(8)(\d+)", x.op):
            found.append(Product(16, 8, int(shape[3]), 1))
        elif shape := re.match(r"v_mfma_f32_(\d+)x(\d+)x(\d+)", x.op):
            m, n, k = map(int, shape.groups())
            found.append(Product(m, n, k, 1))
        elif x.op.startswith("tcgen05.mma"):
            operands = [part.strip() for part in x.operands.split(",")]
            bits = constants[operands[3]]
            m, n = (bits >> 24 & 31) * 16, (bits >> 17 & 63) * 8
            left = 0 if operands[1].startswith("[") else m
            found.append(Product(m, n, 16, 0, 2 * 16 * (left + n)))
    return found


class Machine(NamedTuple):
    """One multiprocessor (AMD: compute unit) with four schedulers. The rates are from NVIDIA's whitepapers
    and the CUDA programming guide ("Arithmetic instructions"), and from AMD's CDNA3 whitepaper and ISA guide.

    block, shared: bytes of shared memory of a program at most, and of the multiprocessor
    warps, registers, lanes: warps it holds, 32-bit registers, threads in a warp
    flops:  of 16-bit products with float32 sums, in a cycle
    issue:  cycles for which an instruction takes its scheduler, by kind; "" = all other kinds
    mufu:   cycles for which an exponential takes the special function unit
    """

    block: int
    shared: int
    warps: int
    registers: int
    flops: int
    lanes: int = 32
    issue: dict[str, int] = {"": 1}  # noqa: RUF012 a table, never written
    mufu: int = 8


KIB = 1024
SHARED_PER_CYCLE = 128  # bytes, on every machine below
TENSOR_COLUMNS = 512
RESERVED = KIB  # of shared memory, for the system, in every program (NVIDIA)
# CDNA: a vector instruction of 64 lanes takes a scheduler's 16 lanes four cycles, an exponential four times
# as long; matrix, scalar and memory instructions are issued beside them.
_CDNA = dict.fromkeys(("fma", "compare", "convert", "integer"), 4) | {"mufu": 16, "": 0}
MACHINES = {
    "sm_80": Machine(163 * KIB, 164 * KIB, 64, 65536, 2048),
    "sm_86": Machine(99 * KIB, 100 * KIB, 48, 65536, 1024),
    "sm_90": Machine(227 * KIB, 228 * KIB, 64, 65536, 4096),
    "sm_100": Machine(227 * KIB, 228 * KIB, 64, 65536, 8192),
    "gfx942": Machine(64 * KIB, 64 * KIB, 32, 4 * 512 * 64, 2048, 64, _CDNA, 0),
}


class Cycles(NamedTuple):
    """Cycles for which one turn of a loop, by all warps of a program, takes each part of a multiprocessor."""

    tensor: float
    issue: float
    mufu: float
    shared: float


def cycles(body: Sequence[Instruction], done: Sequence[Product], warps: int, machine: Machine) -> Cycles:
    """Count the cycles of one turn of a loop. body: its instructions; done: its products (from PTX where SASS
    does not show their shape)."""
    groups = [(product, warps // product.warps if product.warps else 1) for product in done]
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
    """Count the bytes that one warp's instruction moves in or out of shared memory.

    >>> [bytes_of(Instruction(op, ""), 32) for op in ("LDS.128", "STS", "LDSM.16.M88.4", "LDGSTS.E.128")]
    [512, 128, 512, 512]
    >>> bytes_of(Instruction("ds_read_b128", ""), 64), bytes_of(Instruction("LDG.E.128", ""), 32)
    (1024, 0)
    """
    if matrices := re.match(r"(?:LDSM|STSM)\.16\.MT?88(?:\.(\d))?", x.op):
        return 128 * int(matrices[1] or 1)
    if wide := re.match(r"ds_(?:read|write)2?_b(\d+)", x.op):
        return lanes * int(wide[1]) // 8 * (1 + ("2_" in x.op))
    if re.match(r"LDS\b|STS\b|LDGSTS", x.op):
        width = re.search(r"\.(64|128)$", x.op)
        return lanes * (int(width[1]) // 8 if width else 4)
    return 0


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


def touched(body: Iterable[Instruction]) -> list[Instruction]:
    """Find the instructions that touch sums of a wgmma under way, or write to its left side: a data race.
    m64 products: N / 2 registers of sums, 4 of a left side that is not in shared memory.

    >>> say = lambda *lines: [Instruction(*line.split(" ", 1)) for line in lines]
    >>> product = say("HGMMA.64x128x16 R88, R152, gdesc[UR8], R88, gsb0")
    >>> found = touched(product + say("FADD R2, R151, R152", "FADD R2, R152, R2", "MOV R155, R2"))
    >>> [x.operands for x in found]
    ['R2, R151, R152', 'R155, R2']
    """
    groups: list[tuple[set[int], set[int]]] = []
    sums, left = set[int](), set[int]()
    found = []
    for x in body:
        if shape := re.match(r"HGMMA\.64x(\d+)x", x.op):
            base, *rest = re.findall(r"\bR(\d+)", x.operands)
            sums |= {int(base) + i for i in range(int(shape[1]) // 2)}
            if re.match(r"R\d+, R\d+", x.operands):
                left |= {int(rest[0]) + i for i in range(4)}
            if "gsb0" in x.operands:
                groups.append((sums, left))
                sums, left = set(), set()
        elif x.op.startswith("WARPGROUP.DEPBAR"):
            groups = groups[max(0, len(groups) - int(x.operands.split(",")[1], 16)) :]
        else:
            writes, reads = registers(x)
            busy, read = set(sums), set(left)
            for more, others in groups:
                busy, read = busy | more, read | others
            if (writes | reads) & busy or writes & read:
                found.append(x)
    return found


def registers(x: Instruction) -> tuple[set[int], set[int]]:
    """Vector registers that an instruction writes, taken to be its first operand, and reads.

    >>> registers(Instruction("LDS.64", "R4, [R8+0x10]")), registers(Instruction("STG.E.128", "[R2.64], R8"))
    (({4, 5}, {8}), (set(), {2, 3, 8, 9, 10, 11}))
    """
    wide = {"64": 2, "128": 4}.get(x.op.rpartition(".")[2], 1)
    first, _, rest = x.operands.partition(",")
    target = re.match(r"R(\d+)$", first.strip())
    writes = {int(target[1]) + i for i in range(wide)} if target else set[int]()
    places = re.findall(r"\bR(\d+)(\.64)?", rest if target else x.operands)
    each = wide if x.op.startswith("ST") else 1
    return writes, {int(at) + i for at, pair in places for i in range(2 if pair else each)}


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

    Each of Σ FLOPs / rate, Σ instructions × warps / 4 schedulers, Σ exponentials × 8 cycles × warps / 4 and Σ
    bytes / 128 is a lower bound of the time.  A program computes one tile at a time: its products, then,
    since all its warps wait for them, its softmax, with the tensor cores idle (the cost that FlashAttention-3
    hides: arXiv 2407.08608, section 3).  So a program alone takes tensor + max(issue, mufu), and each of c
    programs beside each other at least a c-th of that, and so with groups of a program's warps that take
    ``turns``; instructions and exponentials that are ``hidden`` do not count. Not modelled: latencies, bank
    and pipe conflicts, HBM and L2, clocks.  An upper bound, to compare variants of a kernel.

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
    words = {"tensor": "tensor cores", "shared": "shared memory", "": f"{soft} after tensor; {many}"}
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
    granule = 8  # registers of a thread are given out in eights
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
