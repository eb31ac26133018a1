"""Score_mods and mask_mods of the forms that torch's flex attention is tested with, for :mod:`tests.cases`:
the table in torch_mods.toml."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.device import generator
from tests.zoo import Pairs, Rule, Score, ScoreMod, Sizes, python_rule

TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def drawn(*shape: int) -> Tensor:
    """Uniform numbers, the same in every call."""
    return torch.rand(shape, generator=generator(3))


def integers(low: int, high: int, *shape: int) -> Tensor:
    """Integers from ``low`` to ``high - 1``, the same in every call."""
    return torch.randint(low, high, shape, generator=generator(3))


def starts(length: int) -> Tensor:
    """The first position of each of three documents."""
    return torch.tensor([0, length // 2, length // 2 + length // 4], dtype=torch.int32)


def documents(length: int) -> Tensor:
    """The document of each position."""
    return torch.searchsorted(starts(length), torch.arange(length), right=True).to(torch.int32) - 1


MAKERS = {"drawn": drawn, "integers": integers, "starts": starts, "documents": documents}
SCOPE = vars(torch) | {"silu": torch.nn.functional.silu, "inf": math.inf, "nan": math.nan} | MAKERS


def bind(row: list[str], arguments: str, sizes: Sizes, normal: Any = None) -> Callable[..., Tensor]:
    """Return the function of a row of the table; ``normal`` makes each tensor that it learns."""
    sides = {"batch": sizes.batch, "heads": sizes.heads, "queries": sizes.q, "keys": sizes.kv}
    scope = sides | {"longest": sizes.longest, "normal": normal}
    captured = [eval(value, SCOPE, scope) for value in row[1:]]
    names = ", ".join("tuwxy"[: len(captured)])
    function: Callable[..., Tensor] = eval(f"lambda {names}: lambda {arguments}: {row[0]}", SCOPE)(*captured)
    return function


def score_of(row: list[str]) -> Score:
    """Return the score_mod of a row, whose learned tensors are parts of one."""

    def shape(sizes: Sizes) -> tuple[int, ...]:
        parts = []

        def count(*shape: int) -> Tensor:
            parts.append(math.prod(shape))
            return torch.zeros(shape)

        bind(row, "s, b, h, q, kv", sizes, count)
        return (sum(parts),) if parts else ()

    def bind_parts(sizes: Sizes, visible: Pairs, x: Tensor) -> ScoreMod:
        start = 0

        def take(*shape: int) -> Tensor:
            nonlocal start
            start += math.prod(shape)
            return x[start - math.prod(shape) : start].view(shape)

        return bind(row, "s, b, h, q, kv", sizes, take)

    return Score(shape, bind_parts)


def mask_of(row: list[str]) -> Callable[[Sizes, int], Rule]:
    by_row, by_head = (re.search(rf"\b{name}\b", row[0]) is not None for name in "bh")
    return lambda sizes, number: python_rule(bind(row, "b, h, q, kv", sizes), by_row, by_head)


SCORES = {f"torch: {name}": score_of(row) for name, row in TABLE["scores"].items()}
MASKS = {f"torch: {name}": mask_of(row) for name, row in TABLE["masks"].items()}
FLOAT64 = [f"torch: {name}" for name in TABLE["float64"]]
