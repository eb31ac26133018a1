"""Values of a graph while Triton source is emitted.

- `Scalar`: one value per element of the tile (a Triton scalar or tile), named in the emitted source.
- `Lazy`: a tensor with dimensions, never made: a function from an index tuple to a Scalar.
- `Sparse`: the gradient of such a tensor: (index tuple, Scalar) entries, zero elsewhere.
- `Block`: the lines of one emitted function; equal expressions are written once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tritoncp.mods.translate.integer_ranges import Interval, whole, wrapped

Number = bool | int | float

TRITON_NAME = {
    torch.bool: "int1", torch.uint8: "uint8", torch.int8: "int8", torch.int16: "int16", torch.int32: "int32",
    torch.int64: "int64", torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32",
    torch.float64: "float64",
}  # fmt: skip
NOWHERE: frozenset[str] = frozenset()


class Scalar(NamedTuple):
    """`text` in the emitted source; `rep` is the Triton type it has there, which for an int64 of torch
    may be int32 where `range` proves that enough. `axes`: those that it varies with: "q", "kv", "score"."""

    text: str
    dtype: torch.dtype
    rep: str
    range: Interval | None = None
    const: Number | None = None
    axes: frozenset[str] = NOWHERE
    weak: bool = False  # a Python number: it takes the type of what it meets


class Dim(NamedTuple):
    """The length of a dimension: as traced, and as the emitted source reads it."""

    size: int
    text: str


class Index(NamedTuple):
    """A wrapped index; `valid` is the source of "it is in range", None where that is certain."""

    at: Scalar
    valid: str | None


Indices = tuple[Index, ...]


class Lazy(NamedTuple):
    shape: tuple[Dim, ...]
    dtype: torch.dtype
    at: Callable[[Indices], Scalar]
    fill: Number | None = None  # the one value it holds everywhere, if so


class Entry(NamedTuple):
    indices: Indices
    value: Scalar


class Sparse(NamedTuple):
    shape: tuple[Dim, ...]
    dtype: torch.dtype
    entries: tuple[Entry, ...]


Value = Scalar | Lazy | Sparse


def fixed(size: int) -> Dim:
    return Dim(size, str(size))


def spell(value: Number, rep: str) -> str:
    """The shortest literal that is this value in a Triton type."""
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
    """A typed constant."""
    return f"tl.full((), {spell(value, rep)}, tl.{rep})"


def constant(value: Number, dtype: torch.dtype) -> Scalar:
    """A constant of a torch dtype, rounded to it; integers take 32 bits where they fit."""
    if isinstance(value, int) and dtype.is_floating_point:
        value = float(value)
    if isinstance(value, float) or dtype is torch.bool:
        value = torch.tensor(value, dtype=torch.float64).to(dtype).item()
    value = int(value) if dtype is not torch.bool and not dtype.is_floating_point else value
    interval = None if dtype.is_floating_point else Interval(int(value), int(value))
    rep = TRITON_NAME[dtype]
    if dtype is torch.int64 and interval is not None and interval.fits(32):
        rep = "int32"
    return Scalar(literal(value, rep), dtype, rep, interval, value)


def weak(value: Number) -> Scalar:
    """A Python number in an operation."""
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
    """The type torch computes in: half precisions compute in float32."""
    return "float32" if dtype in (torch.float16, torch.bfloat16) else TRITON_NAME[dtype]


@dataclass
class Block:
    """One function being written."""

    exact: bool  # a mask: divisions and roots rounded as IEEE says, whatever they cost
    lines: list[str] = field(default_factory=list)
    _known: dict[str, str] = field(default_factory=dict)
    _taken: dict[str, int] = field(default_factory=dict)

    def name(self, expression: str, hint: str) -> str:
        """The variable that holds `expression`, written now if it is new."""
        if expression not in self._known:
            used = self._taken.get(hint, 0)
            self._taken[hint] = used + 1
            name = hint if not used else f"{hint}_{used}"
            self._known[expression] = name
            self.lines.append(f"{name} = {expression}")
        return self._known[expression]

    def reserve(self, *names: str) -> None:
        for name in names:
            self._taken[name] = max(self._taken.get(name, 0), 1)

    def scalar(
        self,
        expression: str,
        hint: str,
        dtype: torch.dtype,
        rep: str,
        range: Interval | None,
        *parents: Scalar,
    ) -> Scalar:
        """Write one operation; the result varies with all axes of its operands."""
        axes = frozenset().union(*(p.axes for p in parents)) if parents else NOWHERE
        return Scalar(self.name(expression, hint), dtype, rep, range, None, axes)

    def test(self, expression: str, hint: str, *parents: Scalar) -> Scalar:
        """A comparison."""
        if not any(p.axes for p in parents):
            expression = f"flag({expression})"
        return self.scalar(expression, hint, torch.bool, "int1", whole(torch.bool), *parents)

    def rounded(self, expression: str, hint: str, dtype: torch.dtype, *parents: Scalar) -> Scalar:
        """A float result computed in opmath(dtype), rounded to dtype."""
        rep = TRITON_NAME[dtype]
        if opmath(dtype) != rep:
            expression = f"tl.cast({expression}, tl.{rep})"
        return self.scalar(expression, hint, dtype, rep, None, *parents)

    def convert(self, value: Scalar, dtype: torch.dtype) -> Scalar:
        """`value.to(dtype)` as torch does it."""
        if value.const is not None:
            return constant(value.const, dtype)
        if value.dtype == dtype:
            return value
        rep = TRITON_NAME[dtype]
        if dtype is torch.bool:
            return self.test(f"{value.text} != 0", "nonzero", value)
        if value.range is not None and not dtype.is_floating_point:
            interval = wrapped(value.range, dtype)
            if interval == value.range and dtype is torch.int64 and value.rep in ("int32", "int64"):
                return value._replace(dtype=dtype)
            if interval.fits(32) and dtype is torch.int64:
                rep = "int32"
            return self.scalar(f"tl.cast({value.text}, tl.{rep})", "cast", dtype, rep, interval, value)
        if value.dtype.is_floating_point and not dtype.is_floating_point and dtype is not torch.int64:
            expression = f"tl.cast(tl.cast({value.text}, tl.int64), tl.{rep})"
        else:
            expression = f"tl.cast({value.text}, tl.{rep})"
        return self.scalar(expression, "cast", dtype, rep, whole(dtype), value)
