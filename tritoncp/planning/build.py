"""Construction of plans: checks the options, places the blocks of a mask on ranks, chooses the schedule."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch

from tritoncp.core.host_copy import on_host
from tritoncp.masks.mask import Mask
from tritoncp.planning import cost
from tritoncp.planning.balance import deal, resolve_balancer
from tritoncp.planning.placement import Placement, by_blocks, natural, without_padding
from tritoncp.planning.plan import Plan
from tritoncp.planning.work import Balancer, work_of_rows

SCHEDULES = ("allgather", "ring", "fetch", "ulysses", "ulysses+ring")


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
    weighed: Sequence[Mask] = (),
    degree: int = 0,
) -> Plan:
    """Place a mask's blocks on ``world_size`` ranks.

    ``balancer=None`` is natural order: rank r holds the r-th contiguous piece, ``lengths[r]`` tokens long
    (``kv_lengths`` for the keys, if they differ). ``weighed``: masks whose work is summed, so that their
    plans share one placement; this mask is one of them. ``degree``: ranks that exchange heads under
    "ulysses", which is then the schedule.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is outside a world of {world_size}")
    named_balancer = None if balancer is None else resolve_balancer(balancer)
    schedule = _check_schedule(schedule, world_size, degree)
    _check_same_blocks(mask, weighed)
    if named_balancer is None or world_size == 1:
        name, (q, kv) = "natural", _place_natural(mask, world_size, lengths, kv_lengths)
    else:
        name, (q, kv) = named_balancer[0], _balance(mask, weighed or [mask], world_size, named_balancer[1])
    if mask.tokens is not None:
        close_up = name != "natural"
        q, kv = (without_padding(side, tokens, close_up) for side, tokens in zip((q, kv), mask.tokens))
    if schedule != "auto":
        return Plan(mask, q, kv, rank, name, schedule, reason="asked for", degree=degree)
    plan = Plan(mask, q, kv, rank, name, "allgather")
    if world_size == 1:
        return plan
    hardware = cost.hardware_of(world_size)
    estimates = cost.costs(plan, cost.Shape(), hardware)
    return replace(plan, schedule=estimates[0].schedule, reason=cost.format_reason(estimates, hardware))


def _check_schedule(schedule: str, world_size: int, degree: int) -> str:
    """Return the schedule's name, "ulysses" for "auto" if ``degree`` ranks exchange heads. Raises ValueError
    if there is no such schedule, or if it does not fit the degree."""
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


def _check_same_blocks(mask: Mask, weighed: Sequence[Mask]) -> None:
    """Raise ValueError if masks that share a placement differ in lengths, block sizes or padding."""
    sizes = {(m.q_len, m.kv_len, m.q_block, m.kv_block) for m in (mask, *weighed)}
    if len(sizes) > 1:
        size_text = ", ".join(f"{a} x {b} in blocks of {c} x {d}" for a, b, c, d in sorted(sizes))
        raise ValueError(
            f"masks that share a placement are {size_text}; make them for the same lengths and BLOCK_SIZE"
        )
    if any(not _same_tokens(mask, other) for other in weighed):
        raise ValueError(
            "masks that share a placement have padding in different places; make them from the same "
            "cu_seqlens"
        )


def _place_natural(
    mask: Mask, world_size: int, lengths: Sequence[int] | None, kv_lengths: Sequence[int] | None
) -> tuple[Placement, Placement]:
    """Place queries and keys in natural order, in pieces of these lengths (None: of even lengths)."""
    q = natural(_check_lengths("query", lengths, mask.q_len, world_size), mask.q_block)
    same = kv_lengths is None and mask.kv_len == mask.q_len
    key_lengths = _check_lengths("key", lengths if same else kv_lengths, mask.kv_len, world_size)
    return q, natural(key_lengths, mask.kv_block)


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


def _balance(
    mask: Mask, weighed: Sequence[Mask], world_size: int, balancer: Balancer
) -> tuple[Placement, Placement]:
    """Place queries and keys by a balancer. Keys share the queries' placement if their number is the same."""
    owners = [deal(balancer, work) for work in work_of_rows(weighed, world_size)]
    q = by_blocks(mask.q_len, mask.q_block, owners)
    if mask.kv_len == mask.q_len and mask.kv_block == mask.q_block:
        return q, q
    if mask.kv_len == mask.q_len:  # same tokens, other blocks: cut the same placement at KV blocks
        return q, _recut(q, mask.kv_block)
    owners = [deal(balancer, work) for work in work_of_rows(weighed, world_size, side="kv")]
    return q, by_blocks(mask.kv_len, mask.kv_block, owners)


def _recut(placement: Placement, block: int) -> Placement:
    """Cut the slots of a placement so that none crosses a multiple of ``block``."""
    tables = []
    for slots in placement.slots:
        rows = []
        for batch in slots.tolist():
            cut = []
            for row, position, tokens in batch:
                edges = [
                    position,
                    *range((position // block + 1) * block, position + tokens, block),
                    position + tokens,
                ]
                cut += [(row + a - position, a, b - a) for a, b in itertools.pairwise(edges)]
            rows.append(cut)
        width = max(map(len, rows))
        padded = [cut + [(0, 0, 0)] * (width - len(cut)) for cut in rows]
        tables.append(torch.tensor(padded, dtype=torch.int32).view(len(rows), width, 3))
    return Placement(placement.length, block, tuple(tables), placement.lengths)
