"""Rules that emit pointwise aten operations on Scalars, with torch's type promotion.

A Python number in an aten call is a weak Scalar: it is converted to the type of the computation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tritoncp.mods.translate import integer_ranges
from tritoncp.mods.translate.integer_ranges import IntegerRange, dtype_interval, wrap_interval
from tritoncp.mods.translate.symbolic import TRITON_NAME, Block, Scalar, as_rep, constant, opmath, spell

# fn(block, dtype, *operands), with the dtype of the result, or of a comparison's operands
Rule = Callable[..., Scalar]


def _integer_type(
    block: Block, dtype: torch.dtype, exact: IntegerRange | None, *operands: Scalar
) -> tuple[str, IntegerRange]:
    """Return (Triton type in which an integer operation is exact, interval of its result)."""
    interval = wrap_interval(exact, dtype) if exact is not None else dtype_interval(dtype)
    assert interval is not None
    small = dtype is torch.int64 and exact is not None and exact.fits(32)
    if small and all(o.range is not None and o.range.fits(32) for o in operands):
        return "int32", interval
    return opmath(dtype), interval


def _convert_all(block: Block, dtype: torch.dtype, operands: tuple[Scalar, ...]) -> tuple[Scalar, ...]:
    """Convert operands to the common dtype, and Python numbers to the type of the computation."""
    wide = torch.float32 if opmath(dtype) == "float32" else dtype
    return tuple(block.convert(o, wide if o.weak else dtype) for o in operands)


def _operand(value: Scalar, rep: str, other: Scalar | None = None) -> str:
    """Return the source of an operand of an infix operator: an untyped literal if the other has a type."""
    finite = value.const is not None and not isinstance(value.const, bool) and abs(value.const) < float("inf")
    if finite and other is not None and other.const is None and rep in _LITERAL_TYPES:
        text = spell(value.const, rep)  # type: ignore[arg-type]
        return f"({text})" if text.startswith("-") else text
    return as_rep(value, rep)


_LITERAL_TYPES = ("int32", "int64", "float32", "float64")


Intervals = Callable[[IntegerRange, IntegerRange], IntegerRange]


def _two_operands(
    hint: str, floats: str = "", interval: Intervals | None = None, ints: str = "", bools: str = "",
    naturals: str = "",
) -> Rule:  # fmt: skip
    """Make the rule of a binary operation from templates of its source: {a} and {b} are operands of one type;
    {x} and {y} are these, or an untyped literal for one of them.

    ints, bools: templates for integers and bools, if different. naturals: for non-negative integers with a
    positive second operand
    """

    def rule(block: Block, dtype: torch.dtype, a: Scalar, b: Scalar) -> Scalar:
        a, b = _convert_all(block, dtype, (a, b))

        def fill(template: str, rep: str) -> str:
            typed = {"a": as_rep(a, rep), "b": as_rep(b, rep)}
            return template.format(**typed, x=_operand(a, rep, b), y=_operand(b, rep, a))

        if dtype.is_floating_point:
            return block.float_scalar(fill(floats, opmath(dtype)), hint, dtype, a, b)
        if dtype is torch.bool and bools:
            return block.scalar(fill(bools, "int1"), hint, dtype, "int1", dtype_interval(dtype), a, b)
        assert interval is not None and a.range is not None and b.range is not None
        rep, result = _integer_type(block, dtype, interval(a.range, b.range), a, b)
        template = naturals if naturals and a.range.lo >= 0 and b.range.lo > 0 else ints or floats
        return block.scalar(fill(template, rep), hint, dtype, rep, result, a, b)

    return rule


def _bitwise_rule(symbol: str, hint: str) -> Rule:
    text = f"{{a}} {symbol} {{b}}"
    return _two_operands(hint, interval=integer_ranges.bits, ints=text, bools=text)


def _comparison_rule(symbol: str, hint: str) -> Rule:
    def rule(block: Block, dtype: torch.dtype, a: Scalar, b: Scalar) -> Scalar:
        a, b = _convert_all(block, dtype, (a, b))
        rep = opmath(dtype)
        if not dtype.is_floating_point:
            both = a.range is not None and b.range is not None and a.range.fits(32) and b.range.fits(32)
            rep = "int32" if both else "int64"
        return block.comparison(f"{_operand(a, rep, b)} {symbol} {_operand(b, rep, a)}", hint, a, b)

    return rule


def _divide(block: Block, dtype: torch.dtype, a: Scalar, b: Scalar) -> Scalar:
    """Emit true division (of integers too, with a float result). A score_mod multiplies by the inverse of a
    divisor that is a number or uniform over the tile, which rounds twice."""
    a, b = _convert_all(block, dtype, (a, b))
    rep = opmath(dtype)
    if not block.exact and dtype is torch.float32 and a.axes and not b.axes and b.const != 0:
        if b.const is None:
            inverse = block.float_scalar(f"1 / {as_rep(b, rep)}", "inverse", dtype, b)
        else:
            inverse = constant(1 / b.const, dtype)
        return BINARY["mul"](block, dtype, a, inverse)
    if block.exact and rep == "float32":
        return block.float_scalar(f"tl.div_rn({as_rep(a, rep)}, {as_rep(b, rep)})", "quotient", dtype, a, b)
    return block.float_scalar(f"{_operand(a, rep, b)} / {_operand(b, rep, a)}", "quotient", dtype, a, b)


def _extreme_rule(name: str, interval: Intervals, bools: str) -> Rule:
    """Make the rule of maximum or minimum, which are NaN where an operand is."""
    floats = f"tl.{name}({{a}}, {{b}}, propagate_nan=tl.PropagateNan.ALL)"
    return _two_operands(name[:3], floats, interval, ints=f"tl.{name}({{a}}, {{b}})", bools=bools)


def _power(block: Block, dtype: torch.dtype, a: Scalar, b: Scalar) -> Scalar:
    exponent = b.const
    if not dtype.is_floating_point:
        if isinstance(exponent, int):
            return _power_by_products(block, dtype, block.convert(a, dtype), exponent)
        if a.const != 2:
            raise NotImplementedError("an integer power whose base is not 2 and exponent is no number")
        return BINARY["bitwise_left_shift"](block, dtype, constant(1, dtype), b)
    a, b = _convert_all(block, dtype, (a, b))
    rep = opmath(dtype)
    if exponent in (0, 1, 2, 3, 4):
        return _power_by_products(block, dtype, a, int(exponent))
    if exponent == 0.5:
        return UNARY["sqrt"](block, dtype, a)
    if exponent == -1:
        return _divide(block, dtype, constant(1.0, dtype), a)
    if a.const == 2:
        return block.float_scalar(f"tl.exp2({as_rep(b, rep)})", "power", dtype, b)
    return block.float_scalar(f"libdevice.pow({as_rep(a, rep)}, {as_rep(b, rep)})", "power", dtype, a, b)


def _power_by_products(block: Block, dtype: torch.dtype, a: Scalar, exponent: int) -> Scalar:
    if exponent == 0:
        return constant(1, dtype)
    if opmath(dtype) == "float32" and dtype is not torch.float32 and exponent > 1:
        base = as_rep(a, "float32")
        return block.float_scalar(" * ".join([base] * exponent), "power", dtype, a)
    out = a
    for _ in range(exponent - 1):
        out = BINARY["mul"](block, dtype, out, a)
    return out


def _shift_rule(left: bool) -> Rule:
    def rule(block: Block, dtype: torch.dtype, a: Scalar, b: Scalar) -> Scalar:
        a, b = _convert_all(block, dtype, (a, b))
        amount, width = b.const, torch.iinfo(dtype).bits
        name, symbol = ("shift_left", "<<") if left else ("shift_right", ">>")
        if isinstance(amount, int) and 0 <= amount < width:
            move = integer_ranges.shift_left if left else integer_ranges.shift_right
            rep, result = _integer_type(block, dtype, move(a.range, b.range), a, b)
            rep = rep if amount < 32 else opmath(dtype)
            return block.scalar(f"{as_rep(a, rep)} {symbol} {amount}", "shifted", dtype, rep, result, a)
        rep = opmath(dtype)
        call = f"{name}({as_rep(a, rep)}, {as_rep(b, rep)}, {width})"
        return block.scalar(call, "shifted", dtype, rep, dtype_interval(dtype), a, b)

    return rule


_FLOOR_DIVIDE = _two_operands(
    "quotient", "float_floor_div({a}, {b})", integer_ranges.floor_div, "floor_div({a}, {b})",
    naturals="{x} // {y}",
)  # fmt: skip

BINARY: dict[str, Rule] = {
    "add": _two_operands("total", "{x} + {y}", integer_ranges.add, bools="{a} | {b}"),
    "sub": _two_operands("diff", "{x} - {y}", integer_ranges.sub),
    "mul": _two_operands("product", "{x} * {y}", integer_ranges.mul, bools="{a} & {b}"),
    "div": _divide,
    "div_floor": _FLOOR_DIVIDE,
    "div_trunc": _two_operands(
        "quotient", "float_trunc_div({a}, {b})", integer_ranges.trunc_div, "trunc_div({a}, {b})",
        naturals="{x} // {y}",
    ),
    "floor_divide": _FLOOR_DIVIDE,
    "remainder": _two_operands(
        "rest", "remainder({a}, {b})", integer_ranges.remainder, "floor_mod({a}, {b})", naturals="{x} % {y}"
    ),
    "fmod": _two_operands(
        "rest", "libdevice.fmod({a}, {b})", integer_ranges.fmod, "trunc_mod({a}, {b})", naturals="{x} % {y}"
    ),
    "maximum": _extreme_rule("maximum", integer_ranges.maximum, "{a} | {b}"),
    "minimum": _extreme_rule("minimum", integer_ranges.minimum, "{a} & {b}"),
    "copysign": _two_operands("signed", "libdevice.copysign({a}, {b})"),
    "hypot": _two_operands("hypotenuse", "libdevice.hypot({a}, {b})"),
    "atan2": _two_operands("angle", "libdevice.atan2({a}, {b})"),
    "pow": _power,
    "bitwise_and": _bitwise_rule("&", "both"),
    "bitwise_or": _bitwise_rule("|", "either"),
    "bitwise_xor": _bitwise_rule("^", "differ"),
    "bitwise_left_shift": _shift_rule(True),
    "bitwise_right_shift": _shift_rule(False),
    "__lshift__": _shift_rule(True),
    "__rshift__": _shift_rule(False),
}  # fmt: skip

COMPARE: dict[str, Rule] = {
    "eq": _comparison_rule("==", "equal"),
    "ne": _comparison_rule("!=", "unequal"),
    "lt": _comparison_rule("<", "less"),
    "le": _comparison_rule("<=", "at_most"),
    "gt": _comparison_rule(">", "greater"),
    "ge": _comparison_rule(">=", "at_least"),
}


# -- one operand -----------------------------------------------------------------------------------------


def _function_rule(template: str, hint: str, exact: str | None = None) -> Rule:
    def rule(block: Block, dtype: torch.dtype, a: Scalar) -> Scalar:
        a = block.convert(a, dtype)
        rep = opmath(dtype)
        form = exact if exact and block.exact and rep == "float32" else template
        return block.float_scalar(form.format(as_rep(a, rep)), hint, dtype, a)

    return rule


def _rounding_rule(template: str, hint: str) -> Rule:
    """Make the rule of floor, ceil, trunc or round, which return integers unchanged."""
    call = _function_rule(template, hint)
    return lambda block, dtype, a: call(block, dtype, a) if dtype.is_floating_point else a


def _signed_rule(template: str, hint: str, interval: Callable[[IntegerRange], IntegerRange]) -> Rule:
    """Make the rule of a unary function of floats and integers."""

    def rule(block: Block, dtype: torch.dtype, a: Scalar) -> Scalar:
        a = block.convert(a, dtype)
        if dtype.is_floating_point:
            return block.float_scalar(template.format(as_rep(a, opmath(dtype))), hint, dtype, a)
        rep, result = _integer_type(block, dtype, interval(a.range), a)  # type: ignore[arg-type]
        return block.scalar(template.format(as_rep(a, rep)), hint, dtype, rep, result, a)

    return rule


def _invert(block: Block, dtype: torch.dtype, a: Scalar) -> Scalar:
    if dtype is torch.bool:
        return block.scalar(f"~{as_rep(a, 'int1')}", "negation", dtype, "int1", dtype_interval(dtype), a)
    complement = integer_ranges.sub(IntegerRange(-1, -1), a.range)
    result = complement if dtype is not torch.uint8 else dtype_interval(dtype)
    return block.scalar(f"~{as_rep(a, a.rep)}", "negation", dtype, a.rep, result, a)


# Functions of CUDA's and AMD's libdevice with the name of the aten operation.
LIBDEVICE = (
    "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "erfc", "erfinv", "expm1",
    "lgamma", "log10", "log1p",
)  # fmt: skip

UNARY: dict[str, Rule] = {
    "neg": _signed_rule("-{}", "negated", integer_ranges.neg),
    "abs": _signed_rule("tl.abs({})", "size", integer_ranges.absolute),
    "bitwise_not": _invert,
    "relu": lambda block, dtype, a: BINARY["maximum"](block, dtype, a, constant(0, dtype)),
    "reciprocal": lambda block, dtype, a: _divide(block, dtype, constant(1.0, dtype), a),
    "exp": _function_rule("tl.exp({})", "exp"),
    "exp2": _function_rule("tl.exp2({})", "exp2"),
    "log": _function_rule("tl.log({})", "log"),
    "log2": _function_rule("tl.log2({})", "log2"),
    "sqrt": _function_rule("tl.sqrt({})", "root", "tl.sqrt_rn({})"),
    "rsqrt": _function_rule("tl.rsqrt({})", "inverse_root"),
    "sin": _function_rule("tl.sin({})", "sine"),
    "cos": _function_rule("tl.cos({})", "cosine"),
    "erf": _function_rule("tl.erf({})", "erf"),
    "tanh": _function_rule("tanh({})", "tanh_of"),
    "sigmoid": _function_rule("tl.sigmoid({})", "sigmoid_of"),
    **{name: _function_rule(f"libdevice.{name}({{}})", f"{name}_of") for name in LIBDEVICE},
    "floor": _rounding_rule("tl.floor({})", "floor"),
    "ceil": _rounding_rule("tl.ceil({})", "ceil"),
    "trunc": _rounding_rule("libdevice.trunc({})", "whole"),
    "round": _rounding_rule("libdevice.rint({})", "nearest"),
}


def where(block: Block, dtype: torch.dtype, condition: Scalar, a: Scalar, b: Scalar) -> Scalar:
    """Emit torch.where(condition, a, b) with the result dtype `dtype`."""
    condition = block.convert(condition, torch.bool)
    a, b = block.convert(a, dtype), block.convert(b, dtype)
    rep, interval = TRITON_NAME[dtype], None
    if not dtype.is_floating_point and a.range is not None and b.range is not None:
        interval = integer_ranges.union(a.range, b.range)
        rep = "int32" if dtype is torch.int64 and interval.fits(32) else rep
    expression = f"tl.where({as_rep(condition, 'int1')}, {as_rep(a, rep)}, {as_rep(b, rep)})"
    return block.scalar(expression, "chosen", dtype, rep, interval, condition, a, b)
