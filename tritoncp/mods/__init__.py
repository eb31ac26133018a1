"""Any Python mask_mod or score_mod as readable Triton source.

`mask_mod(fn)` and `score_mod(fn)` trace a function (`trace`), write it as Triton (`emit`), keep the source
where Triton can read it (`cache`) and give a `Mod`: @triton.jit functions plus what they capture now.
"""

from __future__ import annotations

from . import exact
from .errors import Untranslatable
from .mod import Mod, hand_written, mask_mod, score_mod
from .moved import with_tensors

__all__ = ["Mod", "Untranslatable", "exact", "hand_written", "mask_mod", "score_mod", "with_tensors"]
