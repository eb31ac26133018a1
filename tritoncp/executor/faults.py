"""Faults of a compiled kernel: their kind, place and threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tritoncp.executor.ptx.instruction import Instruction


@dataclass
class Fault:
    """A fault of one instruction, as often as it happened in a launch.

    kind:        what is wrong, in words
    kernel:      name of the compiled function
    source:      `file:line` of the kernel's Python source; empty where the compiler gave none
    instruction: the PTX instruction; `line` is its line in the PTX
    count:       threads, or accesses, that were at fault
    program:     ids (x, y, z) of the first program
    threads:     first threads of that program
    address:     first address; an offset where the memory is shared or tensor memory
    tensor:      label of the tensor, the parameter's name, where one is near
    text:        more about the first time
    """

    kind: str
    kernel: str
    source: str = ""
    instruction: str = ""
    line: int = 0
    count: int = 0
    program: tuple[int, ...] | None = None
    threads: tuple[int, ...] = ()
    address: int | None = None
    tensor: str | None = None
    text: str = ""

    def __str__(self) -> str:
        parts = [f"{self.kind}: kernel {self.kernel}"]
        if self.source:
            parts.append(self.source)
        if self.instruction:
            parts.append(f"{self.instruction} (PTX line {self.line})")
        if self.program is not None:
            parts.append(f"program {self.program}, threads {', '.join(map(str, self.threads))}")
        if self.address is not None:
            parts.append(f"address {self.address:#x}")
        if self.tensor:
            parts.append(f"tensor {self.tensor}")
        if self.text:
            parts.append(self.text)
        return f"{'; '.join(parts)} ({self.count} times)"


class ExecutionFault(RuntimeError):
    """A launch with faults. `faults` has them all."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = list(faults)
        shown = "\n".join(f"  {fault}" for fault in self.faults[:8])
        more = f"\n  and {len(self.faults) - 8} more" if len(self.faults) > 8 else ""
        super().__init__(f"compiled code executed with {len(self.faults)} faults:\n{shown}{more}")


class CannotContinue(Exception):
    """A fault after which a launch has no defined state."""

    def __init__(self, kind: str, site: int | None = None, text: str = "") -> None:
        super().__init__(kind)
        self.kind, self.site, self.text = kind, site, text


class FaultLog:
    """Faults of one launch, joined by kind and instruction."""

    def __init__(self, kernel: str, sites: list[Instruction]) -> None:
        self.kernel, self.sites = kernel, sites
        self.by_place: dict[tuple[str, int], Fault] = {}

    @property
    def faults(self) -> list[Fault]:
        return list(self.by_place.values())

    def add(self, kind: str, site: int | Instruction | None, count: int = 1, **details: Any) -> None:
        """Note a fault of an instruction; details are fields of `Fault`, kept of the first time."""
        i = self.sites[site] if isinstance(site, int) else site
        key = kind, i.line if i else 0
        if key in self.by_place:
            self.by_place[key].count += count
        else:
            place = (i.source, str(i), i.line) if i else ("", "", 0)
            self.by_place[key] = Fault(kind, self.kernel, *place, count, **details)
