"""Translation of basic blocks to Python functions on NumPy arrays with one element per thread."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from tritoncp.executor.ptx.instruction import Address, Instruction, Operand, items_of
from tritoncp.executor.ptx.opcodes import UnsupportedInstruction, form_of

NUMPY = {
    **{"u8": "u1", "b8": "u1", "s8": "i1", "u16": "u2", "b16": "u2", "s16": "i2", "f16": "u2", "bf16": "u2"},
    **{"u32": "u4", "b32": "u4", "s32": "i4", "f32": "f4", "f16x2": "u4", "bf16x2": "u4", "tf32": "u4"},
    **{"u64": "u8", "b64": "u8", "s64": "i8", "f64": "f8", "f32x2": "u8", "pred": "b"},
    **{"e4m3x2": "u2", "e5m2x2": "u2"},
}  # PTX type -> NumPy type
OF_WIDTH = {1: "b", 8: "u1", 16: "u2", 32: "u4", 64: "u8"}  # bits of a register -> its type between blocks
SPECIAL = {f"{name}_{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"}
SPECIAL |= {"laneid", "warpid", "nwarpid"}


def bits_of(numpy_type: str) -> int:
    return 1 if numpy_type == "b" else 8 * int(numpy_type[1])


def unsigned(numpy_type: str) -> str:
    return "b" if numpy_type == "b" else "u" + numpy_type[1]


class Names:
    """Names that all blocks of a kernel share: register indices, constants, instructions for reports.

    symbols:   name -> value, known in translation
    addresses: names of variables whose addresses are known when the code is loaded
    """

    def __init__(self, registers: dict[str, int], symbols: dict[str, int], addresses: set[str]) -> None:
        self.widths, self.symbols, self.addresses = registers, symbols, addresses
        self.index = {name: n for n, name in enumerate(registers)}
        self.constants: dict[tuple[str, Any], str] = {}
        self.sites: list[Instruction] = []

    def constant(self, value: Any, numpy_type: str) -> str:
        """Return the name of a constant. value: its bits as an integer, or (symbol, offset)"""
        return self.constants.setdefault((numpy_type, value), f"C{len(self.constants)}")

    def site(self, i: Instruction) -> int:
        """Return an index for an instruction, for reports."""
        if not self.sites or self.sites[-1] is not i:
            self.sites.append(i)
        return len(self.sites) - 1


class BlockWriter:
    """Writer of the lines of one block's function.

    A register has a local variable for each NumPy type in which the block uses it; these are views of one
    array.
    """

    def __init__(self, names: Names, entering: list[str]) -> None:
        self.names = names
        self.lines: list[str] = []
        self.variables: dict[str, dict[str, str]] = {}  # register -> NumPy type -> variable
        self.versions: dict[str, int] = {}
        self.memo: dict[Any, str] = {}
        self.temporaries = 0
        for r in entering:
            t = OF_WIDTH[names.widths[r]]
            self.variables[r] = {t: self.variable(r, t)}

    def emit(self, i: Instruction) -> None:
        """Emit one instruction."""
        entry, match = form_of(i.opcode)
        try:
            entry.emit(self, i, match)
        except UnsupportedInstruction as e:
            raise UnsupportedInstruction(f"line {i.line} of the PTX, {i} {i.operands}: {e}") from None

    def line(self, text: str) -> None:
        self.lines.append(text)

    def temporary(self, expression: str) -> str:
        """Assign an expression to a new variable; return its name."""
        self.temporaries += 1
        self.lines.append(f"t{self.temporaries} = {expression}")
        return f"t{self.temporaries}"

    def once(self, key: tuple[Any, ...], registers: list[Operand], expression: str) -> str:
        """Return a variable with the value of an expression. The variable is reused until one of its
        registers changes."""
        versions = tuple(self.versions.get(r, 0) for r in registers if isinstance(r, str))
        full = (*key, *map(str, registers), *versions)
        if full not in self.memo:
            self.memo[full] = self.temporary(expression)
        return self.memo[full]

    # operands

    def is_register(self, operand: Operand) -> bool:
        return isinstance(operand, str) and operand in self.names.widths

    def variable(self, register: str, t: str) -> str:
        return f"v{self.names.index[register]}_{t}"

    def read(self, operand: Operand, t: str) -> str:
        """Return the source of an operand as an array of a NumPy type, or as a scalar if it is a constant."""
        if not isinstance(operand, str):
            raise UnsupportedInstruction(f"operand {operand}")
        if operand.startswith("!"):
            return f"~{self.array(operand[1:], t)}"
        if operand.startswith("%") and operand not in self.names.widths:
            return self.special(operand, t)
        if operand not in self.names.widths:
            return self.immediate(operand, t)
        width, present = self.names.widths[operand], self.variables[operand]
        if t in present:
            return present[t]
        if (t == "b") != (width == 1):
            raise UnsupportedInstruction(f"{operand} of {width} bits as {t}")
        if bits_of(t) == width:
            name = self.variable(operand, t)
            self.line(f"{name} = {next(iter(present.values()))}.view('{t}')")
            present[t] = name
            return name
        if bits_of(t) > width:
            raise UnsupportedInstruction(f"{operand} of {width} bits as {t}")
        low = f"{self.read(operand, OF_WIDTH[width])}.astype('{unsigned(t)}')"
        return low if unsigned(t) == t else f"{low}.view('{t}')"

    def array(self, operand: Operand, t: str) -> str:
        """Return the source of an operand as an array, also for constants."""
        expression = self.read(operand, t)
        one = not self.is_register(operand) and str(operand)[0] not in "%!"
        return f"T.full({expression})" if one else expression

    def arrays(self, operand: Operand, t: str) -> str:
        """Return the source of an operand's items as a tuple of arrays."""
        return f"({', '.join(self.array(x, t) for x in items_of(operand))},)"

    def special(self, name: str, t: str) -> str:
        attribute = name[1:].replace(".", "_")
        if attribute not in SPECIAL:
            raise UnsupportedInstruction(f"special register {name}")
        return f"T.{attribute}" if t == "u4" else f"T.{attribute}.astype('{t}')"

    def immediate(self, text: str, t: str) -> str:
        if text[:2] in ("0f", "0F") and len(text) == 10:
            return self.float_bits(int(text[2:], 16), "f4", t)
        if text[:2] in ("0d", "0D") and len(text) == 18:
            return self.float_bits(int(text[2:], 16), "f8", t)
        if text in self.names.addresses:
            return self.names.constant((text, 0), t)
        try:
            value = self.names.symbols[text] if text in self.names.symbols else int(text.rstrip("U"), 0)
        except ValueError:
            raise UnsupportedInstruction(f"operand {text}") from None
        return self.constant(value, t)

    def float_bits(self, value: int, source: str, t: str) -> str:
        if bits_of(t) != bits_of(source):
            raise UnsupportedInstruction(f"an immediate {source} as {t}")
        return self.names.constant(value, t)

    def constant(self, value: int, t: str) -> str:
        """Return the name of an integer constant."""
        if t == "b":
            return self.names.constant(int(value != 0), t)
        if t[0] == "f":
            code = {"f4": "f", "f8": "d"}[t]
            value = int.from_bytes(struct.pack("<" + code, value), "little")
        return self.names.constant(value & ((1 << bits_of(t)) - 1), t)

    def address(self, operand: Operand, t: str) -> str:
        """Return the source of a memory operand's address, as an array."""
        assert isinstance(operand, Address), operand
        base, offset = operand.base, operand.offset
        if base in self.names.addresses:
            return f"T.full({self.names.constant((base, offset), t)})"
        if not self.is_register(base):
            value = self.names.symbols[base] if base in self.names.symbols else int(base, 0)
            return f"T.full({self.constant(value + offset, t)})"
        width = OF_WIDTH[self.names.widths[base]]
        expression = self.read(base, width)
        if offset:
            expression = self.once(
                ("address", offset), [base], f"{expression} + {self.constant(offset, width)}"
            )
        return expression if width == t else f"{expression}.astype('{t}')"

    def predicate(self, i: Instruction) -> str:
        """Return the source of an instruction's predicate, or the text "None"."""
        if not i.predicate:
            return "None"
        guard = self.read(i.predicate, "b")
        return self.once(("not",), [i.predicate], f"~{guard}") if i.negated else guard

    def access(self, i: Instruction) -> str:
        """Return the source of the `threads.Access` of the threads that execute an instruction."""
        return f"T.access({self.predicate(i)}, {self.names.site(i)})"

    # results

    def write(self, register: Operand, t: str, expression: str, i: Instruction) -> None:
        """Assign an array to a register (`_`: drop it). A type narrower than the register is extended."""
        if register == "_":
            return
        if not isinstance(register, str) or register not in self.names.widths:
            raise UnsupportedInstruction(f"{register} as a result")
        width = self.names.widths[register]
        if (t == "b") != (width == 1) or bits_of(t) > width:
            raise UnsupportedInstruction(f"a result {t} in {register} of {width} bits")
        if bits_of(t) < width:
            t = f"{'i' if t[0] == 'i' else 'u'}{width // 8}"
            expression = f"({expression}).astype('{t}')"
        name = self.variable(register, t)
        if i.predicate:
            expression = f"np.where({self.predicate(i)}, {expression}, {self.read(register, t)})"
        self.line(f"{name} = {expression}")
        self.variables[register] = {t: name}
        self.versions[register] = self.versions.get(register, 0) + 1

    def write_each(
        self, registers: Sequence[Operand], types: list[str], expression: str, i: Instruction
    ) -> None:
        """Assign a list of arrays to registers; the last type also holds for all further registers."""
        out = self.temporary(expression)
        for n, (register, t) in enumerate(zip(registers, types + types[-1:] * len(registers))):
            self.write(register, t, f"{out}[{n}]", i)
