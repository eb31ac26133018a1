"""Interval arithmetic of integers: which int64 values of torch fit in 32-bit registers.

An `IntegerRange` contains all values of an expression, as exact Python integers. b, h, q_idx and kv_idx are
in [0, 2^30); captured integer tensors have the range of their dtype. A result that can overflow its torch
dtype wraps around, so its interval becomes the dtype's.

>>> add(INDEX, INDEX).fits(32), mul(INDEX, INDEX).fits(32)
(True, False)
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import torch


class IntegerRange(NamedTuple):
    """Every integer from lo to hi, both included."""

    lo: int
    hi: int

    def fits(self, bits: int) -> bool:
        """Return whether all values fit in a signed integer of this many bits."""
        return -(1 << (bits - 1)) <= self.lo and self.hi < 1 << (bits - 1)


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
    return exact if limits.lo <= exact.lo and exact.hi <= limits.hi else limits


def _bounds_at_ends(operation: Callable[..., int]) -> Callable[..., IntegerRange]:
    """Make the interval of an operation that is monotone in each operand on either side of zero: its min and
    max are at the ends of intervals, or at -1, 0 and 1 inside of them."""

    def interval(*operands: IntegerRange) -> IntegerRange:
        places = [{*ends, *(x for x in (-1, 0, 1) if ends.lo <= x <= ends.hi)} for ends in operands]
        values = [operation(*place) for place in itertools.product(*places)]
        return IntegerRange(min(values), max(values))

    return interval


add = _bounds_at_ends(operator.add)
sub = _bounds_at_ends(operator.sub)
mul = _bounds_at_ends(operator.mul)
neg = _bounds_at_ends(operator.neg)
absolute = _bounds_at_ends(abs)
maximum = _bounds_at_ends(max)
minimum = _bounds_at_ends(min)
shift_left = _bounds_at_ends(operator.lshift)
shift_right = _bounds_at_ends(operator.rshift)
# A division by zero gives the dividend, since helpers divide by one in its place.
floor_div = _bounds_at_ends(lambda a, b: a // (b or 1))
trunc_div = _bounds_at_ends(lambda a, b: math.trunc(Fraction(a, b or 1)))


def union(a: IntegerRange, b: IntegerRange) -> IntegerRange:
    return IntegerRange(min(a.lo, b.lo), max(a.hi, b.hi))


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
