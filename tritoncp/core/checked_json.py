"""Parsing of JSON from files and options: ValueError for any text that is none."""

from __future__ import annotations

import json
import math
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text. Raises ValueError for a text that is not JSON, has NaN or an infinite number, or is
    nested too deep for Python.

    >>> parse_json('{"a": [1, 2.5]}')
    {'a': [1, 2.5]}
    >>> parse_json("[1, NaN]")
    Traceback (most recent call last):
    ValueError: NaN is no number of JSON
    >>> parse_json("[" * 100_000)
    Traceback (most recent call last):
    ValueError: JSON that is nested too deep
    """
    try:
        return json.loads(text, parse_constant=_parse_number, parse_float=_parse_number)
    except RecursionError:
        raise ValueError("JSON that is nested too deep") from None


def _parse_number(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no number of JSON")
    return number
