"""Tests of `balancer="auto"`: the cheapest order with its cheapest schedule, equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import tritoncp
from tests.planning.costs.test_traffic import CASES
from tritoncp import (
    Mask,
    and_masks,
    balancers,
    causal,
    create_block_mask,
    document,
    make_plan,
    sliding_window,
)
from tritoncp.planning import build
from tritoncp.planning.costs import cost
from tritoncp.planning.costs.hardware import hardware_of
from tritoncp.planning.costs.layer import Shape

ORDERS = [*balancers, None]
LENGTHS = [300, 4000, 900, 1500, 28, 1024, 440]
MASKS: dict[str, Callable[[], Mask]] = {
    "long causal": lambda: create_block_mask(causal(), 1, 1, 8192, 8192),
    "long window": lambda: create_block_mask(and_masks(causal(), sliding_window(512)), 1, 1, 8192, 8192),
    "long documents": lambda: create_block_mask(
        and_masks(causal(), document(lengths=LENGTHS)), 1, 1, 8192, 8192
    ),
    **CASES,
}


def seconds(plan: tritoncp.Plan) -> float:
    """Predicted time of the plan's schedule for the usual layer."""
    estimates = cost.costs(plan, Shape(batch=plan.batch), hardware_of(plan.world_size))
    return {one.schedule: one.total for one in estimates}[plan.schedule]


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["auto", "allgather", "ring", "fetch", "ulysses", "ulysses+ring"])
def test_auto_takes_the_balancer_of_minimal_time_under_the_schedule(schedule: str) -> None:
    mask, key, times = MASKS["long documents"](), schedule.partition("+")[0], {}
    chosen = make_plan(mask, world_size=8, rank=0, balancer="auto", schedule=schedule)
    for balancer in ORDERS:
        plan = make_plan(mask, world_size=8, rank=0, balancer=balancer, schedule=schedule)
        estimates = cost.costs(plan, Shape(), hardware_of(8))
        times[plan.balancer] = next(one.total for one in estimates if key in ("auto", one.schedule))
        assert plan.balancer == (balancer or "natural") and "auto" not in plan.reason
        assert plan.schedule == (estimates[0].schedule if schedule == "auto" else schedule)
    assert times[chosen.balancer] <= min(times.values()) * (1 + 1e-8)
    assert chosen.schedule == schedule or schedule == "auto"


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MASKS)
def test_every_rank_makes_the_same_choice(name: str) -> None:
    plans = [make_plan(MASKS[name](), world_size=3, rank=rank, balancer="auto") for rank in range(3)]
    assert len({(p.balancer, p.schedule, p.reason, p.digest) for p in plans}) == 1
    assert [p.rank for p in plans] == list(range(3))


@pytest.mark.long
def test_several_masks_share_the_order_with_the_shortest_total_time() -> None:
    masks = {name: MASKS[name]() for name in ("long causal", "long window", "long documents")}
    plans = make_plan(masks, world_size=8, rank=3, balancer="auto")
    total = sum(map(seconds, plans.values()))
    for balancer in ORDERS:
        other = make_plan(masks, world_size=8, rank=3, balancer=balancer)
        assert total <= sum(map(seconds, other.values())) * (1 + 1e-8)
    assert len({plan.balancer for plan in plans.values()}) == 1
    assert all(torch.equal(plan.positions, plans["long causal"].positions) for plan in plans.values())
    assert {plan.rank for plan in plans.values()} == {3}


def test_a_slow_balancer_is_left_out_of_large_plans_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SLOW_BALANCERS", {"locality": 100})
    plan = make_plan(MASKS["long window"](), world_size=8, rank=0, balancer="auto")
    assert plan.balancer == "contiguous" and "not weighed for its planning time: locality" in plan.reason
    assert "locality + " not in plan.reason


def test_one_rank_is_in_natural_order() -> None:
    plan = make_plan(MASKS["long causal"](), world_size=1, rank=0, balancer="auto")
    assert (plan.balancer, plan.reason, plan.schedule) == ("natural", "", "allgather")
