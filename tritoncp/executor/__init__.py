"""Executor of compiled Triton kernels (PTX) on a CPU, with checks of memory, races and barriers:
`compiled_kernels`.

It is independent of attention: any Triton kernel runs, on CPU tensors.
"""

from tritoncp.executor.device import ExecutorDevice, compiled_kernels
from tritoncp.executor.driver import LaunchRecord
from tritoncp.executor.faults import ExecutionFault, Fault
from tritoncp.executor.ptx.opcodes import UnsupportedInstruction

__all__ = [
    "ExecutionFault",
    "ExecutorDevice",
    "Fault",
    "LaunchRecord",
    "UnsupportedInstruction",
    "compiled_kernels",
]
