"""Parsing of untrusted JSON within bounds of size and depth; ValueError for other input."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

MOST_BYTES = 64 << 20  # of a file
MOST_LEVELS = 64  # of lists and objects within each other


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text. Raises ValueError for a text that is not JSON, is nested past MOST_LEVELS, or holds
    half of a surrogate pair, which no file can store.

    >>> parse_json('{"a": [1, 2]}')
    {'a': [1, 2]}
    >>> parse_json("[" * 100_000)
    Traceback (most recent call last):
    ValueError: JSON that is nested more than 64 levels deep
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"JSON that is nested more than {MOST_LEVELS} levels deep") from None
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        level = [
            part
            for whole in level
            if isinstance(whole, (list, dict))
            for part in (whole.values() if isinstance(whole, dict) else whole)
        ]
        if not level:
            break
    else:
        raise ValueError(f"JSON that is nested more than {MOST_LEVELS} levels deep")
    if (b"\\ud" if isinstance(text, bytes) else "\\ud") in text.lower():  # type: ignore[operator]
        json.dumps(value, ensure_ascii=False).encode()  # a UnicodeEncodeError is a ValueError
    return value


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises OSError, or ValueError for files that are larger than MOST_BYTES or that
    :func:`parse_json` refuses."""
    return parse_json(read_bounded(path))


def read_bounded(path: Path, most: int = MOST_BYTES) -> bytes:
    """Read up to ``most`` bytes of a plain file. Raises OSError, or ValueError for a larger file and for
    pipes and devices, which may have no end, or no writer."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{path} is not a plain file")
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path} has more than {most >> 20} MiB")
    return content
