"""FLOP formulas of the ops for torch's FlopCounterMode. They are exact, and count only products of visible
pairs. Where keys are selected at run time, of each query as many visible keys count as it may select.

For a full mask they give torch's counts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tritoncp.core.bounded_cache import BoundedCache
from tritoncp.core.handles import object_of
from tritoncp.core.host_copy import on_host
from tritoncp.graph.spec import decode_spec
from tritoncp.masks.visible_keys import count_visible_keys
from tritoncp.mods.tracing import fresh_dispatch
from tritoncp.planning.derived import PlanCache
from tritoncp.planning.plan import Plan

MAX_COUNTS = 1024  # max counts of one plan
# Visible pairs of each plan, by rank, batch rows, heads, and keys that a query selects.
_PAIR_COUNTS: PlanCache[BoundedCache[tuple[int, ...], int]] = PlanCache(lambda: BoundedCache(MAX_COUNTS))


def count_flops(pairs: int, dim: int, v_dim: int, forward: bool) -> int:
    """Return the FLOPs of one pass: two matrix products forward, five backward (with recomputed scores).

    >>> count_flops(10, 64, 64, forward=True), count_flops(10, 64, 64, forward=False)
    (2560, 6400)
    """
    return 2 * pairs * (dim + v_dim if forward else 3 * dim + 2 * v_dim)


@on_host
def count_pairs(plan: Plan, batch: int, heads: int, selected: int | None = None) -> int:
    """Count the visible pairs of this rank's queries, over a call's batch rows and query heads. selected: max
    keys of a query; None: all that it sees"""
    counts, most = _PAIR_COUNTS.of(plan.derived), plan.mask.kv_len if selected is None else selected
    key = plan.rank, batch, heads, most
    total: int | None = counts.get(key)
    if total is None:
        keys = count_visible_keys(plan.mask, batch, heads, plan.first_row).clamp(max=most)
        positions = plan.positions  # [Bp, S_local]
        per_row = keys.expand(max(len(keys), len(positions)), -1, -1)
        at = positions.clamp(min=0)[:, None].expand(len(per_row), per_row.shape[1], -1)
        local = per_row.gather(2, at) * plan.valid[:, None]
        total = int(local.sum()) * (batch // local.shape[0]) * (heads // local.shape[1])
        counts.put(key, total)
    return total


def register_formulas() -> None:
    """Register the formulas with torch and with active FlopCounterModes, if the program has imported
    torch.utils.flop_counter, which takes too long to import otherwise."""
    counter = sys.modules.get("torch.utils.flop_counter")
    if counter is None:
        return
    ops = torch.ops.tritoncp
    formulas = {
        ops.forward: partial(_flops, forward=True),
        ops.backward: partial(_flops, forward=False),
        ops.probabilities: _probability_flops,
    }
    for op, formula in formulas.items():
        if op not in counter.flop_registry:
            counter.register_flop_formula(op, get_raw=True)(formula)
    for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        if isinstance(mode, counter._FlopCounterMode):
            for op in formulas:
                mode.counter.flop_registry.setdefault(op, counter.flop_registry[op])


def _flops(*args: Any, forward: bool, out_val: Any = None) -> int:
    """Return the FLOPs of this rank's op, without the function that expands latents."""
    q, k, v, *_, captures, _, _, handle, spec = args if forward else args[2:]
    sizes = decode_spec(spec).sizes
    pairs = _pairs_of_op(q, k, captures, handle, spec)
    return count_flops(pairs, q.shape[3], v.shape[3] if sizes is None else sizes[2], forward)


def _probability_flops(*args: Any, out_val: Any = None) -> int:
    """Return the FLOPs of the probabilities of selected keys: the scores once more, without values."""
    q, k, *_, captures, _, _, handle, spec = args
    return count_flops(_pairs_of_op(q, k, captures, handle, spec), q.shape[3], 0, forward=True)


def _pairs_of_op(q: Tensor, k: Tensor, captures: Sequence[Tensor], handle: Tensor, spec: str) -> int:
    """Count the visible pairs of an op. For a fake handle, which has no plan, all pairs of the shards
    count."""
    constants, selected = decode_spec(spec), None
    if constants.selected:
        selected = captures[-1].shape[3] * constants.selected[0]  # keys of a block
    # Calls on meta tensors with a mask on meta have such a handle.
    named: Tensor | None = handle.constant if isinstance(handle, FakeTensor) else handle
    seen = k.shape[2] if selected is None else min(selected, k.shape[2])
    pairs = q.shape[0] * q.shape[1] * q.shape[2] * seen
    with fresh_dispatch():  # a mask is evaluated by functorch
        if named is not None and named.item() >= 0:
            thing = object_of(named)
            plan: Plan = thing if isinstance(thing, Plan) else thing.plan  # of a call outside of graphs
            pairs = count_pairs(plan, q.shape[0], q.shape[1], selected)
    return pairs
