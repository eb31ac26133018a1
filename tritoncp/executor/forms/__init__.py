"""The forms of PTX instructions that the executor knows, by subject; importing this fills their table."""

from tritoncp.executor.forms import (
    bits,
    blackwell,
    conversions,
    floats,
    hopper,
    integers,
    memory,
    moves,
    warps,
)

__all__ = ["bits", "blackwell", "conversions", "floats", "hopper", "integers", "memory", "moves", "warps"]
