"""Conversions between types."""

from __future__ import annotations

import re

from tritoncp.executor.ptx.block_writer import NUMPY, BlockWriter
from tritoncp.executor.ptx.instruction import Instruction
from tritoncp.executor.ptx.opcodes import form

INTEGERS = "u8|u16|u32|u64|s8|s16|s32|s64"
ROUND = "rni|rzi|rmi|rpi"


@form(f"cvt.<to:{INTEGERS}>.<of:{INTEGERS}>", f"cvt.rn.<to:f32|f64>.<of:{INTEGERS}>")
def of_integer(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    d, a = i.operands
    w.write(d, NUMPY[m["to"]], f"{w.array(a, NUMPY[m['of']])}.astype('{NUMPY[m['to']]}')", i)


@form(f"cvt.sat.<to:{INTEGERS}>.<of:{INTEGERS}>")
def of_integer_saturated(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    d, a = i.operands
    to = NUMPY[m["to"]]
    w.write(d, to, f"C.saturated({w.array(a, NUMPY[m['of']])}, '{to}')", i)


@form(f"cvt.rn.<to:f16|bf16>.<of:{INTEGERS}>")
def integer_to_float16(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    d, a = i.operands
    w.write(d, "u2", f"C.integer_to_16('{m['to']}', {w.array(a, NUMPY[m['of']])})", i)


@form(f"cvt.<mode:{ROUND}>[.ftz][.sat].<to:{INTEGERS}>.<of:f32>")
@form(f"cvt.<mode:{ROUND}>[.sat].<to:{INTEGERS}>.<of:f64|f16|bf16>")
def float_to_integer(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    d, a = i.operands
    x = floating(w, a, m["of"])
    if "ftz" in i.parts:
        x = f"F.ftz({x})"
    to = NUMPY[m["to"]]
    w.write(d, to, f"F.to_integer({x}, '{m['mode']}', '{to}')", i)


def floating(w: BlockWriter, operand: object, t: str) -> str:
    """An operand as an array of floats; 16-bit ones become float32."""
    if t in ("f16", "bf16"):
        return f"F.widen('{t}', {w.array(operand, 'u2')})"  # type: ignore[arg-type]
    return w.array(operand, NUMPY[t])  # type: ignore[arg-type]


@form("cvt[.ftz].f64.f32", "cvt.rn[.ftz][.sat].f32.f64", "cvt[.ftz].sat.f32.f32", "cvt[.ftz].f32.f32")
@form("cvt[.sat].f64.f64")
def float_to_float(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    d, a = i.operands
    to, of = NUMPY[i.parts[-2]], NUMPY[i.parts[-1]]
    x = w.array(a, of)
    if "ftz" in i.parts and of == "f4":
        x = f"F.ftz({x})"
    if to != of:
        x = f"{x}.astype('{to}')"
    if "ftz" in i.parts and to == "f4":
        x = f"F.ftz({x})"
    w.write(d, to, f"F.saturate({x})" if "sat" in i.parts else x, i)


@form(f"cvt.<mode:{ROUND}>[.ftz][.sat].f32.f32", f"cvt.<mode:{ROUND}>.f64.f64")
def float_to_whole(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    d, a = i.operands
    t = NUMPY[i.parts[-1]]
    x = f"F.ftz({w.array(a, t)})" if "ftz" in i.parts else w.array(a, t)
    x = f"F.ROUND['{m['mode']}']({x})"
    w.write(d, t, f"F.saturate({x})" if "sat" in i.parts else x, i)


@form("cvt[.ftz].<to:f32>.<of:f16>", "cvt.<to:f32>.<of:bf16>", "cvt.<to:f64>.<of:f16|bf16>")
def widen(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    d, a = i.operands
    out = floating(w, a, m["of"])
    w.write(d, NUMPY[m["to"]], out if m["to"] == "f32" else f"{out}.astype('f8')", i)


@form("cvt.rn[.ftz][.sat].<to:f16>.<of:f32>", "cvt.rn[.sat].<to:f16>.<of:f64>")
@form("cvt.rn[.relu].<to:f16|bf16>.<of:f32>")
def narrow(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    d, a = i.operands
    x = w.array(a, NUMPY[m["of"]])
    for clamp, name in (("ftz", "ftz"), ("sat", "saturate"), ("relu", "relu")):
        if clamp in i.parts:
            x = f"F.{name}({x})"
    w.write(d, "u2", f"F.narrow('{m['to']}', {x})", i)


@form("cvt.rz.bf16.f32")
def truncate(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    d, a = i.operands
    w.write(d, "u2", f"F.to_bf16_towards_zero({w.array(a, 'f4')})", i)


@form("cvt.rn[.relu].<to:f16x2|bf16x2>.f32", "cvt.rn.satfinite[.relu].<to:e4m3x2|e5m2x2>.f32")
def narrow_pair(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    """The first source is the upper half."""
    d, *sources = i.operands
    x, y = (f"F.relu({w.array(a, 'f4')})" if "relu" in i.parts else w.array(a, "f4") for a in sources)
    pack, t = ("F.pack2", "u4") if m["to"].endswith("16x2") else ("C.to_fp8", "u2")
    w.write(d, t, f"{pack}('{m['to']}', {x}, {y})", i)


@form("cvt.<mode:rna|rn>.tf32.f32")
def to_tf32(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    d, a = i.operands
    name = "to_tf32" if m["mode"] == "rna" else "to_tf32_nearest_even"
    w.write(d, "u4", f"F.{name}({w.array(a, 'f4')})", i)


@form("cvt.rn[.relu].f16x2.<of:e4m3x2|e5m2x2>")
def of_fp8(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    d, a = i.operands
    x = f"C.of_fp8('{m['of']}', {w.array(a, 'u2')})"
    w.write(d, "u4", f"F.finish16('relu', 'f16x2', {x})" if "relu" in i.parts else x, i)
