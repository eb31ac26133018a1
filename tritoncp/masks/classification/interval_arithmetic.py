"""Interval arithmetic on torch's element-wise operations (R. E. Moore, "Interval Analysis", 1966).

A ValueRange bounds one element in each of n tiles. A rule gives the ValueRange of an operation's result from
those of its operands. Floats are bounded in their own type, where rounding is monotone: the bounds of a sum
are the sums of the bounds. Integers of every type are bounded exactly, in float64, below 2^51.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

MAX_EXACT = 1 << 51  # below it, float64 also divides integers exactly: floor(a / b) is the integer quotient


class ValueRange(NamedTuple):
    """Bounds lo <= value <= hi of one element in each of n tiles; NaN where there is no bound.

    lo, hi:    [n] or []; bool for bools, float64 for integers, else of ``dtype``
    dtype:     of the value
    magnitude: for integers, an upper bound of the absolute value wherever lo and hi are no NaN
    """

    lo: Tensor
    hi: Tensor
    dtype: torch.dtype
    magnitude: int = 0


Rule = Callable[..., ValueRange | None]  # (type of the result, *operands)


def is_integer(dtype: torch.dtype) -> bool:
    """Return whether a dtype is an integer type other than bool."""
    return not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.bool


def unknown_range(dtype: torch.dtype) -> ValueRange:
    """Return the ValueRange of a value without bounds: False to True for bools, else NaN."""
    if dtype is torch.bool:
        return ValueRange(torch.tensor(False), torch.tensor(True), dtype)
    nan = torch.tensor(float("nan"), dtype=torch.float64 if is_integer(dtype) else dtype)
    return ValueRange(nan, nan, dtype)


def tensor_min(a: Tensor, b: Tensor) -> Tensor:
    """torch.minimum, defined for bools too."""
    return a & b if a.dtype is torch.bool else torch.minimum(a, b)


def tensor_max(a: Tensor, b: Tensor) -> Tensor:
    """torch.maximum, defined for bools too."""
    return a | b if a.dtype is torch.bool else torch.maximum(a, b)


def _hull(dtype: torch.dtype, magnitude: int, *corners: Tensor) -> ValueRange:
    """Return the ValueRange from the least to the greatest of several tensors."""
    lo = hi = corners[0]
    for corner in corners[1:]:
        lo, hi = torch.minimum(lo, corner), torch.maximum(hi, corner)
    return ValueRange(lo, hi, dtype, magnitude)


def limit_range(value: ValueRange | None, dtype: torch.dtype) -> ValueRange:
    """Return a result's range in its type; unknown for an integer that may wrap or exceed MAX_EXACT."""
    limit = torch.iinfo(dtype).max if is_integer(dtype) else MAX_EXACT
    if value is None or value.magnitude >= MAX_EXACT or value.magnitude > limit:
        return unknown_range(dtype)
    if dtype is torch.uint8:
        lo, hi = (end.masked_fill(value.lo < 0, torch.nan) for end in (value.lo, value.hi))
        return ValueRange(lo, hi, dtype, value.magnitude)
    return value._replace(dtype=dtype)


def cast_range(x: ValueRange, dtype: torch.dtype) -> ValueRange:
    """Return the range of ``value.to(dtype)``. Conversion is monotone between any two types."""
    if dtype == x.dtype:
        return x
    if dtype is torch.bool:
        return ValueRange((x.lo > 0) | (x.hi < 0), ~((x.lo == 0) & (x.hi == 0)), dtype)
    if not is_integer(dtype):
        return ValueRange(x.lo.to(dtype), x.hi.to(dtype), dtype)
    if x.dtype is torch.bool or is_integer(x.dtype):
        return limit_range(ValueRange(x.lo.double(), x.hi.double(), dtype, max(x.magnitude, 1)), dtype)
    limit = min(torch.iinfo(dtype).max, MAX_EXACT)
    ends = (end.double().trunc() for end in (x.lo, x.hi))
    lo, hi = (end.masked_fill(~(end.abs() <= limit), torch.nan) for end in ends)
    most = max((int(end.nan_to_num().abs().max()) for end in (lo, hi) if end.numel()), default=0)
    return limit_range(ValueRange(lo, hi, dtype, most), dtype)


# -- rules: (result type, *operands in the type the operation computes in) -> range; None: unknown ---------


def _require_finite(x: ValueRange) -> ValueRange:
    """Drop bounds of floats that may be infinite: inf - inf and 0 * inf are NaN, which no bounds enclose."""
    if not x.dtype.is_floating_point:
        return x
    infinite = x.lo.isinf() | x.hi.isinf()
    return x._replace(lo=x.lo.masked_fill(infinite, torch.nan), hi=x.hi.masked_fill(infinite, torch.nan))


def _add(dtype: torch.dtype, a: ValueRange, b: ValueRange) -> ValueRange:
    return _require_finite(ValueRange(a.lo + b.lo, a.hi + b.hi, dtype, a.magnitude + b.magnitude))


def _sub(dtype: torch.dtype, a: ValueRange, b: ValueRange) -> ValueRange:
    return _require_finite(ValueRange(a.lo - b.hi, a.hi - b.lo, dtype, a.magnitude + b.magnitude))


def _mul(dtype: torch.dtype, a: ValueRange, b: ValueRange) -> ValueRange:
    corners = a.lo * b.lo, a.lo * b.hi, a.hi * b.lo, a.hi * b.hi
    return _require_finite(_hull(dtype, a.magnitude * b.magnitude, *corners))


def _square(dtype: torch.dtype, a: ValueRange) -> ValueRange:
    size = _abs(dtype, a)
    return ValueRange(size.lo * size.lo, size.hi * size.hi, dtype, a.magnitude**2)


def _neg(dtype: torch.dtype, a: ValueRange) -> ValueRange:
    return ValueRange(-a.hi, -a.lo, dtype, a.magnitude)


def _abs(dtype: torch.dtype, a: ValueRange) -> ValueRange:
    least = torch.maximum(torch.maximum(a.lo, -a.hi), torch.zeros_like(a.lo))
    return ValueRange(least, torch.maximum(-a.lo, a.hi), dtype, a.magnitude)


def _monotone(op: Callable[..., Tensor]) -> Rule:
    """Return the rule of an operation that never falls where an operand rises."""

    def rule(dtype: torch.dtype, *operands: ValueRange) -> ValueRange:
        lo, hi = op(*(x.lo for x in operands)), op(*(x.hi for x in operands))
        return ValueRange(lo, hi, dtype, max(x.magnitude for x in operands))

    return rule


def _divide(dtype: torch.dtype, a: ValueRange, b: ValueRange) -> ValueRange:
    """True division: the hull of the corners' quotients; unknown if the divisor may be zero."""
    zero = ~((b.lo > 0) | (b.hi < 0))
    lo, hi = b.lo.masked_fill(zero, torch.nan), b.hi.masked_fill(zero, torch.nan)
    return _hull(dtype, a.magnitude, a.lo / lo, a.lo / hi, a.hi / lo, a.hi / hi)


def _floor_divide(dtype: torch.dtype, a: ValueRange, b: ValueRange) -> ValueRange | None:
    """Floor division of integers. torch's floor division of floats is not the floor of the quotient."""
    return _monotone(torch.floor)(torch.float64, _divide(dtype, a, b)) if is_integer(dtype) else None


def _trunc_divide(dtype: torch.dtype, a: ValueRange, b: ValueRange) -> ValueRange | None:
    return _monotone(torch.trunc)(torch.float64, _divide(dtype, a, b)) if is_integer(dtype) else None


def _remainder(dtype: torch.dtype, a: ValueRange, b: ValueRange) -> ValueRange | None:
    """Remainder of integers by a positive divisor: exact within one period, else from 0 to divisor - 1."""
    if not is_integer(dtype):
        return None
    constant, positive = (b.lo == b.hi), b.lo > 0
    first, last = torch.floor(a.lo / b.lo), torch.floor(a.hi / b.lo)
    period = constant & (first == last)
    lo = torch.where(period, a.lo - first * b.lo, 0).masked_fill(~positive, torch.nan)
    hi = torch.where(period, a.hi - first * b.lo, b.hi - 1).masked_fill(~positive, torch.nan)
    return ValueRange(lo, hi, dtype, b.magnitude)


def _shift_right(dtype: torch.dtype, a: ValueRange, b: ValueRange) -> ValueRange | None:
    return _floor_divide(dtype, a, _power_of_two(b))


def _shift_left(dtype: torch.dtype, a: ValueRange, b: ValueRange) -> ValueRange:
    return _mul(dtype, a, _power_of_two(b))


def _power_of_two(b: ValueRange) -> ValueRange:
    """Return the range of 2 ** b, unknown unless 0 <= b < 51."""
    in_range = (b.lo >= 0) & (b.hi < 51)
    lo, hi = (torch.exp2(end).masked_fill(~in_range, torch.nan) for end in (b.lo, b.hi))
    return ValueRange(lo, hi, b.dtype, 1 << min(b.magnitude, 51))


_and, _or = _monotone(torch.logical_and), _monotone(torch.logical_or)


def _xor(dtype: torch.dtype, a: ValueRange, b: ValueRange) -> ValueRange:
    constant = (a.lo == a.hi) & (b.lo == b.hi)
    return ValueRange(constant & (a.lo ^ b.lo), ~constant | (a.lo ^ b.lo), dtype)


def _not(dtype: torch.dtype, a: ValueRange) -> ValueRange:
    if dtype is torch.bool:
        return ValueRange(~a.hi, ~a.lo, dtype)
    return ValueRange(-a.hi - 1, -a.lo - 1, dtype, a.magnitude + 1)


def _of_bools(rule: Rule) -> Rule:
    """Return the rule of & | or ^ for bools; the bits of integers have no bounds."""
    return lambda dtype, a, b: rule(dtype, a, b) if dtype is torch.bool else None


def _less(dtype: torch.dtype, a: ValueRange, b: ValueRange) -> ValueRange:
    return ValueRange(a.hi < b.lo, ~(a.lo >= b.hi), dtype)


def _at_most(dtype: torch.dtype, a: ValueRange, b: ValueRange) -> ValueRange:
    return ValueRange(a.hi <= b.lo, ~(a.lo > b.hi), dtype)


def _equal(dtype: torch.dtype, a: ValueRange, b: ValueRange) -> ValueRange:
    return ValueRange((a.lo == b.hi) & (a.hi == b.lo), ~((a.hi < b.lo) | (a.lo > b.hi)), dtype)


def _where(dtype: torch.dtype, condition: ValueRange, a: ValueRange, b: ValueRange) -> ValueRange:
    lo = torch.where(condition.lo, a.lo, torch.where(condition.hi, tensor_min(a.lo, b.lo), b.lo))
    hi = torch.where(condition.lo, a.hi, torch.where(condition.hi, tensor_max(a.hi, b.hi), b.hi))
    return ValueRange(lo, hi, dtype, max(a.magnitude, b.magnitude))


COPIES = ("_to_copy", "clone", "detach", "alias", "lift_fresh_copy")
# Rules by operation name, grouped by the type the operation computes in: that of its result, the common type
# of its operands, bool.
RESULT_RULES: dict[str, Rule] = {
    "add": _add, "sub": _sub, "rsub": lambda dtype, a, b: _sub(dtype, b, a), "mul": _mul, "neg": _neg,
    "abs": _abs, "square": _square,
    **dict.fromkeys(("maximum", "clamp_min"), _monotone(torch.maximum)),
    **dict.fromkeys(("minimum", "clamp_max"), _monotone(torch.minimum)),
    "div": _divide, "floor_divide": _floor_divide, "div_floor": _floor_divide, "div_trunc": _trunc_divide,
    "remainder": _remainder,
    **dict.fromkeys(("bitwise_left_shift", "__lshift__"), _shift_left),
    **dict.fromkeys(("bitwise_right_shift", "__rshift__"), _shift_right),
    **dict.fromkeys(("bitwise_and", "__and__"), _of_bools(_and)),
    **dict.fromkeys(("bitwise_or", "__or__"), _of_bools(_or)),
    **dict.fromkeys(("bitwise_xor", "__xor__"), _of_bools(_xor)),
    "bitwise_not": _not, "where": _where, "relu": _monotone(torch.relu),
    "floor": _monotone(torch.floor), "ceil": _monotone(torch.ceil), "trunc": _monotone(torch.trunc),
    "round": _monotone(torch.round),
    "clamp": _monotone(torch.clamp), **dict.fromkeys(COPIES, lambda dtype, a: a),
}  # fmt: skip
OPERAND_RULES: dict[str, Rule] = {
    "lt": _less, "gt": lambda dtype, a, b: _less(dtype, b, a),
    "le": _at_most, "ge": lambda dtype, a, b: _at_most(dtype, b, a),
    "eq": _equal, "ne": lambda dtype, a, b: _not(dtype, _equal(dtype, a, b)),
}  # fmt: skip
BOOL_RULES: dict[str, Rule] = {
    "logical_and": _and, "logical_or": _or, "logical_xor": _xor, "logical_not": _not,
}  # fmt: skip
