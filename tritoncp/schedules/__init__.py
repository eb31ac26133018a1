"""How K and V reach the queries: each schedule is a forward/backward pair of generators."""

from tritoncp.schedules import allgather, fetch, ring

SCHEDULES = {"allgather": allgather, "fetch": fetch, "ring": ring}
