"""Executes the PTX that Triton compiles on a CPU, and checks memory, races and barriers: `compiled_kernels`.

It knows nothing of attention: any Triton kernel runs, on CPU tensors, as its compiler's output says.
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
