"""Integer arithmetic."""

from __future__ import annotations

import re

from tritoncp.executor.ptx.block_writer import NUMPY, BlockWriter, unsigned
from tritoncp.executor.ptx.instruction import Instruction, Operand
from tritoncp.executor.ptx.opcodes import CARRY, form

SIGNS = {"add": "+", "sub": "-"}
INTEGERS = "u16|u32|u64|s16|s32|s64"


@form(f"add.<type:{INTEGERS}>", f"sub.<type:{INTEGERS}>", f"mul.lo.<type:{INTEGERS}>")
def binary(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    d, a, b = i.operands
    t = unsigned(NUMPY[m["type"]])
    w.write(d, t, f"{w.array(a, t)} {SIGNS.get(i.parts[0], '*')} {w.read(b, t)}", i)


@form("add.sat.s32", "sub.sat.s32")
def saturating(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    d, a, b = i.operands
    wide = f"{w.array(a, 'i4')}.astype('i8') {SIGNS[i.parts[0]]} {w.array(b, 'i4')}"
    w.write(d, "i4", f"np.clip({wide}, -2147483648, 2147483647).astype('i4')", i)


@form(f"mul.hi.<type:{INTEGERS}>")
def multiply_high(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    d, a, b = i.operands
    t = NUMPY[m["type"]]
    w.write(d, t, f"I.multiply_high({w.array(a, t)}, {w.read(b, t)})", i)


def wide_product(w: BlockWriter, a: Operand, b: Operand, t: str) -> tuple[str, str]:
    wide = f"{t[0]}{2 * int(t[1])}"
    return f"{w.array(a, t)}.astype('{wide}') * {w.read(b, t)}.astype('{wide}')", wide


@form("mul.wide.<type:u16|u32|s16|s32>", "mad.wide.<type:u16|u32|s16|s32>")
def multiply_wide(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    product, wide = wide_product(w, i.operands[1], i.operands[2], NUMPY[m["type"]])
    if i.parts[0] == "mad":
        product += f" + {w.read(i.operands[3], wide)}"
    w.write(i.operands[0], wide, product, i)


@form(f"mad.<half:lo|hi>.<type:{INTEGERS}>")
def multiply_add(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    d, a, b, c = i.operands
    t = NUMPY[m["type"]]
    if m["half"] == "hi":
        product = f"I.multiply_high({w.array(a, t)}, {w.read(b, t)})"
    else:
        t = unsigned(t)
        product = f"{w.array(a, t)} * {w.read(b, t)}"
    w.write(d, t, f"{product} + {w.read(c, t)}", i)


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


@form(f"div.<type:{INTEGERS}>", f"rem.<type:{INTEGERS}>")
def divide(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    t = NUMPY[m["type"]]
    name = "divide" if i.parts[0] == "div" else "remainder"
    w.write(i.operands[0], t, f"I.{name}({w.array(i.operands[1], t)}, {w.array(i.operands[2], t)})", i)


@form("abs.<type:s16|s32|s64>", "neg.<type:s16|s32|s64>")
def unary(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    t = NUMPY[m["type"]]
    a = w.array(i.operands[1], t)
    w.write(i.operands[0], t, f"np.abs({a})" if i.parts[0] == "abs" else f"-{a}", i)


@form(f"min.<type:{INTEGERS}>", f"max.<type:{INTEGERS}>", "min.relu.<type:s32>", "max.relu.<type:s32>")
def extremum(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    d, a, b = i.operands
    t = NUMPY[m["type"]]
    out = f"np.{i.parts[0]}imum({w.array(a, t)}, {w.read(b, t)})"
    if "relu" in i.parts:
        out = f"np.maximum({out}, {w.constant(0, t)})"
    w.write(d, t, out, i)
