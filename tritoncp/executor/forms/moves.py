"""Moves between registers, and conversions of addresses."""

from __future__ import annotations

import re

from tritoncp.executor.memory.address_space import LOCAL, PARAMETER, SHARED
from tritoncp.executor.ptx.block_writer import NUMPY, BlockWriter, bits_of
from tritoncp.executor.ptx.instruction import Instruction, Vector
from tritoncp.executor.ptx.opcodes import form


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
