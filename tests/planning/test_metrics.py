"""Tests of `plan.metrics()`: the predicted bytes are sent, each figure is that of the rank with the most."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import product

import pytest
import torch

from tests.draws import by_turns
from tests.report.sent_bytes import sent_bytes
from tritoncp import Mask, and_masks, causal, create_block_mask, document, make_plan, sliding_window
from tritoncp.distributed.collectives import Collective
from tritoncp.planning.build import build
from tritoncp.planning.costs.layer import Shape
from tritoncp.planning.costs.message_bytes import bytes_sent
from tritoncp.report import dry_run
from tritoncp.report.dry_run import measure

N = 1 << 15
SHAPES = {
    "usual": Shape(),
    "one KV head": Shape(heads=4, kv_heads=1),
    "three KV heads of wide keys, float64": Shape(heads=6, kv_heads=3, head_dim=192, itemsize=8),
    "narrow heads": Shape(heads=8, kv_heads=2, head_dim=4),
    "two batch rows": Shape(batch=2, heads=8, kv_heads=4),
    "two batch rows of two heads": Shape(batch=2, heads=2, kv_heads=2),  # "ulysses" has rows of two ranks
}
pytestmark = pytest.mark.usefixtures("in_pieces")
SCHEDULES = ["allgather", "ring", "fetch", "ulysses", "ulysses+ring"]


def masks() -> dict[str, Mask]:
    half = [[N // 2, N // 2], [N // 4, 3 * N // 4]]
    return {
        "causal": create_block_mask(causal(), 1, 1, N, N),
        "window": create_block_mask(and_masks(causal(), sliding_window(2048)), 1, 1, N, N),
        "uneven": create_block_mask(causal(), 1, 1, N - 5000, N - 5000, BLOCK_SIZE=4096),
        "few queries": create_block_mask(sliding_window(N // 2), 1, 1, N // 2, N),
        "apart": create_block_mask(document(lengths=[N // 4] * 4), 1, 1, N, N),
        "documents": create_block_mask(and_masks(causal(), document(lengths=half)), 2, 1, N, N),
    }


MASKS = masks()


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("mask_and_schedule", "balancer"), by_turns(product(MASKS, SCHEDULES), ("ptrr", "contiguous"))
)
def test_predicted_bytes_are_those_of_the_messages(
    mask_and_schedule: tuple[str, str], balancer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, schedule = mask_and_schedule
    monkeypatch.setattr(dry_run, "differing_turns", tuple)  # all turns
    turn, pairs = [*MASKS].index(name), [*product((4, 6), SHAPES.values())]
    # Each mask has half of the pairs, and the next mask the others.
    halves = [pair for i, pair in enumerate(pairs) if (i + i // len(SHAPES) + turn) % 2]
    for world_size, shape in [(1, Shape()), *halves]:
        plan = make_plan(MASKS[name], world_size=world_size, rank=0, balancer=balancer, schedule=schedule)
        if shape.batch < plan.batch:
            continue
        for rank in {0, world_size // 2, world_size - 1}:
            requests: list[Collective] = []
            measure(plan.for_rank(rank), shape, requests.append)
            sent = sum(sent_bytes(request, world_size, rank) for request in requests)
            assert sent == sum(int(nbytes[rank]) for nbytes in bytes_sent(plan, shape))


@pytest.mark.parametrize("latent", [0, 16])
def test_all_schedules_have_the_same_figures_on_one_rank(latent: int) -> None:
    plans = [make_plan(MASKS["causal"], world_size=1, schedule=schedule) for schedule in SCHEDULES[:4]]
    figures = [plan.metrics(latent=latent) for plan in plans]
    assert all(one == figures[0] for one in figures)


@pytest.mark.sample(9)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("name", "balancer"), [("window", "head_tail"), ("documents", "ptrr")])
def test_the_figures_are_max_values_over_ranks(name: str, balancer: str, schedule: str) -> None:
    plan = make_plan(MASKS[name], world_size=4, rank=2, balancer=balancer, schedule=schedule)
    assert plan.q.batch == MASKS[name].B  # documents have an order of tokens for each batch row
    shape = replace(SHAPES["one KV head"], batch=2)
    layer = asdict(shape)
    metrics = plan.metrics(**layer)
    views = [plan.for_rank(rank) for rank in range(4)]
    peaks = [measure(view, shape) for view in views]
    assert metrics == plan.for_rank(0).metrics(**layer)
    assert metrics["forward_extra_bytes"] == max(one.forward for one in peaks)
    assert metrics["backward_extra_bytes"] == max(one.backward for one in peaks)
    forward = [view.bytes_sent(**layer, backward=False) for view in views]
    assert metrics["forward_sent_bytes"] == max(forward)
    assert metrics["backward_sent_bytes"] == max(v.bytes_sent(**layer) - f for v, f in zip(views, forward))
    owners = plan.q.inverse // plan.q.s_max  # of each token
    leaves = owners[owners != torch.arange(N) * 4 // N].bincount(minlength=4)
    assert metrics["reshard_sent_bytes"] == int(leaves.max()) * (2 // plan.q.batch) * 4 * 128 * 2
    assert metrics["imbalance"] == plan.imbalance
    remote = 1 - int(plan.traffic.trace()) / int(plan.traffic.sum())
    assert metrics["remote_share"] == pytest.approx(remote) and 0 < remote < 1
    rows = N // 4 * shape.batch
    assert metrics["gradient_bytes"] == rows * (4 * 128 * 2 + 2 * 128) * 2
    assert metrics["shard_bytes"] == metrics["gradient_bytes"] + rows * 4 * 4
    assert metrics["forward_peak_bytes"] == metrics["shard_bytes"] + metrics["forward_extra_bytes"]
    assert metrics["backward_peak_bytes"] == (
        metrics["shard_bytes"] + metrics["gradient_bytes"] + metrics["backward_extra_bytes"]
    )


def test_metrics_are_a_flat_dict_of_numbers_and_one_rank_needs_delta_alone() -> None:
    for schedule in SCHEDULES:
        metrics = make_plan(MASKS["window"], world_size=4, rank=0, schedule=schedule).metrics()
        assert type(metrics) is dict and {type(value) for value in metrics.values()} <= {int, float}
        assert 0 < metrics["forward_ms"] < metrics["backward_ms"] and metrics["world_size"] == 4
    uneven = build(MASKS["window"], 2, lengths=[N // 4, 3 * N // 4], balancer=None)
    assert uneven.metrics() == uneven.for_rank(1).metrics()
    alone = make_plan(MASKS["causal"]).metrics(heads=4, kv_heads=4)
    assert list(alone) == list(metrics) and alone["forward_ms"] > 0
    assert alone["backward_extra_bytes"] == N * 4 * 4 and alone["remote_share"] == 0
    nothing = ("forward_sent_bytes", "backward_sent_bytes", "forward_extra_bytes")
    assert [alone[name] for name in nothing] == [0, 0, 0]
