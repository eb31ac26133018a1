"""Translation of Python mask_mods and score_mods to readable Triton source.

`mask_mod(fn)` and `score_mod(fn)` trace a function (`translate.trace`), write it as Triton
(`translate.emit`), load the source as a module that Triton can read (`source_cache`) and return a `Mod`:
@triton.jit functions with their captured values. `fingerprint` and `snapshot` detect a changed function. Only
`translate` needs Triton, and is imported late. May import: core.
"""

from tritoncp.mods.errors import Untranslatable
from tritoncp.mods.mod import Mod, hand_written, mask_mod, score_mod

__all__ = ["Mod", "Untranslatable", "hand_written", "mask_mod", "score_mod"]
