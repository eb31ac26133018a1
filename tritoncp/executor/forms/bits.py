"""Bits, comparisons and selections."""

from __future__ import annotations

import re

from tritoncp.executor.ptx.block_writer import NUMPY, BlockWriter, bits_of
from tritoncp.executor.ptx.instruction import Instruction, Operand, Vector
from tritoncp.executor.ptx.opcodes import UnsupportedInstruction, form

SIGNS = {"and": "&", "or": "|", "xor": "^"}
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
COMPARE |= {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
OPPOSITE = {"equ": "ne", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}


@form(*(f"{name}.<type:b16|b32|b64|pred>" for name in SIGNS))
def logic(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    d, a, b = i.operands
    t = NUMPY[m["type"]]
    w.write(d, t, f"{w.array(a, t)} {SIGNS[i.parts[0]]} {w.read(b, t)}", i)


@form("not.<type:b16|b32|b64|pred>")
def invert(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    t = NUMPY[m["type"]]
    w.write(i.operands[0], t, f"~{w.array(i.operands[1], t)}", i)


@form("shl.<type:b16|b32|b64>", "shr.<type:b16|b32|b64|u16|u32|u64|s16|s32|s64>")
def shift(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    d, a, b = i.operands
    t = NUMPY[m["type"]]
    if w.is_register(b):
        name = "shift_left" if i.parts[0] == "shl" else "shift_right"
        w.write(d, t, f"I.{name}({w.array(a, t)}, {w.read(b, 'u4')})", i)
        return
    count = int(str(b), 0)
    if count >= bits_of(t) and t[0] == "u":
        w.write(d, t, f"T.full({w.constant(0, t)})", i)
        return
    sign = "<<" if i.parts[0] == "shl" else ">>"
    w.write(d, t, f"{w.array(a, t)} {sign} {w.constant(min(count, bits_of(t) - 1), t)}", i)


@form("shf.<side:l|r>.<mode:wrap|clamp>.b32")
def funnel_shift(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    low, high, count = (w.array(x, "u4") for x in i.operands[1:])
    w.write(i.operands[0], "u4", f"I.funnel_shift('{m['side']}', '{m['mode']}', {low}, {high}, {count})", i)


@form("bfe.<type:u32|s32|u64|s64>")
def extract_field(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    d, a, position, count = i.operands
    t = NUMPY[m["type"]]
    if t[0] == "i" or w.is_register(position) or w.is_register(count):
        at = f"{w.array(position, 'u4')}, {w.array(count, 'u4')}"
        w.write(d, t, f"I.extract_field({w.array(a, t)}, {at})", i)
        return
    p, n = int(str(position), 0) & 255, int(str(count), 0) & 255
    if p >= bits_of(t):
        w.write(d, t, f"T.full({w.constant(0, t)})", i)
    else:
        mask = w.constant((1 << min(n, bits_of(t))) - 1, t)
        w.write(d, t, f"({w.array(a, t)} >> {w.constant(p, t)}) & {mask}", i)


@form("bfi.<type:b32|b64>")
def insert_field(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    d, field, a, position, count = i.operands
    t = NUMPY[m["type"]]
    x = [w.array(field, t), w.array(a, t), w.array(position, "u4"), w.array(count, "u4")]
    w.write(d, t, f"I.insert_field({', '.join(x)})", i)


@form("prmt.b32")
def permute_bytes(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    x = ", ".join(w.array(a, "u4") for a in i.operands[1:])
    w.write(i.operands[0], "u4", f"I.permute_bytes({x})", i)


@form("lop3.b32")
def lookup3(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    d, a, b, c, table = i.operands
    x = ", ".join(w.array(v, "u4") for v in (a, b, c))
    w.write(d, "u4", f"I.lookup3({x}, {int(str(table), 0)})", i)


@form("popc.<type:b32|b64>", "clz.<type:b32|b64>", "bfind.<type:u32|s32|u64|s64>")
def count(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    a = w.array(i.operands[1], NUMPY[m["type"]])
    out = {
        "popc": f"np.bitwise_count({a}).astype('u4')",
        "clz": f"I.count_leading_zeros({a})",
        "bfind": f"I.find_highest({a})",
    }
    w.write(i.operands[0], "u4", out[i.parts[0]], i)


@form("brev.<type:b32|b64>")
def reverse_bits(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    t = NUMPY[m["type"]]
    w.write(i.operands[0], t, f"I.reverse_bits({w.array(i.operands[1], t)})", i)


def comparison(name: str, x: str, y: str, floating: bool) -> str:
    """An expression that is true where a relation holds; NaN has none but the unordered ones."""
    if name == "nan":
        return f"np.isnan({x}) | np.isnan({y})"
    if name == "num":
        return f"~(np.isnan({x}) | np.isnan({y}))"
    if not floating or name in ("eq", "lt", "le", "gt", "ge"):
        return f"{x} {COMPARE[name]} {y}"
    if name == "neu":
        return f"{x} != {y}"
    if name == "ne":
        return f"({x} < {y}) | ({x} > {y})"
    return f"~({comparison(OPPOSITE[name], x, y, True)})"


def compared(w: BlockWriter, i: Instruction, a: Operand, b: Operand, t: str) -> tuple[str, str]:
    if t in ("f16", "bf16"):
        x, y = (f"F.widen('{t}', {w.array(v, 'u2')})" for v in (a, b))
    else:
        x, y = w.array(a, NUMPY[t]), w.read(b, NUMPY[t])
    return (f"F.ftz({x})", f"F.ftz({w.array(b, 'f4')})") if "ftz" in i.parts else (x, y)


INTEGER = "b16|b32|b64|u16|u32|u64|s16|s32|s64"
ORDERS = "eq|ne|lt|le|gt|ge|lo|ls|hi|hs"
UNORDERED = "eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan"


@form(f"setp.<cmp:{ORDERS}>.<type:{INTEGER}>", f"setp.<cmp:{ORDERS}>.<bool:and|or|xor>.<type:{INTEGER}>")
@form(f"setp.<cmp:{UNORDERED}>[.ftz].<type:f32>", f"setp.<cmp:{UNORDERED}>.<type:f64|f16|bf16>")
@form(f"setp.<cmp:{UNORDERED}>.<bool:and|or|xor>[.ftz].<type:f32>")
@form(f"setp.<cmp:{UNORDERED}>.<bool:and|or|xor>.<type:f64|f16|bf16>")
def compare(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    d, a, b, *more = i.operands
    x, y = compared(w, i, a, b, m["type"])
    out = w.temporary(comparison(m["cmp"], x, y, "f" in m["type"]))
    results = d.items if isinstance(d, Vector) else (d,)
    join = ""
    if more:
        join = f" {SIGNS[m['bool']]} {w.condition(more[0])}"
    for register, value in zip(results, (out, f"~{out}")):
        w.write(register, "b", f"{value}{join}", i)


@form("selp.<type:b16|b32|b64|u16|u32|u64|s16|s32|s64|f16|bf16|f32|f64>")
def select(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    d, a, b, c = i.operands
    t = "u2" if m["type"] in ("f16", "bf16") else NUMPY[m["type"]]
    if not isinstance(c, str) or not w.is_register(c):
        raise UnsupportedInstruction(f"predicate {c}")
    w.write(d, t, f"np.where({w.read(c, 'b')}, {w.read(a, t)}, {w.read(b, t)})", i)
