"""How K and V reach the queries: each schedule is a forward/backward pair of generators."""

from typing import Any

from tritoncp.schedules import allgather, fetch, ring, ulysses

SCHEDULES: dict[str, Any] = {
    "allgather": allgather,
    "fetch": fetch,
    "ring": ring,
    "ulysses": ulysses.over(fetch),
    "ulysses+ring": ulysses.over(ring),
}
