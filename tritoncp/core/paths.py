"""File names made from text, as a device's name."""

from __future__ import annotations

import re


def slug(name: str) -> str:
    """Convert a name to at most 100 lower-case letters, digits and hyphens, for a file name.

    >>> slug("NVIDIA H200"), slug("../../etc/passwd"), slug("…")
    ('nvidia-h200', 'etc-passwd', 'device')
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:100].strip("-") or "device"
