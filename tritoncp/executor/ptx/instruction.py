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
}  # bits of a type


class Vector(NamedTuple):
    """Operands in braces, or a pair such as `value|predicate`."""

    items: tuple[Operand, ...]


class Address(NamedTuple):
    """An operand in brackets: a register or symbol, bytes added to it, and coordinates of a tensor map."""

    base: str
    offset: int
    coordinates: Vector | None = None


Operand: TypeAlias = "str | Vector | Address"


@dataclass(slots=True)
class Instruction:
    """One instruction.

    opcode:      with all its modifiers, `add.rn.f32`
    predicate:   register that guards it, negated or not
    line:        of the PTX
    source:      `file:line` of the kernel's Python source
    used_bytes:  bits of the bytes of a load whose value the program uses, where the compiler says so
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

    def __str__(self) -> str:
        guard = f"@{'!' * self.negated}{self.predicate} " if self.predicate else ""
        return f"{guard}{self.opcode}"


class FallThrough(NamedTuple):
    """The next block follows."""


class Branch(NamedTuple):
    """To `target` where the predicate holds, or does not if negated; else to the next block. Without a
    predicate always."""

    target: int
    predicate: str | None = None
    negated: bool = False


class Switch(NamedTuple):
    """`brx.idx`: to one of the targets by number."""

    selector: str
    targets: tuple[int, ...]


class Return(NamedTuple):
    """The end of a thread, where the predicate holds, or does not if negated; without one, always."""

    predicate: str | None = None
    negated: bool = False


class Barrier(NamedTuple):
    """`bar.sync`: threads wait until so many have come, or all of the CTA."""

    number: str
    threads: str | None
    instruction: Instruction


Terminator: TypeAlias = FallThrough | Branch | Switch | Return | Barrier


@dataclass(slots=True)
class BasicBlock:
    """Instructions without a branch between them, and how they end."""

    number: int
    instructions: list[Instruction] = field(default_factory=list)
    end: Terminator = field(default_factory=FallThrough)
    size: int = 0  # instructions with the one that ends the block


@dataclass(slots=True)
class Kernel:
    """The entry of a PTX module, with its calls inlined.

    registers: bits by name
    shared:    offset and bytes of static shared memory by name, external memory last
    constants: alignment and bytes of global and constant variables by name
    local:     offset and bytes of variables of each thread by name
    threads:   of a CTA, where the module requires it, else 0
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
        """Blocks that may follow each block."""
        follows = []
        for block in self.blocks:
            after = [block.number + 1] if block.number + 1 < len(self.blocks) else []
            match block.end:
                case Branch(target, None):
                    follows.append([target])
                case Branch(target):
                    follows.append([target, *after])
                case Switch(_, targets):
                    follows.append(list(targets))
                case Return(None):
                    follows.append([])
                case _:
                    follows.append(after)
        return follows
