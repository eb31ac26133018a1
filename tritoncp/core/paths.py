"""Checks of file names that are built from data, such as a device's name or a journal's fields."""

from __future__ import annotations

import re
from pathlib import Path

LONGEST = 100  # characters of one part of a file name

# sm_90, sm_100a, gfx942, gfx90a, interpreter
ARCHITECTURE = re.compile(r"sm_[0-9]{2,3}[a-z]?|gfx[0-9a-f]{3,5}|interpreter")
# 3.7.1, 3.6.0+git1a2b3c, 3.8.0.post1, 3.5.0rc1; "none" where there is no Triton
TRITON = re.compile(r"none|[0-9]+(\.[0-9]+){1,3}([.+-]?[A-Za-z0-9]+)*")
HISTORY_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*\.jsonl")


def checked_name(name: str, pattern: re.Pattern[str], kind: str, example: str) -> str:
    """Return ``name`` if all of it matches ``pattern``, so that a file may be named after it. Raises
    ValueError otherwise.

    >>> checked_name("sm_90", ARCHITECTURE, "architecture", "sm_90")
    'sm_90'
    >>> checked_name("../sm_90", ARCHITECTURE, "architecture", "sm_90")
    Traceback (most recent call last):
    ValueError: '../sm_90' is not the name of an architecture like 'sm_90': no file is called after it
    """
    if not isinstance(name, str) or len(name) > LONGEST or not pattern.fullmatch(name):
        article = "an" if kind[0] in "aeiou" else "a"
        raise ValueError(
            f"{name!r:.120} is not the name of {article} {kind} like {example!r}: no file is called after it"
        )
    return name


def architecture_name(name: str) -> str:
    return checked_name(name, ARCHITECTURE, "architecture", "sm_90")


def triton_version(name: str) -> str:
    return checked_name(name, TRITON, "Triton version", "3.7.1")


def slug(name: str) -> str:
    """Write a product's name in lower-case letters, digits and hyphens: safe as part of a file name.

    >>> slug("NVIDIA H200"), slug("../../etc/passwd"), slug("…")
    ('nvidia-h200', 'etc-passwd', 'device')
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:LONGEST].strip("-") or "device"


def path_inside(root: Path, path: Path) -> Path:
    """Return ``path`` if it lies below ``root`` once symbolic links and ".." are resolved. Raises ValueError
    otherwise. Links above ``root`` are left to the user.

    >>> path_inside(Path("configs"), Path("configs/sm_90/x.json")).as_posix()
    'configs/sm_90/x.json'
    >>> path_inside(Path("configs"), Path("configs/../x.json"))
    Traceback (most recent call last):
    ValueError: configs/../x.json leads out of configs: nothing is written there; remove the link, or name ...
    """
    try:
        inside = path.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError):  # links in a circle
        inside = False
    if not inside:
        raise ValueError(
            f"{path} leads out of {root}: nothing is written there; remove the link, or name another folder"
        )
    return path
