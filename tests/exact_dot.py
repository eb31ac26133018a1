"""Interpreted ``tl.dot`` whose bits depend only on the rows and columns that it multiplies.

The interpreter uses NumPy's matmul, and the bits that BLAS computes for a row depend on the number of rows,
on the CPU and on the number of threads: no two computations of equal numbers could be compared bit by bit.
Here each product is a few float64 products of *slices* (error-free splitting, Ozaki et al. 2012), integers
times one power of two, so small that no sum of them rounds, in any order.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from triton import language as tl
from triton.runtime import interpreter

FIRST, NEXT = 22, 23  # bits of a slice: a product of two has at most 44, and 53 hold the sum of 256 of them
MOST = 256  # terms of a sum
Wide = NDArray[np.float64]


def install() -> None:
    """Let every kernel that is interpreted from now on multiply exactly."""
    interpreter.InterpreterBuilder.create_dot = create_dot


def create_dot(
    self: interpreter.InterpreterBuilder,
    a: interpreter.TensorHandle,
    b: interpreter.TensorHandle,
    d: interpreter.TensorHandle,
    input_precision: object,
    max_num_imprecise_acc: object,
) -> interpreter.TensorHandle:
    """a @ b, rounded once to the type of d, plus d."""
    if {a.dtype.scalar, b.dtype.scalar} - {tl.float16, tl.float32, tl.float64}:
        raise NotImplementedError(f"an exact product of {a.dtype} and {b.dtype}: add its type to {__name__}")
    product = multiply(a.data, b.data)
    return interpreter.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)


def multiply(a: NDArray, b: NDArray) -> Wide:
    """a [M, K] @ b [K, N]: element (m, n) is a function of row m and column n alone.

    Numbers below 2**-45 of the largest of their row or column (2**-68 for float64) are cut off.
    """
    if a.shape[-1] > MOST:
        raise NotImplementedError(f"an exact sum of {a.shape[-1]} terms, over {MOST}")
    count = 3 if np.float64 in (a.dtype, b.dtype) else 2
    a, b = a.astype(np.float64), b.astype(np.float64)
    if np.isfinite(a).all() and np.isfinite(b).all():
        return multiply_finite(a, b, count)
    with np.errstate(invalid="ignore"):
        plain = a @ b  # not finite if a factor is not, in any order
    exact = multiply_finite(np.where(np.isfinite(a), a, 0.0), np.where(np.isfinite(b), b, 0.0), count)
    return np.where(np.isfinite(plain), exact, plain)


def multiply_finite(a: Wide, b: Wide, count: int) -> Wide:
    rows, columns = list(slices(a, 1, count)), list(slices(b, 0, count))
    total = np.zeros((len(a), b.shape[1]))
    for last in range(count - 1, -1, -1):  # small terms first
        for i in range(last + 1):
            total += rows[i] @ columns[last - i]
    return total


def slices(x: Wide, axis: int, count: int) -> Iterator[Wide]:
    """Parts of x, multiples of a power of two for each vector along ``axis``, that add up to x or nearly."""
    _, exponent = np.frexp(np.abs(x).max(axis, keepdims=True))
    shift = np.ldexp(1.5, exponent + (52 - FIRST))  # adding it rounds to the unit of the slice
    for _ in range(count):
        part = (x + shift) - shift
        yield part
        x = x - part
        shift = shift * 2.0**-NEXT
