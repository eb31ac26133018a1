"""Every mask, score_mod, head layout, balancer and world against the float64 oracle.

`make test` runs rows that hold every pair of factors on the CPU engine, and some of them in kernels; `make
test-all` all of them; the mark nightly is on the full product, schedules in turn.
"""

import itertools

import pytest
import torch

from tests.zoo import (
    BALANCERS,
    HEADS,
    MASKS,
    SCORES,
    TOLERANCE,
    WORLDS,
    agree,
    oracle,
    pairs,
    simulated,
    tensors,
)
from tritoncp import simulate
from tritoncp.distributed.schedules import SCHEDULES

FACTORS = {
    "mask": list(MASKS),
    "score": list(SCORES),
    "heads": list(HEADS),
    "balancer": list(BALANCERS),
    "world": list(WORLDS),
    "schedule": list(SCHEDULES),
}
PAIRS = sorted(pairs(FACTORS), key=str)
*OTHERS, SCHEDULE = FACTORS.values()
REST = [
    (*row, SCHEDULE[(i + i // len(WORLDS)) % len(SCHEDULE)])  # each world meets each schedule
    for i, row in enumerate(itertools.product(*OTHERS))
]


def named(rows: list[tuple]) -> list:
    return [pytest.param(*row, id="-".join(map(str, row))) for row in rows]


def check(
    mask: str, score: str, heads: str, balancer: str | None, world: int, schedule: str, dtype: torch.dtype
) -> None:
    qkv = tensors(HEADS[heads], dtype)
    whole, mod = MASKS[mask](HEADS[heads][0]), SCORES[score](HEADS[heads][0], dtype)
    plan = simulate(world).make_plan(whole, balancer=balancer, schedule=schedule)
    agree(simulated(qkv, plan, mod), oracle(qkv, whole, mod), **TOLERANCE[dtype])


@pytest.mark.parametrize("engine", ["cpu", pytest.param("dense", marks=pytest.mark.long)], indirect=True)
@pytest.mark.parametrize(tuple(FACTORS), named(PAIRS))
def test_any_world_is_the_oracle(mask, score, heads, balancer, world, schedule, engine) -> None:
    check(mask, score, heads, balancer, world, schedule, torch.float64)


@pytest.mark.parametrize(tuple(FACTORS), named(PAIRS[::6]))
def test_some_worlds_are_the_oracle_in_kernels(mask, score, heads, balancer, world, schedule) -> None:
    check(mask, score, heads, balancer, world, schedule, torch.float64)


@pytest.mark.long
@pytest.mark.parametrize(tuple(FACTORS), named([row for row in PAIRS if row not in PAIRS[::6]]))
def test_the_other_worlds_are_the_oracle_in_kernels(mask, score, heads, balancer, world, schedule) -> None:
    check(mask, score, heads, balancer, world, schedule, torch.float64)


@pytest.mark.parametrize(tuple(FACTORS), named(PAIRS[3::12]))
def test_float32_is_within_its_rounding(mask, score, heads, balancer, world, schedule) -> None:
    check(mask, score, heads, balancer, world, schedule, torch.float32)


@pytest.mark.nightly
@pytest.mark.parametrize(tuple(FACTORS), named(REST))
def test_the_full_product(mask, score, heads, balancer, world, schedule) -> None:
    check(mask, score, heads, balancer, world, schedule, torch.float64)


def test_the_rows_hold_every_pair() -> None:
    for (i, a), (j, b) in itertools.combinations(enumerate(FACTORS.values()), 2):
        assert {(row[i], row[j]) for row in PAIRS} == set(itertools.product(a, b))
