"""Registers that asynchronous instructions still write: a use of one before its wait is a fault.

The rule holds for every path through the program, whatever threads take it: results of `tcgen05.ld` until
`tcgen05.wait::ld`, accumulators of `wgmma.mma_async` until a `wgmma.wait_group` that covers them. A copy
(`mov`) takes the state along, as the compiler may rename before the wait.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tritoncp.executor.instruction import Instruction, Kernel, Vector
from tritoncp.executor.opcodes import reads_and_writes, registers_of

State = dict[str, int]  # of a register: -1 by tcgen05.ld, else the commits since its product, from 0
LOADED = -1
NEW_GROUP = "a new group of products"  # in the place of a register
Step = Callable[[State, Instruction, dict[str, int]], str | None]


def early_uses(kernel: Kernel) -> list[tuple[Instruction, str]]:
    """List the instructions that use a register in flight, and products without a fence."""
    instructions = (i for block in kernel.blocks for i in block.instructions)
    early = walk(kernel, {}, advance)
    if of_products := {r for i in instructions for r in product_registers(i, kernel.registers)}:
        early += walk(kernel, dict.fromkeys([NEW_GROUP, *of_products], 0), partial(fence, of_products))
    return early


def walk(kernel: Kernel, start: State, step: Step) -> list[tuple[Instruction, str]]:
    """Follow a state along all paths; the instructions at which a step returns the text of a fault."""
    follows = kernel.successors()
    entering: list[State | None] = [None] * len(kernel.blocks)
    entering[0] = start
    work, early = [0], {}
    while work:
        n = work.pop()
        state = dict(entering[n] or {})
        for i in kernel.blocks[n].instructions:
            if text := step(state, i, kernel.registers):
                early[id(i)] = i, text
        for s in follows[n]:
            merged = merge(entering[s], state)
            if merged != entering[s]:
                entering[s] = merged
                if s not in work:
                    work.append(s)
    return list(early.values())


def product_registers(i: Instruction, registers: dict[str, int]) -> list[str]:
    """Registers of the accumulator and of the left operand of `wgmma`; none of another instruction."""
    operands = i.operands[:2] if i.opcode.startswith("wgmma.mma") else []
    return [r for x in operands if isinstance(x, Vector) for r in registers_of(x, registers)]


def fence(of_products: set[str], state: State, i: Instruction, registers: dict[str, int]) -> str | None:
    """A group of products begins with a `wgmma.fence` where other instructions accessed their registers since
    the last one. PTX wants them all before it; in Triton's code some follow, as LLVM moves arithmetic."""
    if i.opcode.startswith("wgmma.fence"):
        state.clear()
    elif i.opcode.startswith("wgmma.commit"):
        state[NEW_GROUP] = 0
    elif given := product_registers(i, registers):
        if NEW_GROUP in state and any(r in state for r in given):
            return "wgmma of registers accessed since the last wgmma.fence"
    else:
        reads, writes = reads_and_writes(i, registers)
        state |= dict.fromkeys(of_products.intersection((*reads, *writes)), 0)
    return None


def merge(before: State | None, new: State) -> State:
    """What is in flight on any path; of two products the younger one."""
    merged = dict(before or {})
    for r, age in new.items():
        merged[r] = min(age, merged.get(r, age))
    return merged


def advance(state: State, i: Instruction, registers: dict[str, int]) -> str | None:
    """Update the state by an instruction; the text of its fault, if it has one."""
    if not state and not i.opcode.startswith(("wgmma.mma", "tcgen05.ld")):
        return None
    if i.opcode.startswith("tcgen05.wait::ld"):
        drop(state, [r for r, age in state.items() if age == LOADED])
    elif i.opcode.startswith("wgmma.commit"):
        for r, age in state.items():
            state[r] = age + (age != LOADED)
    elif i.opcode.startswith("wgmma.wait"):
        left = int(str(i.operands[0]), 0)
        drop(state, [r for r, age in state.items() if age > left])
    else:
        return use(state, i, registers)
    return None


def drop(state: State, registers: list[str]) -> None:
    for r in registers:
        state.pop(r, None)


def use(state: State, i: Instruction, registers: dict[str, int]) -> str | None:
    reads, writes = reads_and_writes(i, registers)
    busy = [r for r in reads if r in state]
    text = None
    if i.opcode.startswith("wgmma.mma"):
        accumulators = set(writes)
        busy = [r for r in busy if r not in accumulators or state[r] == LOADED]
        drop(state, writes)
        state |= dict.fromkeys(writes, 0)
    elif i.opcode.startswith("mov.") and not i.predicate:
        ages = [state[r] for r in busy]
        drop(state, writes)
        if ages:
            state |= dict.fromkeys(writes, min(ages))
        return None
    else:
        drop(state, writes)
        if i.opcode.startswith("tcgen05.ld"):
            state |= dict.fromkeys(registers_of(i.operands[0], registers), LOADED)
    if busy:
        wait = "tcgen05.wait::ld" if state.get(busy[0], 0) == LOADED else "wgmma.wait_group"
        text = f"use of a register before {wait}"
        drop(state, busy)
    return text
