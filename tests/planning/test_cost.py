"""Tests of the cost model: exact counts, and the ranking in cases with an obvious answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.planning.test_traffic import CASES
from tests.zoo import BALANCERS
from tritoncp import causal, create_block_mask, document, full_mask, make_plan, sliding_window
from tritoncp.masks import Mask
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


def ranked_schedules(
    mask: Mask, world_size: int, balancer: str | None, hardware: cost.Hardware = cost.NVLINK
) -> list[str]:
    """Return the schedules of a mask\'s plan, the cheapest first."""
    plan = make_plan(mask, world_size=world_size, rank=0, balancer=balancer)
    return [estimates.schedule for estimates in cost.costs(plan, cost.Shape(), hardware)]


def test_where_little_is_seen_little_is_fetched() -> None:
    slow = replace(cost.NETWORK, bandwidth=1e9)
    window = create_block_mask(sliding_window(1024), 1, 1, S, S)
    assert ranked_schedules(window, 8, "contiguous", slow)[0] == "fetch"
    assert ranked_schedules(window, 8, "contiguous", slow)[-1] == "allgather"
    apart = create_block_mask(document(lengths=[S // 8] * 8), 1, 1, S, S)
    assert ranked_schedules(apart, 8, "contiguous", slow)[-1] == "allgather"


def test_where_everything_is_seen_a_ring_hides_it() -> None:
    slow = replace(cost.NVLINK, bandwidth=2e10)  # still faster than the products
    assert ranked_schedules(full_mask(S, S), 8, "ptrr", slow)[0] == "ring"


@pytest.mark.parametrize(("small", "messages"), [(0, 2), (1 << 30, 1)])
def test_an_all_gather_waits_for_as_many_messages_as_it_sends(
    small: int, messages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "SMALL", small)
    plan = make_plan(full_mask(1024, 1024), world_size=8, rank=0)
    waiting = replace(cost.NVLINK, latency=1.0)
    estimates = next(x for x in cost.costs(plan, cost.Shape(), waiting) if x.schedule == "allgather")
    assert round(estimates.forward) == messages


def test_messages_alone_favour_the_fewest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "SMALL", 1 << 30)  # one gather for all heads
    waiting = replace(cost.NVLINK, latency=1.0)
    assert ranked_schedules(full_mask(1024, 1024), 8, "ptrr", waiting)[0] == "allgather"


@pytest.mark.parametrize("factor", ["flops", "bandwidth"])
def test_faster_hardware_is_never_slower(factor: str) -> None:
    plan = make_plan(create_block_mask(causal(), 1, 1, S, S), world_size=8, rank=0)
    faster = replace(cost.NVLINK, **{factor: 2 * getattr(cost.NVLINK, factor)})
    now, then = ({c.schedule: c for c in cost.costs(plan, cost.Shape(), h)} for h in (cost.NVLINK, faster))
    for schedule, estimates in now.items():
        assert then[schedule].total <= estimates.total
        assert then[schedule].memory == estimates.memory


def test_every_rank_chooses_the_same_and_says_why() -> None:
    mask = create_block_mask(sliding_window(1024), 1, 1, S, S)
    plans = [make_plan(mask, world_size=5, rank=rank) for rank in range(5)]
    assert len({(plan.schedule, plan.reason) for plan in plans}) == 1
    assert plans[0].schedule in plans[0].reason and "predicted" in plans[0].reason
    assert make_plan(mask, world_size=5, rank=0, schedule="ring").reason == "asked for"
    text = plans[0].explain(heads=64, kv_heads=4, head_dim=64, v_head_dim=64)
    assert "64:4 heads of 64" in text and "datasheets" in text
    assert all(schedule in text for schedule in ("allgather", "ring", "fetch", "ulysses"))


def test_one_rank_has_nothing_to_choose() -> None:
    assert make_plan(full_mask(64, 64), world_size=1, rank=0).schedule == "allgather"
