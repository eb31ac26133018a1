"""The schedules by name, each a :class:`tritoncp.distributed.schedules.schedule.Schedule`."""

from tritoncp.distributed.schedules import allgather, fetch, local, ordered, ring
from tritoncp.distributed.schedules.schedule import Schedule
from tritoncp.distributed.schedules.ulysses import Ulysses
from tritoncp.planning.plan import Plan
from tritoncp.planning.step_tables import Engine

SCHEDULES: dict[str, Schedule[Engine]] = {
    "allgather": allgather,
    "fetch": fetch,
    "ring": ring,
    "ulysses": Ulysses(fetch),
    "ulysses+ring": Ulysses(ring),
}


ORDERED: dict[str, Schedule[Engine]] = {
    "allgather": ordered,
    "fetch": ordered,
    "ulysses": Ulysses(ordered),
}


def schedule_of(plan: Plan, invariant: bool = False) -> Schedule[Engine]:
    """Return the schedule that carries out a plan.

    invariant: whether bits must not depend on the number of ranks. Raises ValueError for a requested schedule
        whose sums depend on it; a schedule that "auto" chose is replaced by "fetch".
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
