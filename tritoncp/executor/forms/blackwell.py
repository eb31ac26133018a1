"""tcgen05: tensor memory and its products."""

from __future__ import annotations

import re

from tritoncp.executor.forms.formulas import effect, immediate, items_of
from tritoncp.executor.ptx.block_writer import BlockWriter
from tritoncp.executor.ptx.instruction import Address, Instruction, Operand
from tritoncp.executor.ptx.opcodes import UnsupportedInstruction, form

# Barriers, and mbarriers that release and acquire, order tcgen05 without a fence. PTX needs it beside relaxed
# arrivals and waits, which have no form.
effect("", "tcgen05.fence::<when:before_thread_sync|after_thread_sync>")
effect("S.tensor.wait(T, '{what}')", "tcgen05.wait::<what:ld|st>.sync.aligned")
ALLOCATE = "tcgen05.alloc.cta_group::1.sync.aligned[.<space:shared::cta>].b32"
effect("S.tensor.allocate({access}, {A}, {b})", ALLOCATE)
effect("S.tensor.free({access}, {A}, {b})", "tcgen05.dealloc.cta_group::1.sync.aligned.b32")
effect("S.tensor.relinquish({access})", "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned")
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one[.<space:shared::cluster>].b64"
effect("S.tcgen05.commit({access}, {A})", COMMIT, of="u64")
COUNTS = "|".join(f"x{1 << n}" for n in range(8))
ACCESS = f"sync.aligned.<shape:32x32b|16x32bx2>.<count:{COUNTS}>"


@form(f"tcgen05.ld.{ACCESS}[.pack::16b].b32")
def load(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    registers, at, *split = items_of(i.operands[0]), *i.operands[1:]
    where = cells(w, i, m, at, split, len(registers))
    load_of = "load_pairs" if "pack::16b" in i.parts else "load"
    out = w.temporary(f"S.tensor.{load_of}({w.access(i)}, {where})")
    for j, register in enumerate(registers):
        w.write(register, "u4", f"{out}[{j}]", i)


@form(f"tcgen05.st.{ACCESS}[.unpack::16b].b32", writes="none")
def store(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    at, *split, values = i.operands
    registers = items_of(values)
    where = cells(w, i, m, at, split, len(registers))
    given = ", ".join(w.array(x, "u4") for x in registers)
    store_of = "store_pairs" if "unpack::16b" in i.parts else "store"
    w.line(f"S.tensor.{store_of}({w.access(i)}, {where}, ({given},))")


def cells(w: BlockWriter, i: Instruction, m: re.Match[str], at: Operand, split: list[Operand], n: int) -> str:
    if n != int(m["count"][1:]):
        raise UnsupportedInstruction(f"{n} registers")
    apart = immediate(w, split[0]) if split else 0
    return f"{w.address(at, 'u4')}, '{m['shape']}', {n}, {apart}"


@form("tcgen05.mma.cta_group::1.kind::<kind:f16|tf32|f8f6f4|i8>", writes="none")
def multiply(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    if len(i.operands) != 5:
        raise UnsupportedInstruction(f"{len(i.operands)} operands")
    d, a, b, description, scale = i.operands
    in_tensor_memory = isinstance(a, Address)
    left = w.address(a, "u4") if in_tensor_memory else w.array(a, "u8")
    keep = w.condition(scale) if w.is_register(scale) else f"T.full(np.bool_({int(str(scale), 0) != 0}))"
    operands = f"{w.address(d, 'u4')}, {left}, {in_tensor_memory}, {w.array(b, 'u8')}"
    call = f"{w.access(i)}, {operands}, {w.array(description, 'u4')}, {keep}, '{m['kind']}'"
    w.line(f"S.tcgen05.multiply({call})")
