"""Inputs from which a raw mask was made (index tensors, captures, code), and its compact form: at most one
device-to-host copy."""

from __future__ import annotations

import enum
import hashlib
import types
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from tritoncp import mods
from tritoncp.api import validate
from tritoncp.core.caller import warn_caller
from tritoncp.core.host_copy import is_remote, to_host
from tritoncp.core.user_code import describe
from tritoncp.masks.block_runs import content
from tritoncp.masks.closed_forms import is_closed_form
from tritoncp.masks.from_torch import from_block_mask, has_no_lengths, with_intervals
from tritoncp.masks.mask import Mask, create_block_mask, full_mask
from tritoncp.masks.mask_mod import MaskMod
from tritoncp.mods.captures import TensorReplacement, with_tensors
from tritoncp.mods.fingerprint import Identity
from tritoncp.mods.snapshot import captured_state
from tritoncp.planning.plan import Plan

RawMask = BlockMask | Mask | MaskMod | None


class MaskState(NamedTuple):
    """The state of a raw mask at one moment.

    key:     hashable; equal for masks that differ at most in their tensors. None: cannot be compared
    tensors: the index tensors of the listed blocks, then the tensors that its mask_mod captures
    listed:  number of index tensors
    reason:  why the mask cannot be compared
    """

    key: Any
    tensors: tuple[Tensor, ...]
    listed: int
    reason: str

    @classmethod
    def of(cls, mask: RawMask) -> MaskState:
        """Read the state of a mask. Raises TypeError for other objects, RuntimeError for a Mask whose state
        has changed since it was made."""
        if isinstance(mask, (Mask, MaskMod)) and (constant := _CONSTANT_STATES.get(mask)) is not None:
            if isinstance(mask, Mask):
                mask.check_state()
            return constant
        if isinstance(mask, Plan):
            raise TypeError("block_mask is a Plan already; pass it in place of the mask")
        if mask is not None and not isinstance(mask, BlockMask | Mask | MaskMod):
            raise TypeError(
                f"block_mask is a {type(mask).__name__}; a BlockMask or a tritoncp Mask is needed: "
                "create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)"
            )
        mask = _without_noop(mask)
        mod = mask.mask_mod if isinstance(mask, BlockMask | Mask) else mask
        read = captured_state(mod)
        if isinstance(mask, Mask):
            mask.check_state(read)
        key, reason = read.key, read.incomparable
        lists, geometry = _lists(mask)
        tensors = *lists, *read.tensors
        if any(t.is_inference() for t in tensors):
            key, reason = None, "a tensor made under torch.inference_mode(), which counts no edits"
        state = cls(None if key is None else (geometry, key), tensors, len(lists), reason)
        if isinstance(mask, (Mask, MaskMod)) and key is not None and is_closed_form(mod):
            _CONSTANT_STATES[mask] = state
        return state


@dataclass(eq=False)
class Sources:
    """The tensors and the code that a raw mask is made of."""

    mask: RawMask
    state: MaskState

    @classmethod
    def of(cls, mask: RawMask, state: MaskState | None = None) -> Sources:
        """Return the sources of a mask. state: its present state, if the caller has read it."""
        state = MaskState.of(mask) if state is None else state
        return cls(_without_noop(mask), state)

    @property
    def lists(self) -> tuple[Tensor, ...]:
        """Index tensors of the listed blocks."""
        return self.state.tensors[: self.state.listed]

    @property
    def captures(self) -> tuple[Tensor, ...]:
        """Tensors that the mask_mod captures."""
        return self.state.tensors[self.state.listed :]

    @property
    def mod(self) -> Any:
        """The mask_mod; None if there is none."""
        return self.mask.mask_mod if isinstance(self.mask, BlockMask | Mask) else self.mask

    @cached_property
    def host_copies(self) -> dict[int, Tensor]:
        """Host copies of remote tensors, by id of the original."""
        remote = [t for t in self.state.tensors if is_remote(t)]
        return {id(t): copy for t, copy in zip(remote, to_host(remote), strict=True)}

    def on_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors of this mask, those on a device as host copies."""
        return [self.host_copies.get(id(t), t) for t in tensors]

    @cached_property
    def evaluate(self) -> Any:
        """The mask_mod with its captures on the host."""
        remote = any(id(tensor) in self.host_copies for tensor in self.captures)
        return with_tensors(self.mod, self.host_copies) if remote else self.mod

    def compact(self, batch: int, q_len: int, kv_len: int) -> Mask:
        """Return the mask as runs. Its row intervals are computed again: captures may have been edited since
        the mask was made. batch, q_len, kv_len: the call's, for masks without sizes of their own."""
        mask = self.mask
        validate.check_mask_captures(self.captures)
        if mask is None:
            return full_mask(q_len, kv_len)
        if isinstance(mask, MaskMod):
            with self._host_captures():
                compacted = create_block_mask(mask, batch if mask.reads[0] else 1, 1, q_len, kv_len)
            return replace(compacted, mask_mod=mask)  # the closed form carries its tensors' versions
        if getattr(self.mod, "__name__", "") == "_sliced_mask_mod_error":
            raise ValueError(
                "block_mask is a slice of a BlockMask, and torch drops the mask_mod of a slice: pass the "
                "global mask, of which each rank selects its own rows"
            )
        opaque = mods.hand_written(self.mod)
        if isinstance(mask, Mask):
            return mask if opaque or self._is_constant() else self._with_intervals(mask)
        listed = replace_lists(mask, self.on_host(self.lists))
        lengths = (q_len, kv_len) if has_no_lengths(mask) else None
        compacted = from_block_mask(listed, search=False, lengths=lengths)
        return compacted if opaque or compacted.mask_mod is None else self._with_intervals(compacted)

    def _is_constant(self) -> bool:
        """Return whether the mask is a closed form without tensors, so that no edit can change it."""
        if self.mod is None:
            return True
        closed = isinstance(self.mod, MaskMod) and not self.captures
        return closed and self.mod.intervals(0, 0) is not None

    def _host_captures(self) -> AbstractContextManager[Any]:
        """Return a context in which the mask_mod reads host copies in place of tensors on devices."""
        return TensorReplacement(self.host_copies) if self.host_copies else nullcontext()

    def _with_intervals(self, mask: Mask) -> Mask:
        if isinstance(self.mod, MaskMod):
            with self._host_captures():
                compacted = with_intervals(mask, self.mod)
            return replace(compacted, mask_mod=mask.mask_mod)
        try:
            return with_intervals(mask, self.evaluate)
        except RuntimeError:
            if self.evaluate is self.mod:
                raise
            # The mask_mod runs only on its own device: it is evaluated there, for every masked block.
            return replace(mask, interval=None, window=None, reads=(True, True))

    @property
    def evaluators(self) -> tuple[tuple[Any, torch.device], ...]:
        """Pairs (mask_mod, device of its indices) to try in order: the host, then the device of its captures
        for a mask_mod that runs only there."""
        on_host = self.evaluate, torch.device("cpu")
        if self.evaluate is self.mod:
            return (on_host,)
        return on_host, (self.mod, next(t.device for t in self.captures if is_remote(t)))

    def digest(self) -> bytes:
        """Digest the contents of tensors, code and plain values: equal on every rank that has the same
        mask."""
        key = self.state.key
        hasher = hashlib.sha256(repr(_stable(key)).encode() if key else describe(self.mod).encode())
        for tensor in self.on_host(self.state.tensors):
            hasher.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            hasher.update(content(tensor))
        return hasher.digest()

    def warn_incomparable(self) -> None:
        """Warn, once per name of a mask_mod, that its plan cannot be cached."""
        name = describe(self.mod)
        if name not in _WARNED:
            _WARNED.add(name)
            warn_caller(
                f"the plan of a mask ({name}) is made again at every call: it captures what cannot be "
                f"compared between calls ({self.state.reason}). Make it once, tritoncp.make_plan(mask, "
                "mesh), and pass the plan"
            )


_WARNED: set[str] = set()


# States of masks in which only the contents of these tensors can change.
_CONSTANT_STATES: weakref.WeakKeyDictionary[Mask | MaskMod, MaskState] = weakref.WeakKeyDictionary()


def _without_noop(mask: RawMask) -> RawMask:
    """Return None for torch's mask without lengths in which all queries see all keys; other masks as they
    are."""
    return None if has_no_lengths(mask) and mask.mask_mod is noop_mask else mask


def _lists(mask: RawMask) -> tuple[tuple[Tensor, ...], Any]:
    if isinstance(mask, BlockMask):
        tensors = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
        return tuple(t for t in tensors if t is not None), ("BlockMask", mask.seq_lengths, mask.BLOCK_SIZE)
    if isinstance(mask, Mask):
        return mask.runs.stored, ("Mask", mask.q_len, mask.kv_len, mask.q_block, mask.kv_block)
    return (), type(mask).__name__


def replace_lists(mask: BlockMask, lists: Sequence[Tensor]) -> BlockMask:
    """Return a copy of the BlockMask with these index tensors."""
    if all(a is b for a, b in zip(_lists(mask)[0], lists)):
        return mask
    count, index, *rest = lists
    full, full_index = rest or (None, None)
    return BlockMask.from_kv_blocks(
        count,
        index,
        full,
        full_index,
        mask.BLOCK_SIZE,
        mask.mask_mod,
        mask.seq_lengths,
        compute_q_blocks=False,
    )


def _stable(key: Any) -> Any:
    """Return a fingerprint's key without addresses and device indices, which differ between processes."""
    if isinstance(key, Identity):
        thing = key.obj
        named = type(thing) if isinstance(thing, enum.Enum) else thing
        name = getattr(named, "__qualname__", getattr(named, "__name__", type(named).__qualname__))
        member = thing.name if isinstance(thing, enum.Enum) else ""
        return getattr(named, "__module__", ""), name, member
    if isinstance(key, types.CodeType):
        return key.co_name, key.co_code.hex(), key.co_names, _stable(key.co_consts)
    if isinstance(key, torch.device):
        return key.type
    if isinstance(key, type):
        return key.__module__, key.__qualname__
    if isinstance(key, frozenset):
        return sorted(map(repr, map(_stable, key)))
    if isinstance(key, tuple):
        return tuple(map(_stable, key))
    return repr(key)
