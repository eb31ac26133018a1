"""Instructions, basic blocks and kernels of a PTX module."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

WIDTHS = {
    "pred": 1,
    **dict.fromkeys(("b8", "u8", "s8"), 8),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16"), 16),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2", "tf32"), 32),
    **dict.fromkeys(("b64", "u64", "s64", "f64", "f32x2"), 64),
}  # PTX type -> bits

BRANCHES, BARRIERS = ("bra", "brx", "ret", "exit"), ("bar", "barrier")  # operations that end a block


class Vector(NamedTuple):
    """Operands in braces, or a pair such as `value|predicate`."""

    items: tuple[Operand, ...]


class Address(NamedTuple):
    """An operand in brackets: a register or symbol, bytes added to it, and coordinates of a tensor map."""

    base: str
    offset: int
    coordinates: Vector | None = None


Operand: TypeAlias = "str | Vector | Address"


def items_of(operand: Operand) -> tuple[Operand, ...]:
    """Return the items of an operand in braces, or the coordinates of a tensor map; else the operand
    itself."""
    if isinstance(operand, Address) and operand.coordinates:
        operand = operand.coordinates
    return operand.items if isinstance(operand, Vector) else (operand,)


@dataclass(slots=True)
class Instruction:
    """A PTX instruction.

    opcode:      with all modifiers, for example `add.rn.f32`
    predicate:   guard of the instruction, a register with or without negation, or None
    line:        line in the PTX
    source:      `file:line` of the kernel's Python source
    used_bytes:  mask of the bytes of a load that the program uses, if the compiler declares it
    """

    opcode: str
    operands: list[Operand]
    predicate: str | None = None
    negated: bool = False
    line: int = 0
    source: str = ""
    used_bytes: int | None = None

    @property
    def parts(self) -> list[str]:
        return self.opcode.split(".")

    @property
    def ends_block(self) -> bool:
        return self.parts[0] in BRANCHES or (self.parts[0] in BARRIERS and self.parts[1] != "warp")

    def __str__(self) -> str:
        guard = f"@{'!' * self.negated}{self.predicate} " if self.predicate else ""
        return f"{guard}{self.opcode}"


@dataclass(slots=True)
class BasicBlock:
    """A basic block; its last instruction may be a branch, a return or a barrier.

    targets: the blocks to which it branches
    """

    number: int
    instructions: list[Instruction] = field(default_factory=list)
    targets: tuple[int, ...] = ()

    @property
    def end(self) -> Instruction | None:
        """The branch, return or barrier at its end, or None."""
        last = self.instructions[-1] if self.instructions else None
        return last if last and last.ends_block else None

    @property
    def goes_on(self) -> bool:
        """Whether threads may continue with the next block."""
        return not self.end or self.end.parts[0] in BARRIERS or bool(self.end.predicate)


@dataclass(slots=True)
class Kernel:
    """The entry function of a PTX module, with calls inlined.

    registers: name -> bits
    shared:    name -> offset and bytes of static shared memory, external memory last
    constants: name -> alignment and bytes of global and constant variables
    local:     name -> offset and bytes of variables in local memory
    threads:   threads per CTA that the module requires, or 0
    """

    name: str
    parameters: list[str]
    registers: dict[str, int]
    blocks: list[BasicBlock]
    shared: dict[str, tuple[int, int]]
    constants: dict[str, tuple[int, bytes]]
    local: dict[str, tuple[int, int]]
    threads: int = 0

    def successors(self) -> list[list[int]]:
        """Return the blocks that may follow each block."""
        return [[*block.targets, *([block.number + 1] if block.goes_on else [])] for block in self.blocks]
