"""`pytest perf/bench_plan.py`: how long a plan takes, beside what it is made from, in one run.

pytest-benchmark shows each as a ratio to the quickest of its group. What has to hold is a ratio too, so that
a slow machine fails nothing: four times the tokens against once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest

from tritoncp import and_masks, causal, create_block_mask, document
from tritoncp.masks.mask import Mask
from tritoncp.perf.balance import corpus_lengths
from tritoncp.planning.balance import balancers
from tritoncp.planning.plan import SCHEDULES, Plan, build

TOKENS, WORLD = 1 << 20, 64


pytestmark = pytest.mark.usefixtures("one_core")


def made(tokens: int) -> Mask:
    packed = and_masks(causal(), document(lengths=corpus_lengths(tokens)))
    return create_block_mask(packed, 1, 1, tokens, tokens)


mask_of = cache(made)


def whole(mask: Mask, balancer: str, schedule: str = "auto") -> Plan:
    """A rank's plan with the tables of its first step."""
    plan = build(mask, WORLD, 5, balancer=balancer, schedule=schedule)
    plan.tables(
        buffer="fetched" if plan.schedule == "fetch" else 5 if plan.schedule == "ring" else "gathered"
    )
    return plan


def seconds(call: Callable[[], Any]) -> float:
    """The quickest of three."""
    found = []
    for _ in range(3):
        begin = time.process_time()
        call()
        found.append(time.process_time() - begin)
    return min(found)


@pytest.mark.benchmark(group="1M tokens of packed documents on 64 ranks: the mask, and the whole plan")
@pytest.mark.parametrize("what", ["mask", *balancers])
def test_whole_plan(benchmark: Any, what: str) -> None:
    if what == "mask":
        benchmark.pedantic(lambda: made(TOKENS), rounds=3, warmup_rounds=1)
    else:
        mask = mask_of(TOKENS)
        benchmark.pedantic(lambda: whole(mask, what), rounds=3, warmup_rounds=1)


@pytest.mark.benchmark(group="1M tokens of packed documents on 64 ranks: each schedule's tables")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(benchmark: Any, schedule: str) -> None:
    mask = mask_of(TOKENS)
    benchmark.pedantic(lambda: whole(mask, "ptrr", schedule), rounds=3, warmup_rounds=1)


@pytest.mark.parametrize("balancer", balancers)
def test_four_times_the_tokens_take_about_four_times_as_long(balancer: str) -> None:
    small, large = (seconds(partial(whole, mask_of(size), balancer)) for size in (TOKENS, 4 * TOKENS))
    assert large < 8 * small, f"{balancer}: {small:.3f} s for 1M tokens, {large:.3f} s for 4M"
