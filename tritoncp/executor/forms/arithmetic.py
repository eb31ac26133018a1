"""PTX instructions of arithmetic, bits and conversions, each as one expression of its operands."""

from __future__ import annotations

import re

from tritoncp.executor.forms.formula import finish, formula, source
from tritoncp.executor.ptx.block_writer import NUMPY, BlockWriter
from tritoncp.executor.ptx.instruction import Instruction
from tritoncp.executor.ptx.opcodes import UnsupportedInstruction, form

SIGNS = {"add": "+", "sub": "-", "mul": "*"}
INTEGERS = "u16|u32|u64|s16|s32|s64"
ALL_INTEGERS = f"u8|s8|{INTEGERS}"
BITS = "b16|b32|b64"
HALVES = "f16|bf16|f16x2|bf16x2"
ROUND = "rni|rzi|rmi|rpi"

# sums and products
for name, sign in SIGNS.items():
    low = ".lo" if name == "mul" else ""
    formula(f"{{a}} {sign} {{b}}", f"{name}[.rn][.ftz][.sat].f32", f"{name}[.rn].f64")
    formula(f"{{a}} {sign} {{b}}", f"{name}{low}.<type:{INTEGERS}>")
    templates = f"{name}[.rn][.sat].<type:f16|f16x2>", f"{name}[.rn].<type:bf16|bf16x2>"
    formula("F.arithmetic16('{op}', '{type}', {A}, {B})", *templates)
for name in ("add", "sub"):  # of 16 bits and 32
    mixed = f"F.widen('{{type}}', {{A}}) {SIGNS[name]} {{b}}"
    formula(mixed, f"{name}[.rn][.sat].f32.<type:f16|bf16>", of="{type} f32", to="f32")
    clamped = f"np.clip({{a}}.astype('i8') {SIGNS[name]} {{b}}, -2147483648, 2147483647).astype('i4')"
    formula(clamped, f"{name}.sat.s32")
of_pairs = [f"{name}.<type:u16x2|s16x2>" for name in ("add", "min", "max")]
formula("I.combine_pairs('{op}', '{type}', {A}, {B})", *of_pairs, of="b32", to="b32")
formula("{a} / {b}", "div.<mode:rn|full|approx>[.ftz].f32", "div.rn.f64")
formula("I.divide({A}, {B})", f"div.<type:{INTEGERS}>")
formula("I.remainder({A}, {B})", f"rem.<type:{INTEGERS}>")
formula("I.multiply_high({a}, {b})", f"mul.hi.<type:{INTEGERS}>")
formula("I.multiply_high({a}, {b}) + {c}", f"mad.hi.<type:{INTEGERS}>")
formula("{a} * {b} + {c}", f"mad.lo.<type:{INTEGERS}>")
WIDE = "{a}.astype('{t}') * {b}.astype('{t}')"
formula(WIDE, "mul.wide.<type:u16|u32|s16|s32>", to="{wide}")
formula(f"{WIDE} + {{c}}", "mad.wide.<type:u16|u32|s16|s32>", of="{type} {type} {wide}", to="{wide}")
formula("F.fma32({a}, {b}, {c})", "fma.rn[.ftz][.sat].f32")
formula("F.fma64({a}, {b}, {c})", "fma.rn.f64")
formula(
    "F.fma32(F.widen('{type}', {A}), F.widen('{type}', {B}), {c})",
    "fma.rn[.sat].f32.<type:f16|bf16>",
    of="{type} {type} f32",
    to="f32",
)
formula(
    "F.fma16('{type}', {A}, {B}, {C})",
    *("fma.rn[.sat].<type:f16|f16x2>", "fma.rn.relu.<type:f16|f16x2>", "fma.rn[.relu].<type:bf16|bf16x2>"),
)

# signs and extrema
formula("-{a}", "neg[.ftz].f32", "neg.f64", "neg.<type:s16|s32|s64>")
formula("np.abs({a})", "abs[.ftz].f32", "abs.f64", "abs.<type:s16|s32|s64>")
for halves, sign in (("f16|bf16", "np.uint16(0x8000)"), ("f16x2|bf16x2", "np.uint32(0x80008000)")):
    formula(f"{{a}} ^ {sign}", f"neg.<type:{halves}>")
    formula(f"{{a}} & ~{sign}", f"abs.<type:{halves}>")
formula("np.copysign({b}, {a})", "copysign.<type:f32|f64>")
for name in ("min", "max"):
    formula(f"np.{name}imum({{a}}, {{b}})", f"{name}.<type:{INTEGERS}>", f"{name}.relu.<type:s32>")
    formula("F.extremum16('{op}', '{type}', {A}, {B}, {NaN})", f"{name}[.NaN].<type:{HALVES}>")
    magnitude = f"F.extremum('{name}', np.abs({{A}}), np.abs({{B}}), {{NaN}})"
    formula(f"F.sign_of_both({magnitude}, {{A}}, {{B}})", f"{name}[.ftz][.NaN].xorsign.abs.f32")


@form(*(f"{name}[.ftz][.NaN].f32" for name in ("min", "max")), "min.f64", "max.f64")
def extremum(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    """Emit min or max of two or three numbers."""
    d, first, *rest = i.operands
    t, nan = i.parts[-1], "NaN" in i.parts
    out = source(w, i, first, t)
    for x in rest:
        out = f"F.extremum('{i.parts[0]}', {out}, {source(w, i, x, t)}, {nan})"
    w.write(d, NUMPY[t], finish(i, t, out), i)


@form(*(f"{name}[.rn][.ftz].f32x2" for name in SIGNS), "fma.rn[.ftz].f32x2")
def pairs(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    x = [f"{w.array(a, 'u8')}.view('f4')" for a in i.operands[1:]]
    x = [f"F.ftz({v})" for v in x] if "ftz" in i.parts else x
    out = f"F.fma32({', '.join(x)})" if i.parts[0] == "fma" else f"{x[0]} {SIGNS[i.parts[0]]} {x[1]}"
    w.write(i.operands[0], "u8", f"({finish(i, 'f32', out)}).view('u8')", i)


# approximations
formula(
    "F.UNARY['{op}']({a})",
    *(f"{name}.approx[.ftz].f32" for name in ("ex2", "lg2", "rcp", "sqrt", "rsqrt", "sin", "cos")),
    *(f"{name}.rn[.ftz].f32" for name in ("rcp", "sqrt")),
    *("tanh.approx.f32", "rcp.rn.f64", "sqrt.rn.f64", "rsqrt.approx.f64"),
)
formula("F.high_word(F.UNARY['{op}']({a}))", "rcp.approx.ftz.f64", "rsqrt.approx.ftz.f64")
formula(
    "F.through_float32(F.UNARY['{op}'], '{type}', {a})",
    *("ex2.approx.<type:f16|f16x2>", "ex2.approx.ftz.<type:bf16|bf16x2>", f"tanh.approx.<type:{HALVES}>"),
)

# bits
for name, sign in (("and", "&"), ("or", "|"), ("xor", "^")):
    formula(f"{{a}} {sign} {{b}}", f"{name}.<type:{BITS}|pred>")
formula("~{a}", f"not.<type:{BITS}|pred>")
formula("I.shift_left({a}, {b})", f"shl.<type:{BITS}>", of="{type} u32")
formula("I.shift_right({a}, {b})", f"shr.<type:{BITS}|{INTEGERS}>", of="{type} u32")
formula("I.funnel_shift('{side}', '{mode}', {A}, {B}, {C})", "shf.<side:l|r>.<mode:wrap|clamp>.b32")
formula("I.extract_field({A}, {B}, {C})", "bfe.<type:u32|s32|u64|s64>", of="{type} u32")
formula("I.insert_field({A}, {B}, {C}, {D})", "bfi.<type:b32|b64>", of="{type} {type} u32")
formula("I.permute_bytes({A}, {B}, {C})", "prmt.b32")
formula("I.lookup3({A}, {B}, {C}, {d})", "lop3.b32")
formula("np.bitwise_count({a}).astype('u4')", "popc.<type:b32|b64>", to="u32")
formula("I.count_leading_zeros({a})", "clz.<type:b32|b64>", to="u32")
formula("I.find_highest({a})", "bfind.<type:u32|s32|u64|s64>", to="u32")
formula("I.reverse_bits({a})", "brev.<type:b32|b64>")
formula("np.where({C}, {a}, {b})", f"selp.<type:{BITS}|{INTEGERS}|f16|bf16|f32|f64>", of="{type} {type} pred")

# conversions
formula("{a}.astype('{t}')", f"cvt.<to:{ALL_INTEGERS}>.<of:{ALL_INTEGERS}>")
formula("{a}.astype('{t}')", f"cvt.rn.<to:f32|f64>.<of:{ALL_INTEGERS}>")
formula(
    "{a}.astype('{t}')",
    *(
        "cvt[.ftz].<to:f64>.<of:f32>",
        "cvt.rn[.ftz][.sat].<to:f32>.<of:f64>",
        "cvt[.ftz][.sat].<to:f32>.<of:f32>",
    ),
    "cvt[.sat].<to:f64>.<of:f64>",
)
formula("F.saturated({a}, '{t}')", f"cvt.sat.<to:{ALL_INTEGERS}>.<of:{ALL_INTEGERS}>")
formula("F.integer_to_16('{to}', {a})", f"cvt.rn.<to:f16|bf16>.<of:{ALL_INTEGERS}>")
formula(
    "F.to_integer({a}, '{mode}', '{t}')",
    f"cvt.<mode:{ROUND}>[.ftz][.sat].<to:{ALL_INTEGERS}>.<of:f32>",
    f"cvt.<mode:{ROUND}>[.sat].<to:{ALL_INTEGERS}>.<of:f64>",
)
formula(
    "F.to_integer(F.widen('{of}', {a}), '{mode}', '{t}')",
    f"cvt.<mode:{ROUND}>[.sat].<to:{ALL_INTEGERS}>.<of:f16|bf16>",
)
formula(
    "F.ROUND['{mode}']({a})",
    f"cvt.<mode:{ROUND}>[.ftz][.sat].<to:f32>.<of:f32>",
    f"cvt.<mode:{ROUND}>.<to:f64>.<of:f64>",
)
formula("F.widen('{of}', {a})", "cvt[.ftz].<to:f32>.<of:f16>", "cvt.<to:f32>.<of:bf16>")
formula("F.widen('{of}', {a}).astype('f8')", "cvt.<to:f64>.<of:f16|bf16>")
formula("F.to_bf16_towards_zero({a})", "cvt.rz.<to:bf16>.<of:f32>")
formula("F.to_tf32({a}, '{ties}')", "cvt.<ties:rna|rn>.<to:tf32>.<of:f32>")
formula("F.of_fp8('{of}', {a})", "cvt.rn[.relu].<to:f16x2>.<of:e4m3x2|e5m2x2>")


@form("cvt.rn[.ftz][.sat].<to:f16>.<of:f32>", "cvt.rn[.sat].<to:f16>.<of:f64>")
@form("cvt.rn[.relu].<to:f16|bf16>.<of:f32>")
@form("cvt.rn[.relu].<to:f16x2|bf16x2>.<of:f32>", "cvt.rn.satfinite[.relu].<to:e4m3x2|e5m2x2>.<of:f32>")
def narrow(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    """Emit conversions to narrower floats. With relu, sources are clamped first, so that no negative zero
    remains. The first of two sources is the upper half."""
    if len(i.operands) != (3 if "x2" in m["to"] else 2):
        raise UnsupportedInstruction(f"{i.opcode} of {len(i.operands)} operands")
    x = ", ".join(finish(i, m["of"], w.array(a, NUMPY[m["of"]])) for a in i.operands[1:])
    function = "F.narrow" if len(i.operands) == 2 else "F.pack2" if "16" in m["to"] else "F.to_fp8"
    w.write(i.operands[0], NUMPY[m["to"]], f"{function}('{m['to']}', {x})", i)
