"""Integer and bit arithmetic of PTX on NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

u1, u4, u8 = np.uint8, np.uint32, np.uint64
Array = np.ndarray[Any, Any]
COMBINE: dict[str, np.ufunc] = {  # operations of warp reductions and atomic updates
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def combine_pairs(operation: str, kind: str, a: Array, b: Array) -> Array:
    """Combine both 16-bit integers of each word; kind: "s16x2" or "u16x2"."""
    half = np.int16 if kind[0] == "s" else np.uint16
    x, y = (np.ascontiguousarray(words).view(half) for words in (a, b))
    return np.asarray(COMBINE[operation](x, y)).view(u4)


def multiply_high(a: Array, b: Array) -> Array:
    """Return the upper halves of products."""
    size = a.dtype.itemsize
    if size <= 4:
        wide = np.dtype(f"{a.dtype.kind}{2 * size}").type
        return ((a.astype(wide) * np.asarray(b).astype(wide)) >> wide(8 * size)).astype(a.dtype)
    x, y = a.view(u8), np.broadcast_to(b, a.shape).view(u8)
    low, half = u8(0xFFFFFFFF), u8(32)
    x0, x1, y0, y1 = x & low, x >> half, y & low, y >> half
    middle = x1 * y0 + ((x0 * y0) >> half)
    high = x1 * y1 + (middle >> half) + (((middle & low) + x0 * y1) >> half)
    if a.dtype.kind == "i":
        high = high - np.where(a < 0, y, u8(0)) - np.where(np.asarray(b) < 0, x, u8(0))
    return high.view(a.dtype)


def divide(a: Array, b: Array) -> Array:
    """Divide with rounding towards zero; all bits are set where the divisor is zero."""
    safe = np.where(b == 0, 1, b).astype(a.dtype)
    if a.dtype.kind == "u":
        return np.where(b == 0, ~np.zeros_like(a), a // safe)
    quotient = a // safe
    quotient = quotient + ((quotient * safe != a) & ((a < 0) ^ (safe < 0)))
    return np.where(b == 0, ~np.zeros_like(a), quotient).astype(a.dtype)


def remainder(a: Array, b: Array) -> Array:
    return np.where(b == 0, a, a - divide(a, b) * b)


def shift_left(a: Array, b: Array) -> Array:
    """`shl`: shifts by the width or more give zero."""
    bits = u4(8 * a.dtype.itemsize)
    if np.ndim(b) == 0:
        return a << a.dtype.type(b) if b < bits else np.zeros_like(a)
    return np.where(b < bits, a << np.minimum(b, bits - u4(1)).astype(a.dtype), a.dtype.type(0))


def shift_right(a: Array, b: Array) -> Array:
    """`shr`: shifts by the width or more give zero, or the sign in every bit."""
    bits = u4(8 * a.dtype.itemsize)
    if np.ndim(b) == 0 and b < bits:
        return a >> a.dtype.type(b)
    out = a >> np.minimum(b, bits - u4(1)).astype(a.dtype)
    return out if a.dtype.kind == "i" else np.where(b < bits, out, a.dtype.type(0))


def funnel_shift(side: str, mode: str, low: Array, high: Array, count: Array) -> Array:
    """`shf`: return 32 bits of the shifted pair high:low."""
    n = (np.minimum(count, u4(32)) if mode == "clamp" else count & u4(31)).astype(u8)
    pair = (high.astype(u8) << u8(32)) | low
    return ((pair << n) >> u8(32)).astype(u4) if side == "l" else (pair >> n).astype(u4)


def count_leading_zeros(x: Array) -> Array:
    bits = 8 * x.dtype.itemsize
    n = np.full(x.shape, bits, u4)
    for s in range(bits):
        n = np.where((x >> x.dtype.type(s)) != 0, u4(bits - 1 - s), n)
    return n


def find_highest(x: Array) -> Array:
    """`bfind`: return the index of the highest bit that differs from the sign; all bits set if there is
    none."""
    y = np.where(x < 0, ~x, x) if x.dtype.kind == "i" else x
    y = y.view(f"u{x.dtype.itemsize}")
    zeros = count_leading_zeros(y)
    bits = u4(8 * x.dtype.itemsize)
    return np.where(zeros == bits, u4(0xFFFFFFFF), bits - u4(1) - zeros)


def reverse_bits(x: Array) -> Array:
    size = x.dtype.itemsize
    flipped = np.unpackbits(x.view(u1).reshape(-1, size), axis=1, bitorder="little")[:, ::-1]
    return np.packbits(flipped, axis=1, bitorder="little").reshape(-1).view(x.dtype)


def low_bits(count: Array, t: np.dtype[Any]) -> Array:
    """Return numbers whose lowest `count` bits are set."""
    return ~shift_left(np.full(len(count), ~t.type(0)), count)


def extract_field(x: Array, position: Array, count: Array) -> Array:
    """`bfe`: extract a bit field, extended by zeros or by its sign."""
    bits = u4(8 * x.dtype.itemsize)
    p, n = (np.minimum(v & u4(255), bits) for v in (position, count))
    wide = x.view(f"u{x.dtype.itemsize}")
    mask = low_bits(np.minimum(n, bits - p), wide.dtype)
    field = shift_right(wide, p) & mask
    if x.dtype.kind == "u":
        return field
    sign = shift_right(wide, np.minimum(p + np.maximum(n, u4(1)) - u4(1), bits - u4(1))) & wide.dtype.type(1)
    return np.where((sign != 0) & (n > 0), field | ~mask, field).view(x.dtype)


def insert_field(field: Array, x: Array, position: Array, count: Array) -> Array:
    """`bfi`: replace a bit field of x."""
    p, n = (np.minimum(v & u4(255), u4(8 * x.dtype.itemsize)) for v in (position, count))
    mask = shift_left(low_bits(n, x.dtype), p)
    return (shift_left(field, p) & mask) | (x & ~mask)


def permute_bytes(a: Array, b: Array, selector: Array) -> Array:
    """`prmt`: select bytes of the pair b:a, or their signs."""
    source = np.stack([a, b], 1).view(u1)
    out = np.empty((len(a), 4), u1)
    rows = np.arange(len(a))
    for j in range(4):
        s = (selector >> u4(4 * j)) & u4(15)
        v = source[rows, s & u4(7)]
        out[:, j] = np.where(s & u4(8), np.where(v & u1(128), u1(255), u1(0)), v)
    return out.reshape(-1).view(u4)


def lookup3(a: Array, b: Array, c: Array, table: int) -> Array:
    """`lop3`: apply a bitwise function of three operands, given by its truth table."""
    out = np.zeros_like(a)
    for j in range(8):
        if table >> j & 1:
            out |= (a if j & 4 else ~a) & (b if j & 2 else ~b) & (c if j & 1 else ~c)
    return out


def add_carry(a: Array, b: Array, carry: Array) -> tuple[Array, Array]:
    """Return (a + b + carry, carry out)."""
    total = a + b
    out = total < a
    total = total + carry.astype(a.dtype)
    return total, out | (carry & (total == 0))


def subtract_borrow(a: Array, b: Array, borrow: Array) -> tuple[Array, Array]:
    """Return (a - b - borrow, borrow out)."""
    total = a - b
    out = np.asarray(a < b)
    return total - borrow.astype(a.dtype), out | (borrow & (total == 0))
