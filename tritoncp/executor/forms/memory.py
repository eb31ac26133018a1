"""PTX instructions of memory: loads, stores, atomics, ldmatrix, stmatrix, cp.async and fences."""

from __future__ import annotations

import re

from tritoncp.executor.forms.formula import MEMORIES, effect, formula, immediate, without_effect
from tritoncp.executor.ptx.block_writer import NUMPY, BlockWriter, bits_of
from tritoncp.executor.ptx.instruction import Address, Instruction, Vector, items_of
from tritoncp.executor.ptx.opcodes import UnsupportedInstruction, form

ORDER = "[.<order:weak|volatile>]"
SCOPE = "<scope:cta|cluster|gpu|sys>"
SPACE = "[.<space:global|shared|shared::cta|local|const>]"
EVICT = "evict_normal|evict_unchanged|evict_first|evict_last|no_allocate"
HINTS = (
    f"[.<l1:{'|'.join('L1::' + x for x in EVICT.split('|'))}>]"
    "[.<l2:L2::evict_normal|L2::evict_first|L2::evict_last>][.L2::cache_hint]"
    "[.<prefetch:L2::64B|L2::128B|L2::256B>]"
)
TYPES = "b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64"
VALUES = f"[.<vector:v2|v4|v8>].<type:{TYPES}>"
ORDERED_LOAD = f"ld.<order:relaxed|acquire>.{SCOPE}{SPACE}{HINTS}{VALUES}"
formula(
    "S.{memory}.load({access}, {A}, '{t}', {n})",
    *(f"ld{ORDER}{SPACE}[.<cache:ca|cg|cs|lu|cv>][.nc]{HINTS}{VALUES}", ORDERED_LOAD),
    to="{type}",
)
ORDERED_STORE = f"st.<order:relaxed|release>.{SCOPE}{SPACE}{HINTS}{VALUES}"
effect(
    "S.{memory}.store({access}, {A}, {B:tuple})",
    *(f"st{ORDER}{SPACE}[.<cache:wb|cg|cs|wt>]{HINTS}{VALUES}", ORDERED_STORE),
    of="u64 {bits}",
)


@form(f"ld.param[.<vector:v2|v4>].<type:{TYPES}>")
def load_parameter(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    t, at = NUMPY[m["type"]], i.operands[1]
    assert isinstance(at, Address)
    position = w.names.symbols.get("parameter " + at.base)
    if position is None:
        raise UnsupportedInstruction(f"parameter {at.base}")
    for j, register in enumerate(items_of(i.operands[0])):
        w.write(register, t, f"T.full(P({position}, {at.offset + j * bits_of(t) // 8}, '{t}'))", i)


ORDERED = "relaxed|acquire|release|acq_rel"
SEMANTICS = (
    f"[.<semantics:{ORDERED}>][.{SCOPE}][.<space:global|shared|shared::cta>]",
    f"[.<space:global|shared|shared::cta>][.{SCOPE}][.<semantics:{ORDERED}>]",  # ptxas accepts both orders
)
ATOMICS = (
    ".<op:add>[.L2::cache_hint].<type:u32|s32|u64|f32|f64>",
    ".<op:add>.noftz[.L2::cache_hint].<type:f16|f16x2|bf16|bf16x2>",
    ".<op:min|max>[.L2::cache_hint].<type:u32|s32|u64|s64>",
    ".<op:and|or|xor>[.L2::cache_hint].<type:b32|b64>",
    ".<op:inc|dec>[.L2::cache_hint].<type:u32>",
    ".<op:add>[.L2::cache_hint].<vector:v2|v4>.<type:f32>",
    ".<op:add>.noftz[.L2::cache_hint].<vector:v2|v4|v8>.<type:f16|f16x2|bf16|bf16x2>",
)


@form(
    *(f"atom{s}{x}" for s in SEMANTICS for x in ATOMICS),
    *(f"atom{s}.<op:exch>[.L2::cache_hint].<type:b32|b64>" for s in SEMANTICS),
    *(f"atom{s}.<op:cas>[.L2::cache_hint].<type:b16|b32|b64>" for s in SEMANTICS),
)
@form(*(f"red{s}{x}" for s in SEMANTICS for x in ATOMICS), writes="none")
def atomic(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    """Emit an atomic update for each element of a vector. (cas has an expected value and a new one; float32
    sums in global memory flush subnormal numbers.)"""
    to, at, *values = ("_", *i.operands) if i.parts[0] == "red" else i.operands
    kind, t, memory = m["type"], NUMPY[m["type"]], MEMORIES.get(m["space"], "generic")
    if kind == "f32" and memory != "shared":
        kind = "f32 flushed"
    assert isinstance(at, Address)
    columns = [items_of(x) for x in values[: 2 if m["op"] == "cas" else 1]]  # a cache policy may follow
    results = items_of(to) if to != "_" else ["_"] * len(columns[0])
    for j, (register, *sources) in enumerate(zip(results, *columns, strict=True)):
        address = w.address(at._replace(offset=at.offset + j * bits_of(t) // 8), "u8")
        operands = w.arrays(Vector(tuple(sources)), t)
        call = f"{w.access(i)}, {address}, '{t}', '{kind}', '{m['op']}', {operands}"
        w.write(register, t, w.temporary(f"S.{memory}.atomic({call})"), i)


MATRICES = "<count:x1|x2|x4>[.trans][.<space:shared|shared::cta>].b16"
formula(
    "S.shared.load_matrices({every}, {A}, {n}, {trans})",
    f"ldmatrix.sync.aligned.m8n8.{MATRICES}",
    to="u32",
)
effect("S.shared.store_matrices({every}, {A}, {B:tuple}, {trans})", f"stmatrix.sync.aligned.m8n8.{MATRICES}")
HINT = "[.L2::cache_hint][.<prefetch:L2::64B|L2::128B|L2::256B>]"


@form(f"cp.async.<cache:ca|cg>.<to:shared|shared::cta>.global{HINT}", writes="none")
def copy_async(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    to, of, count, *size = i.operands
    n = immediate(w, count)
    if n not in ((16,) if m["cache"] == "cg" else (4, 8, 16)):
        raise UnsupportedInstruction(f"{n} bytes")
    if size and "L2::cache_hint" in i.parts:
        size = size[:-1]
    copied = w.array(size[0], "u4") if size else "None"
    addresses = f"{w.address(to, 'u8')}, {w.address(of, 'u8')}"
    w.line(f"S.async_copies.copy({w.access(i)}, {addresses}, {n}, {copied})")


effect("S.async_copies.commit(T)", "cp.async.commit_group")
effect("S.async_copies.wait(T, {a:number})", "cp.async.wait_group")
effect("S.async_copies.commit(T); S.async_copies.wait(T, 0)", "cp.async.wait_all")
formula("T.need_warps('bar.warp.sync')", "bar.warp.sync", to="none", members=True)
effect("S.shared.fence_proxy(T)", "fence.proxy.async[.<space:shared::cta|shared::cluster>]")
without_effect(
    # No effect, since CTAs run in order, and descriptors are read directly from memory
    *("membar.<scope:cta|gl|sys>", f"fence.<order:sc|acq_rel|acquire|release>.{SCOPE}"),
    *("fence.mbarrier_init.release.cluster", "fence.proxy.async.<space:global>"),
    f"fence.proxy.tensormap::generic.<way:acquire|release>.{SCOPE}",
    # Hints
    "prefetch[.<space:global|local>].<level:L1|L2>",
    "prefetch.global.<level:L2::evict_last|L2::evict_normal>",
    *("nanosleep.u32", "griddepcontrol.<what:launch_dependents|wait>"),
)


@form(
    "createpolicy.fractional.<level:L2::evict_last|L2::evict_first|L2::evict_normal|L2::evict_unchanged>.b64"
)
def cache_policy(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    """Emit a zero as the cache policy, a hint without effect."""
    w.write(i.operands[0], "u8", f"T.full({w.constant(0, 'u8')})", i)
