"""Symbolic values of a graph for the emission of Triton source.

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
    dtype: torch dtype of the value
    rep: Triton type of `text`; int32 for an int64 in torch if `range` fits
    range: interval of an integer; None for floating point
    const: the value, if it is a constant
    axes: axes of the score tile, "q", "kv" and "score", on which the value depends
    weak: whether it is a Python number, which is converted to the dtype of the other operand
    """

    text: str
    dtype: torch.dtype
    rep: str
    range: IntegerRange | None = None
    const: Number | None = None
    axes: frozenset[str] = NO_AXES
    weak: bool = False


def as_flag(comparison: str, axes: frozenset[str]) -> str:
    """Return the source of a comparison as int1. In Triton's interpreter a comparison of scalars has the type
    of its operands, which Triton 3.9 does not take as the mask of a load."""
    return comparison if axes else f"flag({comparison})"


class Dim(NamedTuple):
    """The length of a dimension: `size` in tracing, `text` in the emitted source."""

    size: int
    text: str


class Index(NamedTuple):
    """A non-negative index into a dimension. valid: source of its bounds check, None if it is in range"""

    at: Scalar
    valid: str | None


Indices = tuple[Index, ...]


class Lazy(NamedTuple):
    """A tensor with dimensions. at: returns an element; fill: the value of all elements if they are equal"""

    shape: tuple[Dim, ...]
    dtype: torch.dtype
    at: Callable[[Indices], Scalar]
    fill: Number | None = None


class GradientEntry(NamedTuple):
    """A term of a gradient, and the index of the element to which it is added."""

    indices: Indices
    value: Scalar


class Sparse(NamedTuple):
    """The gradient of a tensor with dimensions: at each index the sum of the entries there."""

    shape: tuple[Dim, ...]
    dtype: torch.dtype
    entries: tuple[GradientEntry, ...]


Value = Scalar | Lazy | Sparse


def fixed_dim(size: int) -> Dim:
    """Return a dimension whose length is a constant in the emitted source."""
    return Dim(size, str(size))


def spell(value: Number, rep: str) -> str:
    """Return the shortest literal of a value in a Triton type."""
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
    """Return the source of a constant of a Triton type. (tl.full of bfloat16 fails in the interpreter.)"""
    if rep == "bfloat16":
        return f"tl.cast({literal(value, 'float32')}, tl.bfloat16)"
    return f"tl.full((), {spell(value, rep)}, tl.{rep})"


def constant(value: Number, dtype: torch.dtype) -> Scalar:
    """Return a constant rounded to a torch dtype; integers have 32 bits if they fit."""
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
    """Return a Python number as an operand, see `Scalar.weak`."""
    dtype = (
        torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float64
    )
    return constant(value, dtype)._replace(weak=True)


def as_rep(value: Scalar, rep: str) -> str:
    """Return the source of `value` converted to a Triton type."""
    if value.const is not None:
        return literal(value.const, rep)
    if value.rep == rep:
        return value.text
    if rep == "int1":
        return f"({value.text} != 0)"
    return f"tl.cast({value.text}, tl.{rep})"


def opmath(dtype: torch.dtype) -> str:
    """Return the Triton type in which torch computes: float32 for half precisions."""
    return "float32" if dtype in (torch.float16, torch.bfloat16) else TRITON_NAME[dtype]


@dataclass
class Block:
    """The lines of one emitted function.

    exact: whether divisions and roots are rounded correctly (IEEE 754), which is slower; for masks
    name_counts: number of variables of each name; starts with the parameters, whose names are taken
    uniform: variables that are uniform over a score tile
    """

    exact: bool
    name_counts: dict[str, int]
    lines: list[str] = field(default_factory=list)
    uniform: set[str] = field(default_factory=set)
    _variables: dict[str, str] = field(default_factory=dict)

    def name(self, expression: str, hint: str) -> str:
        """Return the variable of `expression`; a new expression adds a line."""
        if expression not in self._variables:
            count = self.name_counts.get(hint, 0)
            self.name_counts[hint] = count + 1
            name = hint if not count else f"{hint}_{count}"
            self._variables[expression] = name
            self.lines.append(f"{name} = {expression}")
        return self._variables[expression]

    def scalar(
        self,
        expression: str,
        hint: str,
        dtype: torch.dtype,
        rep: str,
        range: IntegerRange | None,
        *parents: Scalar,
    ) -> Scalar:
        """Emit an operation; its result depends on the axes of all operands."""
        axes = frozenset().union(*(p.axes for p in parents)) if parents else NO_AXES
        name = self.name(expression, hint)
        if not axes:
            self.uniform.add(name)
        return Scalar(name, dtype, rep, range, None, axes)

    def comparison(self, expression: str, hint: str, *parents: Scalar) -> Scalar:
        """Emit a comparison."""
        expression = as_flag(expression, NO_AXES.union(*(p.axes for p in parents)))
        return self.scalar(expression, hint, torch.bool, "int1", dtype_interval(torch.bool), *parents)

    def float_scalar(self, expression: str, hint: str, dtype: torch.dtype, *parents: Scalar) -> Scalar:
        """Emit a float operation computed in opmath(dtype) and rounded to dtype."""
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
