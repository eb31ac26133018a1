"""PTX instructions of registers: moves, comparisons, sums with carry, and those that end a block."""

from __future__ import annotations

import re

from tritoncp.executor.forms.arithmetic import BITS, INTEGERS
from tritoncp.executor.forms.formula import formula, source, unguarded, without_effect
from tritoncp.executor.memory.regions import LOCAL, PARAMETER, SHARED
from tritoncp.executor.ptx.block_writer import NUMPY, BlockWriter, bits_of, unsigned
from tritoncp.executor.ptx.instruction import Instruction, Operand, Vector, items_of
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


# High bits of a generic address determine the space
formula("{a}", "cvta[.to].global.u64")
for space, bits in (("shared", SHARED), ("local", LOCAL), ("param", PARAMETER)):
    formula(f"{{a}} | np.uint64({bits})", f"cvta.{space}.u64")
    formula(f"{{a}} & ~np.uint64({bits})", f"cvta.to.{space}.u64")
CARRIED = "<type:u32|s32|b32|u64|s64|b64>"


@form(*(f"{name}{c}.{CARRIED}" for name in ("add", "sub") for c in (".cc", "c.cc", "c")))
@form("mad.<half:lo|hi>.cc.<type:u32|s32|u64|s64>")
@form("madc.<half:lo|hi>[.cc].<type:u32|s32|u64|s64>")
def carried(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    """Emit a sum or difference that reads or sets the carry flag."""
    d, a, b, *summand = i.operands
    t = NUMPY[m["type"]]
    if summand:
        x = f"{w.array(a, t)}, {w.read(b, t)}"
        product = f"I.multiply_high({x})" if m["half"] == "hi" else x.replace(",", " *")
        x, y = f"({product}).view('{unsigned(t)}')", w.array(summand[0], unsigned(t))
    else:
        x, y = (w.array(v, unsigned(t)) for v in (a, b))
    carry = w.read(CARRY, "b") if i.parts[0].endswith("c") else "T.full(np.False_)"
    operation = "subtract_borrow" if i.parts[0].startswith("sub") else "add_carry"
    out = w.temporary(f"I.{operation}({x}, {y}, {carry})")
    w.write(d, unsigned(t), f"{out}[0]", i)
    if "cc" in i.parts:
        w.write(CARRY, "b", f"{out}[1]", i)


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
}  # comparisons with NaN are false, except for relations that end in u


def compared(w: BlockWriter, i: Instruction, a: Operand, b: Operand, m: re.Match[str]) -> str:
    """Return the source of an opcode's comparison of two operands."""
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
    join = f" {JOINS[m['bool']]} {w.array(more[0], 'b')}" if more else ""
    for register, value in zip(items_of(d), (out, f"~{out}")):
        w.write(register, "b", f"{value}{join}", i)


without_effect("bra[.uni]", "ret[.uni]", "exit")  # executed by the scheduler


@form("brx.idx[.uni]", "bar[.cta].sync", "barrier[.cta].sync[.aligned]", writes="none")
def end_unguarded(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    unguarded(i)
