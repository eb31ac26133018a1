"""The forms of PTX instructions that the executor knows, by subject; importing this fills their table."""

from tritoncp.executor.forms import arithmetic, blackwell, hopper, memory, registers, warps

__all__ = ["arithmetic", "blackwell", "hopper", "memory", "registers", "warps"]
