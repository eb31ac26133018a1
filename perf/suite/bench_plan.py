"""`pytest perf/suite/bench_plan.py`: times planning against the construction of the mask, in one run.

pytest-benchmark shows each time as a ratio to the fastest of its group. The tests assert a ratio too, so that
a slow machine fails nothing: four times the tokens against the time of 1M.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
from tritoncp.perf.suite.timing import shortest_seconds

from tritoncp.masks.mask import Mask
from tritoncp.planning import SCHEDULES
from tritoncp.planning.balance import balancers
from tritoncp.planning.build import build
from tritoncp.planning.plan import Plan
from tritoncp.planning.problem import Problem

TOKENS, WORLD = 1 << 20, 64


pytestmark = pytest.mark.usefixtures("one_core")


def make_mask(tokens: int) -> Mask:
    return Problem("corpus", tokens).block_mask()


mask_of = cache(make_mask)


def build_plan(mask: Mask, balancer: str, schedule: str = "auto") -> Plan:
    """Build a rank's plan with the tables of its first step."""
    plan = build(mask, WORLD, 5, balancer=balancer, schedule=schedule)
    plan.tables(
        buffer="fetched" if plan.schedule == "fetch" else 5 if plan.schedule == "ring" else "gathered"
    )
    return plan


@pytest.mark.benchmark(group="1M tokens of packed documents on 64 ranks: the mask, and the whole plan")
@pytest.mark.parametrize("part", ["mask", *balancers])
def test_whole_plan(benchmark: Any, part: str) -> None:
    if part == "mask":
        benchmark.pedantic(lambda: make_mask(TOKENS), rounds=3, warmup_rounds=1)
    else:
        mask = mask_of(TOKENS)
        benchmark.pedantic(lambda: build_plan(mask, part), rounds=3, warmup_rounds=1)


@pytest.mark.benchmark(group="1M tokens of packed documents on 64 ranks: each schedule's tables")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(benchmark: Any, schedule: str) -> None:
    mask = mask_of(TOKENS)
    benchmark.pedantic(lambda: build_plan(mask, "ptrr", schedule), rounds=3, warmup_rounds=1)


@pytest.mark.parametrize("balancer", balancers)
def test_four_times_the_tokens_take_about_four_times_as_long(balancer: str) -> None:
    small, large = (
        shortest_seconds(partial(build_plan, mask_of(size), balancer)) for size in (TOKENS, 4 * TOKENS)
    )
    assert large < 8 * small, f"{balancer}: {small:.3f} s for 1M tokens, {large:.3f} s for 4M"
