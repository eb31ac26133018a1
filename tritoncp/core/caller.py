"""Warnings that show the line of the user's call, whatever functions of the package lie between."""

import sys
import warnings


def warn_caller(message: str) -> None:
    """Warn at the line of the nearest caller outside the package."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "tritoncp":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
