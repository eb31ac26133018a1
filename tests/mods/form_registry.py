"""Registry of forms of Python state that a mask_mod or score_mod can read.

A form is a function that returns ``(scale, edit)``: ``scale(x)`` is x times a number in that state, and
``edit()`` changes the number from 0.5 to 2.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Form = tuple[Callable[[Any], Any], Callable[[], Any]]
FORMS: dict[str, Callable[[], Form]] = {}
RECORDED: set[str] = set()  # forms that have no fingerprint and are compared by recordings


def form(build: Callable[[], Form]) -> Callable[[], Form]:
    FORMS[build.__name__] = build
    return build


def recorded(build: Callable[[], Form]) -> Callable[[], Form]:
    RECORDED.add(build.__name__)
    return form(build)
