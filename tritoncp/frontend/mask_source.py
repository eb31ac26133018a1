"""What a raw mask is made of, and its compact form, with at most one copy from a device to the host."""

from __future__ import annotations

import enum
import hashlib
import types
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from tritoncp import mods
from tritoncp.core.host_copy import is_remote, to_host
from tritoncp.frontend import validate
from tritoncp.masks.block_runs import content
from tritoncp.masks.closed_forms import MaskMod, is_settled
from tritoncp.masks.mask import Mask, create_block_mask, from_block_mask, full_mask, with_intervals
from tritoncp.mods import Mod
from tritoncp.mods.captures import describe
from tritoncp.mods.fingerprint import Identity
from tritoncp.mods.recording import State, read_state
from tritoncp.planning.plan import Plan

RawMask = BlockMask | Mask | MaskMod | None


@dataclass(eq=False)
class Sources:
    """What a raw mask is made of.

    lists:    tensors that say which blocks are listed
    captures: tensors that its mask_mod captures
    key:      hashable; equal for masks that differ in no more than their tensors. None: cannot be compared
    reason:   why not
    """

    mask: RawMask
    lists: tuple[Tensor, ...]
    captures: tuple[Tensor, ...]
    key: Any
    reason: str

    @classmethod
    def of(cls, mask: RawMask) -> Sources:
        if isinstance(mask, Plan):
            raise TypeError("this is a Plan already; pass it where the mask goes")
        if isinstance(mask, (Mask, MaskMod)) and (known := _SETTLED.get(mask)) is not None:
            if isinstance(mask, Mask):
                mask.check_state()
            return cls(mask, *known)
        if mask is not None and not isinstance(mask, BlockMask | Mask | MaskMod):
            raise TypeError(
                f"a BlockMask or a tritoncp Mask is needed; got a {type(mask).__name__}. "
                "create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN) makes one"
            )
        mod = mask.mask_mod if isinstance(mask, BlockMask | Mask) else mask
        state = _captured(mod)
        if isinstance(mask, Mask):
            mask.check_state(state)
        key, captures, reason = state.key, tuple(state.tensors), state.incomparable
        lists, geometry = _lists(mask)
        if any(t.is_inference() for t in (*lists, *captures)):
            key, reason = None, "a tensor made under torch.inference_mode(), which counts no edits"
        made = cls(mask, lists, captures, None if key is None else (geometry, key), reason)
        if isinstance(mask, (Mask, MaskMod)) and key is not None and is_settled(mod):
            _SETTLED[mask] = lists, captures, made.key, reason
        return made

    @property
    def mod(self) -> Any:
        return self.mask.mask_mod if isinstance(self.mask, BlockMask | Mask) else self.mask

    @cached_property
    def hosted(self) -> dict[int, Tensor]:
        """Remote tensors on the host, by id of the original."""
        remote = [t for t in (*self.lists, *self.captures) if is_remote(t)]
        return {id(t): here for t, here in zip(remote, to_host(remote), strict=True)}

    def on_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [self.hosted.get(id(t), t) for t in tensors]

    @cached_property
    def evaluate(self) -> Any:
        """The mask_mod around captures on the host."""
        return mods.with_tensors(self.mod, self.hosted) if self.hosted else self.mod

    def compact(self, batch: int, q_len: int, kv_len: int) -> Mask:
        """The mask in runs, its intervals looked for anew: what was captured may have been edited since it
        was made. The lengths are those of the call, for masks without their own."""
        mask = self.mask
        validate.check_mask_captures(self.captures)
        if mask is None:
            return full_mask(q_len, kv_len)
        if isinstance(mask, MaskMod):
            made = create_block_mask(self.evaluate, batch if mask.reads[0] else 1, 1, q_len, kv_len)
            return replace(made, mask_mod=mask)
        if getattr(self.mod, "__name__", "") == "_sliced_mask_mod_error":
            raise ValueError(
                "this BlockMask is a slice of another, and torch drops a slice's mask_mod; pass the whole, "
                "global "
                "mask: each rank takes its own part of it"
            )
        opaque = mods.hand_written(self.mod)
        if isinstance(mask, Mask):
            return mask if opaque or self._settled() else self._searched(mask)
        listed = replace_lists(mask, self.on_host(self.lists))
        made = from_block_mask(listed, search=False)
        return made if opaque or made.mask_mod is None else self._searched(made)

    def _settled(self) -> bool:
        """Nothing that the mask_mod depends on can be edited."""
        if self.mod is None:
            return True
        closed = isinstance(self.mod, MaskMod) and not self.captures
        return closed and self.mod.intervals(0, 0) is not None

    def _searched(self, mask: Mask) -> Mask:
        try:
            return with_intervals(mask, self.evaluate)
        except RuntimeError:
            if self.evaluate is self.mod:
                raise
            # It was written for its device alone, and will be asked there, in every masked block.
            return replace(mask, interval=None, window=None, reads=(True, True))

    def keep(self, made: Plan) -> Plan:
        """The plan with ways to ask the mask_mod anew: on the host without another copy, or, if it was
        written for its device alone, there.
        """
        made._shared["ways"] = [(self.evaluate, torch.device("cpu"))]
        if self.evaluate is not self.mod:
            device = next(t.device for t in self.captures if is_remote(t))
            made._shared["ways"].append((self.mod, device))
        return made

    def digest(self) -> bytes:
        """The same on every rank that has the same mask: contents of tensors, code, plain values."""
        found = hashlib.sha256(repr(_stable(self.key)).encode() if self.key else describe(self.mod).encode())
        for tensor in self.on_host((*self.lists, *self.captures)):
            found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(content(tensor))
        return found.digest()

    def warn_incomparable(self) -> None:
        name = describe(self.mod)
        if name not in _WARNED:
            _WARNED.add(name)
            warnings.warn(
                f"the plan of a mask ({name}) is made again at every call: it captures what cannot be "
                "compared "
                f"between calls ({self.reason}). Make it once, tritoncp.make_plan(mask, mesh), and pass the "
                "plan",
                stacklevel=5,
            )


_WARNED: set[str] = set()


def _captured(mod: Any) -> State:
    if isinstance(mod, Mod):
        facts = [(t.dtype, tuple(t.shape), t.device) for t in mod.tensors]
        return State((mod.digest, tuple(map(repr, mod.numbers)), tuple(facts)), mod.tensors, ())
    if mods.hand_written(mod):
        return State(Identity(mod), (), ())
    return State((), (), ()) if mod is None else read_state(mod, is_score=False)


# Of masks that are made of these tensors, whose contents alone can change: lists, captures, key, reason.
_SETTLED: weakref.WeakKeyDictionary[Mask | MaskMod, tuple[Any, ...]] = weakref.WeakKeyDictionary()


def _lists(mask: RawMask) -> tuple[tuple[Tensor, ...], Any]:
    if isinstance(mask, BlockMask):
        tensors = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
        return tuple(t for t in tensors if t is not None), ("BlockMask", mask.seq_lengths, mask.BLOCK_SIZE)
    if isinstance(mask, Mask):
        return (mask.runs.ptr, mask.runs.runs), ("Mask", mask.q_len, mask.kv_len, mask.q_block, mask.kv_block)
    return (), type(mask).__name__


def replace_lists(mask: BlockMask, lists: Sequence[Tensor]) -> BlockMask:
    """The BlockMask over these index tensors."""
    if all(a is b for a, b in zip(_lists(mask)[0], lists)):
        return mask
    count, index, full, full_index = (*lists, None, None)[:4]
    assert count is not None
    assert index is not None
    return BlockMask.from_kv_blocks(
        count,
        index,
        full_kv_num_blocks=full,
        full_kv_indices=full_index,
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=mask.mask_mod,
        seq_lengths=mask.seq_lengths,
        compute_q_blocks=False,
    )


def _stable(key: Any) -> Any:
    """A fingerprint's key without what differs between processes: addresses, and the number of a device."""
    if isinstance(key, Identity):
        thing = key.thing
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
