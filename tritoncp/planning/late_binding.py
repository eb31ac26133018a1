"""Modules that a lower layer runs and does not know: the package's root binds them to the name of a use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

BOUND: dict[str, str] = {}  # name of a use -> module


def load_bound(use: str) -> Any:
    """Import the module that is bound to a use."""
    return import_module(BOUND[use])
