"""Draws of hypothesis: 40 of each law, 20 in ``make quick``, 150 of laws marked long in ``make test-all``;
and pairs of values, some of them only for ``make test-all``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # a machine with a GPU may have pytest alone
    from hypothesis import settings


def register() -> None:
    """Register the profiles, and load the usual one; ``pytest --hypothesis-profile`` loads another."""
    from hypothesis import settings

    settings.register_profile("tritoncp", deadline=None, derandomize=True, max_examples=40)
    settings.register_profile("quick", settings.get_profile("tritoncp"), max_examples=20)
    settings.register_profile("wide", settings.get_profile("tritoncp"), max_examples=150)
    settings.load_profile("tritoncp")


def few(share: int = 4) -> settings:
    """Return settings of a law that takes long: one draw in ``share``."""
    from hypothesis import settings

    return settings(max_examples=settings().max_examples // share)


def by_turns(names: Iterable[Any], values: Sequence[Any], rare: Collection[Any] = ()) -> list[Any]:
    """Pair each name, or tuple of names, with one of the values in turn; all other pairs are marked long, and
    all pairs of ``rare`` names."""
    pairs = []
    for (i, name), value in product(enumerate(names), values):
        words = (*name, value) if isinstance(name, tuple) else (name, value)
        marks = [pytest.mark.long] * (value != values[i % len(values)] or name in rare)
        pairs.append(pytest.param(name, value, marks=marks, id="-".join(map(str, words))))
    return pairs
