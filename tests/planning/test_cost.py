"""Tests of the cost model: exact counts, times worked out by hand, one choice for all ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.planning.test_traffic import CASES
from tests.zoo import BALANCERS
from tritoncp import create_block_mask, full_mask, make_plan, sliding_window
from tritoncp.planning import cost, traffic

S = 1 << 16


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("balancer", BALANCERS)
@pytest.mark.parametrize("name", CASES)
def test_pairs_are_those_of_the_listed_blocks(name: str, balancer: str | None, world_size: int) -> None:
    mask = CASES[name]()
    kinds = (mask.runs.to_kinds() != 3).double()  # [Bm, Hm, rows, columns]
    pairs = kinds.repeat_interleave(32, 2).repeat_interleave(32, 3)[:, :, : mask.q_len, : mask.kv_len]
    pairs = pairs.mean(1)
    plan = make_plan(mask, world_size=world_size, rank=0, balancer=balancer)
    for rank in range(world_size):
        (got,) = cost._pairs(plan, [rank])
        for owner in range(world_size):
            want = []
            for b in range(max(len(pairs), len(plan.positions))):
                rows, columns = (p[b % len(p)] for p in (plan.q.positions(rank), plan.kv.positions(owner)))
                want.append(pairs[b % len(pairs)][rows[rows >= 0]][:, columns[columns >= 0]].sum())
            assert got[owner].item() == pytest.approx(torch.stack(want).mean().item())


TIMES = {  # schedule: seconds forward and backward if the pairs of two ranks take 10 s and if they take 1/4 s
    "allgather": ((21.25, 53.5), (2.5, 7.0)),
    "ring": ((20, 50), (2.5, 6.5)),
    "fetch": ((20, 50), (4.5, 12.875)),
    "ulysses": ((27.0833, 60.75), (7.5833, 12.0)),
}


@pytest.mark.parametrize("fast", [False, True])
def test_times_of_a_small_case_are_those_worked_out_by_hand(
    fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks of 256 tokens that see everything; K and V of one have 24,576 bytes, which take 2 s to send,
    their gradients in float32 4 s, and twice that in an all-to-all. Each message waits 1/4 s."""
    monkeypatch.setattr(traffic, "SMALL", 0)  # an all-gather has two groups of heads
    shape = cost.Shape(heads=4, kv_heads=2, head_dim=8, v_head_dim=16)
    flops = 256 * 256 * 2 * 4 * 24 / (0.25 if fast else 10)  # of 256 queries and 256 keys, in a second
    hardware = cost.Hardware("by hand", flops, bandwidth=12288, latency=0.25, scattered=0.5, source="")
    plan = make_plan(full_mask(512, 512), world_size=2, rank=0, balancer="contiguous")
    times = {one.schedule: (one.forward, one.backward) for one in cost.costs(plan, shape, hardware)}
    assert times.keys() == TIMES.keys()
    for schedule, both in TIMES.items():
        assert times[schedule] == pytest.approx(both[fast], rel=1e-4), schedule
    one_key_head = cost.costs(plan, replace(shape, kv_heads=1), hardware)
    ulysses = next(one for one in one_key_head if one.schedule == "ulysses")
    assert ulysses.backward - times["ulysses"][1] == pytest.approx(2.25)  # float32, and one more message
    alone = make_plan(full_mask(512, 512), world_size=1, rank=0)
    local = cost.local_cost(alone, shape, hardware)
    assert (local.forward, local.backward) == ((1, 2.5) if fast else (40, 100))


def test_the_reason_and_the_table_name_every_schedule() -> None:
    plan = make_plan(create_block_mask(sliding_window(1024), 1, 1, S, S), world_size=5, rank=0)
    assert plan.schedule in plan.reason and "predicted" in plan.reason
    assert make_plan(plan.mask, world_size=5, rank=0, schedule="ring").reason == "requested"
    text = plan.explain(heads=64, kv_heads=4, head_dim=64, v_head_dim=64)
    assert "64:4 heads of 64" in text and "datasheets" in text
    assert all(schedule in text for schedule in ("allgather", "ring", "fetch", "ulysses"))
