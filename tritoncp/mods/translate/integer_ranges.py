"""Interval arithmetic of integers: which int64 values of torch fit in 32-bit registers.

An `IntegerRange` contains all values of an expression, as exact Python integers. b, h, q_idx and kv_idx are
in [0, 2^30); captured integer tensors have the range of their dtype. A result that can overflow its torch
dtype wraps around, so its interval becomes that of the dtype.

>>> add(INDEX, INDEX).fits(32), mul(INDEX, INDEX).fits(32)
(True, False)
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class IntegerRange(NamedTuple):
    """Every integer from lo to hi, both included."""

    lo: int
    hi: int

    def fits(self, bits: int) -> bool:
        """Return whether all values fit in a signed integer of this many bits."""
        return -(1 << (bits - 1)) <= self.lo and self.hi < 1 << (bits - 1)

    def within(self, other: IntegerRange) -> bool:
        return other.lo <= self.lo and self.hi <= other.hi


INDEX = IntegerRange(0, 2**30 - 1)


def dtype_interval(dtype: torch.dtype) -> IntegerRange | None:
    """Return the range of an integer dtype; None for floating point."""
    if dtype is torch.bool or dtype.is_floating_point:
        return IntegerRange(0, 1) if dtype is torch.bool else None
    return IntegerRange(torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def wrap_interval(exact: IntegerRange, dtype: torch.dtype) -> IntegerRange:
    """Return the interval of a result that wraps to `dtype`. exact: its interval before wrapping"""
    limits = dtype_interval(dtype)
    assert limits is not None, f"{dtype} is no integer type"
    return exact if exact.within(limits) else limits


def _hull(*corners: int) -> IntegerRange:
    """The smallest interval that holds all corners."""
    return IntegerRange(min(corners), max(corners))


def add(a: IntegerRange, b: IntegerRange) -> IntegerRange:
    return IntegerRange(a.lo + b.lo, a.hi + b.hi)


def sub(a: IntegerRange, b: IntegerRange) -> IntegerRange:
    return IntegerRange(a.lo - b.hi, a.hi - b.lo)


def mul(a: IntegerRange, b: IntegerRange) -> IntegerRange:
    return _hull(a.lo * b.lo, a.lo * b.hi, a.hi * b.lo, a.hi * b.hi)


def neg(a: IntegerRange) -> IntegerRange:
    return IntegerRange(-a.hi, -a.lo)


def absolute(a: IntegerRange) -> IntegerRange:
    return a if a.lo >= 0 else neg(a) if a.hi <= 0 else IntegerRange(0, max(-a.lo, a.hi))


def maximum(a: IntegerRange, b: IntegerRange) -> IntegerRange:
    return IntegerRange(max(a.lo, b.lo), max(a.hi, b.hi))


def minimum(a: IntegerRange, b: IntegerRange) -> IntegerRange:
    return IntegerRange(min(a.lo, b.lo), min(a.hi, b.hi))


def union(a: IntegerRange, b: IntegerRange) -> IntegerRange:
    return _hull(*a, *b)


def floor_div(a: IntegerRange, b: IntegerRange) -> IntegerRange:
    """The interval of floor(a / b); a division by zero gives the dividend, as helpers then divide by one."""
    divisors = [d for d in (b.lo, b.hi, -1, 1) if d and b.lo <= d <= b.hi]
    if b.lo <= 0 <= b.hi:
        divisors.append(1)
    return _hull(*(n // d for n in a for d in divisors))


def trunc_div(a: IntegerRange, b: IntegerRange) -> IntegerRange:
    bound = max(abs(a.lo), abs(a.hi))
    if a.lo >= 0 and b.lo >= 0:
        return IntegerRange(a.lo // max(b.hi, 1), a.hi // max(b.lo, 1))
    return IntegerRange(-bound, bound)


def remainder(a: IntegerRange, b: IntegerRange) -> IntegerRange:
    """The interval of a - floor(a / b) * b, which has the sign of b."""
    if b.lo > 0 and a.lo >= 0:
        return IntegerRange(0, min(a.hi, b.hi - 1))
    return IntegerRange(min(b.lo + 1, 0), max(b.hi - 1, 0))


def fmod(a: IntegerRange, b: IntegerRange) -> IntegerRange:
    """The interval of a - trunc(a / b) * b, which has the sign of a."""
    bound = max(abs(b.lo), abs(b.hi), 1) - 1
    return IntegerRange(max(min(a.lo, 0), -bound), min(max(a.hi, 0), bound))


def bits(a: IntegerRange, b: IntegerRange) -> IntegerRange:
    """The interval of a & b, a | b and a ^ b: all values with as many bits as the wider operand."""
    if a.lo >= 0 and b.lo >= 0:
        return IntegerRange(0, (1 << max(a.hi.bit_length(), b.hi.bit_length())) - 1)
    width = max(v.bit_length() for v in (a.lo, a.hi, b.lo, b.hi)) + 1
    return IntegerRange(-(1 << width), (1 << width) - 1)


def shift_left(a: IntegerRange, amount: int) -> IntegerRange:
    return IntegerRange(a.lo << amount, a.hi << amount)


def shift_right(a: IntegerRange, amount: int) -> IntegerRange:
    return IntegerRange(a.lo >> amount, a.hi >> amount)
