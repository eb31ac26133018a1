"""Which pairs of query and key see each other: compact masks, closed forms, and how they are made.

May import: mods, core.  The public names are those of `tritoncp.masks.mask`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tritoncp.masks.mask import *  # noqa: F403


def __getattr__(name: str) -> Any:
    module = importlib.import_module("tritoncp.masks.mask")
    if name not in module.__all__:
        raise AttributeError(f"module 'tritoncp.masks' has no attribute {name!r}")
    return getattr(module, name)
