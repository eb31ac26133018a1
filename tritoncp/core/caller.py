"""Warnings with the file and line of the user's call, outside of this package and torch."""

import re
import sys
import warnings
from pathlib import Path
from typing import Any

PLACE = re.compile(r'File "([^"]+)", line (\d+)')
_registry: dict[Any, Any] = {}  # warning registry for traced graphs: filters decide about repetitions


def warn_caller(message: str) -> None:
    """Warn at the line of the nearest caller outside of the package and torch; while torch retraces a graph,
    at the source line of the present node."""
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
    roots = Path(__file__).parents[1], Path(str(sys.modules["torch"].__file__)).parent
    folders = tuple(f"{root}/" for root in roots)
    places = PLACE.findall(traceback.get_current_meta().get("stack_trace") or "")
    outside = [(file, int(line)) for file, line in places if not file.startswith(folders)]
    return outside[-1] if outside else None
