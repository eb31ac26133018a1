"""The exception of a mod that cannot be translated."""

from __future__ import annotations

_HAND_WRITTEN = (
    "Rewrite it with plain tensor operations, or pass a @triton.jit function: see Mod.from_triton."
)


class Untranslatable(Exception):
    """Raised for an operation of a mask_mod or score_mod that cannot be translated to Triton.

    The message names the operation, its line in the user's file, and the remedy.

    >>> print(Untranslatable("Tensor.item()", "model.py:12", "it differs at every element"))
    Tensor.item() at model.py:12 cannot be translated to Triton: it differs at every element.
    Rewrite it with plain tensor operations, or pass a @triton.jit function: see Mod.from_triton.
    """

    def __init__(self, operation: str, where: str, why: str, remedy: str = _HAND_WRITTEN) -> None:
        self.operation, self.where, self.why = operation, where, why
        super().__init__(f"{operation} at {where} cannot be translated to Triton: {why}.\n{remedy}")
