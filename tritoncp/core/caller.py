"""Warnings with the file and line of the user's call, outside of this package and torch."""

import re
import sys
import warnings
from pathlib import Path
from typing import Any

PLACE = re.compile(r'File "([^"]+)", line (\d+)')
FRAME_START = re.compile(r'^\s*(?=File ")', re.MULTILINE)
_registry: dict[Any, Any] = {}  # warning registry for traced graphs: filters decide about repetitions


def warn_caller(message: str) -> None:
    """Warn at the line of the nearest caller outside of the package and torch; while torch retraces a graph,
    at the source line of the current node."""
    if place := _traced_place():
        warnings.warn_explicit(message, UserWarning, *place, registry=_registry)
        return
    level, frame = 2, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("tritoncp", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def _traced_place() -> tuple[str, int] | None:
    """Return the source (file, line) of the node that torch is retracing, None if it is not."""
    traceback: Any = sys.modules.get("torch.fx.traceback")
    if traceback is None or not traceback.has_preserved_node_meta():
        return None
    frame = PLACE.match(user_frame(traceback.get_current_meta().get("stack_trace") or ""))
    return (frame[1], int(frame[2])) if frame else None


def user_frame(stack_trace: str) -> str:
    """Return the last frame of a node's stack trace that is outside of this package and torch, with its line
    of code; "" if there is none."""
    roots = Path(__file__).parents[1], Path(str(sys.modules["torch"].__file__)).parent
    inside = tuple(f'File "{root}/' for root in roots)
    frames = [text.strip() for text in FRAME_START.split(stack_trace)]
    outside = [text for text in frames if PLACE.match(text) and not text.startswith(inside)]
    return outside[-1] if outside else ""
