"""Inputs from which a raw mask was made (index tensors, captures, code), and its compact form, with at most
one device-to-host copy."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from tritoncp.core.caller import warn_caller
from tritoncp.core.host_copy import is_remote, to_host
from tritoncp.core.records import replace
from tritoncp.masks.closed_forms import is_closed_form
from tritoncp.masks.from_torch import from_block_mask, has_no_lengths
from tritoncp.masks.mask import Mask, create_block_mask, full_mask
from tritoncp.masks.mask_mod import MaskMod, name_of
from tritoncp.masks.runs.block_lists import index_lists
from tritoncp.masks.runs.block_runs import content
from tritoncp.mods.captures import TensorReplacement
from tritoncp.mods.places import stable
from tritoncp.mods.snapshot import captured_state
from tritoncp.mods.user_code import describe
from tritoncp.planning.plan import Plan

RawMask = BlockMask | Mask | MaskMod | None


class MaskState(NamedTuple):
    """The state of a raw mask at one moment.

    key:     hashable; masks with equal keys differ only in their tensors. None: the mask cannot be compared
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
    """The tensors and the code of a raw mask."""

    mask: RawMask
    state: MaskState

    @classmethod
    def of(cls, mask: RawMask, state: MaskState | None = None) -> Sources:
        """Return the sources of a mask. state: its current state, if the caller has read it."""
        state = MaskState.of(mask) if state is None else state
        return cls(_without_noop(mask), state)

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
        """Host copies of tensors on a device, by id of the original."""
        remote = [t for t in self.state.tensors if is_remote(t)]
        return {id(t): copy for t, copy in zip(remote, to_host(remote), strict=True)}

    def on_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors of this mask, with host copies of tensors on a device."""
        return [self.host_copies.get(id(t), t) for t in tensors]

    def compact(self, batch: int, q_len: int, kv_len: int) -> Mask:
        """Return the mask as runs. batch, q_len, kv_len: sizes of the call, for masks without sizes."""
        mask = self.mask
        check_mask_captures(self.captures)
        if mask is None:
            return full_mask(q_len, kv_len)
        if isinstance(mask, Mask):
            return mask.with_intervals()
        if getattr(self.mod, "__name__", "") == "_sliced_mask_mod_error":
            raise ValueError(
                "block_mask is a slice of a BlockMask, and torch drops the mask_mod of a slice: pass the "
                "global mask, from which each rank selects its rows"
            )
        # Lists and captures on devices are read from their host copies.
        with TensorReplacement(self.host_copies) if self.host_copies else nullcontext():
            if isinstance(mask, MaskMod):
                compacted = create_block_mask(mask, batch if mask.reads[0] else 1, 1, q_len, kv_len)
            else:
                lengths = (q_len, kv_len) if has_no_lengths(mask) else None
                compacted = from_block_mask(mask, lengths)
        return replace(compacted).with_intervals()  # its snapshot has the versions of the original tensors

    def digest(self) -> bytes:
        """Digest the contents of tensors, code and plain values. Ranks with the same mask have equal
        digests."""
        key = self.state.key
        hasher = hashlib.sha256(repr(stable(key)).encode() if key else describe(self.mod).encode())
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


def check_mask_captures(tensors: Sequence[Tensor]) -> None:
    """Raise if the mask_mod captures a tensor that requires grad: a mask has no gradient."""
    for tensor in tensors:
        if tensor.requires_grad:
            raise ValueError(
                f"the mask_mod captures a tensor {tuple(tensor.shape)} that requires grad, and a mask has no "
                "gradient; capture tensor.detach(), or learn it in a score_mod"
            )


def check_plannable(mask: Any) -> None:
    """Raise TypeError for a mask without lengths: None, a mask_mod, or a BlockMask of torch without sizes."""
    if mask is None or has_no_lengths(mask):
        raise TypeError(
            "None has no lengths, and a plan needs them: make_plan(full_mask(Q_LEN, KV_LEN), mesh)"
        )
    is_plain = callable(mask) and not isinstance(mask, BlockMask | Mask | Plan)
    if isinstance(mask, MaskMod) or is_plain:
        name = name_of(mask) if name_of(mask) != "<lambda>" else "mask_mod"
        raise TypeError(
            f"{name} has no lengths, and a plan needs Q_LEN and KV_LEN, the global lengths of queries "
            f"and keys: make_plan(create_block_mask({name}, None, None, Q_LEN, KV_LEN), mesh)"
        )


_WARNED: set[str] = set()


# States of masks whose only changeable part is the contents of these tensors.
_CONSTANT_STATES: weakref.WeakKeyDictionary[Mask | MaskMod, MaskState] = weakref.WeakKeyDictionary()


def _without_noop(mask: RawMask) -> RawMask:
    """Return None for torch's mask without lengths in which all queries see all keys, and any other mask
    unchanged."""
    return None if has_no_lengths(mask) and mask.mask_mod is noop_mask else mask


def _lists(mask: RawMask) -> tuple[tuple[Tensor, ...], Any]:
    if isinstance(mask, BlockMask):
        return index_lists(mask), ("BlockMask", mask.seq_lengths, mask.BLOCK_SIZE)
    if isinstance(mask, Mask):
        return mask.runs.stored, ("Mask", mask.q_len, mask.kv_len, mask.q_block, mask.kv_block)
    return (), type(mask).__name__
