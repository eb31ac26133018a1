"""PTX text to a kernel of basic blocks. Calls of functions are inlined: Triton's are never recursive."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tritoncp.executor.ptx.instruction import (
    WIDTHS,
    Address,
    Barrier,
    Block,
    Branch,
    FallThrough,
    Instruction,
    Jump,
    Kernel,
    Operand,
    Parameter,
    Return,
    Switch,
    Vector,
)


class PtxSyntaxError(SyntaxError):
    """A statement of PTX that the executor does not know."""


LABEL = re.compile(r"([\w$.%]+):(?!:)")
LINE_DIRECTIVE = re.compile(r"\.(loc|file|pragma)\s")
STATEMENT = re.compile(r"(?:@(!?)([%\w$]+)\s+)?([\w.:]+)\s*(.*)$", re.S)
FUNCTION = re.compile(r"\.(entry|func)\s*(?:\(([^)]*)\)\s*)?([\w$]+)\s*(?:\(([^)]*)\))?([^;{]*)([;{])", re.S)
SHARED = re.compile(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d*)\]")
CONSTANT = re.compile(
    r"\.(?:global|const)\s+(?:\.attribute\([^)]*\)\s+)?\.align\s+(\d+)\s+\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?"
    r"(?:\s*=\s*(?:\{([^}]*)\}|([^;]*)))?;"
)
LOCAL = re.compile(r"\.local\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d+)\]")
ADDRESS = re.compile(r"([%\w$.]+)\s*(?:\+\s*(-?\w+))?$")
FORMAL = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(?:\.ptr\s.*?)?([\w$]+)(?:\[(\d+)\])?$", re.S)


def parse_ptx(text: str) -> Kernel:
    """Parse the module's only entry."""
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.S)
    lines = [line.split("//")[0] for line in text.split("\n")]
    debug = (n for n, line in enumerate(lines) if line.lstrip().startswith(".section"))
    text = "\n".join(lines[: next(debug, len(lines))])
    files = {int(m[1]): m[2] for m in re.finditer(r'\.file\s+(\d+)\s+"([^"]*)"', "\n".join(lines))}
    functions = {f.name: f for f in functions_of(text)}
    entries = [f for f in functions.values() if f.kind == "entry"]
    if len(entries) != 1:
        raise PtxSyntaxError(f"a module with {len(entries)} entries, the executor runs modules with one")
    entry = entries[0]
    body = Body(text, functions, files)
    body.read(entry, prefix="")
    parameters = {name: Parameter(n, kind, size) for n, (name, kind, size) in enumerate(entry.formals)}
    threads = re.search(r"\.reqntid\s+(\d+)", entry.directives)
    head = text[: min(f.start for f in functions.values())]
    return Kernel(
        entry.name,
        parameters,
        body.registers,
        blocks_of(body.statements, body.tables),
        shared_of(head),
        constants_of(head),
        body.local,
        int(threads[1]) if threads else 0,
    )


@dataclass
class Function:
    """A function's text: where its body lies, its formals (name, type, bytes) and results."""

    kind: str
    name: str
    start: int
    body: int
    formals: list[tuple[str, str, int]]
    results: list[tuple[str, str, int]]
    directives: str


def functions_of(text: str) -> list[Function]:
    """List the functions of a module that have a body."""
    functions = []
    for m in FUNCTION.finditer(text):
        kind, results, name, formals, directives, end = m.groups()
        if end == "{":
            functions.append(
                Function(kind, name, m.start(), m.end(), formals_of(formals), formals_of(results), directives)
            )
    return functions


def formals_of(text: str | None) -> list[tuple[str, str, int]]:
    formals = []
    for part in split_operands(text or ""):
        m = FORMAL.match(part)
        if not m:
            raise PtxSyntaxError(part)
        formals.append((m[2], m[1], WIDTHS[m[1]] // 8 * int(m[3] or 1)))
    return formals


def shared_of(head: str) -> dict[str, tuple[int, int]]:
    symbols, end = {}, 0
    for m in SHARED.finditer(head):
        start = -(-end // int(m[1])) * int(m[1])
        symbols[m[2]] = start, int(m[3] or 0)
        end = start + int(m[3] or 0)
    return symbols


def constants_of(head: str) -> dict[str, tuple[int, bytes]]:
    symbols = {}
    for m in CONSTANT.finditer(head):
        width = WIDTHS[m[2]] // 8
        numbers = [int(x, 0) for x in (m[5] or m[6] or "").replace(" ", "").split(",") if x]
        data = b"".join((n & ((1 << 8 * width) - 1)).to_bytes(width, "little") for n in numbers)
        symbols[m[3]] = int(m[1]), data + bytes(int(m[4] or 1) * width - len(data))
    return symbols


def split_operands(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for n, c in enumerate(text):
        depth += (c in "{[(") - (c in "}])")
        if c == "," and not depth:
            parts.append(text[start:n].strip())
            start = n + 1
    if text[start:].strip():
        parts.append(text[start:].strip())
    return parts


class Label(str):
    """A label between instructions."""


class Body:
    """The statements of an entry and of the functions that it calls, each call with names of its own."""

    def __init__(self, text: str, functions: dict[str, Function], files: dict[int, str]) -> None:
        self.text, self.functions, self.files = text, functions, files
        self.registers: dict[str, int] = {}
        self.local: dict[str, tuple[int, int]] = {}
        self.statements: list[Label | Instruction] = []
        self.tables: dict[str, list[str]] = {}
        self.scopes: list[dict[str, str]] = []
        self.labels: list[dict[str, str]] = []
        self.names = 0  # given so far
        self.calls: list[str] = []
        self.source = ""
        self.used_bytes: int | None = None

    def read(self, function: Function, prefix: str, end: Label | None = None) -> None:
        """Append a function's statements; `ret` jumps to `end` where there is one."""
        if function.name in self.calls:
            raise PtxSyntaxError(f"{function.name} calls itself")
        self.calls.append(function.name)
        above, self.scopes, self.labels = (self.scopes, self.labels), [{}], [{}]
        if prefix:
            for name, kind, _ in (*function.formals, *function.results):
                self.declare(name, WIDTHS[kind])
        position, line = function.body, self.text.count("\n", 0, function.body) + 1
        while self.scopes:
            position, line = self.step(position, line, end)
        self.scopes, self.labels = above
        self.calls.pop()

    def step(self, position: int, line: int, end: Label | None) -> tuple[int, int]:
        """Read one statement, label, brace or space."""
        c = self.text[position]
        if c.isspace() or c == ";":
            return position + 1, line + (c == "\n")
        if c == "{":
            self.scopes.append({})
            self.labels.append({})
            return position + 1, line
        if c == "}":
            self.scopes.pop()
            self.labels.pop()
            return position + 1, line
        if m := LABEL.match(self.text, position):
            self.statements.append(Label(self.label(m[1])))
            return m.end(), line
        if LINE_DIRECTIVE.match(self.text, position):
            stop = self.text.find("\n", position)
            self.directive(self.text[position:stop])
            return stop, line
        stop = self.text.index(";", position)
        statement = self.text[position:stop]
        self.statement(statement.strip(), line, end)
        return stop + 1, line + statement.count("\n")

    def directive(self, text: str) -> None:
        if m := re.search(r"used_bytes_mask\s+(\w+)", text):
            self.used_bytes = int(m[1], 0)
        elif text.startswith(".loc"):
            fields = text.replace(",", " ").split()
            self.source = f"{self.files.get(int(fields[1]), fields[1])}:{fields[2]}"

    def declare(self, name: str, width: int) -> None:
        """Give a register of the innermost scope a name of its own."""
        if len(self.calls) == 1 and len(self.scopes) == 1:
            unique = name
        else:
            self.names += 1
            unique = f"%u{self.names}"
        self.scopes[-1][name] = unique
        self.registers[unique] = width

    def label(self, name: str) -> str:
        """The name of a label for the innermost scope that has one, known or still to come."""
        for labels in reversed(self.labels):
            if name in labels:
                return labels[name]
        depth = 0 if name.startswith("$") else len(self.labels) - 1
        self.names += 1
        self.labels[depth][name] = f"{name}@{self.names}"
        return self.labels[depth][name]

    def resolve(self, name: str) -> str:
        if name.startswith("!"):
            return "!" + self.resolve(name[1:])
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return name

    def operand(self, text: str) -> Operand:
        text = text.strip()
        if text.startswith("{"):
            return Vector(tuple(self.operand(part) for part in split_operands(text[1:-1])))
        if text.startswith("["):
            inner = split_operands(text[1:-1])
            m = ADDRESS.match(inner[0])
            if not m or len(inner) > 2:
                raise PtxSyntaxError(text)
            coordinates = self.operand(inner[1]) if len(inner) == 2 else None
            if coordinates is not None and not isinstance(coordinates, Vector):
                raise PtxSyntaxError(text)
            return Address(self.resolve(m[1]), int(m[2], 0) if m[2] else 0, coordinates)
        if "|" in text:
            return Vector(tuple(self.resolve(part.strip()) for part in text.split("|")))
        return self.resolve(text)

    def statement(self, text: str, line: int, end: Label | None) -> None:
        if text.startswith((".reg", ".param")):
            self.declare_registers(text)
        elif text.startswith(".local"):
            self.declare_local(text)
        elif text.startswith(".branchtargets"):
            self.tables[str(self.statements[-1])] = [
                self.label(x.strip()) for x in text.removeprefix(".branchtargets").split(",")
            ]
        elif text.startswith("."):
            raise PtxSyntaxError(f"line {line}: {text}")
        else:
            self.instruction(text, line, end)

    def declare_registers(self, text: str) -> None:
        m = re.match(r"\.(?:reg|param)\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(.*)$", text, re.S)
        if not m or m[1] not in WIDTHS:
            raise PtxSyntaxError(text)
        for name in (x.strip() for x in m[2].split(",")):
            several = re.match(r"([%\w$]+)<(\d+)>$", name)
            if several:
                for n in range(int(several[2])):
                    self.declare(f"{several[1]}{n}", WIDTHS[m[1]])
            elif "[" in name:
                raise PtxSyntaxError(f"a parameter of a call that is a structure: {text}")
            else:
                self.declare(name, WIDTHS[m[1]])

    def declare_local(self, text: str) -> None:
        m = LOCAL.match(text)
        if not m:
            raise PtxSyntaxError(text)
        start = max((-(-(a + n) // 16) * 16 for a, n in self.local.values()), default=0)
        self.names += 1
        unique = f"{m[2]}@{self.names}"
        self.scopes[-1][m[2]] = unique
        self.local[unique] = start, int(m[3])

    def instruction(self, text: str, line: int, end: Label | None) -> None:
        m = STATEMENT.match(text)
        if not m:
            raise PtxSyntaxError(f"line {line}: {text}")
        guard = self.resolve(m[2]) if m[2] else None
        opcode, negated = m[3], bool(m[1])
        operation = opcode.split(".")[0]
        if operation == "call":
            self.call(m[4], line, guard)
            return
        if operation in ("bra", "brx"):
            parts = split_operands(m[4])
            operands: list[Operand] = [*map(self.resolve, parts[:-1]), self.label(parts[-1])]
        else:
            operands = [self.operand(part) for part in split_operands(m[4])]
        if operation == "ret" and end is not None:
            opcode, operands = "bra", [str(end)]
        new = Instruction(opcode, operands, guard, negated, line, self.source, self.used_bytes)
        self.used_bytes = None
        self.statements.append(self.parameter_move(new))

    def parameter_move(self, new: Instruction) -> Instruction:
        """A load or store of a parameter of an inlined call is a move of a register."""
        if not new.opcode.startswith(("ld.param", "st.param")):
            return new
        at = next(x for x in new.operands if isinstance(x, Address))
        if at.base not in self.registers:
            return new
        width = WIDTHS[new.parts[-1]]
        if at.offset or len(new.parts) != 3 or self.registers[at.base] != width:
            raise PtxSyntaxError(f"line {new.line}: {new.opcode} of a part of a parameter")
        new.opcode = f"mov.b{width}"
        new.operands = [at.base if x is at else x for x in new.operands]
        return new

    def call(self, text: str, line: int, guard: str | None) -> None:
        parts = split_operands(text)
        results = split_operands(parts.pop(0)[1:-1]) if parts[0].startswith("(") else []
        name = parts.pop(0)
        actuals = split_operands(parts.pop(0)[1:-1]) if parts else []
        function = self.functions.get(name)
        if guard or function is None or parts:
            raise PtxSyntaxError(f"line {line}: call {text}, of a function that the module does not define")
        outside = [self.resolve(x) for x in (*actuals, *results)]
        self.names += 1
        end = Label(f"end@{self.names}")
        first, before = self.names + 1, len(self.statements)
        formals = (*function.formals, *function.results)  # declared first, in this order
        inside = [f"%u{first + n}" for n in range(len(formals))]
        source = self.source
        self.read(function, f"{name}@{self.names}", end)
        moves = [
            Instruction(f"mov.b{WIDTHS[kind]}", [a, b], None, False, line, source)
            for (_, kind, _), a, b in zip(formals, inside, outside, strict=True)
        ]
        taken = len(function.formals)
        self.statements[before:before] = moves[:taken]
        self.source = source
        self.statements.append(end)
        for move in moves[taken:]:
            move.operands.reverse()
            self.statements.append(move)


def blocks_of(statements: list[Label | Instruction], tables: dict[str, list[str]]) -> list[Block]:
    """Cut statements into blocks at branches, barriers and the labels that branches name."""
    targets = {str(s.operands[0]) for s in statements if isinstance(s, Instruction) and s.parts[0] == "bra"}
    targets |= {name for table in tables.values() for name in table}
    blocks, numbers = [Block(0)], {}
    for s in statements:
        block = blocks[-1]
        if isinstance(s, Label):
            if s in targets:
                if block.size:
                    block = Block(len(blocks))
                    blocks.append(block)
                numbers[str(s)] = block.number
            continue
        block.size += 1
        if ends_block(s):
            block.end = s  # type: ignore[assignment]  # resolved below, when every label has a number
            blocks.append(Block(len(blocks)))
        else:
            block.instructions.append(s)
    for block in blocks:
        if isinstance(block.end, Instruction):
            block.end = terminator(block.end, numbers, tables)
    if isinstance(blocks[-1].end, FallThrough):
        blocks[-1].end = Return()
    return blocks


def ends_block(i: Instruction) -> bool:
    return i.parts[0] in ("bra", "brx", "ret", "exit") or i.opcode in (
        "bar.sync",
        "barrier.sync",
        "barrier.sync.aligned",
        "bar.cta.sync",
        "barrier.cta.sync",
        "barrier.cta.sync.aligned",
    )


def terminator(
    i: Instruction, numbers: dict[str, int], tables: dict[str, list[str]]
) -> Jump | Branch | Switch | Return | Barrier:
    if i.opcode in ("bra", "bra.uni"):
        target = numbers[str(i.operands[0])]
        return Branch(i.predicate, i.negated, target) if i.predicate else Jump(target)
    if i.opcode in ("ret", "exit", "ret.uni"):
        return Return(i.predicate, i.negated)
    if i.predicate:
        raise PtxSyntaxError(f"line {i.line}: {i}")
    if i.opcode in ("brx.idx", "brx.idx.uni"):
        return Switch(str(i.operands[0]), tuple(numbers[x] for x in tables[str(i.operands[1])]))
    if i.parts[0] in ("bar", "barrier"):
        number, *count = map(str, i.operands)
        return Barrier(number, count[0] if count else None, i)
    raise PtxSyntaxError(f"line {i.line}: {i}")
