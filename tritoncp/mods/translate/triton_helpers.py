"""Functions that emitted mods call: integer division with torch's rounding, and others that Triton lacks.

Triton's `//` and `%` truncate towards zero; torch's round to minus infinity. Kernels also evaluate masked
positions, so nothing traps: integer division by zero, for which torch raises, gives an unspecified value.
Emitted mods take `libdevice` from here too: Triton's where kernels are compiled, torch's where interpreted.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

if triton.knobs.runtime.interpret:
    from tritoncp.mods.translate.interpreted_libdevice import libdevice
else:
    from triton.language.extra import libdevice


@triton.jit
def flag(condition):
    """Convert a comparison of scalars to int1; in the interpreter it has the type of its operands."""
    return tl.where(condition, tl.full((), True, tl.int1), tl.full((), False, tl.int1))


@triton.jit
def trunc_div(a, b):
    """Integer division, rounded towards zero; an unspecified value, not a trap, for b = 0."""
    return a // tl.where(b == 0, 1, b)


@triton.jit
def trunc_mod(a, b):
    """torch.fmod of integers, with the sign of a; an unspecified value, not a trap, for b = 0."""
    return a % tl.where(b == 0, 1, b)


@triton.jit
def floor_mod(a, b):
    """torch.remainder of integers, with the sign of b; an unspecified value, not a trap, for b = 0."""
    b = tl.where(b == 0, 1, b)
    r = a % b
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)


@triton.jit
def floor_div(a, b):
    """torch.floor_divide of integers, which rounds towards minus infinity."""
    b = tl.where(b == 0, 1, b)
    r = a % b
    return a // b - tl.where((r != 0) & ((r < 0) != (b < 0)), 1, 0)


@triton.jit
def remainder(a, b):
    """torch.remainder of floats; the result has the sign of b."""
    r = libdevice.fmod(a, b)
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)


@triton.jit
def float_trunc_div(a, b):
    """Division of floats, rounded to nearest, then towards zero."""
    return libdevice.trunc(tl.div_rn(a, b) if a.dtype == tl.float32 else a / b)


@triton.jit
def float_floor_div(a, b):
    """torch.floor_divide of floats, computed from the remainder as in Python and torch."""
    r = libdevice.fmod(a, b)
    quotient = (a - r) / b - tl.where((r != 0) & ((r < 0) != (b < 0)), 1.0, 0.0).to(a.dtype)
    down = tl.floor(quotient)
    whole = tl.where(quotient - down > 0.5, down + 1, down)
    return tl.where(b == 0, a / b, whole)


@triton.jit
def tanh(x):
    """tanh. float32: t / sqrt(1 + t^2) with a polynomial t near sinh, relative error up to 4e-7; float64:
    libdevice's."""
    if x.dtype == tl.float64:
        return libdevice.tanh(x)
    else:
        a = tl.clamp(x.to(tl.float32), -9.0, 9.0, propagate_nan=tl.PropagateNan.ALL)
        z = a * a
        p = ((3.3750080e-8 * z + 2.6278353e-6) * z + 1.99084956e-4) * z + 8.3320923e-3
        t = a * ((p * z + 1.66667357e-1) * z + 1.0)
        return (t * tl.rsqrt(t * t + 1.0)).to(x.dtype)


@triton.jit
def shift_left(x, amount, bits: tl.constexpr):
    """x << amount; 0 where the amount is not in [0, bits)."""
    bad = (amount < 0) | (amount >= bits)
    return tl.where(bad, 0, x << tl.where(bad, 0, amount))


@triton.jit
def shift_right(x, amount, bits: tl.constexpr):
    """Arithmetic x >> amount; 0 or -1, the sign of x, where the amount is not in [0, bits)."""
    bad = (amount < 0) | (amount >= bits)
    return x >> tl.where(bad, bits - 1, amount)


@triton.jit
def wrap(i, size):
    """Add `size` to a negative index, which counts from the end."""
    return tl.where(i < 0, i + size, i)


@triton.jit
def inside(i, size):
    """Return whether 0 <= i < size, with one comparison: an unsigned negative number is larger than any
    size."""
    return tl.cast(i, tl.uint64) < tl.cast(size, tl.uint64)


@triton.jit
def accumulate(pointer, value, valid, keep):
    """Atomically add `value` at `pointer` wherever the index is in range (`valid`): zero where not `keep`."""
    if pointer.dtype.element_ty == tl.int64:
        add_exactly(tl.broadcast_to(pointer, keep.shape), tl.broadcast_to(value, keep.shape), keep & valid)
    else:
        shape: tl.constexpr = keep.shape
        value = tl.where(keep, tl.broadcast_to(value.to(pointer.dtype.element_ty), shape), 0)
        tl.atomic_add(
            tl.broadcast_to(pointer, shape), value, mask=tl.broadcast_to(valid, shape), sem="relaxed"
        )


@triton.jit
def accumulate_sum(pointer, value, valid, keep):
    """Do :func:`accumulate` for a pointer that all elements of the tile share: one atomic addition of their
    sum."""
    if pointer.dtype.element_ty == tl.int64:
        value = tl.sum(tl.where(keep & valid, tl.broadcast_to(value, keep.shape), 0))
        add_exactly(pointer, value, valid)
    else:
        value = tl.broadcast_to(value.to(pointer.dtype.element_ty), keep.shape)
        tl.atomic_add(pointer, tl.sum(tl.where(keep, value, 0)), mask=valid, sem="relaxed")


@triton.jit
def add_exactly(pointer, value, keep):
    """Add to a `deterministic_sum.buffer`, whose integer sums do not depend on the order."""
    value = value if value.dtype == tl.float64 else value.to(tl.float32)
    fits = tl.abs(value) < 2.0**60  # NaN does not
    tl.atomic_add(pointer + 5, tl.where(fits, 0, 1).to(tl.int64), mask=keep & (fits == 0), sem="relaxed")
    rest = tl.where(fits, value, 0.0)
    for i in tl.static_range(5):
        word = (rest * 2.0 ** (30 * (i - 1))).to(tl.int64)  # towards zero
        rest -= word.to(value.dtype) * 2.0 ** (30 * (1 - i))
        tl.atomic_add(pointer + i, word, mask=keep & (word != 0), sem="relaxed")
