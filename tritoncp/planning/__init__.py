"""Block ownership and traffic between ranks: balancers, placements, plans, traffic, cost.

May import: masks, mods, core.
"""

SCHEDULES = ("allgather", "ring", "fetch", "ulysses", "ulysses+ring")
