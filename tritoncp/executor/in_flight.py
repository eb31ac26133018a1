"""Registers that asynchronous instructions still write: a use of one before its wait is a fault.

The rule holds for every path through the program, whatever threads take it: results of `tcgen05.ld` until
`tcgen05.wait::ld`, accumulators of `wgmma.mma_async` until a `wgmma.wait_group` that covers them. A copy
(`mov`) takes the state along, as the compiler may rename before the wait.
"""

from __future__ import annotations

from tritoncp.executor.instruction import Instruction, Kernel
from tritoncp.executor.opcodes import reads_and_writes, registers_of

State = dict[str, int]  # of a register: -1 by tcgen05.ld, else the commits since its product, from 0
LOADED = -1


def early_uses(kernel: Kernel) -> list[tuple[Instruction, str]]:
    """List the instructions that use a register in flight."""
    follows = kernel.successors()
    entering: list[State | None] = [None] * len(kernel.blocks)
    entering[0] = {}
    work, early = [0], {}
    while work:
        n = work.pop()
        state = dict(entering[n] or {})
        for i in kernel.blocks[n].instructions:
            if text := advance(state, i, kernel.registers):
                early[id(i)] = i, text
        for s in follows[n]:
            merged = merge(entering[s], state)
            if merged != entering[s]:
                entering[s] = merged
                if s not in work:
                    work.append(s)
    return list(early.values())


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
