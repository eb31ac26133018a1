"""Values of a graph while Triton source is emitted.

- `Scalar`: one value per element of the tile (a Triton scalar or tile), named in the emitted source.
- `Lazy`: a tensor with dimensions, which is a function from an index tuple to a Scalar.
- `Sparse`: the gradient of such a tensor: (index tuple, Scalar) entries, zero elsewhere.
- `Block`: the lines of one emitted function; equal expressions share a line.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tritoncp.mods.translate.integer_ranges import IntegerRange, dtype_interval, wrap_interval

Number = bool | int | float

TRITON_NAME = {
    torch.bool: "int1", torch.uint8: "uint8", torch.int8: "int8", torch.int16: "int16", torch.int32: "int32",
    torch.int64: "int64", torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32",
    torch.float64: "float64",
}  # fmt: skip
NO_AXES: frozenset[str] = frozenset()


class Scalar(NamedTuple):
    """A value in the emitted source.

    text: a Triton expression without side effects
    dtype: of the value in torch
    rep: the Triton type of `text`; int32 for an int64 of torch where `range` proves that it fits
    range: every value of an integer; None for floating point
    const: the value, where it is the same in every call
    axes: of the score tile, "q", "kv" and "score", with which the value varies
    weak: a Python number, which takes the dtype of the other operand
    """

    text: str
    dtype: torch.dtype
    rep: str
    range: IntegerRange | None = None
    const: Number | None = None
    axes: frozenset[str] = NO_AXES
    weak: bool = False


class Dim(NamedTuple):
    """The length of a dimension: `size` when traced, `text` in the emitted source."""

    size: int
    text: str


class Index(NamedTuple):
    """An index from the beginning of a dimension; `valid`: source of its bounds check, None if in range."""

    at: Scalar
    valid: str | None


Indices = tuple[Index, ...]


class Lazy(NamedTuple):
    """A tensor with dimensions; `at` gives an element, `fill` the value of all elements if they are equal."""

    shape: tuple[Dim, ...]
    dtype: torch.dtype
    at: Callable[[Indices], Scalar]
    fill: Number | None = None


class GradientEntry(NamedTuple):
    """An addend of a gradient, and the index of the element that it belongs to."""

    indices: Indices
    value: Scalar


class Sparse(NamedTuple):
    """The gradient of a tensor with dimensions: the sum of its entries at each index, zero elsewhere."""

    shape: tuple[Dim, ...]
    dtype: torch.dtype
    entries: tuple[GradientEntry, ...]


Value = Scalar | Lazy | Sparse


def fixed_dim(size: int) -> Dim:
    """A dimension whose length is a constant of the emitted source."""
    return Dim(size, str(size))


def spell(value: Number, rep: str) -> str:
    """The shortest literal of a value in a Triton type."""
    if rep == "int1":
        return repr(bool(value))
    if not rep.startswith(("float", "bfloat")):
        return repr(int(value))
    if not math.isfinite(value):
        return f'float("{float(value)}")'
    if rep != "float32":
        return repr(float(value))
    digits = next(d for d in range(1, 18) if _float32(float(f"{value:.{d}g}")) == _float32(float(value)))
    return repr(float(f"{value:.{digits}g}"))


def _float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32).item())


def literal(value: Number, rep: str) -> str:
    """The source of a constant of a Triton type. Triton's interpreter fills no bfloat16."""
    if rep == "bfloat16":
        return f"tl.cast({literal(value, 'float32')}, tl.bfloat16)"
    return f"tl.full((), {spell(value, rep)}, tl.{rep})"


def constant(value: Number, dtype: torch.dtype) -> Scalar:
    """A constant of a torch dtype, rounded to it; integers take 32 bits where they fit."""
    if isinstance(value, int) and dtype.is_floating_point:
        value = float(value)
    if isinstance(value, float) or dtype is torch.bool:
        value = torch.tensor(value, dtype=torch.float64).to(dtype).item()
    value = int(value) if dtype is not torch.bool and not dtype.is_floating_point else value
    interval = None if dtype.is_floating_point else IntegerRange(int(value), int(value))
    rep = TRITON_NAME[dtype]
    if dtype is torch.int64 and interval is not None and interval.fits(32):
        rep = "int32"
    return Scalar(literal(value, rep), dtype, rep, interval, value)


def weak_scalar(value: Number) -> Scalar:
    """A Python number as the operand of an operation, see `Scalar.weak`."""
    dtype = (
        torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float64
    )
    return constant(value, dtype)._replace(weak=True)


def as_rep(value: Scalar, rep: str) -> str:
    """The source of `value` as a Triton type."""
    if value.const is not None:
        return literal(value.const, rep)
    if value.rep == rep:
        return value.text
    if rep == "int1":
        return f"({value.text} != 0)"
    return f"tl.cast({value.text}, tl.{rep})"


def opmath(dtype: torch.dtype) -> str:
    """The Triton type that torch computes in: float32 for half precisions."""
    return "float32" if dtype in (torch.float16, torch.bfloat16) else TRITON_NAME[dtype]


@dataclass
class Block:
    """The lines of one emitted function.

    exact: whether divisions and roots are rounded as IEEE 754 says, as in masks, although that is slower
    uniform: variables that all scores of a tile share
    """

    exact: bool
    lines: list[str] = field(default_factory=list)
    uniform: set[str] = field(default_factory=set)
    _variables: dict[str, str] = field(default_factory=dict)
    _name_counts: dict[str, int] = field(default_factory=dict)

    def name(self, expression: str, hint: str) -> str:
        """Return the variable of `expression`; a new expression adds a line."""
        if expression not in self._variables:
            count = self._name_counts.get(hint, 0)
            self._name_counts[hint] = count + 1
            name = hint if not count else f"{hint}_{count}"
            self._variables[expression] = name
            self.lines.append(f"{name} = {expression}")
        return self._variables[expression]

    def reserve(self, *names: str) -> None:
        """Keep names of parameters from being given to variables."""
        for name in names:
            self._name_counts[name] = max(self._name_counts.get(name, 0), 1)

    def scalar(
        self,
        expression: str,
        hint: str,
        dtype: torch.dtype,
        rep: str,
        range: IntegerRange | None,
        *parents: Scalar,
    ) -> Scalar:
        """Emit an operation; its result varies with the axes of all operands."""
        axes = frozenset().union(*(p.axes for p in parents)) if parents else NO_AXES
        name = self.name(expression, hint)
        if not axes:
            self.uniform.add(name)
        return Scalar(name, dtype, rep, range, None, axes)

    def comparison(self, expression: str, hint: str, *parents: Scalar) -> Scalar:
        """Emit a comparison."""
        if not any(p.axes for p in parents):
            expression = f"flag({expression})"
        return self.scalar(expression, hint, torch.bool, "int1", dtype_interval(torch.bool), *parents)

    def float_scalar(self, expression: str, hint: str, dtype: torch.dtype, *parents: Scalar) -> Scalar:
        """Emit a float operation that is computed in opmath(dtype) and rounded to dtype."""
        rep = TRITON_NAME[dtype]
        if opmath(dtype) != rep:
            expression = f"tl.cast({expression}, tl.{rep})"
        return self.scalar(expression, hint, dtype, rep, None, *parents)

    def convert(self, value: Scalar, dtype: torch.dtype) -> Scalar:
        """Emit `value.to(dtype)`, with the rounding and wrapping of torch."""
        if value.const is not None:
            return constant(value.const, dtype)
        if value.dtype == dtype:
            return value
        rep = TRITON_NAME[dtype]
        if dtype is torch.bool:
            return self.comparison(f"{value.text} != 0", "nonzero", value)
        if value.range is not None and not dtype.is_floating_point:
            interval = wrap_interval(value.range, dtype)
            if interval == value.range and dtype is torch.int64 and value.rep in ("int32", "int64"):
                return value._replace(dtype=dtype)
            if interval.fits(32) and dtype is torch.int64:
                rep = "int32"
            return self.scalar(f"tl.cast({value.text}, tl.{rep})", "cast", dtype, rep, interval, value)
        if dtype is torch.bfloat16 and value.rep != "float32":
            # as torch does; Triton's interpreter converts other types to the bits of a uint16
            expression = f"tl.cast(tl.cast({value.text}, tl.float32), tl.bfloat16)"
        elif value.dtype.is_floating_point and not dtype.is_floating_point and dtype is not torch.int64:
            expression = f"tl.cast(tl.cast({value.text}, tl.int64), tl.{rep})"
        else:
            expression = f"tl.cast({value.text}, tl.{rep})"
        return self.scalar(expression, "cast", dtype, rep, dtype_interval(dtype), value)
