"""Interval arithmetic on torch's element-wise operations (R. E. Moore, "Interval Analysis", 1966).

A ValueRange bounds one element in each of n tiles. A rule maps the ValueRanges of an operation's operands to
the ValueRange of its result. Floats are bounded in their type, in which rounding is monotone: the bounds of
a sum are the sums of the bounds. Integers of every type are bounded exactly, in float64, up to 2^51.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

SUPPORTED_TYPES = (  # a value of any other type has no bounds
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip
HALF_TYPES = (torch.float16, torch.bfloat16)  # torch rounds operations with Python numbers in another way
MAX_EXACT = 1 << 51  # up to it, float64 also divides integers exactly: floor(a / b) is the integer quotient


class ValueRange(NamedTuple):
    """Bounds lo <= value <= hi of one element in each of n tiles; NaN where there is no bound.

    lo, hi: [n] or []; bool for bools, float64 for integers, else of ``dtype``; one tensor for a constant
    dtype:  of the value
    """

    lo: Tensor
    hi: Tensor
    dtype: torch.dtype


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


def _drop_bounds(x: ValueRange, unknown: Tensor) -> ValueRange:
    """Return a range without bounds in the tiles that ``unknown`` names."""
    lo = x.lo.masked_fill(unknown, torch.nan)
    return x._replace(lo=lo, hi=lo if x.hi is x.lo else x.hi.masked_fill(unknown, torch.nan))


def limit_range(value: ValueRange | None, dtype: torch.dtype) -> ValueRange:
    """Return a result's range in its type; unknown for an integer that may wrap or exceed MAX_EXACT."""
    if value is None:
        return unknown_range(dtype)
    if is_integer(dtype):
        least, most = max(torch.iinfo(dtype).min, -MAX_EXACT), min(torch.iinfo(dtype).max, MAX_EXACT)
        value = _drop_bounds(value, (value.lo < least) | (value.hi > most))
    return value._replace(dtype=dtype)


def cast_range(x: ValueRange, dtype: torch.dtype) -> ValueRange:
    """Return the range of ``value.to(dtype)``. Conversion is monotone between any two types."""
    if dtype == x.dtype:
        return x
    if dtype is torch.bool:
        return ValueRange((x.lo > 0) | (x.hi < 0), ~((x.lo == 0) & (x.hi == 0)), dtype)
    if not is_integer(dtype):
        return ValueRange(x.lo.to(dtype), x.hi.to(dtype), dtype)
    return limit_range(ValueRange(x.lo.double().trunc(), x.hi.double().trunc(), dtype), dtype)


# -- rules: (result type, *operands in the type the operation computes in) -> range; None: unknown ---------


def _monotone(op: Callable[..., Tensor]) -> Rule:
    """Return the rule of an operation that is monotone in each operand: its min and max are at the ends of
    the operands' ranges."""

    def rule(dtype: torch.dtype, *operands: ValueRange) -> ValueRange:
        ends = [(x.lo,) if x.lo is x.hi else (x.lo, x.hi) for x in operands]
        values = [op(*corner) for corner in itertools.product(*ends)]
        return ValueRange(functools.reduce(tensor_min, values), functools.reduce(tensor_max, values), dtype)

    return rule


def _finite(rule: Rule) -> Rule:
    """Drop bounds of floats that may be infinite: inf - inf and 0 * inf are NaN, which no bounds enclose."""

    def finite_rule(dtype: torch.dtype, *operands: ValueRange) -> ValueRange | None:
        x = rule(dtype, *operands)
        return _drop_bounds(x, x.lo.isinf() | x.hi.isinf()) if x and dtype.is_floating_point else x

    return finite_rule


def _abs(dtype: torch.dtype, a: ValueRange) -> ValueRange:
    least = torch.maximum(torch.maximum(a.lo, -a.hi), torch.zeros_like(a.lo))
    return ValueRange(least, torch.maximum(-a.lo, a.hi), dtype)


def _divide(dtype: torch.dtype, a: ValueRange, b: ValueRange) -> ValueRange | None:
    """True division; unknown if the divisor may be zero."""
    return _monotone(torch.div)(dtype, a, _drop_bounds(b, ~((b.lo > 0) | (b.hi < 0))))


def _integer_division(rounding: Callable[[Tensor], Tensor]) -> Rule:
    """Return the rule of a division of integers. torch's floor division of floats is not the floor of the
    quotient."""
    return lambda dtype, *operands: (
        _monotone(rounding)(dtype, _divide(torch.float64, *operands)) if is_integer(dtype) else None
    )


def _remainder(dtype: torch.dtype, a: ValueRange, b: ValueRange) -> ValueRange | None:
    """Remainder of integers by a positive divisor: exact within one period, else from 0 to divisor - 1."""
    if not is_integer(dtype):
        return None
    constant, positive = (b.lo == b.hi), b.lo > 0
    first, last = torch.floor(a.lo / b.lo), torch.floor(a.hi / b.lo)
    period = constant & (first == last)
    lo = torch.where(period, a.lo - first * b.lo, 0)
    hi = torch.where(period, a.hi - first * b.lo, b.hi - 1)
    return _drop_bounds(ValueRange(lo, hi, dtype), ~positive)


def _shift(rule: Rule) -> Rule:
    """Return the rule of a shift by 0 to 50 bits, from that of a product or quotient."""

    def shift(dtype: torch.dtype, a: ValueRange, b: ValueRange) -> ValueRange | None:
        return rule(dtype, a, _monotone(torch.exp2)(dtype, _drop_bounds(b, ~((b.lo >= 0) & (b.hi < 51)))))

    return shift


def _bool_rule(op: Callable[..., Tensor]) -> Rule:
    """Return the rule of & | or ^ for bools; the bits of integers have no bounds."""
    return lambda dtype, *operands: _monotone(op)(dtype, *operands) if dtype is torch.bool else None


def _less(dtype: torch.dtype, a: ValueRange, b: ValueRange) -> ValueRange:
    return ValueRange(a.hi < b.lo, ~(a.lo >= b.hi), dtype)


def _at_most(dtype: torch.dtype, a: ValueRange, b: ValueRange) -> ValueRange:
    return ValueRange(a.hi <= b.lo, ~(a.lo > b.hi), dtype)


def _equal(dtype: torch.dtype, a: ValueRange, b: ValueRange) -> ValueRange:
    return ValueRange((a.lo == b.hi) & (a.hi == b.lo), ~((a.hi < b.lo) | (a.lo > b.hi)), dtype)


COPIES = ("_to_copy", "clone", "detach", "alias", "lift_fresh_copy")
# Rules by operation name, grouped by the type that the operation computes in: its result's type, the common
# type of its operands, or bool.
RESULT_RULES: dict[str, Rule] = {
    "add": _finite(_monotone(torch.add)), "sub": _finite(_monotone(torch.sub)),
    "rsub": _finite(_monotone(torch.rsub)),
    "mul": _finite(_monotone(torch.mul)), "neg": _monotone(torch.neg), "abs": _abs,
    "square": lambda dtype, a: _monotone(torch.square)(dtype, _abs(dtype, a)),
    **dict.fromkeys(("maximum", "clamp_min"), _monotone(torch.maximum)),
    **dict.fromkeys(("minimum", "clamp_max"), _monotone(torch.minimum)),
    "div": _divide, "remainder": _remainder,
    **dict.fromkeys(("floor_divide", "div_floor"), _integer_division(torch.floor)),
    "div_trunc": _integer_division(torch.trunc),
    **dict.fromkeys(("bitwise_left_shift", "__lshift__"), _shift(_monotone(torch.mul))),
    **dict.fromkeys(("bitwise_right_shift", "__rshift__"), _shift(_integer_division(torch.floor))),
    **dict.fromkeys(("bitwise_and", "__and__"), _bool_rule(torch.logical_and)),
    **dict.fromkeys(("bitwise_or", "__or__"), _bool_rule(torch.logical_or)),
    **dict.fromkeys(("bitwise_xor", "__xor__"), _bool_rule(torch.logical_xor)),
    "bitwise_not": _monotone(lambda x: ~x if x.dtype is torch.bool else -1 - x),
    "where": _monotone(torch.where),
    **{name: _monotone(getattr(torch, name)) for name in ("relu", "floor", "ceil", "trunc", "round")},
    "clamp": _monotone(torch.clamp),
    **dict.fromkeys(COPIES, lambda dtype, a: a),
}  # fmt: skip
OPERAND_RULES: dict[str, Rule] = {
    "lt": _less, "gt": lambda dtype, a, b: _less(dtype, b, a),
    "le": _at_most, "ge": lambda dtype, a, b: _at_most(dtype, b, a),
    "eq": _equal, "ne": lambda dtype, a, b: _monotone(torch.logical_not)(dtype, _equal(dtype, a, b)),
}  # fmt: skip
BOOL_RULES: dict[str, Rule] = {
    name: _monotone(getattr(torch, name))
    for name in ("logical_and", "logical_or", "logical_xor", "logical_not")
}
