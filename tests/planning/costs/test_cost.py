"""Tests of the cost model: exact counts, times worked out by hand, one choice for all ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.planning.costs.test_traffic import CASES
from tests.zoo import BALANCERS
from tritoncp import create_block_mask, document, full_mask, make_plan
from tritoncp.planning.build import build
from tritoncp.planning.costs import cost, traffic
from tritoncp.planning.costs.hardware import Hardware
from tritoncp.planning.costs.layer import Shape
from tritoncp.report.facts import PlanFacts


@pytest.mark.sample(13)
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("balancer", BALANCERS)
@pytest.mark.parametrize("name", CASES)
def test_counted_pairs_are_in_listed_blocks(name: str, balancer: str | None, world_size: int) -> None:
    mask = CASES[name]()
    kinds = (mask.runs.to_kinds() != 3).double()  # [Bm, Hm, rows, columns]
    size, block = (mask.q_len, mask.kv_len), mask.BLOCK_SIZE
    pairs = (
        kinds.repeat_interleave(block[0], 2)
        .repeat_interleave(block[1], 3)[:, :, : size[0], : size[1]]
        .mean(1)
    )
    plan = make_plan(mask, world_size=world_size, rank=0, balancer=balancer)
    for rank in range(world_size):
        (got,) = cost._pairs(plan, [rank], Shape())
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
@pytest.mark.usefixtures("in_pieces")
def test_times_of_a_small_case_equal_times_computed_by_hand(fast: bool) -> None:
    """Two ranks of 256 tokens see all keys. K and V of a rank have 24,576 bytes, which take 2 s to send;
    their float32 gradients take 4 s, and twice that in an all-to-all. Each message waits 1/4 s. An
    all-gather has two groups of heads."""
    shape = Shape(heads=4, kv_heads=2, head_dim=8, v_head_dim=16)
    flops = 256 * 256 * 2 * 4 * 24 / (0.25 if fast else 10)  # of 256 queries and 256 keys, in a second
    hardware = Hardware("by hand", flops, bandwidth=12288, latency=0.25, scattered=0.5, source="")
    plan = make_plan(full_mask(512, 512), world_size=2, rank=0, balancer="contiguous")
    times = {one.schedule: (one.forward, one.backward) for one in cost.costs(plan, shape, hardware)}
    assert times.keys() == TIMES.keys()
    for schedule, both in TIMES.items():
        assert times[schedule] == pytest.approx(both[fast], rel=1e-4), schedule
    one_key_head = cost.costs(plan, replace(shape, kv_heads=1), hardware)
    ulysses = next(one for one in one_key_head if one.schedule == "ulysses")
    assert ulysses.backward - times["ulysses"][1] == pytest.approx(2.25)  # float32, and one more message
    alone = make_plan(full_mask(512, 512), world_size=1, rank=0)
    local = cost.costs(alone, shape, hardware)[0]
    assert (local.forward, local.backward) == ((1, 2.5) if fast else (40, 100))


@pytest.mark.sample(1)
@pytest.mark.parametrize("latent", [0, 24])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.usefixtures("in_pieces")
def test_seconds_are_those_of_bytes_or_of_products_where_the_other_takes_none(
    world_size: int, latent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of 256 tokens that see all keys, only their keys, or only rank 0's keys."""
    monkeypatch.setattr(traffic, "HEAD_GROUPS", 4)
    size, inf = 256 * world_size, float("inf")
    masks = {
        "all": full_mask(size, size),
        "own": create_block_mask(document(lengths=[256] * world_size), None, None, size, size),
        "first": create_block_mask(lambda b, h, q, kv: kv < 256, None, None, size, size),
    }
    shape = Shape(batch=2, heads=12, kv_heads=4, head_dim=8, v_head_dim=16, latent=latent)
    wires, cores = (Hardware("", *rates, 0.0, 1.0, "") for rates in ((inf, 1.0), (1.0, inf)))
    attend, expand = 256 * 256 * 2 * 12 * 2 * 24, 256 * latent * 2 * 2 * 4 * 24  # FLOPs for a rank's keys
    for name, mask in masks.items():
        plan = build(mask, world_size, balancer="contiguous")
        sent = {one.schedule: one for one in cost.costs(plan, shape, wires)}
        computed = {one.schedule: (one.forward, one.backward) for one in cost.costs(plan, shape, cores)}
        assert sent.keys() == computed.keys() == TIMES.keys() - ({"ulysses"} if latent else set())
        for schedule, one in sent.items():
            own = build(mask, world_size, balancer="contiguous", schedule=schedule)
            facts = PlanFacts(own, shape, wires, "")
            extra = facts.metrics
            assert (extra["forward_ms"], extra["backward_ms"]) == (1e3 * one.forward, 1e3 * one.backward)
            if name != "first":  # no rank receives more than it sends
                assert one.total == pytest.approx(max(facts.bytes_sent[schedule]))
                assert schedule == "ulysses" or one.forward == pytest.approx(one.total / 4)
            elif schedule == "fetch":  # rank 0 sends to all others
                assert one.forward == (world_size - 1) * 256 * shape.row * 2 == one.total / 4
            attended = world_size if name == "all" or (name, schedule) == ("first", "ring") else 1
            fetched = {"all": world_size, "own": 1, "first": 2}[name]
            expanded = fetched if schedule == "fetch" else 1 if name == "own" else world_size
            forward, backward = attended * attend, 2.5 * attended * attend
            want = forward + expanded * expand, backward + 3 * expanded * expand
            assert computed[schedule] == pytest.approx(want), (name, schedule)
        if name == "own":  # nothing is sent, so nothing waits
            waits = cost.costs(plan, shape, replace(wires, latency=1.0))
            assert all(one.total == sent[one.schedule].total for one in waits if one.schedule != "ulysses")
    rows = create_block_mask(lambda b, h, q, kv: (b == 0) | (q // 256 == kv // 256), 2, None, size, size)
    plan = build(rows, world_size, balancer="contiguous")
    fetch = next(one for one in cost.costs(plan, shape, wires) if one.schedule == "fetch")
    sent = PlanFacts(plan, shape, wires, "").bytes_sent["fetch"]  # of one of two rows
    assert fetch.total == pytest.approx(max(sent))
    alone = cost.costs(build(full_mask(256, 256)), shape, cores)[0]
    assert (alone.forward, alone.backward) == (attend + expand, 2.5 * attend + 3 * expand)
