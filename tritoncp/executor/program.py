"""Translation of a kernel to Python functions, one per basic block, cached in Triton's cache by PTX hash."""

from __future__ import annotations

import functools
import hashlib
import marshal
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from triton.runtime.cache import get_cache_manager

from tritoncp.executor import forms
from tritoncp.executor.arithmetic import floating, integers, warps
from tritoncp.executor.memory.regions import PARAMETER
from tritoncp.executor.ptx.block_writer import OF_WIDTH, BlockWriter, Names
from tritoncp.executor.ptx.control_flow import liveness, meeting_order
from tritoncp.executor.ptx.in_flight import early_uses
from tritoncp.executor.ptx.instruction import Instruction, Kernel
from tritoncp.executor.ptx.opcodes import CARRY, reads_and_writes
from tritoncp.executor.ptx.parse import parse_ptx

Array = np.ndarray[Any, Any]
__all__ = ["PtxProgram", "load_program", "write_program"]
assert forms  # the import fills the table of instructions


@dataclass
class PtxProgram:
    """A kernel translated to Python.

    source:    Python source of the blocks' functions
    literals:  name, NumPy type and value of each constant; a value (symbol, offset) is an address
    borders:   for each block, the indices of registers that are live at its start and at its end
    rank:      rank of each block, see `meeting_order`
    sites:     instructions by index, for reports
    early:     uses of registers that an asynchronous instruction still writes
    """

    kernel: Kernel
    source: str
    literals: list[tuple[str, str, Any]]
    borders: list[tuple[list[int], list[int]]]
    rank: list[int]
    sites: list[Instruction]
    early: list[tuple[Instruction, str]]

    @functools.cached_property
    def compiled(self) -> Any:
        return compile(self.source, f"<PTX of {self.kernel.name}>", "exec")

    @functools.cached_property
    def dtypes(self) -> list[np.dtype[Any]]:
        """NumPy types of registers between blocks."""
        return [np.dtype("?" if w == 1 else OF_WIDTH[w]) for w in self.kernel.registers.values()]

    @functools.cached_property
    def constants(self) -> dict[str, tuple[Array, int]]:
        """Memory and size in bytes of global and constant variables."""
        return {
            name: (np.frombuffer(bytearray(data + bytes(16)), np.uint8), len(data))
            for name, (_, data) in self.kernel.constants.items()
        }

    def functions(self, addresses: dict[str, int]) -> list[Callable[..., Any]]:
        """Return the functions of the blocks. addresses: of global constants"""
        space: dict[str, Any] = {"np": np, "F": floating, "I": integers, "W": warps}
        for name, t, value in self.literals:
            raw = addresses[value[0]] + value[1] if isinstance(value, tuple) else value
            space[name] = constant(raw, t)
        exec(self.compiled, space)
        return [space[f"block{n}"] for n in range(len(self.kernel.blocks))]


def constant(raw: int, t: str) -> Any:
    if t == "b":
        return np.bool_(raw)
    return np.array([raw], dtype=f"u{t[1]}").view(t)[0]


def load_program(ptx: str) -> PtxProgram:
    """Translate a PTX module to Python, or load the translation from Triton's cache."""
    cache = get_cache_manager(hashlib.sha256((fingerprint() + ptx).encode()).hexdigest())
    if path := cache.get_file("executor.code"):
        fields, compiled = pickle.loads(Path(path).read_bytes())
        program = pickle.loads(fields)
        program.compiled = marshal.loads(compiled)
    else:
        program = write_program(ptx)
        fields = pickle.dumps(program)
        cache.put(pickle.dumps((fields, marshal.dumps(program.compiled))), "executor.code")
    return program


@functools.cache
def fingerprint() -> str:
    """Return a hash of the translator's sources, and of the versions of Python and NumPy."""
    folder = Path(__file__).parent
    digest = hashlib.sha256(f"{sys.version} {np.__version__}".encode())
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def write_program(ptx: str) -> PtxProgram:
    kernel = parse_ptx(ptx)
    kernel.registers[CARRY] = 1
    symbols = {name: start for name, (start, _) in kernel.shared.items()}
    symbols |= {name: start for name, (start, _) in kernel.local.items()}
    for position, name in enumerate(kernel.parameters):
        symbols["parameter " + name] = position
        symbols[name] = PARAMETER | position << 16
    names = Names(kernel.registers, symbols, set(kernel.constants))
    live_in, live_out = liveness(kernel)
    functions, borders = [], []
    for block in kernel.blocks:
        entering = sorted(live_in[block.number], key=names.index.__getitem__)
        writer = BlockWriter(names, entering)
        parameters = [writer.variable(r, OF_WIDTH[names.widths[r]]) for r in entering]
        written: set[str] = set()
        for i in block.instructions:
            writer.emit(i)
            written.update(reads_and_writes(i, names.widths)[1])
        leaving = sorted(written & live_out[block.number], key=names.index.__getitem__)
        values = [writer.read(r, OF_WIDTH[names.widths[r]]) for r in leaving]
        end, condition = block.end, "None"
        if end:  # the condition of the branch: its predicate, or all threads
            switch = end.parts[0] == "brx"
            condition = writer.array(end.operands[0], "u4") if switch else writer.predicate(end)
        writer.line(f"return ({''.join(v + ', ' for v in values)}), {condition}")
        head = f"def block{block.number}(T, S, P, {', '.join(parameters)}):"
        functions.append("\n  ".join([head, *writer.lines]))
        borders.append(([names.index[r] for r in entering], [names.index[r] for r in leaving]))
    literals = [(name, t, value) for (t, value), name in names.constants.items()]
    early = early_uses(kernel)
    rank, source = meeting_order(kernel), "\n".join(functions)
    return PtxProgram(kernel, source, literals, borders, rank, names.sites, early)
