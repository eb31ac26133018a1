"""A kernel as Python functions, one a basic block, kept in Triton's cache by the hash of its PTX."""

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
from tritoncp.executor.ptx.instruction import Branch, Instruction, Kernel, Return, Switch
from tritoncp.executor.ptx.opcodes import CARRY, reads_and_writes
from tritoncp.executor.ptx.parse import parse_ptx

__all__ = ["PtxProgram", "load_program"]
assert forms  # its import fills the table of instructions


@dataclass
class Code:
    """The part of a program that is kept on disk.

    source:     Python source of the functions
    constants:  name, NumPy type and value of each constant; a value (symbol, offset) is an address
    borders:    of each block, the numbers of registers that enter it and that leave it
    rank:       of each block, see `meeting_order`
    sites:      instructions by the numbers under which the code reports them
    early:      uses of registers that are still in flight
    """

    kernel: Kernel
    source: str
    constants: list[tuple[str, str, Any]]
    borders: list[tuple[list[int], list[int]]]
    rank: list[int]
    sites: list[Instruction]
    early: list[tuple[Instruction, str]]


class PtxProgram:
    """Code that can run: functions of its blocks, and its constants in memory."""

    def __init__(self, code: Code, compiled: Any = None) -> None:
        self.kernel, self.sites, self.early = code.kernel, code.sites, code.early
        self.borders, self.rank = code.borders, code.rank
        self.dtypes = [np.dtype("?" if w == 1 else OF_WIDTH[w]) for w in code.kernel.registers.values()]
        self.constants = {
            name: (np.frombuffer(bytearray(data + bytes(16)), np.uint8), len(data))
            for name, (_, data) in code.kernel.constants.items()
        }
        self.code = code
        self.compiled = compiled or compile(code.source, f"<PTX of {code.kernel.name}>", "exec")

    def functions(self, addresses: dict[str, int]) -> list[Callable[..., Any]]:
        """The functions of the blocks, where global constants lie at these addresses."""
        space: dict[str, Any] = {"np": np, "F": floating, "I": integers, "W": warps}
        for name, t, value in self.code.constants:
            raw = addresses[value[0]] + value[1] if isinstance(value, tuple) else value
            space[name] = constant(raw, t)
        exec(self.compiled, space)
        return [space[f"block{n}"] for n in range(len(self.kernel.blocks))]


def constant(raw: int, t: str) -> Any:
    if t == "b":
        return np.bool_(raw)
    return np.array([raw], dtype=f"u{t[1]}").view(t)[0]


def load_program(ptx: str) -> PtxProgram:
    """Write the code of a PTX module, or take it from Triton's cache."""
    cache = get_cache_manager(hashlib.sha256((fingerprint() + ptx).encode()).hexdigest())
    if path := cache.get_file("executor.code"):
        code, compiled = pickle.loads(Path(path).read_bytes())
        return PtxProgram(code, marshal.loads(compiled))
    program = PtxProgram(write_code(ptx))
    cache.put(pickle.dumps((program.code, marshal.dumps(program.compiled))), "executor.code")
    return program


@functools.cache
def fingerprint() -> str:
    """A hash of the sources that write code, and of the versions that run it."""
    folder = Path(__file__).parent
    digest = hashlib.sha256(f"{sys.version} {np.__version__}".encode())
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def write_code(ptx: str) -> Code:
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
        writer.line(f"return ({''.join(v + ', ' for v in values)}), {condition(writer, block.end)}")
        head = f"def block{block.number}(T, S, P, {', '.join(parameters)}):"
        functions.append("\n  ".join([head, *writer.lines]))
        borders.append(([names.index[r] for r in entering], [names.index[r] for r in leaving]))
    constants = [(name, t, value) for (t, value), name in names.constants.items()]
    early = early_uses(kernel)
    return Code(kernel, "\n".join(functions), constants, borders, meeting_order(kernel), names.sites, early)


def condition(writer: BlockWriter, end: object) -> str:
    """Write the expression by which threads take the branch that ends a block."""
    match end:
        case Branch(_, str(predicate), negated) | Return(str(predicate), negated):
            held = writer.array(predicate, "b")
            return f"~{held}" if negated else held
        case Switch(index):
            return writer.array(index, "u4")
    return "None"
