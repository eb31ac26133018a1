"""Pointwise aten operations, as Triton source on Scalars, with torch's types to the letter.

A Python number in an aten call is a weak Scalar: it takes the type the operation computes in.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tritoncp.mods.translate import integer_ranges
from tritoncp.mods.translate.integer_ranges import Interval, whole, wrapped
from tritoncp.mods.translate.symbolic import TRITON_NAME, Block, Scalar, as_rep, constant, opmath, spell

# fn(block, dtype, *operands): `dtype` is the result's (for comparisons: the type compared in)
Rule = Callable[..., Scalar]


def _ints(
    block: Block, dtype: torch.dtype, exact: Interval | None, *operands: Scalar
) -> tuple[str, Interval]:
    """The Triton type in which an integer operation is exact, and the interval of its result."""
    interval = wrapped(exact, dtype) if exact is not None else whole(dtype)
    assert interval is not None
    small = dtype is torch.int64 and exact is not None and exact.fits(32)
    if small and all(o.range is not None and o.range.fits(32) for o in operands):
        return "int32", interval
    return opmath(dtype), interval


def _convert_all(block: Block, dtype: torch.dtype, operands: tuple[Scalar, ...]) -> tuple[Scalar, ...]:
    """Operands in the common dtype; Python numbers in the type the operation computes in."""
    wide = torch.float32 if opmath(dtype) == "float32" else dtype
    return tuple(block.convert(o, wide if o.weak else dtype) for o in operands)


def _operand(value: Scalar, rep: str, other: Scalar | None = None) -> str:
    """An operand of an infix operator: a plain literal where the other side fixes its type."""
    finite = value.const is not None and not isinstance(value.const, bool) and abs(value.const) < float("inf")
    if finite and other is not None and other.const is None and rep in _PLAIN:
        text = spell(value.const, rep)  # type: ignore[arg-type]
        return f"({text})" if text.startswith("-") else text
    return as_rep(value, rep)


_PLAIN = ("int32", "int64", "float32", "float64")


def _binary(symbol: str, hint: str, interval: Callable[[Interval, Interval], Interval]) -> Rule:
    def rule(block: Block, dtype: torch.dtype, a: Scalar, b: Scalar) -> Scalar:
        a, b = _convert_all(block, dtype, (a, b))
        if dtype.is_floating_point:
            rep = opmath(dtype)
            return block.rounded(f"{_operand(a, rep, b)} {symbol} {_operand(b, rep, a)}", hint, dtype, a, b)
        rep, result = _ints(block, dtype, interval(a.range, b.range), a, b)  # type: ignore[arg-type]
        return block.scalar(
            f"{_operand(a, rep, b)} {symbol} {_operand(b, rep, a)}", hint, dtype, rep, result, a, b
        )

    return rule


def _either(bool_symbol: str, hint: str, numeric: Rule) -> Rule:
    """bool + bool is "or", bool * bool is "and"; other dtypes are arithmetic."""

    def rule(block: Block, dtype: torch.dtype, a: Scalar, b: Scalar) -> Scalar:
        return (
            _bitwise(bool_symbol, hint)(block, dtype, a, b)
            if dtype is torch.bool
            else numeric(block, dtype, a, b)
        )

    return rule


def _bitwise(symbol: str, hint: str) -> Rule:
    def rule(block: Block, dtype: torch.dtype, a: Scalar, b: Scalar) -> Scalar:
        a, b = _convert_all(block, dtype, (a, b))
        exact = whole(dtype) if dtype is torch.bool else integer_ranges.bits(a.range, b.range)  # type: ignore[arg-type]
        rep, result = ("int1", exact) if dtype is torch.bool else _ints(block, dtype, exact, a, b)
        return block.scalar(f"{as_rep(a, rep)} {symbol} {as_rep(b, rep)}", hint, dtype, rep, result, a, b)

    return rule


def _logical(symbol: str, hint: str) -> Rule:
    return lambda block, dtype, a, b: _bitwise(symbol, hint)(
        block, torch.bool, truth(block, a), truth(block, b)
    )


def truth(block: Block, value: Scalar) -> Scalar:
    return (
        constant(bool(value.const), torch.bool)
        if value.const is not None
        else block.convert(value, torch.bool)
    )


def _compare(symbol: str, hint: str) -> Rule:
    def rule(block: Block, dtype: torch.dtype, a: Scalar, b: Scalar) -> Scalar:
        a, b = _convert_all(block, dtype, (a, b))
        rep = opmath(dtype)
        if not dtype.is_floating_point:
            both = a.range is not None and b.range is not None and a.range.fits(32) and b.range.fits(32)
            rep = "int32" if both else "int64"
        return block.test(f"{_operand(a, rep, b)} {symbol} {_operand(b, rep, a)}", hint, a, b)

    return rule


def _divide(block: Block, dtype: torch.dtype, a: Scalar, b: Scalar) -> Scalar:
    """True division; the operands may be integers, the result is floating point."""
    a, b = _convert_all(block, dtype, (a, b))
    rep = opmath(dtype)
    if block.exact and rep == "float32":
        return block.rounded(f"tl.div_rn({as_rep(a, rep)}, {as_rep(b, rep)})", "quotient", dtype, a, b)
    return block.rounded(f"{_operand(a, rep, b)} / {_operand(b, rep, a)}", "quotient", dtype, a, b)


def _helper(
    int_name: str,
    float_name: str,
    hint: str,
    interval: Callable[[Interval, Interval], Interval],
    plain: str = "",
) -> Rule:
    """Emit division and remainder through the library; `plain`: the operator for non-negative operands."""

    def rule(block: Block, dtype: torch.dtype, a: Scalar, b: Scalar) -> Scalar:
        a, b = _convert_all(block, dtype, (a, b))
        if dtype.is_floating_point:
            rep = opmath(dtype)
            return block.rounded(f"{float_name}({as_rep(a, rep)}, {as_rep(b, rep)})", hint, dtype, a, b)
        assert a.range is not None and b.range is not None
        rep, result = _ints(block, dtype, interval(a.range, b.range), a, b)
        if plain and a.range.lo >= 0 and b.range.lo > 0:
            expression = f"{_operand(a, rep, b)} {plain} {_operand(b, rep, a)}"
        else:
            expression = f"{int_name}({as_rep(a, rep)}, {as_rep(b, rep)})"
        return block.scalar(expression, hint, dtype, rep, result, a, b)

    return rule


def _extreme(name: str, interval: Callable[[Interval, Interval], Interval]) -> Rule:
    def rule(block: Block, dtype: torch.dtype, a: Scalar, b: Scalar) -> Scalar:
        a, b = _convert_all(block, dtype, (a, b))
        if dtype is torch.bool:
            return _bitwise("|" if name == "maximum" else "&", name[:3])(block, dtype, a, b)
        if dtype.is_floating_point:
            rep = opmath(dtype)
            operands = f"{as_rep(a, rep)}, {as_rep(b, rep)}, propagate_nan=tl.PropagateNan.ALL"
            return block.rounded(f"tl.{name}({operands})", name[:3], dtype, a, b)
        rep, result = _ints(block, dtype, interval(a.range, b.range), a, b)  # type: ignore[arg-type]
        return block.scalar(
            f"tl.{name}({as_rep(a, rep)}, {as_rep(b, rep)})", name[:3], dtype, rep, result, a, b
        )

    return rule


def _power(block: Block, dtype: torch.dtype, a: Scalar, b: Scalar) -> Scalar:
    exponent = b.const
    if not dtype.is_floating_point:
        if isinstance(exponent, int) and 0 <= exponent <= 8:
            return _repeated(block, dtype, block.convert(a, dtype), exponent)
        a, b = _convert_all(block, dtype, (a, b))
        rep = opmath(dtype)
        return block.scalar(
            f"int_pow({as_rep(a, rep)}, {as_rep(b, rep)})", "power", dtype, rep, whole(dtype), a, b
        )
    a, b = _convert_all(block, dtype, (a, b))
    rep = opmath(dtype)
    if exponent in (0, 1, 2, 3, 4):
        return _repeated(block, dtype, a, int(exponent))
    if exponent == 0.5:
        return UNARY["sqrt"](block, dtype, a)
    if exponent == -1:
        return _divide(block, dtype, constant(1.0, dtype), a)
    if a.const == 2:
        return block.rounded(f"tl.exp2({as_rep(b, rep)})", "power", dtype, b)
    return block.rounded(f"float_pow({as_rep(a, rep)}, {as_rep(b, rep)})", "power", dtype, a, b)


def _repeated(block: Block, dtype: torch.dtype, a: Scalar, exponent: int) -> Scalar:
    if exponent == 0:
        return constant(1, dtype)
    if opmath(dtype) == "float32" and dtype is not torch.float32 and exponent > 1:
        base = as_rep(a, "float32")
        return block.rounded(" * ".join([base] * exponent), "power", dtype, a)
    out = a
    for _ in range(exponent - 1):
        out = BINARY["mul"](block, dtype, out, a)
    return out


def _shift(left: bool) -> Rule:
    def rule(block: Block, dtype: torch.dtype, a: Scalar, b: Scalar) -> Scalar:
        a, b = _convert_all(block, dtype, (a, b))
        amount, width = b.const, torch.iinfo(dtype).bits
        name, symbol = ("shift_left", "<<") if left else ("shift_right", ">>")
        if isinstance(amount, int) and 0 <= amount < width:
            move = integer_ranges.shift_left if left else integer_ranges.shift_right
            rep, result = _ints(block, dtype, move(a.range, amount), a, b)  # type: ignore[arg-type]
            rep = rep if amount < 32 else opmath(dtype)
            return block.scalar(f"{as_rep(a, rep)} {symbol} {amount}", "shifted", dtype, rep, result, a)
        rep = opmath(dtype)
        call = f"{name}({as_rep(a, rep)}, {as_rep(b, rep)}, {width})"
        return block.scalar(call, "shifted", dtype, rep, whole(dtype), a, b)

    return rule


def _minus(block: Block, dtype: torch.dtype, a: Scalar, b: Scalar) -> Scalar:
    return BINARY["sub"](block, dtype, b, a)


BINARY: dict[str, Rule] = {
    "add": _either("|", "total", _binary("+", "total", integer_ranges.add)),
    "sub": _binary("-", "diff", integer_ranges.sub),
    "rsub": _minus,
    "mul": _either("&", "product", _binary("*", "product", integer_ranges.mul)),
    "div": _divide,
    "div_floor": _helper("floor_div", "float_floor_div", "quotient", integer_ranges.floor_div, "//"),
    "div_trunc": _helper("trunc_div", "trunc_quotient", "quotient", integer_ranges.trunc_div, "//"),
    "floor_divide": _helper("floor_div", "float_floor_div", "quotient", integer_ranges.floor_div, "//"),
    "remainder": _helper("floor_mod", "remainder", "rest", integer_ranges.remainder, "%"),
    "fmod": _helper("trunc_mod", "fmod", "rest", integer_ranges.fmod, "%"),
    "maximum": _extreme("maximum", integer_ranges.maximum),
    "minimum": _extreme("minimum", integer_ranges.minimum),
    "clamp_min": _extreme("maximum", integer_ranges.maximum),
    "clamp_max": _extreme("minimum", integer_ranges.minimum),
    "pow": _power,
    "bitwise_and": _bitwise("&", "both"),
    "bitwise_or": _bitwise("|", "either"),
    "bitwise_xor": _bitwise("^", "differ"),
    "logical_and": _logical("&", "both"),
    "logical_or": _logical("|", "either"),
    "logical_xor": _logical("^", "differ"),
    "bitwise_left_shift": _shift(True),
    "bitwise_right_shift": _shift(False),
    "__lshift__": _shift(True),
    "__rshift__": _shift(False),
    "__and__": _bitwise("&", "both"),
    "__or__": _bitwise("|", "either"),
    "__xor__": _bitwise("^", "differ"),
}

COMPARE: dict[str, Rule] = {
    "eq": _compare("==", "equal"),
    "ne": _compare("!=", "unequal"),
    "lt": _compare("<", "less"),
    "le": _compare("<=", "at_most"),
    "gt": _compare(">", "greater"),
    "ge": _compare(">=", "at_least"),
}


# -- one operand -----------------------------------------------------------------------------------------


def _call(template: str, hint: str, exact: str | None = None) -> Rule:
    def rule(block: Block, dtype: torch.dtype, a: Scalar) -> Scalar:
        a = block.convert(a, dtype)
        rep = opmath(dtype)
        form = exact if exact and block.exact and rep == "float32" else template
        return block.rounded(form.format(as_rep(a, rep)), hint, dtype, a)

    return rule


def _rounding(template: str, hint: str) -> Rule:
    """floor, ceil, trunc, round: integers stay as they are."""
    call = _call(template, hint)
    return lambda block, dtype, a: call(block, dtype, a) if dtype.is_floating_point else a


def _negate(block: Block, dtype: torch.dtype, a: Scalar) -> Scalar:
    a = block.convert(a, dtype)
    if dtype.is_floating_point:
        return block.rounded(f"-{as_rep(a, opmath(dtype))}", "negated", dtype, a)
    rep, result = _ints(block, dtype, integer_ranges.neg(a.range), a)  # type: ignore[arg-type]
    return block.scalar(f"-{as_rep(a, rep)}", "negated", dtype, rep, result, a)


def _absolute(block: Block, dtype: torch.dtype, a: Scalar) -> Scalar:
    if dtype.is_floating_point:
        return block.rounded(f"tl.abs({as_rep(a, opmath(dtype))})", "size", dtype, a)
    rep, result = _ints(block, dtype, integer_ranges.absolute(a.range), a)  # type: ignore[arg-type]
    return block.scalar(f"tl.abs({as_rep(a, rep)})", "size", dtype, rep, result, a)


def _invert(block: Block, dtype: torch.dtype, a: Scalar) -> Scalar:
    if dtype is torch.bool:
        return block.scalar(f"~{as_rep(a, 'int1')}", "negation", dtype, "int1", whole(dtype), a)
    result = integer_ranges.sub(Interval(-1, -1), a.range) if dtype is not torch.uint8 else whole(dtype)  # type: ignore[arg-type]
    return block.scalar(f"~{as_rep(a, a.rep)}", "negation", dtype, a.rep, result, a)


def _sign(block: Block, dtype: torch.dtype, a: Scalar) -> Scalar:
    if dtype.is_floating_point:
        return block.rounded(f"sign({as_rep(a, opmath(dtype))})", "sign_of", dtype, a)
    return block.scalar(f"sign({as_rep(a, a.rep)})", "sign_of", dtype, a.rep, Interval(-1, 1), a)


def _relu(block: Block, dtype: torch.dtype, a: Scalar) -> Scalar:
    return BINARY["maximum"](block, dtype, a, constant(0, dtype))


def _test(template: str, hint: str, of_integers: bool) -> Rule:
    def rule(block: Block, dtype: torch.dtype, a: Scalar) -> Scalar:
        if not a.dtype.is_floating_point:
            return constant(of_integers, torch.bool)
        return block.test(template.format(as_rep(a, opmath(a.dtype))), hint, a)

    return rule


def _not(block: Block, dtype: torch.dtype, a: Scalar) -> Scalar:
    return _invert(block, torch.bool, truth(block, a))


UNARY: dict[str, Rule] = {
    "neg": _negate,
    "abs": _absolute,
    "sign": _sign,
    "sgn": _sign,
    "bitwise_not": _invert,
    "logical_not": _not,
    "relu": _relu,
    "square": lambda block, dtype, a: _repeated(block, dtype, a, 2),
    "reciprocal": lambda block, dtype, a: _divide(block, dtype, constant(1.0, dtype), a),
    "exp": _call("tl.exp({})", "exp"),
    "exp2": _call("tl.exp2({})", "exp2"),
    "expm1": _call("expm1({})", "grown"),
    "log": _call("tl.log({})", "log"),
    "log2": _call("tl.log2({})", "log2"),
    "log10": _call("tl.log2({}) * 0.30102999566398120", "log10"),
    "log1p": _call("log1p({})", "log_one_plus"),
    "sqrt": _call("tl.sqrt({})", "root", "tl.sqrt_rn({})"),
    "rsqrt": _call("tl.rsqrt({})", "inverse_root"),
    "sin": _call("tl.sin({})", "sine"),
    "cos": _call("tl.cos({})", "cosine"),
    "erf": _call("tl.erf({})", "erf"),
    "tanh": _call("tanh({})", "tanh_of"),
    "sigmoid": _call("sigmoid({})", "sigmoid_of"),
    "floor": _rounding("tl.floor({})", "floor"),
    "ceil": _rounding("tl.ceil({})", "ceil"),
    "trunc": _rounding("trunc({})", "whole"),
    "fix": _rounding("trunc({})", "whole"),
    "round": _rounding("round_even({})", "nearest"),
    "isnan": _test("{0} != {0}", "is_nan", False),
    "isinf": _test('tl.abs({}) == float("inf")', "is_inf", False),
    "isfinite": _test('tl.abs({}) < float("inf")', "is_finite", True),
}


def where(block: Block, dtype: torch.dtype, condition: Scalar, a: Scalar, b: Scalar) -> Scalar:
    """condition ? a : b in the promoted dtype."""
    condition = truth(block, condition)
    a, b = block.convert(a, dtype), block.convert(b, dtype)
    rep, interval = TRITON_NAME[dtype], None
    if not dtype.is_floating_point and a.range is not None and b.range is not None:
        interval = integer_ranges.union(a.range, b.range)
        rep = "int32" if dtype is torch.int64 and interval.fits(32) else rep
    expression = f"tl.where({as_rep(condition, 'int1')}, {as_rep(a, rep)}, {as_rep(b, rep)})"
    return block.scalar(expression, "chosen", dtype, rep, interval, condition, a, b)
