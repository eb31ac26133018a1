"""Registers that asynchronous instructions still write: a use of one before its wait is a fault.

The rule holds for every path through the program, whatever threads take it: results of `tcgen05.ld` until
`tcgen05.wait::ld`, accumulators of `wgmma.mma_async` until a `wgmma.wait_group` that covers them. A copy
(`mov`) takes the state along, as the compiler may rename before the wait.

Products also need a `wgmma.fence` behind other writes of their registers. Accumulators need it after the last
write. Operands A in registers need one since the group of products before: LLVM packs them behind the fence
of their own group, and ptxas keeps that order by the registers. LLVM also puts copies of one accumulator to
another behind the fence, where several start with the same value; ptxas puts them in front of the machine
code's fence (`WARPGROUP.ARRIVE`; read in what ptxas of Triton 3.7.1 makes of `forward_kernel` for one key).
So a copy of an accumulator that has its fence is no write to the accumulator that it starts.
"""

from __future__ import annotations

from tritoncp.executor.ptx.instruction import Instruction, Kernel, Vector
from tritoncp.executor.ptx.opcodes import reads_and_writes, registers_of

State = dict[str, int]  # of a register: commits since its product, from 0, or one of these
LOADED, FRESH = -1, 1 << 30  # by tcgen05.ld; written by another instruction, no wgmma.fence since
NEW_GROUP = "a commit without a wgmma.fence since"  # FRESH in the place of a register
ASYNCHRONOUS = ("wgmma.mma", "tcgen05.ld")


def early_uses(kernel: Kernel) -> list[tuple[Instruction, str]]:
    """List the instructions that use a register in flight."""
    opcodes = (i.opcode for block in kernel.blocks for i in block.instructions)
    if not any(o.startswith(ASYNCHRONOUS) for o in opcodes):
        return []
    rules = Rules(kernel)
    follows = kernel.successors()
    entering: list[State | None] = [None] * len(kernel.blocks)
    entering[0] = dict.fromkeys([NEW_GROUP, *rules.operands], FRESH)
    work, early = [0], {}
    while work:
        n = work.pop()
        state = dict(entering[n] or {})
        for i in kernel.blocks[n].instructions:
            if text := rules.advance(state, i):
                early[id(i)] = i, text
        for s in follows[n]:
            merged = merge(entering[s], state)
            if merged != entering[s]:
                entering[s] = merged
                if s not in work:
                    work.append(s)
    return list(early.values())


def merge(before: State | None, new: State) -> State:
    """Merge registers in flight over all paths; of two products the younger one counts."""
    merged = dict(before or {})
    for r, age in new.items():
        merged[r] = min(age, merged.get(r, age))
    return merged


def drop(state: State, registers: list[str]) -> None:
    for r in registers:
        state.pop(r, None)


class Rules:
    """How instructions change the state of registers.

    operands: registers of all products; accumulators: those that they add to
    """

    def __init__(self, kernel: Kernel) -> None:
        self.registers = kernel.registers
        products = [
            i for block in kernel.blocks for i in block.instructions if i.opcode.startswith("wgmma.mma")
        ]
        self.operands = {r for i in products for part in self.parts(i) for r in part}
        self.accumulators = {r for i in products for r in self.parts(i)[0]}

    def parts(self, i: Instruction) -> tuple[list[str], list[str]]:
        """Registers of a product's accumulator, and those of its operand A."""
        a = i.operands[1]
        return registers_of(i.operands[0], self.registers), (
            registers_of(a, self.registers) if isinstance(a, Vector) else []
        )

    def advance(self, state: State, i: Instruction) -> str | None:
        """Update the state by an instruction; the text of its fault, if it has one."""
        if i.opcode.startswith("wgmma.mma"):
            return self.issue(state, i)
        if i.opcode.startswith("tcgen05.wait::ld"):
            drop(state, [r for r, age in state.items() if age == LOADED])
        elif i.opcode.startswith("wgmma.fence"):
            drop(state, [r for r, age in state.items() if age == FRESH])
        elif i.opcode.startswith("wgmma.commit"):
            state |= {r: age + 1 for r, age in state.items() if 0 <= age < FRESH}
            state[NEW_GROUP] = FRESH
        elif i.opcode.startswith("wgmma.wait"):
            left = int(str(i.operands[0]), 0)
            drop(state, [r for r, age in state.items() if left < age < FRESH])
        else:
            return self.use(state, i)
        return None

    def issue(self, state: State, i: Instruction) -> str | None:
        """A product: its accumulators may be those of the products before it."""
        accumulators, fragments = self.parts(i)
        ages = {state[r] for r in accumulators if r in state}
        busy = LOADED in ages or any(state.get(r, FRESH) < FRESH for r in fragments)
        state |= dict.fromkeys(accumulators, 0)
        if busy:
            return "use of a register before its wait"
        if FRESH in ages:
            return "wgmma of accumulators that were written after the last wgmma.fence"
        if NEW_GROUP in state and any(r in state for r in fragments):
            return "wgmma of operands that were written after the wgmma.fence of another group"
        return None

    def use(self, state: State, i: Instruction) -> str | None:
        """Any other instruction."""
        reads, writes = reads_and_writes(i, self.registers)
        busy = [r for r in reads if state.get(r, FRESH) < FRESH]
        ages = [state[r] for r in busy]
        drop(state, writes)
        is_copy = i.opcode.startswith("mov.") and bool(reads) and not i.predicate
        copies_sum = (
            is_copy and self.accumulators.issuperset(reads + writes) and state.keys().isdisjoint(reads)
        )
        if i.opcode.startswith("tcgen05.ld"):
            state |= dict.fromkeys(writes, LOADED)
        elif ages and is_copy:
            state |= dict.fromkeys(writes, min(ages))
            return None
        elif not copies_sum:
            state |= {r: FRESH for r in writes if r in self.operands}
        if not ages:
            return None
        drop(state, busy)
        return f"use of a register before {'tcgen05.wait::ld' if LOADED in ages else 'wgmma.wait_group'}"
