"""What the engines of calls with selected keys read: the selection of the queries, and the look-up of the
pairs that the mask shows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritoncp.call import call_mods
from tritoncp.call.facts import Call
from tritoncp.core.bounded_cache import BoundedCache
from tritoncp.mods import Mod
from tritoncp.planning.derived import PlanCache
from tritoncp.planning.plan import Plan
from tritoncp.planning.selected_rows import SelectedRows
from tritoncp.selection.selection import check_shape
from tritoncp.selection.visible import VisiblePairs

MAX_LOOK_UPS = 16  # max look-ups of visible pairs, for one plan
# Of each plan: look-ups by first row, device and mask_mod.
_LOOK_UPS: PlanCache[BoundedCache[Any, VisiblePairs]] = PlanCache(lambda: BoundedCache(MAX_LOOK_UPS))


def pairs_of(plan: Plan, q: Tensor) -> VisiblePairs:
    """Return the look-up of the pairs that a plan's mask shows to queries [B, H, S_local, D]."""
    copy = call_mods.translate_mask(plan, q)
    return look_up(plan, None if copy is None else copy.on_current_stream(), q.device)


def look_up(plan: Plan, mask_mod: Mod | None, device: torch.device) -> VisiblePairs:
    """Return the look-up of the pairs that a plan's mask shows, made once for a device. mask_mod: with
    captures on the device"""
    kept, key = _LOOK_UPS.of(plan.derived), (plan.first_row, device, mask_mod)
    if (found := kept.get(key)) is None:
        if mask_mod is not None and mask_mod.graph is None:
            raise ValueError(
                "mask_mod is a hand-written @triton.jit function, and selected keys are looked up by torch, "
                "which cannot call it: write the mask_mod in Python"
            )
        found = kept.put(key, VisiblePairs(plan.mask, mask_mod, plan.first_row, device))
    return found


def selected_rows(call: Call, q: Tensor, k: Tensor) -> SelectedRows:
    """Return what the queries of a call with selected keys select."""
    assert call.selected is not None
    check_shape(call.selected, q, k.shape[1])  # sizes of a graph are known only here
    indices, block_size, query_block = call.selected
    heads, positions = q.shape[1], call.plan.positions_on(indices.device)
    group = heads // k.shape[1]
    return SelectedRows(indices, block_size, query_block, positions, heads, group, indices.shape[1])
