"""mbarriers, TMA and products of warpgroups."""

from __future__ import annotations

import re

from tritoncp.executor.forms.formulas import effect, immediate, items_of, unguarded
from tritoncp.executor.ptx.block_writer import BlockWriter
from tritoncp.executor.ptx.instruction import Address, Instruction, Vector
from tritoncp.executor.ptx.opcodes import UnsupportedInstruction, form

SHARED = "<space:shared|shared::cta>"


effect("S.mbarriers.initialise({access}, {A}, {B})", f"mbarrier.init.{SHARED}.b64")
effect("S.mbarriers.invalidate({access}, {A})", f"mbarrier.inval.{SHARED}.b64")
ARRIVE = f"[.release][.<scope:cta|cluster>].{SHARED}.b64"


@form(f"mbarrier.arrive{ARRIVE}", f"mbarrier.arrive.expect_tx{ARRIVE}", writes="none")
def arrive(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    state, at, *count = i.operands if i.operands[0] == "_" else ("_", *i.operands)
    if state != "_" or not isinstance(at, Address):
        raise UnsupportedInstruction("the state of an mbarrier as a result")
    arrivals, nbytes = "T.full(np.uint32(1))", "None"
    if "expect_tx" in i.parts:
        nbytes = w.array(count[0], "u4")
    elif count:
        arrivals = w.array(count[0], "u4")
    w.line(f"S.mbarriers.arrive({w.access(i)}, {w.address(at, 'u8')}, {arrivals}, {nbytes})")


@form(f"mbarrier.<kind:try_wait|test_wait>.parity[.acquire][.<scope:cta|cluster>].{SHARED}.b64")
def wait(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    at, parity = w.address(i.operands[1], "u8"), w.array(i.operands[2], "u4")
    out = w.temporary(f"S.mbarriers.wait({w.access(i)}, {at}, {parity})")
    w.write(i.operands[0], "b", out, i)


DIMENSIONS = "<rank:1d|2d|3d|4d|5d>"


@form(
    f"cp.async.bulk.tensor.{DIMENSIONS}.<to:shared::cta|shared::cluster>.global[.tile]"
    ".mbarrier::complete_tx::bytes[.L2::cache_hint]",
    writes="none",
)
def load_box(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    to, box, barrier, *_ = i.operands
    assert isinstance(box, Address)
    at = (
        f"{w.address(to, 'u8')}, {w.address(box, 'u8')}, ({coordinates(w, box)},), {w.address(barrier, 'u8')}"
    )
    w.line(f"S.tma.load({w.access(i)}, {at})")


def coordinates(w: BlockWriter, box: Address) -> str:
    if box.coordinates is None:
        raise UnsupportedInstruction("a box without coordinates")
    return ", ".join(w.array(x, "i4") for x in box.coordinates.items)


@form(
    f"cp.async.bulk.tensor.{DIMENSIONS}.global.shared::cta[.tile].bulk_group[.L2::cache_hint]",
    f"cp.reduce.async.bulk.tensor.{DIMENSIONS}.global.shared::cta.<op:add|min|max|and|or|xor>[.tile]"
    ".bulk_group[.L2::cache_hint]",
    writes="none",
)
def store_box(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    box, source, *_ = i.operands
    assert isinstance(box, Address)
    operation = m["op"] if i.parts[1] == "reduce" else None
    at = f"{w.address(box, 'u8')}, ({coordinates(w, box)},), {w.address(source, 'u8')}"
    w.line(f"S.tma.store({w.access(i)}, {at}, {operation!r})")


effect("S.tma.commit({access})", "cp.async.bulk.commit_group")
effect("S.tma.wait({access}, {a})", "cp.async.bulk.wait_group[.read]")
FIELDS = "global_address|rank|box_dim|global_dim|global_stride|element_stride|elemtype|interleave_layout"


@form(
    f"tensormap.replace.tile.<field:{FIELDS}|swizzle_mode|fill_mode>.shared::cta.b1024.<type:b32|b64>",
    writes="none",
)
def replace_field(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    at, *value = i.operands
    dimension = immediate(w, value[0]) if len(value) == 2 else 0
    new = w.array(value[-1], "u8" if m["type"] == "b64" else "u4")
    w.line(f"S.tma.replace({w.access(i)}, {w.address(at, 'u8')}, '{m['field']}', {dimension}, {new})")


PUBLISH = "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release"
effect("S.tma.publish({access}, {A}, {B})", f"{PUBLISH}.<scope:gpu|cta|sys>.sync.aligned")
effect("", "wgmma.fence.sync.aligned")  # registers are read when the product is issued
effect("S.wgmma.commit(T)", "wgmma.commit_group.sync.aligned")
effect("S.wgmma.wait(T, {a})", "wgmma.wait_group.sync.aligned")
WIDTHS = "|".join(f"m64n{n}k{k}" for k in (8, 16, 32) for n in range(8, 257, 8))
DEPTH = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32}


@form(
    f"wgmma.mma_async.sync.aligned.<shape:{WIDTHS}>.<to:f32|f16>.<a:f16|bf16|tf32|e4m3|e5m2>"
    ".<b:f16|bf16|tf32|e4m3|e5m2>",
    f"wgmma.mma_async.sync.aligned.<shape:{WIDTHS}>.<to:s32>.<a:s8|u8>.<b:s8|u8>",
    writes="accumulator",
)
def multiply(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    n, k = map(int, re.findall(r"\d+", m["shape"])[1:])
    d, a, b, scale, *rest = i.operands
    if i.predicate or DEPTH[m["a"]] != k or DEPTH[m["b"]] != k or not isinstance(d, Vector):
        raise UnsupportedInstruction(i.opcode)
    flags = [immediate(w, x) for x in rest]
    if m["to"] != "s32" and [flags.pop(0), flags.pop(0)] != [1, 1]:
        raise UnsupportedInstruction("a negated operand")
    if isinstance(a, Vector):
        left, flags = f"({', '.join(w.array(x, 'u4') for x in a.items)},)", [0, *flags]
    else:
        left = w.array(a, "u8")
    flip_a, flip_b = [*flags, 0, 0][:2]  # 16-bit types alone have these flags
    t = {"f32": "f4", "s32": "i4", "f16": "u4"}[m["to"]]
    keep = w.read(scale, "b") if w.is_register(scale) else str(bool(int(str(scale), 0)))
    given = ", ".join(w.array(x, t) for x in items_of(d))
    operands = f"{left}, {w.array(b, 'u8')}, {flip_a}, {flip_b}, {keep}, ({given},)"
    shape = f"{n}, {k}, '{m['to']}', '{m['a']}', '{m['b']}'"
    out = w.temporary(f"S.wgmma.multiply({w.access(i)}, {shape}, {operands})")
    for j, register in enumerate(items_of(d)):
        w.write(register, t, f"{out}[{j}]", i)


@form("setmaxnreg.<way:inc|dec>.sync.aligned.u32", writes="none")
def set_registers(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    unguarded(i)
    count = immediate(w, i.operands[0])
    if count % 8 or not 24 <= count <= 256:
        raise UnsupportedInstruction(f"{count} registers")
    w.line(f"S.wgmma.set_registers({w.access(i)}, {count})")
