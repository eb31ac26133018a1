"""Schedules: the messages and steps of a pass. Each is a pair of generators, ``forward`` and ``backward``."""

from typing import Any

from tritoncp.distributed.schedules import allgather, fetch, local, ring, ulysses
from tritoncp.planning.plan import Plan

SCHEDULES: dict[str, Any] = {
    "allgather": allgather,
    "fetch": fetch,
    "ring": ring,
    "ulysses": ulysses.with_inner(fetch),
    "ulysses+ring": ulysses.with_inner(ring),
}


def schedule_of(plan: Plan) -> Any:
    """The forward and backward generators that carry out a plan."""
    return local if plan.world_size == 1 else SCHEDULES[plan.schedule]
