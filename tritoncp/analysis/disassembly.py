"""The machine code of a compiled kernel: its instructions, inner loops and matrix products.

Three dialects have one form: SASS (NVIDIA's machine code), PTX (where SASS lacks the size of a tcgen05
product) and AMD's assembly are lists of instructions with jumps; a loop is a jump back to an instruction that
every path into the loop passes ("natural loop").
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Instruction(NamedTuple):
    """One instruction.

    op:     mnemonic with its suffixes
    target: index of the instruction that a jump goes to
    ends:   control never falls through to the next instruction
    """

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
    fields = [match.groups() for match in map(_SASS.match, text.splitlines()) if match]
    places = {int(place, 16): i for i, (place, *_) in enumerate(fields)}
    code = []
    for _, guard, op, operands in fields:
        address = re.search(r"0x([0-9a-f]+)\s*$", operands) if op.startswith(_JUMPS) else None
        always = guard is None and (address is None or address.start() == 0)
        target = places.get(int(address[1], 16)) if address else None
        code.append(
            Instruction(op, operands, target, always and op.startswith(("BRA", "BRX", "JMP", "EXIT", "RET")))
        )
    return code


def ptx(text: str) -> list[Instruction]:
    """Parse the instructions of a PTX module. Labels inside inline assembly are not followed."""
    return _parse_labels(text, _PTX, jumps=("bra.uni", "bra"), last=("ret", "exit", "brx"))


def gcn(text: str) -> list[Instruction]:
    """Parse the instructions of AMD assembly."""
    return _parse_labels(text, _GCN, jumps=("s_branch", "s_cbranch"), last=("s_endpgm",))


def _parse_labels(
    text: str, line_of: re.Pattern[str], jumps: tuple[str, ...], last: tuple[str, ...]
) -> list[Instruction]:
    places: dict[str, int] = {}
    fields: list[tuple[str, str, str]] = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            places[label[1]] = len(fields)
        elif match := line_of.match(line):
            guard, op, operands = match.groups()
            fields.append(((guard or "").strip(), op, operands.strip()))
    code = []
    for guard, op, operands in fields:
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
        past = _reach(after, 0, head)  # instructions on paths that avoid the head
        back = [i for i in before[head] if i in reachable and i not in past]
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
    reached, todo = set(), [start]
    while todo:
        at = todo.pop()
        if at not in reached and at != without:
            reached.add(at)
            todo += edges[at]
    return reached


def innermost(code: Code, *kinds: str) -> list[list[Instruction]]:
    """Find the loops that hold instructions of these kinds (default: "tensor") and no smaller such loop;
    shortest first."""
    selection = {*(kinds or ("tensor",))}
    holding = [body for body in loops(code) if any(kind_of(x.op) in selection for x in body)]
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
    previous: dict[int, int] = {}
    todo = [head]
    for at in todo:
        x = code[at]
        for to in ([] if x.ends else [at + 1]) + ([] if x.target is None else [x.target]):
            if to == head:
                way = [at]
                while way[-1] != head:
                    way.append(previous[way[-1]])
                return [code[i] for i in reversed(way)]
            if to in inside and to not in previous:
                previous[to] = at
                todo.append(to)
    return list(body)


def barrier_warps(body: Iterable[Instruction]) -> int:
    """Count the warps that run a loop of specialised warps, by the threads of its barriers; 1 without them.

    >>> barrier_warps([Instruction("BAR.SYNC.DEFER_BLOCKING", "0x2, 0x80")]), barrier_warps([])
    (4, 1)
    """
    counts = (re.search(r", 0x(\w+)", x.operands) for x in body if x.op.startswith("BAR.SYNC"))
    return max((int(threads[1], 16) // 32 for threads in counts if threads), default=1)


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
    listed = []
    constants: dict[str, int] = {}
    for x in body:
        if x.op == "mov.b32" and (moved := re.fullmatch(r"(%\w+), (\d+)", x.operands)):
            constants[moved[1]] = int(moved[2])
        elif shape := re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", x.op):
            m, n, k = map(int, shape.groups())
            left = m if "gdesc" in x.operands.split(",")[1] else 0
            listed.append(Product(m, n, k, 4, 2 * k * (left + n)))
        elif shape := re.match(r"HMMA\.(16)(8)(\d+)", x.op):
            listed.append(Product(16, 8, int(shape[3]), 1))
        elif shape := re.match(r"v_mfma_f32_(\d+)x(\d+)x(\d+)", x.op):
            m, n, k = map(int, shape.groups())
            listed.append(Product(m, n, k, 1))
        elif x.op.startswith("tcgen05.mma"):
            operands = [part.strip() for part in x.operands.split(",")]
            bits = constants[operands[3]]
            m, n = (bits >> 24 & 31) * 16, (bits >> 17 & 63) * 8
            left = 0 if operands[1].startswith("[") else m
            listed.append(Product(m, n, 16, 0, 2 * 16 * (left + n)))
    return listed


def find_races(body: Iterable[Instruction]) -> list[Instruction]:
    """Find the instructions that touch sums of a wgmma under way, or write to its left side: a data race.
    m64 products: N / 2 registers of sums, 4 of a left side that is not in shared memory.

    >>> say = lambda *lines: [Instruction(*line.split(" ", 1)) for line in lines]
    >>> product = say("HGMMA.64x128x16 R88, R152, gdesc[UR8], R88, gsb0")
    >>> races = find_races(product + say("FADD R2, R151, R152", "FADD R2, R152, R2", "MOV R155, R2"))
    >>> [x.operands for x in races]
    ['R2, R151, R152', 'R155, R2']
    """
    groups: list[tuple[set[int], set[int]]] = []
    sums, left = set[int](), set[int]()
    races = []
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
            for group_sums, group_left in groups:
                busy, read = busy | group_sums, read | group_left
            if (writes | reads) & busy or writes & read:
                races.append(x)
    return races


def count_serial(body: Iterable[Instruction]) -> int:
    """Count the wgmmas that a loop waits for before it starts another. ptxas inserts those waits where it
    lacks registers for products under way; the tensor cores are idle between such products.

    >>> say = lambda *lines: [Instruction(*line.split(" ", 1)) for line in lines]
    >>> product, wait = say("HGMMA.64x128x16 R24, gsb0"), say("WARPGROUP.DEPBAR.LE gsb0, 0x0")
    >>> count_serial(product + wait + product + wait), count_serial(product + product + wait)
    (2, 0)
    """
    count = waiting = 0
    for x in body:
        if x.op.startswith("HGMMA"):
            waiting += 1
        elif x.op.startswith("WARPGROUP.DEPBAR"):
            left = int(x.operands.split(",")[1], 16)
            count += waiting == 1 and left == 0
            waiting = min(waiting, left)
    return count


def registers(x: Instruction) -> tuple[set[int], set[int]]:
    """Vector registers that an instruction writes, taken to be its first operand, and reads.

    >>> registers(Instruction("LDS.64", "R4, [R8+0x10]")), registers(Instruction("STG.E.128", "[R2.64], R8"))
    (({4, 5}, {8}), (set(), {2, 3, 8, 9, 10, 11}))
    """
    wide = {"64": 2, "128": 4}.get(x.op.rpartition(".")[2], 1)
    first, _, rest = x.operands.partition(",")
    target = re.match(r"R(\d+)$", first.strip())
    writes = {int(target[1]) + i for i in range(wide)} if target else set[int]()
    sources = re.findall(r"\bR(\d+)(\.64)?", rest if target else x.operands)
    size = wide if x.op.startswith("ST") else 1
    return writes, {int(at) + i for at, pair in sources for i in range(2 if pair else size)}
