"""Snapshots of a mask_mod's state, to detect changes after a mask was made."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from tritoncp.mods.fingerprint import ModState
from tritoncp.mods.recording import read_state


class Snapshot:
    """The state of a mask_mod when a mask was made. Keeps no captured tensor alive.

    >>> width = 40
    >>> def near(b, h, q_idx, kv_idx):
    ...     return q_idx - kv_idx <= width
    >>> snapshot = Snapshot(near)
    >>> width = 41
    >>> near.__globals__["width"] = 41
    >>> snapshot.difference(near)
    'global width was 40 and is 41'
    """

    def __init__(self, mask_mod: Callable[..., Any], fixed: bool = False) -> None:
        """Read the state. fixed: only the contents of its tensors can change, as for closed forms"""
        state = captured_state(mask_mod)
        self._fixed = fixed or _is_translated(mask_mod)
        self._key = state.key
        self._tensors = [weakref.ref(tensor) for tensor in state.tensors]
        self._versions = [_version(tensor) for tensor in state.tensors]

    def difference(self, mask_mod: Callable[..., Any], state: ModState | None = None) -> str:
        """Describe the first change since the snapshot as text; "" if there is none.

        state: the present state; None: it is read here
        """
        if not self._fixed and (text := self._key_difference(state or captured_state(mask_mod))):
            return text
        for ref, version in zip(self._tensors, self._versions):
            tensor = ref()
            if tensor is not None and version != _version(tensor):
                return f"a captured tensor of shape {tuple(tensor.shape)} was edited in place"
        return ""

    def _key_difference(self, state: ModState) -> str:
        if state.key != self._key:
            if state.incomparable or self._key is None or self._key[0] == "recording":
                return f"the operations of the mask_mod changed ({state.incomparable or 'with its state'})"
            return first_difference(self._key, state.key)
        for ref, tensor in zip(self._tensors, state.tensors):
            # A recording may capture tensors that the function makes at each call, which are freed by now.
            if ref() is not tensor and (ref() is not None or not state.incomparable):
                return f"a captured tensor of shape {tuple(tensor.shape)} was replaced by another"
        return ""


def first_difference(old: Any, new: Any) -> str:
    """Describe the first difference of two keys as text."""
    for before, after in zip(old, new):
        if before != after:
            path = after[0] if before[0] == after[0] else before[0]
            return f"{path} was {_text(before[1])} and is {_text(after[1])}"
    return "it reads other state"


def _text(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return f"the code at {value.co_filename}:{value.co_firstlineno}"
    if isinstance(value, tuple) and len(value) == 2:  # (type, value) or (name of a type of numbers, text)
        return value[1] if isinstance(value[0], str) and isinstance(value[1], str) else repr(value[1])
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def captured_state(mask_mod: Any) -> ModState:
    """Return the state of a mask_mod, which may also be a Mod, @triton.jit code or None."""
    if mask_mod is None:
        return ModState((), (), ())
    if not _is_translated(mask_mod):
        return read_state(mask_mod, is_score=False)
    if not hasattr(mask_mod, "digest"):  # @triton.jit code
        return ModState(mask_mod, (), ())
    facts = [(t.dtype, tuple(t.shape), t.device) for t in mask_mod.tensors]
    return ModState((mask_mod.digest, tuple(map(repr, mask_mod.numbers)), tuple(facts)), mask_mod.tensors, ())


def _is_translated(mask_mod: Any) -> bool:
    """Return whether a mask_mod is @triton.jit code or a Mod, which read no Python state."""
    return (
        type(mask_mod).__module__.split(".")[0] == "triton"
        or type(mask_mod).__module__ == "tritoncp.mods.mod"
    )


def _version(tensor: Tensor) -> int | None:
    """Return a tensor's version counter; None if it has none."""
    return None if tensor.is_inference() else tensor._version
