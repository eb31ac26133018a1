"""Any Python mask_mod or score_mod as readable Triton source.

`mask_mod(fn)` and `score_mod(fn)` trace a function (`trace`), write it as Triton (`emit`), keep the source
where Triton can read it (`cache`) and give a `Mod`: @triton.jit functions plus what they capture now.
"""

from __future__ import annotations

from .errors import Untranslatable
from .mod import Mod, mask_mod, score_mod

__all__ = ["Mod", "Untranslatable", "mask_mod", "score_mod"]
