"""Moves, comparisons, and sums with a carry."""

from __future__ import annotations

import re

from tritoncp.executor.forms.formulas import BITS, INTEGERS, source
from tritoncp.executor.memory.regions import LOCAL, PARAMETER, SHARED
from tritoncp.executor.ptx.block_writer import NUMPY, BlockWriter, bits_of, unsigned
from tritoncp.executor.ptx.instruction import Instruction, Operand, Vector
from tritoncp.executor.ptx.opcodes import CARRY, form


@form("mov.<type:pred|b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64>")
def move(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    d, a = i.operands
    t = NUMPY[m["type"]]
    if isinstance(d, Vector):
        unpack(w, i, d, t)
    elif isinstance(a, Vector):
        pack(w, i, a, t)
    else:
        if w.is_register(a) and t != "b":
            assert isinstance(a, str)
            t = next((x for x in (t, *w.variables[a]) if x in w.variables[a] and bits_of(x) == bits_of(t)), t)
        w.write(d, t, w.array(a, t), i)


def unpack(w: BlockWriter, i: Instruction, d: Vector, t: str) -> None:
    whole, bits = f"u{bits_of(t) // 8}", bits_of(t) // len(d.items)
    source = w.array(i.operands[1], whole)
    for j, register in enumerate(d.items):
        part = f"({source} >> {w.constant(j * bits, whole)}).astype('u{bits // 8}')"
        w.write(register, f"u{bits // 8}", part, i)


def pack(w: BlockWriter, i: Instruction, a: Vector, t: str) -> None:
    whole, bits = f"u{bits_of(t) // 8}", bits_of(t) // len(a.items)
    parts = [
        f"({w.array(x, f'u{bits // 8}')}.astype('{whole}') << {w.constant(j * bits, whole)})"
        for j, x in enumerate(a.items)
    ]
    w.write(i.operands[0], whole, " | ".join(parts), i)


SPACE_BITS = {"shared": SHARED, "local": LOCAL, "param": PARAMETER, "global": 0}


@form("cvta.<space:global|shared|local|param>.u64", "cvta.to.<space:global|shared|local|param>.u64")
def convert_address(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    """To a generic address, or from one. The spaces are told apart by high bits."""
    bits = SPACE_BITS[m["space"]]
    a = w.array(i.operands[1], "u8")
    if bits and "to" in i.parts:
        a = f"{a} & {w.constant(~bits, 'u8')}"
    elif bits:
        a = f"{a} | {w.constant(bits, 'u8')}"
    w.write(i.operands[0], "u8", a, i)


def with_carry(w: BlockWriter, i: Instruction, operation: str, a: str, b: str, t: str) -> None:
    """Write a sum or difference, and the carry where the opcode says so."""
    carry = w.read(CARRY, "b") if i.parts[0].endswith("c") else "T.full(np.False_)"
    out = w.temporary(f"I.{operation}({a}, {b}, {carry})")
    w.write(i.operands[0], t, f"{out}[0]", i)
    if "cc" in i.parts:
        w.write(CARRY, "b", f"{out}[1]", i)


def carried(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    t = unsigned(NUMPY[m["type"]])
    operation = "add_carry" if i.parts[0].startswith("add") else "subtract_borrow"
    with_carry(w, i, operation, w.array(i.operands[1], t), w.array(i.operands[2], t), t)


def carried_product(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    t = NUMPY[m["type"]]
    a, b = w.array(i.operands[1], t), w.read(i.operands[2], t)
    product = f"I.multiply_high({a}, {b})" if m["half"] == "hi" else f"{a} * {b}"
    t = unsigned(t)
    with_carry(w, i, "add_carry", f"({product}).view('{t}')", w.array(i.operands[3], t), t)


CARRIED = "<type:u32|s32|b32|u64|s64|b64>"
form(f"add.cc.{CARRIED}", f"sub.cc.{CARRIED}", carry="writes")(carried)
form(f"addc.cc.{CARRIED}", f"subc.cc.{CARRIED}", carry="both")(carried)
form(f"addc.{CARRIED}", f"subc.{CARRIED}", carry="reads")(carried)
form("mad.<half:lo|hi>.cc.<type:u32|s32|u64|s64>", carry="writes")(carried_product)
form("madc.<half:lo|hi>.cc.<type:u32|s32|u64|s64>", carry="both")(carried_product)
form("madc.<half:lo|hi>.<type:u32|s32|u64|s64>", carry="reads")(carried_product)

JOINS = {"and": "&", "or": "|", "xor": "^"}
ORDERED = {"eq": "==", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
OF_INTEGERS = {**ORDERED, "ne": "!=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
OF_FLOATS = {
    **{name: f"{{x}} {sign} {{y}}" for name, sign in ORDERED.items()},
    "ne": "({x} < {y}) | ({x} > {y})",
    "equ": "~(({x} < {y}) | ({x} > {y}))",
    "neu": "{x} != {y}",
    "ltu": "~({x} >= {y})",
    "leu": "~({x} > {y})",
    "gtu": "~({x} <= {y})",
    "geu": "~({x} < {y})",
    "num": "~(np.isnan({x}) | np.isnan({y}))",
    "nan": "np.isnan({x}) | np.isnan({y})",
}  # NaN is in no relation but those that end in u


def compared(w: BlockWriter, i: Instruction, a: Operand, b: Operand, m: re.Match[str]) -> str:
    """Whether two operands are in the relation of an opcode."""
    t = m["type"]
    if t in ("f16", "bf16"):
        x, y = (f"F.widen('{t}', {w.array(v, 'u2')})" for v in (a, b))
    else:
        x, y = source(w, i, a, t), source(w, i, b, t, scalar=True)
    return OF_FLOATS[m["cmp"]].format(x=x, y=y) if "f" in t else f"{x} {OF_INTEGERS[m['cmp']]} {y}"


JOINED = "[.<bool:and|or|xor>]"


@form(f"setp.<cmp:{'|'.join(OF_INTEGERS)}>{JOINED}.<type:{BITS}|{INTEGERS}>")
@form(f"setp.<cmp:{'|'.join(OF_FLOATS)}>{JOINED}[.ftz].<type:f32>")
@form(f"setp.<cmp:{'|'.join(OF_FLOATS)}>{JOINED}.<type:f64|f16|bf16>")
def compare(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    d, a, b, *more = i.operands
    out = w.temporary(compared(w, i, a, b, m))
    join = f" {JOINS[m['bool']]} {w.condition(more[0])}" if more else ""
    for register, value in zip(d.items if isinstance(d, Vector) else (d,), (out, f"~{out}")):
        w.write(register, "b", f"{value}{join}", i)
