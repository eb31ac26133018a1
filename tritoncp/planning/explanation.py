"""Plain words about a plan: which tokens a rank keeps, whether the work is even, and what travels."""

from __future__ import annotations

import torch
from torch import Tensor

from tritoncp.planning.metrics import Metrics
from tritoncp.planning.plan_data import PlanData
from tritoncp.planning.units import format_bytes, format_tokens

EVEN, NEARLY_EVEN = 1.02, 1.1  # largest work over the mean, up to which work is called so
MESSAGES = {
    "allgather": "every rank receives all keys and values, seen or not",
    "ring": "keys and values pass from rank to rank, each as far as the last rank that sees them",
    "fetch": "each rank receives only the blocks of keys and values that its queries see",
    "ulysses": "ranks exchange heads and tokens, so a rank computes some heads for tokens of several ranks",
    "ulysses+ring": "ranks exchange heads and tokens; keys and values go around a ring between rows of ranks",
}


def format_meaning(plan: PlanData, metrics: Metrics, sent: int) -> list[str]:
    """Say in plain words who keeps which tokens, whether the work is even, and what travels: a sentence or
    two a line. sent: bytes in both passes, of the rank that sends most"""
    if plan.world_size == 1:
        return [
            "Who computes what: one rank computes all.",
            "What travels: nothing (remote share 0 %).",
        ]
    return [
        f"Who computes what: {_format_pieces(plan)}.",
        f"Is it even: {_format_evenness(plan.imbalance)}.",
        f"What travels: {100 * metrics.remote_share:.3g} % of the keys that queries see are kept by another "
        "rank (remote share).",
        f"How it travels: {plan.schedule}: {MESSAGES[plan.schedule]}; at most {format_bytes(sent)} sent by a "
        "rank, forward and backward.",
    ]


def _format_pieces(plan: PlanData) -> str:
    """Say how many tokens each rank keeps, and which of them rank 0 has."""
    tokens = [int(slots[0, :, 2].sum()) for slots in plan.q.slots]
    least, most = min(tokens), max(tokens)
    amount = format_tokens(most) if least == most else f"{format_tokens(least)} to {format_tokens(most)}"
    ranges = token_ranges(plan, 0)
    names = [f"{format_tokens(start)}-{format_tokens(end)}" for start, end in ranges]
    where = f"at {', '.join(names)}" if 0 < len(names) <= 4 else f"in {len(names)} pieces"
    share = f"each of the {plan.world_size} ranks computes the queries of {amount} tokens"
    return f"{share}; those of rank 0 lie {where}" if names else share


def _format_evenness(imbalance: float) -> str:
    """Say what the largest work over the mean costs."""
    word = "yes" if imbalance <= EVEN else "nearly" if imbalance <= NEARLY_EVEN else "no"
    if imbalance < 1.0005:
        return f"{word}, all ranks have the same work (max/mean {imbalance:.3f})"
    return (
        f"{word}, the busiest rank has {100 * (imbalance - 1):.2g} % more work than the mean (max/mean "
        f"{imbalance:.3f}), so ranks wait {100 * (1 - 1 / imbalance):.2g} % of the time in attention"
    )


def token_ranges(plan: PlanData, rank: int) -> list[tuple[int, int]]:
    """List the ranges of positions whose queries a rank has, in the first batch row: (start, end),
    ascending."""
    slots = plan.q.slots[rank][0]
    slots = slots[slots[:, 2] > 0]
    ranges: list[tuple[int, int]] = []
    for start, count in sorted(slots[:, 1:].tolist()):
        if ranges and ranges[-1][1] == start:
            ranges[-1] = ranges[-1][0], start + count
        else:
            ranges.append((start, start + count))
    return ranges


def owner_shares(plan: PlanData, lines: int, width: int) -> Tensor:
    """Return the share of each part of the sequence that each group of neighbouring ranks has, in the first
    batch row: float32 [<= lines, <= width]."""
    owners = plan.owners[0]
    lines, width = min(lines, plan.world_size), min(width, len(owners))
    place = torch.arange(len(owners)) * width // max(1, len(owners))
    group = owners * lines // plan.world_size
    counts = torch.zeros(lines, width)
    held = owners >= 0
    counts.index_put_((group[held], place[held]), torch.ones(()), accumulate=True)
    return counts / torch.bincount(place, minlength=width)
