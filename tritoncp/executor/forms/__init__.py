"""The PTX instructions that the executor supports, by subject; the import fills their table."""

from tritoncp.executor.forms import arithmetic, blackwell, hopper, memory, registers, warps

__all__ = ["arithmetic", "blackwell", "hopper", "memory", "registers", "warps"]
