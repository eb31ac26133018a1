"""Faults of a compiled kernel: kind, instruction, threads and address."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tritoncp.executor.ptx.instruction import Instruction


@dataclass
class Fault:
    """A fault of one instruction, with all its occurrences in a launch.

    kind:        description of the fault
    kernel:      name of the compiled function
    source:      `file:line` of the kernel's Python source; "" if unknown
    instruction: the PTX instruction; `line` is its line in the PTX
    count:       number of threads, or accesses, at fault
    program:     ids (x, y, z) of the first CTA at fault
    threads:     first threads at fault in that CTA
    address:     first address; an offset for shared and tensor memory
    tensor:      name of the parameter whose tensor is nearest to the address, if any
    text:        details of the first occurrence
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
    """Raised for a launch with faults, which are listed in `faults`."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = list(faults)
        lines = "\n".join(f"  {fault}" for fault in self.faults[:8])
        more = f"\n  and {len(self.faults) - 8} more" if len(self.faults) > 8 else ""
        super().__init__(f"compiled code executed with {len(self.faults)} faults:\n{lines}{more}")


class CannotContinue(Exception):
    """Raised for a fault after which the state of a launch is undefined."""

    def __init__(self, kind: str, site: int | None = None, text: str = "") -> None:
        super().__init__(kind)
        self.kind, self.site, self.text = kind, site, text


class FaultLog:
    """Log of a launch's faults, merged by kind and instruction."""

    def __init__(self, kernel: str, sites: list[Instruction]) -> None:
        self.kernel, self.sites = kernel, sites
        self.by_place: dict[tuple[str, int], Fault] = {}

    @property
    def faults(self) -> list[Fault]:
        return list(self.by_place.values())

    def add(self, kind: str, site: int | Instruction | None, count: int = 1, **details: Any) -> None:
        """Record a fault. details: fields of `Fault`, kept for the first occurrence"""
        i = self.sites[site] if isinstance(site, int) else site
        key = kind, i.line if i else 0
        if key in self.by_place:
            self.by_place[key].count += count
        else:
            place = (i.source, str(i), i.line) if i else ("", "", 0)
            self.by_place[key] = Fault(kind, self.kernel, *place, count, **details)
