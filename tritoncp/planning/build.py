"""Construction of plans: checks the options, places the blocks of a mask on ranks, chooses the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from tritoncp.core.host_copy import on_host
from tritoncp.masks.mask import Mask
from tritoncp.planning import SCHEDULES, cost
from tritoncp.planning.balance import balancers, deal, resolve_balancer
from tritoncp.planning.placement import Placement, by_blocks, natural, recut, without_padding
from tritoncp.planning.plan import Plan
from tritoncp.planning.work import Balancer, work_of_rows

# Balancers whose time grows with blocks x ranks, and the largest product for which "auto" weighs them: 3 s.
SLOW_BALANCERS = {"locality": 1 << 20}


@on_host
def build(
    mask: Mask,
    world_size: int = 1,
    rank: int = 0,
    *,
    balancer: str | Balancer | None = "ptrr",
    lengths: Sequence[int] | None = None,
    kv_lengths: Sequence[int] | None = None,
    schedule: str = "auto",
    degree: int = 0,
) -> Plan:
    """Place a mask's blocks on ``world_size`` ranks.

    ``balancer=None`` is natural order: rank r holds the r-th contiguous piece, ``lengths[r]`` tokens long
    (``kv_lengths`` for the keys, if they differ). "auto": see :func:`build_all`. ``degree``: ranks that
    exchange heads under "ulysses", which is then the schedule.
    """
    if balancer is not None:
        return build_all([mask], world_size, rank, balancer=balancer, schedule=schedule, degree=degree)[0]
    schedule = _check_options([mask], world_size, rank, schedule, degree)
    return _schedule([mask], _place_natural(mask, world_size, lengths, kv_lengths), rank, schedule, degree)[0]


@on_host
def build_all(
    masks: Sequence[Mask],
    world_size: int = 1,
    rank: int = 0,
    *,
    balancer: str | Balancer | None = "ptrr",
    schedule: str = "auto",
    degree: int = 0,
) -> list[Plan]:
    """Place the blocks of masks of the same size on ``world_size`` ranks, and return a plan for each. Their
    work is summed, so that one placement serves all.

    balancer: "auto" takes the one, or natural order, with the least predicted time of a layer of each mask,
    each under its best schedule (or under ``schedule``).
    """
    schedule = _check_options(masks, world_size, rank, schedule, degree)
    if balancer is None or world_size == 1:
        if balancer not in (None, "auto"):
            resolve_balancer(balancer)
        return _schedule(masks, _place_natural(masks[0], world_size), rank, schedule, degree)
    if balancer == "auto":
        return _cheapest(masks, world_size, rank, schedule, degree)
    return _schedule(masks, _place(masks, world_size, balancer), rank, schedule, degree)


class Placed(NamedTuple):
    """The placements of queries and keys, and the name of the balancer that made them."""

    name: str
    q: Placement
    kv: Placement


class Candidate(NamedTuple):
    """A placement with the cheapest schedule of each mask, and their predicted time together."""

    placed: Placed
    schedules: list[str]
    seconds: float


def _schedule(masks: Sequence[Mask], placed: Placed, rank: int, schedule: str, degree: int) -> list[Plan]:
    """Make the plans of masks on one placement, with the cheapest schedule of each for "auto"."""
    plans = _unscheduled(masks, placed, rank, schedule, degree)
    world_size = placed.q.world_size
    if schedule != "auto":
        return [replace(plan, reason="asked for") for plan in plans]
    if world_size == 1:
        return plans
    hardware = cost.hardware_of(world_size)
    result = []
    layer = _layer_of(plans)
    for plan in plans:
        estimates = cost.costs(plan, layer, hardware)
        reason = cost.format_reason(estimates, hardware)
        result.append(replace(plan, schedule=estimates[0].schedule, reason=reason))
    return result


def _unscheduled(masks: Sequence[Mask], placed: Placed, rank: int, schedule: str, degree: int) -> list[Plan]:
    """Make the plans of masks on one placement, under "allgather" where the schedule is "auto"."""
    schedule = "allgather" if schedule == "auto" else schedule
    return [Plan(mask, placed.q, placed.kv, rank, placed.name, schedule, degree=degree) for mask in masks]


def _cheapest(masks: Sequence[Mask], world_size: int, rank: int, schedule: str, degree: int) -> list[Plan]:
    """Make the plans of the balancer, or of natural order, that costs the least."""
    hardware, candidates = cost.hardware_of(world_size), []
    blocks = sum(mask.B * mask.runs.shape[2] for mask in masks)
    skipped = [name for name, most in SLOW_BALANCERS.items() if blocks * world_size > most]
    for name in (*(name for name in balancers if name not in skipped), None):  # None: natural order
        placed = _place(masks, world_size, name) if name else _place_natural(masks[0], world_size)
        plans = _unscheduled(masks, placed, rank, schedule, degree)
        layer = _layer_of(plans)
        best = [_cost_of(plan, schedule, layer, hardware) for plan in plans]
        seconds = sum(one.total for one in best)
        candidates.append(Candidate(placed, [one.schedule for one in best], seconds))
    # Of equal ones the first, also where the last digits differ between the CPUs of the ranks.
    candidates.sort(key=lambda candidate: float(f"{candidate.seconds:.9g}"))
    best_placed, schedules, _ = candidates[0]
    reason = _format_choice(candidates, hardware, skipped)
    return [
        replace(plan, schedule=own if schedule == "auto" else schedule, reason=reason)
        for plan, own in zip(_unscheduled(masks, best_placed, rank, schedule, degree), schedules)
    ]


def _layer_of(plans: Sequence[Plan]) -> cost.Shape:
    """Return the shape of a standard layer with the batch rows of these plans. The bytes of a plan whose rows
    differ are summed over them, so that a layer of fewer rows would be charged for all."""
    return cost.Shape(batch=max(plan.batch for plan in plans))


def _cost_of(plan: Plan, schedule: str, layer: cost.Shape, hardware: cost.Hardware) -> cost.Cost:
    """Estimate the cost of a plan under a schedule, under the cheapest for "auto"."""
    estimates = cost.costs(plan, layer, hardware)
    names = [estimate.schedule for estimate in estimates]
    return estimates[0 if schedule == "auto" else names.index(schedule.partition("+")[0])]


def _format_choice(candidates: Sequence[Candidate], hardware: cost.Hardware, skipped: Sequence[str]) -> str:
    """Format the predicted time of each order as one line, the reason of the choice."""
    times = ", ".join(
        f"{one.placed.name} + {'/'.join(dict.fromkeys(one.schedules))} {one.seconds * 1e3:.3g}"
        for one in candidates
    )
    omitted = f"; not weighed for its planning time: {', '.join(skipped)}" if skipped else ""
    return f"auto: predicted ms a layer on {hardware.name}: {times}{omitted}"


def _check_options(masks: Sequence[Mask], world_size: int, rank: int, schedule: str, degree: int) -> str:
    """Return the schedule's name, "ulysses" for "auto" if ``degree`` ranks exchange heads. Raises ValueError
    if an option does not fit the masks, the world or the degree."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is outside a world of {world_size}")
    _check_same_blocks(masks)
    if schedule not in ("auto", *SCHEDULES):
        raise ValueError(f"unknown schedule {schedule!r}; known: auto, {', '.join(SCHEDULES)}")
    if not degree:
        return schedule
    schedule = "ulysses" if schedule == "auto" else schedule
    if not schedule.startswith("ulysses") or world_size % degree:
        raise ValueError(
            f"a mesh of two dimensions, {world_size // degree} x {degree} ranks here, goes with "
            f"'ulysses' and 'ulysses+ring': the second one trades heads; got schedule={schedule!r}"
        )
    return schedule


def _check_same_blocks(masks: Sequence[Mask]) -> None:
    """Raise ValueError if masks that share a placement differ in lengths, block sizes or padding."""
    sizes = {(m.q_len, m.kv_len, m.q_block, m.kv_block) for m in masks}
    if len(sizes) > 1:
        size_text = ", ".join(f"{a} x {b} in blocks of {c} x {d}" for a, b, c, d in sorted(sizes))
        raise ValueError(
            f"masks that share a placement are {size_text}; make them for the same lengths and BLOCK_SIZE"
        )
    if any(not _same_tokens(masks[0], other) for other in masks):
        raise ValueError(
            "masks that share a placement have padding in different places; make them from the same "
            "cu_seqlens"
        )


def _place_natural(
    mask: Mask,
    world_size: int,
    lengths: Sequence[int] | None = None,
    kv_lengths: Sequence[int] | None = None,
) -> Placed:
    """Place queries and keys in natural order, in pieces of these lengths (None: of even lengths)."""
    q = natural(_check_lengths("query", lengths, mask.q_len, world_size), mask.q_block)
    same = kv_lengths is None and mask.kv_len == mask.q_len
    key_lengths = _check_lengths("key", lengths if same else kv_lengths, mask.kv_len, world_size)
    return _without_padding(mask, Placed("natural", q, natural(key_lengths, mask.kv_block)))


def _without_padding(mask: Mask, placed: Placed) -> Placed:
    """Remove positions that are padding in the mask from the slots; balancers' shards close up over them."""
    if mask.tokens is None:
        return placed
    sides, close_up = (placed.q, placed.kv), placed.name != "natural"
    q, kv = (without_padding(side, tokens, close_up) for side, tokens in zip(sides, mask.tokens))
    return Placed(placed.name, q, kv)


def pieces(total: int, world_size: int) -> list[int]:
    """Return the lengths of natural-order pieces that differ by at most one token.

    >>> pieces(10, 4)
    [3, 3, 2, 2]
    """
    return [total // world_size + (rank < total % world_size) for rank in range(world_size)]


def _check_lengths(side: str, lengths: Sequence[int] | None, total: int, world_size: int) -> Sequence[int]:
    """Return the lengths of the ranks' shards, even ones for None. Raises ValueError if they do not add up to
    ``total``."""
    if lengths is None:
        return pieces(total, world_size)
    if len(lengths) != world_size or sum(lengths) != total:
        raise ValueError(
            f"the {side} shards of the ranks are {list(lengths)} tokens long, {sum(lengths)} together, but "
            f"the mask is for {total}; pass the global mask, and shards that add up to it in rank order"
        )
    return lengths


def _same_tokens(mask: Mask, other: Mask) -> bool:
    """Return whether the same positions of both masks are tokens, not padding."""
    if mask.tokens is None or other.tokens is None:
        return mask.tokens is other.tokens
    return all(map(torch.equal, mask.tokens, other.tokens))


def _place(masks: Sequence[Mask], world_size: int, balancer: str | Balancer) -> Placed:
    """Place queries and keys by a balancer, by the work of all masks."""
    name, function = resolve_balancer(balancer)
    mask = masks[0]
    owners = [deal(function, work) for work in work_of_rows(masks, world_size)]
    q = kv = by_blocks(mask.q_len, mask.q_block, owners)
    if mask.kv_len != mask.q_len:
        owners = [deal(function, work) for work in work_of_rows(masks, world_size, side="kv")]
        kv = by_blocks(mask.kv_len, mask.kv_block, owners)
    elif mask.kv_block != mask.q_block:  # same tokens, other blocks: cut the same placement at KV blocks
        kv = recut(q, mask.kv_block)
    return _without_padding(mask, Placed(name, q, kv))
