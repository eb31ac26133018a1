"""Warnings that show the line of the user's call, whatever functions of the package lie between."""

import re
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.fx import traceback

FOLDERS = tuple(f"{Path(file).resolve().parents[up]}/" for file, up in ((__file__, 1), (torch.__file__, 0)))
PLACE = re.compile(r'File "([^"]+)", line (\d+)')
_shown: dict[Any, Any] = {}  # warnings of graphs, which are traced several times; filters decide


def warn_caller(message: str) -> None:
    """Warn at the line of the nearest caller outside the package and torch; where torch traces a graph again,
    at the line that its present node comes from."""
    traced = (traceback.has_preserved_node_meta() and traceback.get_current_meta().get("stack_trace")) or ""
    for file, line in reversed(PLACE.findall(traced)):
        if not file.startswith(FOLDERS):
            warnings.warn_explicit(message, UserWarning, file, int(line), registry=_shown)
            return
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in (
        "tritoncp",
        "torch",
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
