"""`pytest perf/suite/bench_plan.py`: times planning against the construction of the mask, in one run.

pytest-benchmark shows each time as a ratio to the fastest of its group. The tests assert a ratio too, so that
a slow machine fails nothing: four times the tokens against the time of 1M.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest

from tritoncp.api.masks import create_block_mask
from tritoncp.masks.closed_forms import causal, document
from tritoncp.masks.mask import Mask
from tritoncp.masks.mask_mod import and_masks
from tritoncp.perf.studies.balance import corpus_lengths
from tritoncp.planning.balance import balancers
from tritoncp.planning.build import SCHEDULES, build
from tritoncp.planning.plan import Plan

TOKENS, WORLD = 1 << 20, 64


pytestmark = pytest.mark.usefixtures("one_core")


def make_mask(tokens: int) -> Mask:
    packed = and_masks(causal(), document(lengths=corpus_lengths(tokens)))
    return create_block_mask(packed, 1, 1, tokens, tokens)


mask_of = cache(make_mask)


def build_plan(mask: Mask, balancer: str, schedule: str = "auto") -> Plan:
    """Build a rank's plan with the tables of its first step."""
    plan = build(mask, WORLD, 5, balancer=balancer, schedule=schedule)
    plan.tables(
        buffer="fetched" if plan.schedule == "fetch" else 5 if plan.schedule == "ring" else "gathered"
    )
    return plan


def seconds(call: Callable[[], Any]) -> float:
    """Return the shortest of three times of a call, in seconds."""
    durations = []
    for _ in range(3):
        begin = time.process_time()
        call()
        durations.append(time.process_time() - begin)
    return min(durations)


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
    small, large = (seconds(partial(build_plan, mask_of(size), balancer)) for size in (TOKENS, 4 * TOKENS))
    assert large < 8 * small, f"{balancer}: {small:.3f} s for 1M tokens, {large:.3f} s for 4M"
