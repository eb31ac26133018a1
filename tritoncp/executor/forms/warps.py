"""PTX instructions of warps: shuffles, votes, reductions and matrix products."""

from __future__ import annotations

import re

from tritoncp.executor.forms.formula import formula, unguarded
from tritoncp.executor.ptx.block_writer import BlockWriter
from tritoncp.executor.ptx.instruction import Instruction, Operand, items_of
from tritoncp.executor.ptx.opcodes import UnsupportedInstruction, form

SHUFFLE = "W.shuffle(T, '{mode}', {A}, {b}, {c})"
formula(SHUFFLE, "shfl.sync.<mode:bfly|up|down|idx>.b32", to="b32 pred", members=True)
formula("W.vote(T, '{mode}', {A})", "vote.sync.<mode:all|any|uni>.pred", members=True)
formula("W.vote(T, 'ballot', {A})", "vote.sync.ballot.b32", of="pred", to="b32", members=True)
formula(
    "W.reduce(T, '{op}', {A}, {abs}, {NaN})",
    *("redux.sync.<op:add|min|max>.<type:u32|s32>", "redux.sync.<op:and|or|xor>.<type:b32>"),
    "redux.sync.<op:min|max>[.abs][.NaN].<type:f32>",
    members=True,
)
formula("W.elect(T)", "elect.sync", to="u32 pred", members=True)
SHAPES = {
    "m16n8k8": ("f16", "bf16", "tf32"),
    "m16n8k16": ("f16", "bf16", "s8", "u8"),
    "m16n8k32": ("s8", "u8", "e4m3", "e5m2"),
}
OPERANDS = "f16|bf16|tf32|e4m3|e5m2"
RESULTS = {"f32": "f4", "s32": "i4", "f16": "u4"}  # element type of a product -> type of its registers


@form(
    f"mma.sync.aligned.<shape:m16n8k8|m16n8k16|m16n8k32>.row.col.<to:f32>.<a:{OPERANDS}>.<b:{OPERANDS}>.f32"
)
@form("mma.sync.aligned.<shape:m16n8k8|m16n8k16>.row.col.<to:f16>.<a:f16>.<b:f16>.f16")
@form("mma.sync.aligned.<shape:m16n8k16|m16n8k32>.row.col[.satfinite].<to:s32>.<a:s8|u8>.<b:s8|u8>.s32")
def multiply(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    unguarded(i)
    types = {m["a"], m["b"]}
    mixed = len(types) > 1 and not types <= {"e4m3", "e5m2"} and not types <= {"s8", "u8"}
    if mixed or m["a"] not in SHAPES[m["shape"]]:
        raise UnsupportedInstruction(i.opcode)
    d, a, b, c = i.operands
    t = RESULTS[m["to"]]
    w.line("T.need_warps('mma')")
    left, right = fragment(w, "a", a, m["a"]), fragment(w, "b", b, m["b"])
    to = "s32 saturated" if "satfinite" in i.parts else m["to"]
    product = f"W.add_to_result(np.matmul({left}, {right}), '{to}', {w.arrays(c, t)})"
    w.write_each(items_of(d), [t], product, i)


def fragment(w: BlockWriter, which: str, registers: Operand, t: str) -> str:
    """Return the source of a matrix fragment; products that share it convert it once."""
    expression = f"W.fragment_{which}({w.arrays(registers, 'u4')}, '{t}')"
    return w.once((which, t), list(items_of(registers)), expression)


MULTIPLY64 = "mma.sync.aligned.<shape:m8n8k4|m16n8k4|m16n8k8|m16n8k16>.row.col.f64.f64.f64.f64"
formula("W.multiply64(T, {A:tuple}, {B:tuple}, {C:tuple})", MULTIPLY64, of="f64", to="f64 f64")
