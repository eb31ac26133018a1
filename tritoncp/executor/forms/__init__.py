"""The forms of PTX instructions that the executor knows, by subject; importing this fills their table."""

from tritoncp.executor.forms import blackwell, formulas, hopper, memory, registers, warps

__all__ = ["blackwell", "formulas", "hopper", "memory", "registers", "warps"]
