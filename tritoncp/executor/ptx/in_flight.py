"""Static check for uses of registers that an asynchronous instruction still writes.

It covers every path through the program: accumulators of `wgmma.mma_async` until a `wgmma.wait_group` that
covers them. A copy (`mov`) has the state of its source, since the compiler may rename registers before the
wait.

Results of `tcgen05.ld` may be used before `tcgen05.wait::ld`: the dependence of registers orders them (PTX
ISA, "Register dependency, same thread"), and code of Triton 3.9 relies on that (triton#11464). The wait
orders the read of tensor memory before what overwrites or frees it, which `TensorMemory` checks.

Products also need a `wgmma.fence` after other writes of their registers. For accumulators it has to follow
the last write. For operands A in registers, a fence after the previous group of products is enough: LLVM
packs them after the fence of their group, and ptxas preserves this order. LLVM also copies one register to
several accumulators after the fence, if they have the same initial value; ptxas moves the copies before the
machine code's fence (`WARPGROUP.ARRIVE`), or makes them RZ if the value is 0 (seen in the output of ptxas of
Triton 3.7.1 for `forward_kernel` and `dq_kernel` with one key). So a copy of a register that was last written
before the fence does not count as a write to an accumulator.
"""

from __future__ import annotations

from tritoncp.executor.ptx.instruction import Instruction, Kernel, Vector
from tritoncp.executor.ptx.opcodes import reads_and_writes, registers_of

State = dict[str, int]  # register -> number of commits since its product, or FRESH
FRESH = 1 << 30  # written by another instruction after the last wgmma.fence
NEW_GROUP = "a commit without a wgmma.fence since"  # a key in place of a register, with the value FRESH


def early_uses(kernel: Kernel) -> list[tuple[Instruction, str]]:
    """List (instruction, fault) for uses of registers that an asynchronous instruction still writes."""
    opcodes = (i.opcode for block in kernel.blocks for i in block.instructions)
    if not any(o.startswith("wgmma.mma") for o in opcodes):
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
    """Merge the states of two paths; for a register of two products, the later product counts."""
    merged = dict(before or {})
    for r, age in new.items():
        merged[r] = min(age, merged.get(r, age))
    return merged


def drop(state: State, registers: list[str]) -> None:
    for r in registers:
        state.pop(r, None)


class Rules:
    """Transfer function of the check: the effect of each instruction on the state of registers.

    operands: registers of all products, and of their initial sums
    sums:     accumulators of all products, and registers that are copied to them
    """

    def __init__(self, kernel: Kernel) -> None:
        self.registers = kernel.registers
        products = [
            i for block in kernel.blocks for i in block.instructions if i.opcode.startswith("wgmma.mma")
        ]
        self.sums = {r for i in products for r in self.parts(i)[0]}
        moves = [i for block in kernel.blocks for i in block.instructions if i.opcode.startswith("mov.")]
        copies = [reads_and_writes(i, self.registers) for i in moves]
        while sources := {r for reads, (to, *_) in copies if to in self.sums for r in reads} - self.sums:
            self.sums |= sources
        self.operands = self.sums.union(*(part for i in products for part in self.parts(i)))

    def parts(self, i: Instruction) -> tuple[list[str], list[str]]:
        """Return (registers of a product's accumulator, registers of its operand A)."""
        a = i.operands[1]
        return registers_of(i.operands[0], self.registers), (
            registers_of(a, self.registers) if isinstance(a, Vector) else []
        )

    def advance(self, state: State, i: Instruction) -> str | None:
        """Update the state by an instruction; return its fault or None."""
        if i.opcode.startswith("wgmma.mma"):
            return self.issue(state, i)
        if i.opcode.startswith("wgmma.fence"):
            drop(state, [r for r, age in state.items() if age == FRESH])
        elif i.opcode.startswith("wgmma.commit"):
            state |= {r: age + 1 for r, age in state.items() if age < FRESH}
            state[NEW_GROUP] = FRESH
        elif i.opcode.startswith("wgmma.wait"):
            left = int(str(i.operands[0]), 0)
            drop(state, [r for r, age in state.items() if left < age < FRESH])
        else:
            return self.use(state, i)
        return None

    def issue(self, state: State, i: Instruction) -> str | None:
        """Update the state by a product; earlier products may have the same accumulators."""
        accumulators, fragments = self.parts(i)
        ages = {state[r] for r in accumulators if r in state}
        busy = any(state.get(r, FRESH) < FRESH for r in fragments)
        state |= dict.fromkeys(accumulators, 0)
        if busy:
            return "use of a register before its wait"
        if FRESH in ages:
            return "wgmma of accumulators that were written after the last wgmma.fence"
        if NEW_GROUP in state and any(r in state for r in fragments):
            return "wgmma of operands that were written after the wgmma.fence of another group"
        return None

    def use(self, state: State, i: Instruction) -> str | None:
        """Update the state by any other instruction."""
        reads, writes = reads_and_writes(i, self.registers)
        busy = [r for r in reads if state.get(r, FRESH) < FRESH]
        ages = [state[r] for r in busy]
        drop(state, writes)
        is_copy = i.opcode.startswith("mov.") and bool(reads) and not i.predicate
        is_of_sum = len(reads) == len(writes) == 1 and self.sums.issuperset(reads + writes)
        copies_sum = is_copy and is_of_sum and state.keys().isdisjoint(reads)
        if ages and is_copy:
            state |= dict.fromkeys(writes, min(ages))
            return None
        if not copies_sum:
            state |= {r: FRESH for r in writes if r in self.operands}
        if not ages:
            return None
        drop(state, busy)
        return "use of a register before wgmma.wait_group"
