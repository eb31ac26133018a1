"""Calls by a route of the forward pass, compared with dense attention."""

from __future__ import annotations

from contextlib import nullcontext

from tests.cases import Case, check
from tests.conftest import COMPILED
from tests.kernels.support.harness import route
from tritoncp.executor import compiled_kernels
from tritoncp.kernels.tile_rules import widest_route


def check_route(name: str, case: Case) -> None:
    """Check a call by a route, in several orders of warps where its kernel is executed; an architecture
    without the route takes the loops, and says so."""
    executed = COMPILED is not None and widest_route(COMPILED, name) > 0
    for seed in (None, 1, 2) if executed else (None,):
        with route(name), compiled_kernels(COMPILED, seed) if COMPILED else nullcontext():
            check(case)
