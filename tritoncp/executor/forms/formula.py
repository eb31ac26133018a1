"""Opcodes defined by formulas: NumPy expressions of their operands, or calls of memories and units."""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import Formatter
from typing import NamedTuple

from tritoncp.executor.ptx.block_writer import NUMPY, BlockWriter
from tritoncp.executor.ptx.instruction import Address, Instruction, Operand, items_of
from tritoncp.executor.ptx.opcodes import UnsupportedInstruction, form

MEMORIES = {"global": "globals", "const": "globals", "shared": "shared", "shared::cta": "shared"}
MEMORIES |= {"local": "local"}


def formula(expression: str, *templates: str, of: str = "", to: str = "", members: bool = False) -> None:
    """Register opcodes whose results are an expression.

    Args:
        expression: `{a}` to `{d}` are operands: `{a}` is an array, the others may be scalars, in capitals all
            are arrays. `{A:tuple}` has the items of a vector, or the coordinates of a box; `{a:number}` is an
            immediate number. `{access}` is the `Access` of the threads with a true predicate, `{every}` that
            of all threads. `{op}` is the first part of the opcode, `{t}` the NumPy type of the result, `{n}`
            the number of results, `{memory}` the opcode's memory; other names are choices of the template, or
            are true if the opcode has a part of that name.
        of: types of the operands, the last one also for all that follow; default: the choice `of`, or the
            type at the opcode's end
        to: type of the result; default: the choice `to`, or the type of the first operand. For several
            results (a pair, or a list of `{n}`) their types, the last one also for all that follow. "none":
            no result
        members: the last operand is a mask of lanes, which must be all of the warp
    """
    names = {name for _, name, _, _ in Formatter().parse(expression) if name}
    count = len({name.lower() for name in names} & set("abcd"))

    def emit(w: BlockWriter, i: Instruction, m: re.Match[str]) -> None:
        d, *operands = ("_", *i.operands) if to == "none" else i.operands
        if members:
            need_all_lanes(w, i, operands.pop())
        if len(operands) != count + ("L2::cache_hint" in i.parts):  # a cache policy is the last operand
            raise UnsupportedInstruction(f"{len(operands)} operands")
        if "every" in names or (to == "none" and "access" not in names):
            unguarded(i)
        words = words_of(i, m, names)
        types = (of.format(**words) or str(words.get("of", i.parts[-1]))).split()
        kinds = (to.format(**words) or str(words.get("to", types[0]))).split()
        for name, operand, t in zip("abcd", operands, types + types[-1:] * 4):
            words[name] = FormulaOperand(w, i, m, operand, t, scalar=name != "a")
            words[name.upper()] = FormulaOperand(w, i, m, operand, t)
        if names & {"access", "every"}:
            words["access"] = words["every"] = w.access(i)
        registers = items_of(d)
        text = expression.format(**words | {"t": NUMPY.get(kinds[0]), "n": len(registers)})
        if to == "none":
            w.line(text)
        elif "n" in names or len(kinds) > 1:
            need_count(m, registers)
            w.write_each(registers, [NUMPY[t] for t in kinds], text, i)
        else:
            w.write(d, NUMPY[kinds[0]], finish(i, kinds[0], text), i)

    form(*templates, writes="none" if to == "none" else "first")(emit)


def effect(call: str, *templates: str, of: str = "u32") -> None:
    """Register opcodes without a result. call: an expression as in `formula`"""
    formula(call, *templates, of=of, to="none")


def without_effect(*templates: str) -> None:
    """Register opcodes that have no effect on results."""
    form(*templates, writes="none")(lambda w, i, m: None)


class FormulaOperand(NamedTuple):
    """An operand in a formula, emitted as array, scalar, tuple or number by its format."""

    writer: BlockWriter
    instruction: Instruction
    match: re.Match[str]
    operand: Operand
    t: str
    scalar: bool = False

    def __format__(self, place: str) -> str:
        w, operand = self.writer, self.operand
        if place == "number":
            return str(immediate(w, operand))
        if place == "tuple":
            need_count(self.match, items_of(operand))
            return w.arrays(operand, NUMPY[self.t])
        if isinstance(operand, Address):
            return w.address(operand, "u8")
        return source(w, self.instruction, operand, self.t, self.scalar)


def words_of(i: Instruction, m: re.Match[str], names: set[str]) -> dict[str, object]:
    """Return the values of a formula's names from the opcode; for types also their bits, and the type of
    twice the width."""
    choices = m.groupdict()
    words: dict[str, object] = {name: name in i.parts for name in names}
    memory = MEMORIES.get(choices.get("space") or "", "generic")  # generic: the address determines the space
    words |= {"op": i.parts[0], "memory": memory}
    if bits := re.search(r"\d+$", choices.get("type") or ""):
        words |= {"bits": f"b{bits[0]}", "wide": f"{m['type'][0]}{2 * int(bits[0])}"}
    return words | choices


def need_all_lanes(w: BlockWriter, i: Instruction, members: Operand) -> None:
    """Raise UnsupportedInstruction unless all lanes take part in an exchange, as in all code that Triton
    emits."""
    if w.is_register(members) and not i.predicate:
        w.line(f"W.need_every_lane({w.array(members, 'u4')})")
    elif i.predicate or int(str(members), 0) & 0xFFFFFFFF != 0xFFFFFFFF:
        raise UnsupportedInstruction(f"{i.opcode} of a part of a warp")


def need_count(m: re.Match[str], registers: Sequence[Operand]) -> None:
    """Raise UnsupportedInstruction unless an opcode's `count` is the number of its registers."""
    if "count" in m.groupdict() and len(registers) != int(m["count"][1:]):
        raise UnsupportedInstruction(f"{len(registers)} registers")


def immediate(w: BlockWriter, operand: Operand) -> int:
    if w.is_register(operand):
        raise UnsupportedInstruction(f"{operand} in place of a number")
    return int(str(operand), 0)


def unguarded(i: Instruction) -> None:
    if i.predicate:
        raise UnsupportedInstruction(f"{i} with a predicate")


def source(w: BlockWriter, i: Instruction, operand: Operand, t: str, scalar: bool = False) -> str:
    """Return the source of an operand, flushed if the opcode has .ftz (except ex2: 2^x is 1 in both
    cases)."""
    x = (w.read if scalar else w.array)(operand, NUMPY[t])
    return f"F.ftz({x})" if "ftz" in i.parts and t == "f32" and i.parts[0] != "ex2" else x


def finish(i: Instruction, t: str, expression: str) -> str:
    """Return the source of a result, flushed and clamped if the opcode has .ftz and .sat."""
    if "ftz" in i.parts and t == "f32":
        expression = f"F.ftz({expression})"
    clamp = "relu" if "relu" in i.parts else "saturate" if "sat" in i.parts and "f" in t else ""
    if clamp and "f16" in t:
        return f"F.through_float32(F.{clamp}, '{t}', {expression})"
    return f"F.{clamp}({expression})" if clamp else expression
