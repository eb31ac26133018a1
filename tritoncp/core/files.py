"""Files: parsing of JSON, with ValueError for any other text, and file names made from text."""

from __future__ import annotations

import json
import math
import re
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


def slug(name: str) -> str:
    """Convert a name to at most 100 lower-case letters, digits and hyphens, for a file name.

    >>> slug("NVIDIA H200"), slug("../../etc/passwd"), slug("…")
    ('nvidia-h200', 'etc-passwd', 'device')
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:100].strip("-") or "device"
