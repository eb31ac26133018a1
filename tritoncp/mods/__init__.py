"""Any Python mask_mod or score_mod as readable Triton source.

`mask_mod(fn)` and `score_mod(fn)` trace a function (`trace`), write it as Triton (`emit`), keep the source
where Triton can read it (`cache`) and give a `Mod`: @triton.jit functions with their captured values.
`fingerprint` and `snapshot` tell whether a function has changed; they need no Triton, so the names
of this package are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import exact
    from .errors import Untranslatable
    from .mod import Mod, hand_written, mask_mod, score_mod
    from .moved import with_tensors

__all__ = ["Mod", "Untranslatable", "exact", "hand_written", "mask_mod", "score_mod", "with_tensors"]

_HOMES = {"Untranslatable": "errors", "with_tensors": "moved"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "exact":
        return import_module(f"{__name__}.exact")
    value = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'mod')}"), name)
    globals()[name] = value
    return value
