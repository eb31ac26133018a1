"""PTX instructions of mbarriers, TMA and wgmma."""

from __future__ import annotations

import re

from tritoncp.executor.forms.formula import effect, formula, immediate, unguarded, without_effect
from tritoncp.executor.forms.warps import RESULTS
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
    arrivals, nbytes = w.array(count[0] if count else "1", "u4"), "None"
    if "expect_tx" in i.parts:
        arrivals, nbytes = w.array("1", "u4"), arrivals
    w.line(f"S.mbarriers.arrive({w.access(i)}, {w.address(at, 'u8')}, {arrivals}, {nbytes})")


WAIT = f"mbarrier.<kind:try_wait|test_wait>.parity[.acquire][.<scope:cta|cluster>].{SHARED}.b64"
formula("S.mbarriers.wait({access}, {A}, {B})", WAIT, of="u32", to="pred")
BOX = "async.bulk.tensor.<rank:1d|2d|3d|4d|5d>"
TO_SHARED = "<to:shared::cta|shared::cluster>.global[.tile].mbarrier::complete_tx::bytes[.L2::cache_hint]"
TO_GLOBAL = "[.tile].bulk_group[.L2::cache_hint]"
REDUCE = f"cp.reduce.{BOX}.global.shared::cta.<op:add|min|max|and|or|xor>{TO_GLOBAL}"
effect("S.tma.load({access}, {A}, {B}, {B:tuple}, {C})", f"cp.{BOX}.{TO_SHARED}", of="s32")
effect("S.tma.store({access}, {A}, {A:tuple}, {B})", f"cp.{BOX}.global.shared::cta{TO_GLOBAL}", of="s32")
effect("S.tma.store({access}, {A}, {A:tuple}, {B}, '{op}')", REDUCE, of="s32")
effect("S.tma.commit({access})", "cp.async.bulk.commit_group")
effect("S.tma.wait({access}, {a:number})", "cp.async.bulk.wait_group[.read]")
MAP, IN_SHARED = "tensormap.replace.tile", "shared::cta.b1024.<of:b32|b64>"
FIELDS = "global_address|rank|elemtype|interleave_layout|swizzle_mode|fill_mode"
effect("S.tma.replace({access}, {A}, '{field}', 0, {B})", f"{MAP}.<field:{FIELDS}>.{IN_SHARED}", of="{of}")
FIELDS = "box_dim|global_dim|global_stride|element_stride"  # fields that have a value for each dimension
effect(
    "S.tma.replace({access}, {A}, '{field}', {b:number}, {C})",
    f"{MAP}.<field:{FIELDS}>.{IN_SHARED}",
    of="{of}",
)
PUBLISH = "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release"
effect("S.tma.publish({access}, {A}, {B}, {c:number})", f"{PUBLISH}.<scope:gpu|cta|sys>.sync.aligned")
without_effect("wgmma.fence.sync.aligned")  # the executor reads registers when the product is issued
effect("S.wgmma.commit(T)", "wgmma.commit_group.sync.aligned")
effect("S.wgmma.wait(T, {a:number})", "wgmma.wait_group.sync.aligned")
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
    d, a, b, keep, *rest = i.operands
    if i.predicate or DEPTH[m["a"]] != k or DEPTH[m["b"]] != k or not isinstance(d, Vector):
        raise UnsupportedInstruction(i.opcode)
    flags = [immediate(w, x) for x in rest]
    if m["to"] != "s32" and [flags.pop(0), flags.pop(0)] != [1, 1]:
        raise UnsupportedInstruction("a negated operand")
    if isinstance(a, Vector):
        left, flags = w.arrays(a, "u4"), [0, *flags]
    else:
        left = w.array(a, "u8")
    flip_a, flip_b = [*flags, 0, 0][:2]  # 16-bit types alone have these flags
    t, shape = RESULTS[m["to"]], f"{n}, {k}, '{m['to']}', '{m['a']}', '{m['b']}'"
    operands = f"{left}, {w.array(b, 'u8')}, {flip_a}, {flip_b}, {w.read(keep, 'b')}, {w.arrays(d, t)}"
    w.write_each(d.items, [t], f"S.wgmma.multiply({w.access(i)}, {shape}, {operands})", i)


@form("setmaxnreg.<way:inc|dec>.sync.aligned.u32", writes="none")
def set_registers(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    unguarded(i)
    count = immediate(w, i.operands[0])
    if count % 8 or not 24 <= count <= 256:
        raise UnsupportedInstruction(f"{count} registers")
    w.line(f"S.wgmma.set_registers({w.access(i)}, {count})")
