"""Construction of plans: checks the options, places the blocks of a mask on ranks, chooses the schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tritoncp.core.host_copy import on_host
from tritoncp.core.records import replace
from tritoncp.masks.mask import Mask
from tritoncp.planning import SCHEDULES
from tritoncp.planning.balance import assign_blocks, balancers, resolve_balancer
from tritoncp.planning.costs import cost
from tritoncp.planning.costs.hardware import Hardware, hardware_of
from tritoncp.planning.costs.layer import Shape
from tritoncp.planning.placement import Placement, by_blocks, joined, natural, pieces, recut, without_padding
from tritoncp.planning.plan import Plan
from tritoncp.planning.work import Balancer, Work, work_of_rows

# Balancers whose time grows with blocks x ranks, and the max product for which "auto" tries them (3 s).
SLOW_BALANCERS = {"locality": 1 << 20}


def build(mask: Mask, world_size: int = 1, rank: int = 0, **options: Any) -> Plan:
    """Place a mask's blocks on ``world_size`` ranks. options: as in :func:`build_all`"""
    return build_all([mask], world_size, rank, **options)[0]


@on_host
def build_all(
    masks: Sequence[Mask],
    world_size: int,
    rank: int,
    *,
    balancer: str | Balancer | None = "ptrr",
    lengths: Sequence[int] | None = None,
    kv_lengths: Sequence[int] | None = None,
    schedule: str = "auto",
    degree: int = 0,
    layer: Mapping[str, int] | None = None,
) -> list[Plan]:
    """Place the blocks of masks of the same size on ``world_size`` ranks, and return a plan for each. Their
    work is summed, so that one placement serves all.

    balancer: None is natural order: rank r holds the r-th contiguous piece, ``lengths[r]`` tokens long
        (``kv_lengths`` for the keys, if they differ). "auto" chooses the balancer, or natural order, with the
        lowest predicted time of one layer of each mask, under its fastest schedule (or under ``schedule``).
    degree: number of ranks that exchange heads under "ulysses" and "ulysses+ring"; 0: as many as heads allow
    layer: sizes of the layer for which "auto" chooses, see :meth:`Shape.of_layer`; None: the defaults
    """
    _check_options(masks, world_size, rank, schedule)
    if balancer not in (None, "auto"):
        resolve_balancer(balancer)
    if balancer == "auto" and world_size > 1:
        return _cheapest(masks, world_size, rank, schedule, degree, layer)
    selected = _selected(layer)
    placed = _place(masks, world_size, balancer, lengths, kv_lengths, selected)
    plans = _make_plans(masks, placed, rank, schedule, degree, selected)
    if schedule != "auto":
        return [replace(plan, reason="requested") for plan in plans]
    if world_size == 1:
        return plans
    hardware = hardware_of(world_size)
    chosen = []
    for plan, costs in zip(plans, _estimate(plans, hardware, layer)):
        times = ", ".join(f"{one.schedule} {one.total * 1e3:.3g}" for one in costs)
        reason = f"predicted ms a layer on {hardware.name}: {times}"
        chosen.append(replace(plan, schedule=costs[0].schedule, reason=reason))
    return chosen


def _selected(layer: Mapping[str, int] | None) -> int:
    """Return the number of keys that a query of a layer selects at run time, 0 if it sees all."""
    selected = (layer or {}).get("selected", 0)
    if isinstance(selected, bool) or not isinstance(selected, int) or selected < 0:
        raise ValueError(f"selected={selected!r} of a layer; pass an int, 0 if queries see all visible keys")
    return selected


def _make_plans(
    masks: Sequence[Mask], placed: tuple[str, Placement, Placement], rank: int, schedule: str, degree: int,
    selected: int,
) -> list[Plan]:  # fmt: skip
    """Make the plans of masks on one placement; "auto" is replaced by "allgather" for now."""
    (name, q, kv), schedule = placed, "allgather" if schedule == "auto" else schedule
    return [Plan(mask, q, kv, rank, name, schedule, degree=degree, selected=selected) for mask in masks]


def _estimate(
    plans: Sequence[Plan], hardware: Hardware, layer: Mapping[str, int] | None
) -> list[tuple[cost.Cost, ...]]:
    """Estimate the costs of each plan for a layer, by default a standard one, with the batch rows of these
    plans. Traffic is summed over the batch rows of a plan, so that the layer needs the same number of
    them."""
    sizes = {"batch": max(plan.batch for plan in plans), **(layer or {})}
    return [cost.costs(plan, Shape.of_layer(plan, **sizes), hardware) for plan in plans]


def _cheapest(
    masks: Sequence[Mask], world_size: int, rank: int, schedule: str, degree: int,
    layer: Mapping[str, int] | None,
) -> list[Plan]:  # fmt: skip
    """Make the plans of the balancer, or of natural order, with the lowest predicted time."""
    hardware, blocks = hardware_of(world_size), sum(mask.B * mask.runs.shape[2] for mask in masks)
    skipped = [name for name, most in SLOW_BALANCERS.items() if blocks * world_size > most]
    candidates = []
    for name in (*(name for name in balancers if name not in skipped), None):  # None: natural order
        placed = _place(masks, world_size, name, selected=_selected(layer))
        plans = _make_plans(masks, placed, rank, schedule, degree, _selected(layer))
        best = [
            next(one for one in costs if schedule.partition("+")[0] in ("auto", one.schedule))
            for costs in _estimate(plans, hardware, layer)
        ]
        if schedule == "auto":
            plans = [replace(plan, schedule=one.schedule) for plan, one in zip(plans, best)]
        candidates.append((sum(one.total for one in best), plans))
    # The first of equal ones, also if their last digits differ between the CPUs of the ranks.
    candidates.sort(key=lambda candidate: float(f"{candidate[0]:.9g}"))
    times = ", ".join(
        f"{plans[0].balancer} + {'/'.join(dict.fromkeys(plan.schedule for plan in plans))} "
        f"{seconds * 1e3:.3g}"
        for seconds, plans in candidates
    )
    omitted = f"; not weighed for its planning time: {', '.join(skipped)}" if skipped else ""
    reason = f"auto: predicted ms a layer on {hardware.name}: {times}{omitted}"
    return [replace(plan, reason=reason) for plan in candidates[0][1]]


def _check_options(masks: Sequence[Mask], world_size: int, rank: int, schedule: str) -> None:
    """Raise ValueError if an option does not fit the masks or the world."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is outside a world of {world_size}")
    _check_same_blocks(masks)
    if schedule not in ("auto", *SCHEDULES):
        raise ValueError(f"schedule={schedule!r} is unknown; pass auto, {', '.join(SCHEDULES)}")


def _check_same_blocks(masks: Sequence[Mask]) -> None:
    """Raise ValueError if masks that share a placement differ in lengths, block sizes or padding."""
    sizes = {(m.q_len, m.kv_len, m.q_block, m.kv_block) for m in masks}
    if len(sizes) > 1:
        size_text = ", ".join(f"{a} x {b} in blocks of {c} x {d}" for a, b, c, d in sorted(sizes))
        raise ValueError(
            f"masks that share a placement are {size_text}; make them for the same lengths and BLOCK_SIZE"
        )
    tokens = [mask.tokens for mask in masks if mask.tokens is not None]
    if tokens and (
        len(tokens) < len(masks) or not all(all(map(torch.equal, tokens[0], other)) for other in tokens)
    ):
        raise ValueError(
            "masks that share a placement have padding in different places; make them from the same "
            "cu_seqlens"
        )


def _place(
    masks: Sequence[Mask],
    world_size: int,
    balancer: str | Balancer | None,
    lengths: Sequence[int] | None = None,
    kv_lengths: Sequence[int] | None = None,
    selected: int = 0,
) -> tuple[str, Placement, Placement]:
    """Place queries and keys by a balancer, by the summed work of all masks. None, and a world of one rank,
    give natural order, in pieces of these lengths (None: even lengths). Also return the balancer's name.

    Positions that are padding in the masks get no slot; shards of balancers close up over them.
    """
    mask = masks[0]
    if balancer is None or world_size == 1:
        name, q = "natural", natural(lengths or pieces(mask.q_len, world_size), mask.q_block)
        kv = natural(kv_lengths or lengths or pieces(mask.kv_len, world_size), mask.kv_block)
    else:
        name, function = resolve_balancer(balancer)
        owners = [assign_blocks(function, work) for work in work_of_rows(masks, world_size, "q", selected)]
        q = kv = by_blocks(mask.q_len, mask.q_block, owners)
        if mask.kv_len != mask.q_len:
            kv = _place_keys(masks, world_size, function, q)
        elif mask.kv_block != mask.q_block:  # same tokens, other blocks: cut the same placement at KV blocks
            kv = recut(q, mask.kv_block)
    if mask.tokens is not None:
        q, kv = (without_padding(*side, name != "natural") for side in zip((q, kv), mask.tokens))
    return name, q, kv


def _place_keys(masks: Sequence[Mask], world_size: int, balancer: Balancer, q: Placement) -> Placement:
    """Place the keys of masks with more or fewer keys than queries: keys at the positions of queries with
    them, the others by a balancer."""
    mask = masks[0]
    offsets = {getattr(one.mask_mod, "query_offset", None) for one in masks}
    offset = offsets.pop() if len(offsets) == 1 else None
    works = work_of_rows(masks, world_size, side="kv")
    if offset is None or offset + mask.q_len != mask.kv_len:
        return by_blocks(mask.kv_len, mask.kv_block, [assign_blocks(balancer, work) for work in works])
    blocks = -(-offset // mask.kv_block)
    owners = [assign_blocks(balancer, Work(work.costs[:blocks], world_size)) for work in works]
    return joined(by_blocks(offset, mask.kv_block, owners), q, mask.kv_block)
