"""Tests of plans of layers that select keys: a query's work is the number of its visible keys, at most those
that it selects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tritoncp
from tritoncp import Mask, Selection, causal, create_block_mask, document, make_plan
from tritoncp.distributed import collectives
from tritoncp.planning.costs.cost import costs
from tritoncp.planning.costs.hardware import hardware_of
from tritoncp.planning.costs.layer import Shape

S, BLOCK, CHOSEN = 200, 16, 24
MODS: dict[str, Any] = {
    "causal": causal(),
    "documents": causal() & document(lengths=[100, 17, 83]),
    "by batch row and head": lambda b, h, q, kv: (kv <= q) & ((q - kv) % (b + h + 2) != 1),
}


def mask_of(name: str) -> Mask:
    batch, heads = (2, 4) if name.startswith("by") else (1, 1)
    return create_block_mask(MODS[name], batch, heads, S, S, BLOCK_SIZE=BLOCK)


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("balancer", ["ptrr", "head_tail", None])
def test_work_of_a_query_is_at_most_the_keys_that_it_selects(name: str, balancer: str | None) -> None:
    mask = mask_of(name)
    taken = mask.to_dense(mask.B, mask.H).sum(3).clamp(max=CHOSEN).sum(1)  # [B, S]
    plan = make_plan(mask, world_size=3, rank=0, balancer=balancer, layer={"selected": CHOSEN})
    for rank, work in enumerate(plan.work):
        at = plan.for_rank(rank).positions
        want = (taken.gather(1, at.clamp(min=0).expand(mask.B, -1)) * (at >= 0)).sum()
        # Rows of a block count equally, so that parts of a block count as fractions.
        assert abs(work * BLOCK * BLOCK - float(want)) <= mask.B * mask.H * CHOSEN * BLOCK / 4
    assert abs(sum(plan.work) * BLOCK * BLOCK - float(taken.sum())) < 1e-6
    whole = make_plan(mask, world_size=3, rank=0, balancer=balancer)
    assert sum(plan.work) < 0.7 * sum(whole.work)
    if balancer == "ptrr":
        assert plan.imbalance < 1.1


def test_predicted_time_follows_the_selected_keys() -> None:
    mask = create_block_mask(causal(), 1, 1, 1 << 15, 1 << 15)
    plan = make_plan(mask, world_size=4, rank=0)
    times = []
    for selected in (0, 1 << 12, 1 << 10):
        shape = Shape.of_layer(plan, selected=selected)
        times.append({one.schedule: one for one in costs(plan, shape, hardware_of(4))})
    whole, many, few = (one["allgather"].forward for one in times)
    assert whole > many > few
    extra = times[2]["ulysses"].total - _without_indices(plan, 1 << 10)
    assert extra > 0  # the exchange of the indices, forward and backward


def _without_indices(plan: Any, selected: int) -> float:
    """Return the time under Ulysses if the indices took no bytes."""
    from tritoncp.planning.costs import message_bytes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(message_bytes, "INDEX_BYTES", 0)
        shape = Shape.of_layer(plan, selected=selected)
        return {one.schedule: one for one in costs(plan, shape, hardware_of(4))}["ulysses"].total


def test_predicted_bytes_are_those_that_ranks_send(cpu_engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    world, mask = tritoncp.simulate(4), mask_of("documents")
    plan = world.make_plan(mask, schedule="ulysses", balancer="head_tail", layer={"selected": CHOSEN})
    sent: list[int] = []
    start = collectives.AllToAll.__init__

    def record(self: Any, x: Tensor, sends: Any, *rest: Any) -> None:
        sent.append(sum(sends) * 3 // 4 * (x.nbytes // len(x)))  # each rank sends itself a quarter
        start(self, x, sends, *rest)

    monkeypatch.setattr(collectives.AllToAll, "__init__", record)
    x = torch.randn(1, 4, S, 8)
    shards = world.shard(x, plan, dim=2)
    indices = torch.randint(-1, S, (1, 1, S, CHOSEN), dtype=torch.int32)
    chosen = [Selection(one) for one in world.shard(indices, plan, dim=2, pad=-1)]
    world.flex_attention(shards, shards, shards, plan, selected=chosen)
    want = plan.bytes_sent(batch=1, heads=4, kv_heads=4, head_dim=8, v_head_dim=8, itemsize=4, backward=False)
    assert sum(sent) == 4 * want


def test_a_wrong_number_of_selected_keys_is_refused() -> None:
    for wrong in (-1, 2.5, True):
        with pytest.raises(ValueError, match="pass an int, 0 if queries see all visible keys"):
            make_plan(mask_of("causal"), world_size=2, rank=0, layer={"selected": wrong})
