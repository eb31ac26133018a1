"""Translation of Python mask_mods and score_mods to readable Triton source.

`mask_mod(fn)` and `score_mod(fn)` trace a function (`translate.trace`), write it as Triton
(`translate.emit`), load the source as a module that Triton can read (`source_cache`) and return a `Mod`:
@triton.jit functions with their captured values. `fingerprint` and `snapshot` detect a changed function; they
need no Triton, so the names of this package are imported lazily. May import: core.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tritoncp.mods.errors import Untranslatable
    from tritoncp.mods.mod import Mod, hand_written, mask_mod, score_mod

__all__ = ["Mod", "Untranslatable", "hand_written", "mask_mod", "score_mod"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "errors" if name == "Untranslatable" else "mod"
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
