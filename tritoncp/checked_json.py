"""JSON that other programs, or people, may have written: parsed within bounds, or refused with ValueError."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

MOST_BYTES = 64 << 20  # of a file
MOST_LEVELS = 64  # of lists and objects within each other


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError for what is no JSON, is nested past MOST_LEVELS, or holds
    text that no file can (half of a surrogate pair).

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
            _check_text(text, value)
            return value
    raise ValueError(f"JSON that is nested more than {MOST_LEVELS} levels deep")


def _check_text(text: str | bytes, value: Any) -> None:
    if (b"\\ud" if isinstance(text, bytes) else "\\ud") in text.lower():  # type: ignore[operator]
        json.dumps(value, ensure_ascii=False).encode()  # a UnicodeEncodeError is a ValueError


def read_json(path: Path) -> Any:
    """The value of a JSON file. Raises OSError, or ValueError for what :func:`parse_json` refuses and for
    files larger than MOST_BYTES."""
    return parse_json(read_bounded(path))


def read_bounded(path: Path, most: int = MOST_BYTES) -> bytes:
    """The bytes of a plain file. Raises OSError, or ValueError for a larger one and for pipes and devices,
    which may have no end, or no writer to wait for."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{path} is not a plain file")
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path} has more than {most >> 20} MiB")
    return content
