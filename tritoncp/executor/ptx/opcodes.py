"""The table of supported PTX instructions; an unknown opcode or modifier is an error, never ignored.

A template is an opcode with its modifiers in order. `[.ftz]` is optional, `<type:f16|bf16>` is one of two:

    @form("min[.ftz][.NaN].f32", "min.<type:s32|u32>")
    def minimum(writer, instruction, match): ...
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

from tritoncp.executor.ptx.instruction import Address, Instruction, Operand, items_of

Emit = Callable[..., None]  # (block_writer.BlockWriter, instruction, match of its template) -> None
CARRY = "%carry"  # the carry flag counts as a register


class UnsupportedInstruction(NotImplementedError):
    """Raised for an instruction, modifier or operand that the executor does not support."""


class Form(NamedTuple):
    """The implementation of an opcode.

    writes: "first": the first operand; "none"; "accumulator": the first operand, which is also read
    """

    pattern: re.Pattern[str]
    emit: Emit
    writes: str


FORMS: dict[str, list[Form]] = {}
TOKEN = re.compile(r"<(?P<name>\w+):(?P<choices>[^>]*)>|(?P<open>\[)|(?P<close>\])|(?P<text>[^<\[\]]+)")


def form(*templates: str, writes: str = "first") -> Callable[[Emit], Emit]:
    """Decorate a function that emits the code of opcodes, given by templates."""

    def register(emit: Emit) -> Emit:
        for template in templates:
            operation = re.match(r"\w+", template)
            assert operation, template
            FORMS.setdefault(operation[0], []).append(Form(pattern_of(template), emit, writes))
        return emit

    return register


def pattern_of(template: str) -> re.Pattern[str]:
    out = []
    for m in TOKEN.finditer(template):
        if m["name"]:
            out.append(f"(?P<{m['name']}>{'|'.join(map(re.escape, m['choices'].split('|')))})")
        else:
            out.append("(?:" if m["open"] else ")?" if m["close"] else re.escape(m["text"]))
    return re.compile("".join(out))


@functools.cache
def form_of(opcode: str) -> tuple[Form, re.Match[str]]:
    """Return the form of an opcode, and the match of its template.

    Raises:
        UnsupportedInstruction: the table has no such opcode.
    """
    for entry in FORMS.get(opcode.split(".")[0], ()):
        if m := entry.pattern.fullmatch(opcode):
            return entry, m
    raise UnsupportedInstruction(f"the executor's table of PTX instructions has no {opcode}")


def registers_of(operand: Operand, registers: dict[str, int]) -> list[str]:
    """Return the registers in an operand."""
    if isinstance(operand, str):
        name = operand.removeprefix("!")
        return [name] if name in registers else []
    items = items_of(operand)
    if isinstance(operand, Address):
        items = (operand.base, *(items if operand.coordinates else ()))
    return [r for item in items for r in registers_of(item, registers)]


def reads_and_writes(i: Instruction, registers: dict[str, int]) -> tuple[list[str], list[str]]:
    """Return (registers that an instruction reads, registers that it writes). With a predicate, it also reads
    the registers that it writes, since they may keep their values."""
    entry, _ = form_of(i.opcode)
    writes: list[str] = []
    rest = i.operands
    if entry.writes != "none":
        writes = registers_of(i.operands[0], registers)
        rest = i.operands[1:]
    reads = [r for operand in rest for r in registers_of(operand, registers)]
    if i.predicate:
        reads.append(i.predicate)
    if i.parts[0] in ("addc", "subc", "madc"):
        reads.append(CARRY)
    if i.predicate or entry.writes == "accumulator":
        reads += writes
    if "cc" in i.parts:
        writes = [*writes, CARRY]
    return reads, writes
