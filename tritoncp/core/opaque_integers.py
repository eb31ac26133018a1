"""Integers for which Triton compiles no kernel of their own.

Triton compiles a kernel again if an integer argument becomes 1, becomes a multiple of 16, or no longer is
one; for integers inside tuples this cannot be turned off. Strides of a step's tables, counts of a selection
and captured integers change from call to call, and their values buy no better code. They are passed as
4 n + 3, which is neither 1 nor even; kernels shift it back.
"""

from __future__ import annotations

SHIFT = 2  # a kernel has the integer as ``argument >> SHIFT``
SMALL = 1 << 29  # integers in [-SMALL, SMALL) are arguments of 32 bits; others have kernels of their own
LARGE = 1 << 61  # integers in [-LARGE, LARGE) are arguments of 64 bits


def opaque(n: int) -> int:
    """Return the argument that stands for an integer.

    >>> [opaque(n) for n in (0, 1, 16, -1)]
    [3, 7, 67, -1]
    """
    return (n << SHIFT) + 3
