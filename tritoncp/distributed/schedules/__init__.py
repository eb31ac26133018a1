"""Schedules: the messages and steps of a pass. Each is a pair of generators, ``forward`` and ``backward``."""

from typing import Any

from tritoncp.distributed.schedules import allgather, fetch, local, ordered, ring, ulysses
from tritoncp.planning.plan import Plan

SCHEDULES: dict[str, Any] = {
    "allgather": allgather,
    "fetch": fetch,
    "ring": ring,
    "ulysses": ulysses.with_inner(fetch),
    "ulysses+ring": ulysses.with_inner(ring),
}


ORDERED: dict[str, Any] = {
    "allgather": ordered,
    "fetch": ordered,
    "ulysses": ulysses.with_inner(ordered),
}


def schedule_of(plan: Plan, invariant: bool = False) -> Any:
    """The forward and backward generators that carry out a plan.

    invariant: whether bits must not depend on the number of ranks. Raises ValueError for a requested schedule
        whose sums do; where "auto" chose one, keys are fetched.
    """
    if not invariant:
        return local if plan.is_local else SCHEDULES[plan.schedule]
    if plan.world_size == 1:
        return ordered
    if plan.schedule not in ORDERED and plan.reason == "requested":
        raise ValueError(
            f"kernel option invariant=True with a plan of schedule {plan.schedule!r}, whose sums begin with "
            "the rank's own keys, so that their order differs between ranks; make the plan with schedule="
            "'allgather', 'fetch' or 'ulysses'"
        )
    return ORDERED.get(plan.schedule, ordered)
