"""Score_mods and mask_mods of the forms that torch's flex attention is tested with: the table in
torch_mods.toml, as functions.

A form is a function of its captured tensors, so that one call can bind them in the dtype of the case and
another in float64.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

Mod = Callable[..., Tensor]
TABLE: dict[str, dict[str, list[str]]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


class Dims(NamedTuple):
    """Sizes of a call: q [batch, heads, q, dim], k [kv_batch, kv_heads, kv, dim], v [..., v_dim]."""

    batch: int = 1
    heads: int = 2
    q: int = 64
    dim: int = 16
    kv: int | None = None
    kv_heads: int | None = None
    kv_batch: int | None = None
    v_dim: int | None = None

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        rows = self.kv_batch or self.batch, self.kv_heads or self.heads, self.keys
        return (self.batch, self.heads, self.q, self.dim), (*rows, self.dim), (*rows, self.v_dim or self.dim)

    @property
    def keys(self) -> int:
        return self.kv or self.q


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def drawn(*shape: int) -> Tensor:
    """Uniform numbers, the same in every call."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(3))


def starts(length: int) -> Tensor:
    """The first position of each of three documents."""
    return torch.tensor([0, length // 2, length // 2 + length // 4], dtype=torch.int32)


def documents(length: int) -> Tensor:
    """The document of each position."""
    return torch.searchsorted(starts(length), torch.arange(length), right=True).to(torch.int32) - 1


MAKERS = {"normal": normal, "drawn": drawn, "starts": starts, "documents": documents}
SCOPE = vars(torch) | {"silu": torch.nn.functional.silu, "inf": math.inf, "nan": math.nan} | MAKERS


class Form(NamedTuple):
    """A mod by the expressions of its result and of the values that it captures."""

    result: str
    values: tuple[str, ...] = ()
    arguments: str = "s, b, h, q, kv"

    def captured(self, dims: Dims) -> list[Any]:
        """Make the captured values: tensors in float64 or of integers, and numbers."""
        longest = max(dims.q, dims.keys)
        sizes = {"batch": dims.batch, "heads": dims.heads, "queries": dims.q, "keys": dims.keys}
        return [eval(value, SCOPE, sizes | {"longest": longest}) for value in self.values]

    def bind(self, *captured: Any) -> Mod:
        names = ", ".join("tuwxy"[: len(self.values)])
        function: Mod = eval(f"lambda {names}: lambda {self.arguments}: {self.result}", SCOPE)(*captured)
        return function


def forms(kind: str) -> dict[str, Form]:
    return {name: Form(row[0], tuple(row[1:])) for name, row in TABLE[kind].items() if row}


def masks(row: list[str]) -> Callable[[Dims], Mod]:
    form = Form(row[0], tuple(row[1:]), "b, h, q, kv")
    return lambda dims: form.bind(*form.captured(dims))


BUILTIN, CAPTURING = forms("builtin"), forms("capturing")
SCORES = BUILTIN | CAPTURING | forms("learned")
LEARNED = tuple(TABLE["learned"])
MASKS: dict[str, Callable[[Dims], Mod]] = {name: masks(row) for name, row in TABLE["masks"].items()}
