"""PTX instructions of tcgen05: tensor memory and matrix products."""

from __future__ import annotations

import re

from tritoncp.executor.forms.formula import effect, formula, without_effect
from tritoncp.executor.ptx.block_writer import BlockWriter
from tritoncp.executor.ptx.instruction import Address, Instruction
from tritoncp.executor.ptx.opcodes import UnsupportedInstruction, form

# tcgen05.fence has no effect: barriers, and mbarriers with release and acquire semantics, order tcgen05
# without it. PTX requires it with relaxed arrivals and waits, which are not supported.
without_effect("tcgen05.fence::<when:before_thread_sync|after_thread_sync>")
effect("S.tensor.wait(T, '{what}')", "tcgen05.wait::<what:ld|st>.sync.aligned")
ALLOCATE = "tcgen05.alloc.cta_group::1.sync.aligned[.<space:shared::cta>].b32"
effect("S.tensor.allocate({access}, {A}, {b:number})", ALLOCATE)
effect("S.tensor.free({access}, {A}, {b:number})", "tcgen05.dealloc.cta_group::1.sync.aligned.b32")
effect("S.tensor.relinquish({access})", "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned")
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one[.<space:shared::cluster>].b64"
effect("S.tcgen05.commit({access}, {A})", COMMIT, of="u64")
COUNTS = "|".join(f"x{1 << n}" for n in range(8))
for shape, apart, values in (("32x32b", "0", "{B:tuple}"), ("16x32bx2", "{b:number}", "{C:tuple}")):
    access, where = f"sync.aligned.{shape}.<count:{COUNTS}>", f"{{access}}, {{A}}, '{shape}', {apart}"
    formula(f"S.tensor.load({where}, {{n}}, {{halves!r}})", f"tcgen05.ld.{access}[.<halves:pack::16b>].b32")
    effect(
        f"S.tensor.store({where}, {values}, {{halves!r}})", f"tcgen05.st.{access}[.<halves:unpack::16b>].b32"
    )


@form("tcgen05.mma.cta_group::1.kind::<kind:f16|tf32|f8f6f4|i8>", writes="none")
def multiply(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
    if len(i.operands) != 5:
        raise UnsupportedInstruction(f"{len(i.operands)} operands")
    d, a, b, description, keep = i.operands
    in_tensor_memory = isinstance(a, Address)
    left = w.address(a, "u4") if in_tensor_memory else w.array(a, "u8")
    operands = f"{w.address(d, 'u4')}, {left}, {in_tensor_memory}, {w.array(b, 'u8')}"
    call = f"{w.access(i)}, {operands}, {w.array(description, 'u4')}, {w.array(keep, 'b')}, '{m['kind']}'"
    w.line(f"S.tcgen05.multiply({call})")
