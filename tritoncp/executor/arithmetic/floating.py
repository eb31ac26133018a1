"""PTX floating-point arithmetic on NumPy arrays: rounding, flushing of subnormal numbers, 16-bit types.

bfloat16 and float16 are stored as uint16, pairs of them as uint32. The payload of a NaN is unspecified where
PTX leaves it open; conversions to 16 bits and min/max return PTX's canonical NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

f4, f8, u1, u2, u4, u8 = np.float32, np.float64, np.uint8, np.uint16, np.uint32, np.uint64
Array = np.ndarray[Any, Any]
SMALLEST = f4(np.finfo(f4).tiny)
MIDPOINT_MASK, MIDPOINT = u8(0x1FFFFFFF), u8(0x10000000)  # float64 bits halfway between float32 numbers
NAN32 = u4(0x7FFFFFFF)


def ftz(x: Array) -> Array:
    """Flush subnormal float32 numbers to zeros with the same sign."""
    small = np.abs(x) < SMALLEST
    return np.where(small, np.copysign(f4(0), x), x) if small.any() else x


def saturate(x: Array) -> Array:
    """Clamp to [0, 1]; NaN becomes 0."""
    return np.where(x > 0, np.minimum(x, x.dtype.type(1)), x.dtype.type(0))


def relu(x: Array) -> Array:
    """Replace negative numbers by 0; NaN is unchanged."""
    return np.where(x < 0, x.dtype.type(0), x)


def sum_rounded_to_odd(a: Array, b: Array) -> Array:
    """Return a + b in float64, rounded to odd, so that a second rounding to 51 or fewer bits is correct."""
    s = a + b
    bb = s - a
    rest = (a - (s - bb)) + (b - bb)
    bits = np.ascontiguousarray(s).view(np.int64)
    fix = (rest != 0) & np.isfinite(rest) & ((bits & 1) == 0) & np.isfinite(s)
    if not fix.any():
        return s
    away = (rest > 0) == (s > 0)
    return np.where(fix, np.where(away, bits + 1, bits - 1).view(f8), s)


def fma32(a: Array, b: Array, c: Array) -> Array:
    """Return a × b + c in float32, rounded once."""
    product = np.multiply(a, b, dtype=f8)
    total = product + c
    bits = total.view(u8)
    tie = ((bits & MIDPOINT_MASK) == MIDPOINT) | ((np.abs(total) < SMALLEST) & (total != 0))
    if tie.any():
        at = np.flatnonzero(tie)
        total[at] = sum_rounded_to_odd(product[at], np.broadcast_to(c, total.shape)[at].astype(f8))
    return total.astype(f4)


def two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """Return (a × b in float64, its rounding error), by Dekker's algorithm."""
    splitter = f8(134217729)
    p = a * b
    ta, tb = a * splitter, b * splitter
    ha, hb = ta - (ta - a), tb - (tb - b)
    la, lb = a - ha, b - hb
    return p, ((ha * hb - p) + ha * lb + la * hb) + la * lb


def fma64(a: Array, b: Array, c: Array) -> Array:
    """Return a × b + c in float64, rounded once (Boldo and Melquiond), unless an intermediate result over- or
    underflows."""
    a, b, c = np.broadcast_arrays(a, b, c)
    high, low = two_product(a, b)
    s = c + low
    bb = s - c
    t = (c - (s - bb)) + (low - bb)
    v = high + s
    bb = v - high
    rest = (high - (v - bb)) + (s - bb)
    exact = v + sum_rounded_to_odd(t, rest)
    plain = a * b + c
    return np.where(np.isfinite(exact), exact, plain)


def extremum(operation: str, a: Array, b: Array, nan: bool) -> Array:
    """Return "min" or "max" of two numbers, with -0 < +0. nan: propagate NaN; else return the other number"""
    out = getattr(np, f"{operation}imum" if nan else f"f{operation}")(a, b)
    zero = out == 0
    if zero.any():
        join = np.logical_or if operation == "min" else np.logical_and
        signed = join(np.signbit(a), np.signbit(b))
        both = zero & (np.asarray(a) == b)
        out = np.where(both, np.copysign(out, np.where(signed, f4(-1), f4(1))), out)
    lost = np.isnan(out)
    if out.dtype == f4 and lost.any():
        out = np.where(lost, NAN32.view(f4), out)
    return out


def sign_of_both(out: Array, a: Array, b: Array) -> Array:
    """`.xorsign.abs`: set the sign of `out` to the product of the signs of a and b."""
    return np.copysign(out, np.where(np.signbit(a) ^ np.signbit(b), f4(-1), f4(1)))


# 16-bit types


def to_bf16(x: Array) -> Array:
    """Convert float32 to bfloat16, rounded to nearest even."""
    bits = x.view(u4)
    out = (bits + u4(0x7FFF) + ((bits >> u4(16)) & u4(1))) >> u4(16)
    lost = np.isnan(x)
    if lost.any():
        out = np.where(lost, u4(0x7FFF), out)
    return out.astype(u2)


def to_bf16_towards_zero(x: Array) -> Array:
    out = (x.view(u4) >> u4(16)).astype(u2)
    return np.where(np.isnan(x), u2(0x7FFF), out)


def to_f16(x: Array) -> Array:
    """Convert float32 or float64 to float16, rounded to nearest even."""
    out = x.astype(np.float16).view(u2)
    lost = np.isnan(x)
    return np.where(lost, u2(0x7FFF), out) if lost.any() else out


def narrow(t: str, x: Array) -> Array:
    """Convert float32 to the bits of a 16-bit type."""
    return to_bf16(x) if t.startswith("bf16") else to_f16(x)


def narrow64(t: str, x: Array) -> Array:
    """Convert float64, exact or rounded to odd, to the bits of a 16-bit type."""
    if not t.startswith("bf16"):
        return to_f16(x)
    near = x.astype(f4)  # rounded to odd once more, so that the second rounding is the only one
    bits = near.view(np.int32)
    fix = (near.astype(f8) != x) & ((bits & 1) == 0) & np.isfinite(near)
    away = np.abs(x) > np.abs(near)
    return to_bf16(np.where(fix, np.where(away, bits + 1, bits - 1), bits).view(f4))


def widen(t: str, x: Array) -> Array:
    """Convert the bits of a 16-bit type to float32."""
    return (x.astype(u4) << u4(16)).view(f4) if t.startswith("bf16") else x.view(np.float16).astype(f4)


def pack2(t: str, high: Array, low: Array) -> Array:
    """Convert two float32 arrays to pairs of a 16-bit type."""
    return (narrow(t, high).astype(u4) << u4(16)) | narrow(t, low)


def arithmetic16(operation: str, t: str, a: Array, b: Array) -> Array:
    """Add, subtract or multiply 16-bit numbers or pairs of them, rounded once."""
    x, y = widen(t, a.view(u2)).astype(f8), widen(t, b.view(u2)).astype(f8)
    if operation == "mul":
        total = x * y
    else:
        total = sum_rounded_to_odd(x, y if operation == "add" else -y)
    return narrow64(t, total).view(a.dtype)


def fma16(t: str, a: Array, b: Array, c: Array) -> Array:
    x, y, z = (widen(t, v.view(u2)).astype(f8) for v in (a, b, c))
    return narrow64(t, sum_rounded_to_odd(x * y, z)).view(a.dtype)


def through_float32(function: Callable[[Array], Array], t: str, a: Array) -> Array:
    """Apply a float32 function to 16-bit numbers or pairs of them."""
    return narrow(t, function(widen(t, a.view(u2)))).view(a.dtype)


def extremum16(operation: str, t: str, a: Array, b: Array, nan: bool) -> Array:
    return narrow(t, extremum(operation, widen(t, a.view(u2)), widen(t, b.view(u2)), nan)).view(a.dtype)


def to_tf32(x: Array, ties: str) -> Array:
    """Convert float32 to tf32, rounded to nearest, ties away from zero ("rna") or to even ("rn")."""
    bits = x.view(u4)
    half = u4(0x1000) if ties == "rna" else u4(0xFFF) + ((bits >> u4(13)) & u4(1))
    return np.where(np.isfinite(x), (bits + half) & u4(0xFFFFE000), np.where(np.isnan(x), NAN32, bits))


def tf32_of(bits: Array) -> Array:
    """Truncate to TF32 as tensor cores do: they ignore the lowest 13 bits of a register."""
    return (bits & u4(0xFFFFE000)).view(f4)


# approximations, accurate to about the last bit and within PTX's documented errors


def rsqrt(x: Array) -> Array:
    return (1 / np.sqrt(x.astype(f8))).astype(x.dtype)


def high_word(x: Array) -> Array:
    """Return a float64 approximation with its lower 32 bits set to zero."""
    return (x.view(u8) & u8(0xFFFFFFFF00000000)).view(f8)


UNARY: dict[str, Callable[[Array], Array]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda x: x.dtype.type(1) / x,
    "sqrt": np.sqrt,
    "rsqrt": rsqrt,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}

# conversions

FP8 = {"e4m3x2": (torch.float8_e4m3fn, 448.0), "e5m2x2": (torch.float8_e5m2, 57344.0)}
ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def to_integer(x: Array, mode: str, t: str) -> Array:
    """Convert float to integer with saturation; NaN becomes 0, or from or to 64 bits the highest bit."""
    info = np.iinfo(t)
    wide = x.dtype == f8 or info.bits == 64
    y = ROUND[mode](x.astype(f8))
    lost = np.isnan(y)
    y = np.where(lost, 0.0, y)
    low, high = f8(info.min), f8(2.0 ** (info.bits - (info.min < 0)))
    inside = (y > low) & (y < high)
    out = np.where(inside, y, 0.0).astype(t)
    out = np.where(y >= high, np.dtype(t).type(info.max), np.where(y <= low, np.dtype(t).type(info.min), out))
    unknown = (
        np.array(1 << (info.bits - 1), np.uint64).astype(f"u{info.bits // 8}").view(t)
        if wide
        else np.dtype(t).type(0)
    )
    return np.where(lost, unknown, out)


def saturated(x: Array, t: str) -> Array:
    """Convert integers to another type with saturation."""
    info, source = np.iinfo(t), np.iinfo(x.dtype)
    low, high = max(info.min, source.min), min(info.max, source.max)
    return np.clip(x, x.dtype.type(low), x.dtype.type(high)).astype(t)


def integer_to_16(t: str, x: Array) -> Array:
    """Convert integers to float16 or bfloat16, rounded once."""
    wide = x.astype(np.float64)
    if x.dtype.itemsize == 8:  # rounded to odd, as numbers past 2^53 are not exact
        low = (x & x.dtype.type(0x7FF)).astype(bool)
        cut = (x & ~x.dtype.type(0x7FF)) | np.where(low, x.dtype.type(0x800), x.dtype.type(0))
        large = np.abs(wide) >= 2.0**53
        wide = np.where(large, cut.astype(np.float64), wide)
    return narrow64(t, wide)


def to_fp8(t: str, high: Array, low: Array) -> Array:
    """Convert two float32 arrays to pairs of 8-bit floats, rounded to nearest even, with saturation."""
    dtype, most = FP8[t]
    bytes_ = []
    for x in (low, high):
        clamped = torch.from_numpy(np.where(np.isnan(x), x, np.clip(x, -most, most)))
        code = clamped.to(dtype).view(torch.uint8).numpy()
        bytes_.append(np.where(np.isnan(x), u1(0x7F), code))
    return np.stack(bytes_, 1).reshape(-1).view(u2)


def of_fp8(t: str, pairs: Array) -> Array:
    """Convert pairs of 8-bit floats to pairs of float16 (exact)."""
    codes = torch.from_numpy(np.ascontiguousarray(pairs).view(u1).copy())
    return codes.view(FP8[t][0]).to(torch.float16).view(torch.int16).numpy().view(u4)
