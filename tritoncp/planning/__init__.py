"""Block ownership and traffic between ranks: balancers, placements, plans, traffic, cost.

May import: masks, mods, core.
"""

from typing import Literal, get_args

ScheduleName = Literal["auto", "allgather", "ring", "fetch", "ulysses", "ulysses+ring"]  # "auto": the fastest
SCHEDULES: tuple[str, ...] = get_args(ScheduleName)[1:]
