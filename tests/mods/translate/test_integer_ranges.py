"""Interval arithmetic: an interval holds every result of its operation."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from tritoncp.mods.translate import integer_ranges
from tritoncp.mods.translate.integer_ranges import IntegerRange

ENDS = st.integers(-40, 40)
INTERVALS = st.tuples(ENDS, ENDS).map(lambda ab: IntegerRange(min(ab), max(ab)))

RULES: dict[str, tuple[Callable[..., IntegerRange], Callable[..., torch.Tensor]]] = {
    "add": (integer_ranges.add, torch.add),
    "sub": (integer_ranges.sub, torch.sub),
    "mul": (integer_ranges.mul, torch.mul),
    "maximum": (integer_ranges.maximum, torch.maximum),
    "minimum": (integer_ranges.minimum, torch.minimum),
    "floor_div": (integer_ranges.floor_div, torch.floor_divide),
    "trunc_div": (integer_ranges.trunc_div, lambda a, b: torch.div(a, b, rounding_mode="trunc")),
    "remainder": (integer_ranges.remainder, torch.remainder),
    "fmod": (integer_ranges.fmod, torch.fmod),
    "and": (integer_ranges.bits, torch.bitwise_and),
    "or": (integer_ranges.bits, torch.bitwise_or),
    "xor": (integer_ranges.bits, torch.bitwise_xor),
    "neg": (lambda a, b: integer_ranges.neg(a), lambda a, b: -a),
    "absolute": (lambda a, b: integer_ranges.absolute(a), lambda a, b: a.abs()),
    "union": (integer_ranges.union, lambda a, b: torch.cat([a, b])),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", RULES)
@hypothesis.given(INTERVALS, INTERVALS)
def test_an_interval_holds_every_result(name: str, a: IntegerRange, b: IntegerRange) -> None:
    bound, operation = RULES[name]
    left, right = (torch.arange(i.lo, i.hi + 1) for i in (a, b))
    if name in ("floor_div", "trunc_div", "remainder", "fmod"):
        right = torch.where(right == 0, 1, right)  # as in the helpers
    pairs = torch.cartesian_prod(left, right).unbind(1)
    values = operation(*pairs)
    low, high = bound(a, b)
    assert low <= values.min()
    assert values.max() <= high


@hypothesis.given(INTERVALS, st.integers(0, 20))
def test_shifts(a: IntegerRange, amount: int) -> None:
    for bound, move in (
        (integer_ranges.shift_left, int.__lshift__),
        (integer_ranges.shift_right, int.__rshift__),
    ):
        low, high = bound(a, IntegerRange(amount, amount))
        assert all(low <= move(value, amount) <= high for value in range(a.lo, a.hi + 1))


def test_a_result_that_wraps_has_the_interval_of_its_dtype() -> None:
    assert integer_ranges.wrap_interval(IntegerRange(0, 2**31), torch.int32) == IntegerRange(
        -(2**31), 2**31 - 1
    )
    assert integer_ranges.wrap_interval(IntegerRange(-5, 5), torch.uint8) == IntegerRange(0, 255)
    assert integer_ranges.wrap_interval(IntegerRange(-5, 5), torch.int8) == IntegerRange(-5, 5)
    assert integer_ranges.dtype_interval(torch.float32) is None
