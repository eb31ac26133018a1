"""Loads, stores, atomics, matrices in shared memory, asynchronous copies of threads, fences."""

from __future__ import annotations

import re

from tritoncp.executor.forms.formulas import effect, immediate, items_of, unguarded
from tritoncp.executor.ptx.block_writer import NUMPY, BlockWriter, bits_of, unsigned
from tritoncp.executor.ptx.instruction import Address, Instruction, Operand
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
VALUES = "[.<vector:v2|v4|v8>].<type:b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64>"
ATTRIBUTES = {"global": "globals", "const": "globals", "shared": "shared", "shared::cta": "shared"}
ATTRIBUTES |= {"local": "local"}


def memory_of(m: re.Match[str]) -> str:
    """The object that holds a space; without a space the address tells it."""
    return ATTRIBUTES[m["space"]] if m["space"] else "generic"


@form("ld.param[.<vector:v2|v4>].<type:b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64>")
def load_parameter(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    t, at = NUMPY[m["type"]], i.operands[1]
    assert isinstance(at, Address)
    position = w.names.symbols.get("parameter " + at.base)
    if position is None:
        raise UnsupportedInstruction(f"parameter {at.base}")
    for j, register in enumerate(items_of(i.operands[0])):
        w.write(register, t, f"T.full(P({position}, {at.offset + j * bits_of(t) // 8}, '{t}'))", i)


@form(f"ld{ORDER}{SPACE}[.<cache:ca|cg|cs|lu|cv>][.nc]{HINTS}{VALUES}")
@form(f"ld.<order:relaxed|acquire>.{SCOPE}{SPACE}{HINTS}{VALUES}")
def load(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    t = NUMPY[m["type"]]
    registers = items_of(i.operands[0])
    where = f"{w.address(i.operands[1], 'u8')}, '{unsigned(t)}', {len(registers)}"
    out = w.temporary(f"S.{memory_of(m)}.load({w.access(i)}, {where})")
    for j, register in enumerate(registers):
        w.write(register, t, f"{out}[{j}]" if t == unsigned(t) else f"{out}[{j}].view('{t}')", i)


@form(f"st{ORDER}{SPACE}[.<cache:wb|cg|cs|wt>]{HINTS}{VALUES}", writes="none")
@form(f"st.<order:relaxed|release>.{SCOPE}{SPACE}{HINTS}{VALUES}", writes="none")
def store(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    t = unsigned(NUMPY[m["type"]])
    address = w.address(i.operands[0], "u8")
    values = ", ".join(w.array(x, t) for x in items_of(i.operands[1]))
    w.line(f"S.{memory_of(m)}.store({w.access(i)}, {address}, '{t}', ({values},))")


ORDERED = "relaxed|acquire|release|acq_rel"
SEMANTICS = (
    f"[.<semantics:{ORDERED}>][.{SCOPE}][.<space:global|shared|shared::cta>]",
    f"[.<space:global|shared|shared::cta>][.{SCOPE}][.<semantics:{ORDERED}>]",  # ptxas takes both orders
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
def atomic(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    write_atomic(w, i, m, i.operands[0], *i.operands[1:])


@form(*(f"red{s}{x}" for s in SEMANTICS for x in ATOMICS), writes="none")
def reduce(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    write_atomic(w, i, m, "_", *i.operands)


def write_atomic(
    w: BlockWriter, i: Instruction, m: re.Match[str], to: Operand, at: Operand, *values: Operand
) -> None:
    """An update for each element of a vector; cas has the expected value and the new one. Sums of float32 in
    global memory flush subnormal numbers."""
    kind = m["type"]
    t = NUMPY[kind]
    if kind == "f32" and memory_of(m) != "shared":
        kind = "f32 flushed"
    assert isinstance(at, Address)
    taken = values[: 2 if m["op"] == "cas" else 1]  # a cache policy may follow
    columns = [items_of(x) for x in taken]
    results = items_of(to) if to != "_" else ["_"] * len(columns[0])
    for j, (register, *sources) in enumerate(zip(results, *columns, strict=True)):
        address = w.address(at._replace(offset=at.offset + j * bits_of(t) // 8), "u8")
        given = ", ".join(w.array(x, t) for x in sources)
        call = f"{w.access(i)}, {address}, '{t}', '{kind}', '{m['op']}', ({given},)"
        out = w.temporary(f"S.{memory_of(m)}.atomic({call})")
        w.write(register, t, out, i)


COUNT = "<count:x1|x2|x4>"
MATRIX_SPACE = "[.<space:shared|shared::cta>]"


@form(f"ldmatrix.sync.aligned.m8n8.{COUNT}[.trans]{MATRIX_SPACE}.b16")
def load_matrix(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    unguarded(i)
    registers = items_of(i.operands[0])
    call = f"{w.access(i)}, {w.address(i.operands[1], 'u8')}, {len(registers)}, {'trans' in i.parts}"
    out = w.temporary(f"S.shared.load_matrices({call})")
    for j, register in enumerate(registers):
        w.write(register, "u4", f"{out}[{j}]", i)


@form(f"stmatrix.sync.aligned.m8n8.{COUNT}[.trans]{MATRIX_SPACE}.b16", writes="none")
def store_matrix(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    unguarded(i)
    values = ", ".join(w.array(x, "u4") for x in items_of(i.operands[1]))
    address = w.address(i.operands[0], "u8")
    w.line(f"S.shared.store_matrices({w.access(i)}, {address}, ({values},), {'trans' in i.parts})")


HINT = "[.L2::cache_hint][.<prefetch:L2::64B|L2::128B|L2::256B>]"


@form(f"cp.async.<cache:ca|cg>.<to:shared|shared::cta>.global{HINT}", writes="none")
def copy_async(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    to, of, count, *size = i.operands
    n = immediate(w, count)
    if n not in ((16,) if m["cache"] == "cg" else (4, 8, 16)):
        raise UnsupportedInstruction(f"{n} bytes")
    if size and "L2::cache_hint" in i.parts:
        size = size[:-1]
    taken = w.array(size[0], "u4") if size else "None"
    addresses = f"{w.address(to, 'u8')}, {w.address(of, 'u8')}"
    w.line(f"S.async_copies.copy({w.access(i)}, {addresses}, {n}, {taken})")


effect("S.async_copies.commit(T)", "cp.async.commit_group")
effect("S.async_copies.wait(T, {a})", "cp.async.wait_group")
effect("S.async_copies.commit(T); S.async_copies.wait(T, 0)", "cp.async.wait_all")
effect("T.need_warps('bar.warp.sync')", "bar.warp.sync")
# Programs run in order, and descriptors in memory are read as they are
effect("", "membar.<scope:cta|gl|sys>", f"fence.<order:sc|acq_rel|acquire|release>.{SCOPE}")
effect(
    "", "fence.mbarrier_init.release.cluster", f"fence.proxy.tensormap::generic.<way:acquire|release>.{SCOPE}"
)
effect("", "fence.proxy.async.<space:global>")
effect("S.shared.fence_proxy(T)", "fence.proxy.async[.<space:shared::cta|shared::cluster>]")
# Without effect on results
effect(
    "",
    "prefetch[.<space:global|local>].<level:L1|L2>",
    "prefetch.global.<level:L2::evict_last|L2::evict_normal>",
)
effect("", "nanosleep.u32", "griddepcontrol.<what:launch_dependents|wait>")


@form(
    "createpolicy.fractional.<level:L2::evict_last|L2::evict_first|L2::evict_normal|L2::evict_unchanged>.b64"
)
def cache_policy(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    """A hint: its value has no meaning here."""
    w.write(i.operands[0], "u8", f"T.full({w.constant(0, 'u8')})", i)
