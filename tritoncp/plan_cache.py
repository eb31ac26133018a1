"""Plans behind raw masks: made once, found again, never stale.

An entry lives under a weak reference to the mask with the versions of the tensors it was made from.
Eviction is by count in call order, the same on every rank.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from tritoncp import comm, plan
from tritoncp.autograd import pin
from tritoncp.closed_forms import MaskMod
from tritoncp.masks import Mask, create_block_mask, from_block_mask, full_mask
from tritoncp.mods.captures import Fingerprint
from tritoncp.plan import Plan

MOST = 64
_PLANS: OrderedDict[Any, tuple[weakref.ref[Any] | None, Plan]] = OrderedDict()


def compact(mask: BlockMask | Mask) -> tuple[Mask, tuple[Tensor, ...]]:
    """The compact form of a mask, and the tensors it depends on."""
    if isinstance(mask, Plan):
        raise TypeError("this is a Plan already; pass it where the mask goes")
    if isinstance(mask, Mask):
        return mask, _captured(mask.mask_mod)
    if isinstance(mask, BlockMask):
        return from_block_mask(mask), (*_index(mask), *_captured(mask.mask_mod))
    raise TypeError(
        f"a BlockMask or a tritoncp Mask is needed; got a {type(mask).__name__}. "
        "create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN) makes one"
    )


def record(made: Plan, sources: tuple[Tensor, ...]) -> Plan:
    """The plan, with the versions of what it was made from."""
    return replace(made, sources=sources, versions=tuple(t._version for t in sources))


def plan_for(mask: Any, q: Tensor, k: Tensor, group: Any) -> Plan:
    """The natural-order plan of a raw mask for shards of these lengths."""
    mod = mask.mask_mod if isinstance(mask, BlockMask | Mask) else mask
    found = Fingerprint(mod) if mod is not None else None
    key = (
        None if mask is None else id(mask), None if group is None else group.group_name, q.shape[2], k.shape[2],
        q.shape[0], q.shape[1], found and found.key,
    )
    entry = _PLANS.get(key)
    if entry is not None and (entry[0] is None or entry[0]() is mask) and _fresh(entry[1]):
        _PLANS.move_to_end(key)
        return entry[1]
    made = _make(mask, q, k, group)
    if found is None or found.key is not None:
        _PLANS[key] = (None if mask is None else weakref.ref(mask)), made
        while len(_PLANS) > MOST:
            _PLANS.popitem(last=False)
    return made


def _make(mask: Any, q: Tensor, k: Tensor, group: Any) -> Plan:
    rows = [[q.shape[2], k.shape[2]]] if group is None else comm.exchange([q.shape[2], k.shape[2]], group)
    lengths, kv_lengths = ([row[i] for row in rows] for i in (0, 1))
    return in_order(mask, q.shape[0], lengths, kv_lengths, 0 if group is None else group.rank())


def in_order(mask: Any, batch: int, lengths: Sequence[int], kv_lengths: Sequence[int], rank: int) -> Plan:
    """The plan of a raw mask (or None) whose ranks hold pieces of these lengths, in order."""
    if mask is None:
        mask = full_mask(sum(lengths), sum(kv_lengths))
    elif isinstance(mask, MaskMod):
        mask = create_block_mask(mask, batch if mask.reads[0] else 1, 1, sum(lengths), sum(kv_lengths))
    whole, sources = compact(mask)
    made = plan.build(whole, len(lengths), rank, balancer=None, lengths=lengths, kv_lengths=kv_lengths)
    return pin(record(made, sources))


def _fresh(made: Plan) -> bool:
    return all(t._version == version for t, version in zip(made.sources, made.versions, strict=True))


def _index(mask: BlockMask) -> tuple[Tensor, ...]:
    tensors = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    return tuple(t for t in tensors if t is not None)


def _captured(mask_mod: Any) -> tuple[Tensor, ...]:
    return () if mask_mod is None else tuple(Fingerprint(mask_mod).tensors)
