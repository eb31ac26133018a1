"""Parser of PTX text, which makes a kernel of basic blocks. Function calls are inlined; Triton emits no
recursion."""

from __future__ import annotations

import re
from typing import NamedTuple

from tritoncp.executor.ptx.instruction import (
    WIDTHS,
    Address,
    BasicBlock,
    Instruction,
    Kernel,
    Operand,
    Vector,
)


class PtxSyntaxError(SyntaxError):
    """Raised for a PTX statement that the executor does not support."""


TOKEN = re.compile(
    r"(?P<space>[\s;]+)|(?P<open>\{)|(?P<close>\})|(?P<label>[\w$.%]+):(?!:)"
    r"|(?P<directive>\.(?:loc|file|pragma)\s[^\n]*)|(?P<statement>[^;]*);"
)
STATEMENT = re.compile(r"(?:@(!?)([%\w$]+)\s+)?([\w.:]+)\s*(.*)$", re.S)
FUNCTION = re.compile(r"\.(entry|func)\s*(?:\(([^)]*)\)\s*)?([\w$]+)\s*(?:\(([^)]*)\))?([^;{]*)([;{])", re.S)
SHARED = re.compile(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d*)\]")
CONSTANT = re.compile(
    r"\.(?:global|const)\s+(?:\.attribute\([^)]*\)\s+)?\.align\s+(\d+)\s+\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?"
    r"(?:\s*=\s*(?:\{([^}]*)\}|([^;]*)))?;"
)
LOCAL = re.compile(r"\.local\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d+)\]")
REGISTERS = re.compile(r"\.(?:reg|param)\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(.*)$", re.S)
ADDRESS = re.compile(r"([%\w$.]+)\s*(?:\+\s*(-?\w+))?$")
STRUCTURE = "structure"  # type of a parameter or result of several bytes
FORMAL = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(?:\.ptr\s.*?)?([\w$]+)(?:\[(\d+)\])?$", re.S)


def parse_ptx(text: str) -> Kernel:
    """Parse the only entry function of a PTX module."""
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.S)
    lines = [line.split("//")[0] for line in text.split("\n")]
    debug = (n for n, line in enumerate(lines) if line.lstrip().startswith(".section"))
    text = "\n".join(lines[: next(debug, len(lines))])
    files = {int(m[1]): m[2] for m in re.finditer(r'\.file\s+(\d+)\s+"([^"]*)"', "\n".join(lines))}
    functions = {m[3]: PtxFunction.of(m) for m in FUNCTION.finditer(text) if m[6] == "{"}
    entries = [f for f in functions.values() if f.kind == "entry"]
    if len(entries) != 1:
        raise PtxSyntaxError(f"a module with {len(entries)} entries, the executor runs modules with one")
    entry = entries[0]
    body = Body(text, functions, files)
    body.read(entry)
    threads = re.search(r"\.reqntid\s+(\d+)", entry.directives)
    head = text[: min(f.start for f in functions.values())]
    return Kernel(
        entry.name,
        [name for name, _ in entry.formals],
        body.registers,
        blocks_of(body.statements, body.tables),
        shared_of(head),
        constants_of(head),
        body.local,
        int(threads[1]) if threads else 0,
    )


class PtxFunction(NamedTuple):
    """A function's text, and its parameters and results as (name, type), where the type may be
    `STRUCTURE`."""

    kind: str
    name: str
    start: int
    body: int
    formals: list[tuple[str, str]]
    results: list[tuple[str, str]]
    directives: str

    @classmethod
    def of(cls, m: re.Match[str]) -> PtxFunction:
        kind, results, name, formals, directives, _ = m.groups()
        return cls(kind, name, m.start(), m.end(), formals_of(formals), formals_of(results), directives)


def formals_of(text: str | None) -> list[tuple[str, str]]:
    formals = []
    for part in split_operands(text or ""):
        m = FORMAL.match(part)
        if not m:
            raise PtxSyntaxError(part)
        formals.append((m[2], STRUCTURE if m[3] else m[1]))
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
    """Split a text at commas outside of brackets."""
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
    """The statements of an entry function with inlined calls; the names of each call are made unique.

    scopes:     for each open brace, name of a register, label or local variable -> unique name
    structures: for each structure that a call returns, offset of a part in bytes -> its register
    """

    def __init__(self, text: str, functions: dict[str, PtxFunction], files: dict[int, str]) -> None:
        self.text, self.functions, self.files = text, functions, files
        self.registers: dict[str, int] = {}
        self.structures: dict[str, dict[int, str]] = {}
        self.local: dict[str, tuple[int, int]] = {}
        self.statements: list[Label | Instruction] = []
        self.tables: dict[str, list[str]] = {}
        self.scopes: list[dict[str, str]] = []
        self.names = 0  # number of unique names so far
        self.calls: list[str] = []
        self.source = ""
        self.used_bytes: int | None = None

    def read(self, function: PtxFunction, end: Label | None = None) -> None:
        """Append a function's statements. end: label to which `ret` jumps, in an inlined call"""
        if function.name in self.calls:
            raise PtxSyntaxError(f"{function.name} calls itself")
        self.calls.append(function.name)
        above, self.scopes = self.scopes, [{}]
        if end is not None:
            for name, kind in (*function.formals, *function.results):
                self.declare(name, kind)
        line = self.text.count("\n", 0, function.body) + 1
        for m in TOKEN.finditer(self.text, function.body):
            self.step(m, line, end)
            line += m[0].count("\n")
            if not self.scopes:
                break
        else:
            raise PtxSyntaxError(f"{function.name} does not end")
        self.scopes = above
        self.calls.pop()

    def step(self, m: re.Match[str], line: int, end: Label | None) -> None:
        match m.lastgroup:
            case "open":
                self.scopes.append({})
            case "close":
                self.scopes.pop()
            case "label":
                self.statements.append(Label(self.label(m["label"])))
            case "directive":
                self.directive(m[0])
            case "statement":
                self.statement(m["statement"].strip(), line, end)

    def directive(self, text: str) -> None:
        if m := re.search(r"used_bytes_mask\s+(\w+)", text):
            self.used_bytes = int(m[1], 0)
        elif text.startswith(".loc"):
            fields = text.replace(",", " ").split()
            self.source = f"{self.files.get(int(fields[1]), fields[1])}:{fields[2]}"

    def unique(self, name: str) -> str:
        self.names += 1
        return f"{name}@{self.names}"

    def declare(self, name: str, kind: str) -> None:
        """Declare a register or a structure in the innermost scope, under a unique name."""
        outermost = len(self.calls) == 1 and len(self.scopes) == 1
        self.scopes[-1][name] = unique = name if outermost else self.unique("%u")
        if kind == STRUCTURE:
            self.structures[unique] = {}
        else:
            self.registers[unique] = WIDTHS[kind]

    def part_of(self, structure: str, offset: int, width: int) -> str:
        """Return the register of a part of a structure, which is made at its first use."""
        parts = self.structures[structure]
        if offset not in parts:
            parts[offset] = self.unique("%u")
            self.registers[parts[offset]] = width
        return parts[offset]

    def resolve(self, name: str) -> str:
        if name.startswith("!"):
            return "!" + self.resolve(name[1:])
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), name)

    def label(self, name: str) -> str:
        """Return the unique name of a label in the innermost scope that defines it, before or after this
        place."""
        if self.resolve(name) == name:
            self.scopes[0 if name.startswith("$") else -1][name] = self.unique(name)
        return self.resolve(name)

    def operand(self, text: str) -> Operand:
        text = text.strip()
        if text.startswith("{"):
            return Vector(tuple(map(self.operand, split_operands(text[1:-1]))))
        if text.startswith("["):
            first, *coordinates = split_operands(text[1:-1])
            m, vector = ADDRESS.match(first), [self.operand(x) for x in coordinates]
            if not m or len(vector) > 1 or not all(isinstance(x, Vector) for x in vector):
                raise PtxSyntaxError(text)
            return Address(self.resolve(m[1]), int(m[2] or "0", 0), *vector)  # type: ignore[arg-type]
        if "|" in text:
            return Vector(tuple(self.resolve(part.strip()) for part in text.split("|")))
        return self.resolve(text)

    def statement(self, text: str, line: int, end: Label | None) -> None:
        if text.startswith((".reg", ".param")):
            self.declare_registers(text)
        elif m := LOCAL.match(text):
            start = max((-(-(a + n) // 16) * 16 for a, n in self.local.values()), default=0)
            self.scopes[-1][m[2]] = self.unique(m[2])
            self.local[self.resolve(m[2])] = start, int(m[3])
        elif text.startswith(".branchtargets"):
            names = text.removeprefix(".branchtargets").split(",")
            self.tables[str(self.statements[-1])] = [self.label(x.strip()) for x in names]
        elif (m := STATEMENT.match(text)) and not text.startswith("."):
            self.instruction(m, line, end)
        else:
            raise PtxSyntaxError(f"line {line}: {text}")

    def declare_registers(self, text: str) -> None:
        m = REGISTERS.match(text)
        if not m or m[1] not in WIDTHS:
            raise PtxSyntaxError(text)
        for name in (x.strip() for x in m[2].split(",")):
            several = re.match(r"([%\w$]+)<(\d+)>$", name)
            if "[" in name:
                self.declare(name.split("[")[0], STRUCTURE)
                continue
            for x in [f"{several[1]}{n}" for n in range(int(several[2]))] if several else [name]:
                self.declare(x, m[1])

    def instruction(self, m: re.Match[str], line: int, end: Label | None) -> None:
        negated, guard, opcode, rest = m.groups()
        guard, operation = self.resolve(guard) if guard else None, opcode.split(".")[0]
        if operation == "call":
            self.call(rest, line, guard)
            return
        operands: list[Operand] = [self.operand(part) for part in split_operands(rest)]
        if operation in ("bra", "brx"):
            operands[-1] = self.label(split_operands(rest)[-1])
        if operation == "ret" and end is not None:
            opcode, operands = "bra", [str(end)]
        new = Instruction(opcode, operands, guard, bool(negated), line, self.source, self.used_bytes)
        self.used_bytes = None
        self.statements.append(self.parameter_move(new))

    def parameter_move(self, new: Instruction) -> Instruction:
        """Replace a load or store of an inlined call's parameter by a move of a register."""
        if not new.opcode.startswith(("ld.param", "st.param")):
            return new
        at = next(x for x in new.operands if isinstance(x, Address))
        width, register, offset = WIDTHS[new.parts[-1]], at.base, at.offset
        if at.base in self.structures:
            register, offset = self.part_of(at.base, at.offset, width), 0
        elif at.base not in self.registers:
            return new
        if offset or len(new.parts) != 3 or self.registers[register] != width:
            raise PtxSyntaxError(f"line {new.line}: {new.opcode} of a part of a parameter")
        new.opcode = f"mov.b{width}"
        new.operands = [register if x is at else x for x in new.operands]
        return new

    def call(self, text: str, line: int, guard: str | None) -> None:
        parts = split_operands(text)
        results = split_operands(parts.pop(0)[1:-1]) if parts[0].startswith("(") else []
        name = parts.pop(0)
        actuals = split_operands(parts.pop(0)[1:-1]) if parts else []
        function = self.functions.get(name)
        if guard or function is None or parts:
            raise PtxSyntaxError(f"line {line}: call {text}, of a function that the module does not define")
        end, source, before = Label(self.unique("end")), self.source, len(self.statements)
        inside = [f"%u@{self.names + 1 + n}" for n in range(len(actuals) + len(results))]  # to declare first
        outside = list(map(self.resolve, (*actuals, *results)))
        if not self.structures.keys().isdisjoint(outside[: len(actuals)]):
            raise PtxSyntaxError(f"line {line}: call {text}, with a structure as an argument")
        self.read(function, end)
        self.source = source

        def move(to: str, of: str) -> Instruction:
            return Instruction(f"mov.b{self.registers[to]}", [to, of], None, False, line, source)

        pairs = list(zip(inside, outside, strict=True))
        self.statements[before:before] = [move(formal, actual) for formal, actual in pairs[: len(actuals)]]
        self.statements.append(end)
        for formal, actual in pairs[len(actuals) :]:
            for offset, register in self.structures.get(formal, {0: formal}).items():
                width = self.registers[register]
                to = self.part_of(actual, offset, width) if actual in self.structures else actual
                self.statements.append(move(to, register))


def blocks_of(statements: list[Label | Instruction], tables: dict[str, list[str]]) -> list[BasicBlock]:
    """Split statements into basic blocks: after branches and barriers, and at labels that branches use."""
    targets = {str(s.operands[0]) for s in statements if isinstance(s, Instruction) and s.parts[0] == "bra"}
    targets |= {name for table in tables.values() for name in table}
    blocks, numbers = [BasicBlock(0)], {}
    for s in [*statements, Instruction("ret", [])]:
        entry = isinstance(s, Label) and s in targets
        if blocks[-1].end or (entry and blocks[-1].instructions):
            blocks.append(BasicBlock(len(blocks)))
        if isinstance(s, Instruction):
            blocks[-1].instructions.append(s)
        elif entry:
            numbers[str(s)] = blocks[-1].number
    for block in blocks:
        if block.end and block.end.parts[0] in ("bra", "brx"):
            label = str(block.end.operands[-1])
            block.targets = tuple(numbers[name] for name in tables.get(label, [label]))
    return blocks
