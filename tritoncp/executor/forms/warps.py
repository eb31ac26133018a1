"""Exchange between the lanes of a warp, and products of matrices of a warp."""

from __future__ import annotations

import re

from tritoncp.executor.forms.formulas import items_of, unguarded
from tritoncp.executor.ptx.block_writer import NUMPY, BlockWriter
from tritoncp.executor.ptx.instruction import Instruction, Operand, Vector
from tritoncp.executor.ptx.opcodes import UnsupportedInstruction, form


def whole_warp(w: BlockWriter, i: Instruction, mask: Operand) -> None:
    """Members must be all lanes: Triton asks for no others."""
    if w.is_register(mask) and not i.predicate:
        w.line(f"W.need_every_lane({w.array(mask, 'u4')})")
    elif i.predicate or int(str(mask), 0) & 0xFFFFFFFF != 0xFFFFFFFF:
        raise UnsupportedInstruction(f"{i.opcode} of a part of a warp")


@form("shfl.sync.<mode:bfly|up|down|idx>.b32")
def shuffle(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    d, a, b, c, mask = i.operands
    whole_warp(w, i, mask)
    d, inside = d.items if isinstance(d, Vector) else (d, "_")
    call = f"'{m['mode']}', {w.array(a, 'u4')}, {w.read(b, 'u4')}, {w.read(c, 'u4')}"
    out = w.temporary(f"W.shuffle(T, {call})")
    w.write(d, "u4", f"{out}[0]", i)
    w.write(inside, "b", f"{out}[1]", i)


@form("vote.sync.<mode:all|any|uni>.pred", "vote.sync.<mode:ballot>.b32")
def vote(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    d, a, mask = i.operands
    whole_warp(w, i, mask)
    t = "u4" if m["mode"] == "ballot" else "b"
    w.write(d, t, f"W.vote(T, '{m['mode']}', {w.condition(a)})", i)


@form("redux.sync.<op:add|min|max>.<type:u32|s32>", "redux.sync.<op:and|or|xor>.<type:b32>")
@form("redux.sync.<op:min|max>[.abs][.NaN].<type:f32>")
def reduce_warp(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    d, a, mask = i.operands
    whole_warp(w, i, mask)
    t = NUMPY[m["type"]]
    x = f"np.abs({w.array(a, t)})" if "abs" in i.parts else w.array(a, t)
    w.write(d, t, f"W.reduce(T, '{m['op']}', {x}, {'NaN' in i.parts})", i)


@form("elect.sync")
def elect(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    d, mask = i.operands
    whole_warp(w, i, mask)
    assert isinstance(d, Vector)
    w.write(d.items[0], "u4", "T.elected()", i)
    w.write(d.items[1], "b", "T.laneid == T.elected()", i)


SHAPES = {
    "m16n8k8": ("f16", "bf16", "tf32"),
    "m16n8k16": ("f16", "bf16", "s8", "u8"),
    "m16n8k32": ("s8", "u8", "e4m3", "e5m2"),
}
OPERANDS = "f16|bf16|tf32|e4m3|e5m2"


@form(
    f"mma.sync.aligned.<shape:m16n8k8|m16n8k16|m16n8k32>.row.col.<to:f32>.<a:{OPERANDS}>.<b:{OPERANDS}>.f32"
)
@form("mma.sync.aligned.<shape:m16n8k8|m16n8k16>.row.col.<to:f16>.<a:f16>.<b:f16>.f16")
@form("mma.sync.aligned.<shape:m16n8k16|m16n8k32>.row.col[.satfinite].<to:s32>.<a:s8|u8>.<b:s8|u8>.s32")
def multiply(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    types = {m["a"], m["b"]}
    mixed = len(types) > 1 and not types <= {"e4m3", "e5m2"} and not types <= {"s8", "u8"}
    if mixed or m["a"] not in SHAPES[m["shape"]] or i.predicate:
        raise UnsupportedInstruction(i.opcode)
    d, a, b, c = map(items_of, i.operands)
    t = {"f32": "f4", "s32": "i4", "f16": "u4"}[m["to"]]
    w.line("T.need_warps('mma')")
    left, right = fragment(w, "a", a, m["a"]), fragment(w, "b", b, m["b"])
    summands = ", ".join(w.array(x, t) for x in c)
    to = "s32 saturated" if "satfinite" in i.parts else m["to"]
    out = w.temporary(f"W.add_to_result(np.matmul({left}, {right}), '{to}', ({summands},))")
    for j, register in enumerate(d):
        w.write(register, t, f"{out}[{j}]", i)


def fragment(w: BlockWriter, which: str, registers: tuple[Operand, ...], t: str) -> str:
    """Several products share a fragment: it is laid out once."""
    values = ", ".join(w.array(x, "u4") for x in registers)
    return w.once((which, t), list(registers), f"W.fragment_{which}(({values},), '{t}')")


@form("mma.sync.aligned.<shape:m8n8k4|m16n8k4|m16n8k8|m16n8k16>.row.col.f64.f64.f64.f64")
def multiply64(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    unguarded(i)
    d, a, b, c = map(items_of, i.operands)
    sources = ", ".join(f"({', '.join(w.array(x, 'f8') for x in part)},)" for part in (a, b, c))
    w.line("T.need_warps('mma')")
    out = w.temporary(f"W.multiply64({sources})")
    for j, register in enumerate(d):
        w.write(register, "f8", f"{out}[{j}]", i)
