"""Floating-point arithmetic."""

from __future__ import annotations

import re

from tritoncp.executor.ptx.block_writer import NUMPY, BlockWriter, bits_of
from tritoncp.executor.ptx.instruction import Instruction, Operand
from tritoncp.executor.ptx.opcodes import UnsupportedInstruction, form

SIGNS = {"add": "+", "sub": "-", "mul": "*"}


def source(w: BlockWriter, i: Instruction, operand: Operand, t: str = "f4") -> str:
    """An operand as an array, flushed where the opcode says so."""
    return f"F.ftz({w.array(operand, t)})" if "ftz" in i.parts else w.array(operand, t)


def finish(i: Instruction, expression: str) -> str:
    """Flush and saturate a result where the opcode says so."""
    if "ftz" in i.parts:
        expression = f"F.ftz({expression})"
    return f"F.saturate({expression})" if "sat" in i.parts else expression


@form(*(f"{name}[.rn][.ftz][.sat].f32" for name in SIGNS), *(f"{name}[.rn].f64" for name in SIGNS))
@form("div.<mode:rn|full|approx>[.ftz].f32", "div.rn.f64")
def binary(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    d, a, b = i.operands
    t = NUMPY[i.parts[-1]]
    sign = SIGNS.get(i.parts[0], "/")
    w.write(d, t, finish(i, f"{source(w, i, a, t)} {sign} {source(w, i, b, t)}"), i)


@form(*(f"{name}[.rn][.ftz].f32x2" for name in SIGNS), "fma.rn[.ftz].f32x2")
def pairs(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    x = [f"{w.array(a, 'u8')}.view('f4')" for a in i.operands[1:]]
    x = [f"F.ftz({v})" for v in x] if "ftz" in i.parts else x
    out = f"F.fma32({', '.join(x)})" if i.parts[0] == "fma" else f"{x[0]} {SIGNS[i.parts[0]]} {x[1]}"
    w.write(i.operands[0], "u8", f"({finish(i, out)}).view('u8')", i)


@form("add[.rn][.sat].f32.<type:f16|bf16>", "sub[.rn][.sat].f32.<type:f16|bf16>")
def mixed(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    """The first operand has 16 bits, the second one and the result 32."""
    d, a, b = i.operands
    x = f"F.widen('{m['type']}', {w.array(a, 'u2')})"
    w.write(d, "f4", finish(i, f"{x} {SIGNS[i.parts[0]]} {w.read(b, 'f4')}"), i)


@form("fma.rn[.sat].f32.<type:f16|bf16>")
def mixed_fma(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    """The factors have 16 bits, the summand and the result 32."""
    d, a, b, c = i.operands
    x, y = (f"F.widen('{m['type']}', {w.array(v, 'u2')})" for v in (a, b))
    w.write(d, "f4", finish(i, f"F.fma32({x}, {y}, {w.array(c, 'f4')})"), i)


@form("fma.rn[.ftz][.sat].f32", "fma.rn.f64")
def fma(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    t = NUMPY[i.parts[-1]]
    x = ", ".join(source(w, i, a, t) for a in i.operands[1:])
    w.write(i.operands[0], t, finish(i, f"F.fma{bits_of(t)}({x})"), i)


def finish16(w: BlockWriter, i: Instruction, t: str, expression: str) -> None:
    """Write a 16-bit result, clamped where the opcode says so."""
    clamp = next((x for x in ("sat", "relu") if x in i.parts), None)
    if clamp:
        expression = f"F.finish16('{clamp}', '{t}', {expression})"
    w.write(i.operands[0], width16(t), expression, i)


def width16(t: str) -> str:
    return "u4" if t.endswith("x2") else "u2"


@form(*(f"{name}[.rn][.sat].<type:f16|f16x2>" for name in SIGNS))
@form(*(f"{name}[.rn].<type:bf16|bf16x2>" for name in SIGNS))
def binary16(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    t = m["type"]
    x, y = (w.array(v, width16(t)) for v in i.operands[1:])
    finish16(w, i, t, f"F.arithmetic16('{i.parts[0]}', '{t}', {x}, {y})")


@form("fma.rn[.sat].<type:f16|f16x2>", "fma.rn.relu.<type:f16|f16x2>", "fma.rn[.relu].<type:bf16|bf16x2>")
def fma16(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    t = m["type"]
    x, y, z = (w.array(v, width16(t)) for v in i.operands[1:])
    finish16(w, i, t, f"F.fma16('{t}', {x}, {y}, {z})")


@form("neg.<type:f16|f16x2|bf16|bf16x2>", "abs.<type:f16|f16x2|bf16|bf16x2>")
def sign16(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    t = width16(m["type"])
    ones = 0x80008000 if t == "u4" else 0x8000
    a = w.array(i.operands[1], t)
    flip = i.parts[0] == "neg"
    w.write(i.operands[0], t, f"{a} {'^' if flip else '&'} {w.constant(ones if flip else ~ones, t)}", i)


@form("neg[.ftz].f32", "abs[.ftz].f32", "neg.f64", "abs.f64")
def sign(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    t = NUMPY[i.parts[-1]]
    a = source(w, i, i.operands[1], t)
    w.write(i.operands[0], t, f"-{a}" if i.parts[0] == "neg" else f"np.abs({a})", i)


@form(*(f"{name}[.ftz][.NaN].f32" for name in ("min", "max")), *(f"{name}.f64" for name in ("min", "max")))
@form(*(f"{name}[.ftz][.NaN].xorsign.abs.f32" for name in ("min", "max")))
def extremum(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    d, *sources = i.operands
    t = NUMPY[i.parts[-1]]
    x = [source(w, i, a, t) for a in sources]
    name, nan = ("minimum" if i.parts[0] == "min" else "maximum"), "NaN" in i.parts
    if "xorsign" not in i.parts:
        out = f"F.{name}({x[0]}, {x[1]}, {nan})"
        for y in x[2:]:
            out = f"F.{name}({out}, {y}, {nan})"
        w.write(d, t, out, i)
        return
    if len(x) != 2:
        raise UnsupportedInstruction("three operands")
    out = f"F.{name}(np.abs({x[0]}), np.abs({x[1]}), {nan})"
    w.write(d, t, f"F.sign_of_both({out}, {x[0]}, {x[1]})", i)


@form(*(f"{name}[.NaN].<type:f16|f16x2|bf16|bf16x2>" for name in ("min", "max")))
def extremum16(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    d, a, b = i.operands
    t = m["type"]
    x, y = w.array(a, width16(t)), w.array(b, width16(t))
    w.write(d, width16(t), f"F.extremum16('{i.parts[0]}', '{t}', {x}, {y}, {'NaN' in i.parts})", i)


@form(
    *(f"{name}.approx[.ftz].f32" for name in ("ex2", "lg2", "rcp", "sqrt", "rsqrt", "sin", "cos")),
    *(f"{name}.rn[.ftz].f32" for name in ("rcp", "sqrt")),
    *("tanh.approx.f32", "rcp.rn.f64", "sqrt.rn.f64", "rsqrt.approx.f64"),
)
def unary(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    t = NUMPY[i.parts[-1]]
    # 2^x of a subnormal x is 1, flushed or not
    a = w.array(i.operands[1], t) if i.parts[0] == "ex2" else source(w, i, i.operands[1], t)
    w.write(i.operands[0], t, finish(i, f"F.UNARY['{i.parts[0]}']({a})"), i)


@form("rcp.approx.ftz.f64", "rsqrt.approx.ftz.f64")
def seed64(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    a = w.array(i.operands[1], "f8")
    w.write(i.operands[0], "f8", f"F.high_word(F.UNARY['{i.parts[0]}']({a}))", i)


@form("ex2.approx.<type:f16|f16x2>", "ex2.approx.ftz.<type:bf16|bf16x2>")
@form("tanh.approx.<type:f16|f16x2|bf16|bf16x2>")
def unary16(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    t = m["type"]
    a = w.array(i.operands[1], width16(t))
    w.write(i.operands[0], width16(t), f"F.unary16('{i.parts[0]}', '{t}', {a})", i)


@form("copysign.<type:f32|f64>")
def copysign(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    """The sign of the first operand, the magnitude of the second."""
    d, a, b = i.operands
    t = NUMPY[m["type"]]
    w.write(d, t, f"np.copysign({w.array(b, t)}, {w.read(a, t)})", i)
