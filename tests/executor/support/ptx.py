"""Hand-written PTX, run without Triton: kernels of a few instructions on NumPy arrays."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch

from tritoncp.executor.faults import CannotContinue, Fault
from tritoncp.executor.launch import GridExecution, Settings
from tritoncp.executor.memory.regions import extent_of
from tritoncp.executor.program import write_program

Array = np.ndarray[Any, Any]
DECLARED = """
.reg .pred %p<16>;
.reg .b16 %h<16>;
.reg .b32 %r<64>;
.reg .f32 %f<32>;
.reg .b64 %d<48>;
.reg .f64 %g<16>;
"""


def module(body: str, parameters: int, shared: int = 0, threads: int = 32, head: str = "") -> str:
    """A module whose entry `k` has pointers p0, p1, ..."""
    formals = ", ".join(f".param .u64 p{n}" for n in range(parameters))
    memory = f".shared .align 128 .b8 smem[{shared}];\n" if shared else ""
    return (
        f".version 8.7\n.target sm_100a\n.address_size 64\n{memory}{head}\n"
        f".visible .entry k({formals})\n.reqntid {threads}\n{{{DECLARED}\n{body}\n}}\n"
    )


def run_module(
    text: str,
    *arrays: Array | torch.Tensor,
    grid: tuple[int, int, int] = (1, 1, 1),
    threads: int = 32,
    seed: int | None = None,
) -> list[Fault]:
    """Execute a module on arrays, in place; return its faults."""
    tensors = [torch.as_tensor(a) for a in arrays]
    extents = [extent_of(x, f"p{n}") for n, x in enumerate(tensors)]
    launch = GridExecution(write_program(text), grid, threads, 0, extents, Settings(seed))
    with contextlib.suppress(CannotContinue):  # the fault is in the log
        launch.run([launch.memory.tag(x.data_ptr()) for x in tensors])
    return launch.log.faults


LOADS = {1: ("%h", "u8"), 2: ("%h", "b16"), 4: ("%r", "b32"), 8: ("%d", "b64")}


def run_instruction(text: str, out: str, *inputs: Array) -> Array:
    """Run one instruction for each element: `{d}` in its text is the result, `{a}`, `{b}`, `{c}` the inputs.

    out: NumPy type of the result; predicates are "b"
    """
    count = len(inputs[0])
    padded = [np.zeros(-(-count // 32) * 32, x.dtype) for x in inputs]
    for big, x in zip(padded, inputs, strict=True):
        big[:count] = x
    result = np.zeros(len(padded[0]), "u4" if out == "b" else out)
    lines = [
        "mov.u32 %r60, %ctaid.x;",
        "mov.u32 %r61, %tid.x;",
        "mad.lo.s32 %r62, %r60, 32, %r61;",
    ]
    names = {}
    for n, (name, x) in enumerate(zip("abce", padded)):
        register, t = LOADS[x.itemsize]
        names[name] = f"{register}{n + 1}"
        lines += [
            f"ld.param.b64 %d{20 + n}, [p{n}];",
            f"mad.wide.u32 %d{30 + n}, %r62, {x.itemsize}, %d{20 + n};",
            f"ld.global.{t} {names[name]}, [%d{30 + n}];",
        ]
    register, t = LOADS[result.itemsize]
    names["d"] = "%p1" if out == "b" else f"{register}10"
    lines += [text.format(**names)]
    if out == "b":
        lines += ["selp.b32 %r10, 1, 0, %p1;"]
    last = len(inputs)
    lines += [
        f"ld.param.b64 %d40, [p{last}];",
        f"mad.wide.u32 %d41, %r62, {result.itemsize}, %d40;",
        f"st.global.{t} [%d41], {register}10;",
        "ret;",
    ]
    faults = run_module(module("\n".join(lines), last + 1), *padded, result, grid=(len(result) // 32, 1, 1))
    assert not faults, "\n".join(map(str, faults))
    return result[:count].astype(bool) if out == "b" else result[:count]
