"""The one exception of this room."""

from __future__ import annotations

_HAND_WRITTEN = (
    "Rewrite it with plain tensor operations, or hand over a @triton.jit function "
    "(tritoncp.mods.Mod.from_triton shows the signature)."
)


class Untranslatable(Exception):
    """A mask_mod or score_mod that cannot become Triton source.

    The message names the operation, the line of the user's file it stands on, and what to do.

    >>> print(Untranslatable("Tensor.item()", "mymodel.py:12", "the value is not known before the kernel runs"))
    Tensor.item() at mymodel.py:12 cannot be translated to Triton: the value is not known before the kernel runs.
    Rewrite it with plain tensor operations, or hand over a @triton.jit function \
(tritoncp.mods.Mod.from_triton shows the signature).
    """

    def __init__(self, operation: str, where: str, why: str, remedy: str = _HAND_WRITTEN) -> None:
        self.operation, self.where, self.why = operation, where, why
        super().__init__(f"{operation} at {where} cannot be translated to Triton: {why}.\n{remedy}")
