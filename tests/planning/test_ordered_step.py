"""Tests of ordered steps: all keys that a rank's queries see, once, by position, pieces of a block joined."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn.functional import pad

from tritoncp import and_masks, causal, create_block_mask, document, make_plan, shard, sliding_window
from tritoncp.distributed.collectives import lockstep
from tritoncp.distributed.schedules import ordered
from tritoncp.planning.ordered_step import ordered_step

LENGTH, BLOCK, WORLD = 110, 32, 3


@pytest.mark.parametrize("balancer", [None, "head_tail"])
@pytest.mark.parametrize("documents", [None, [[LENGTH, 0, 0], [36, 37, 37]]])
def test_ordered_steps_have_all_visible_keys_by_position(documents, balancer) -> None:
    """Keys are positions here, plus 1000 in the second batch row."""
    mod = and_masks(causal(), document(lengths=documents)) if documents else sliding_window(40)
    mask = create_block_mask(mod, 2 if documents else 1, None, LENGTH, LENGTH, BLOCK_SIZE=BLOCK)
    plan = make_plan(mask, world_size=WORLD, rank=0, balancer=balancer)
    views = [plan.for_rank(rank) for rank in range(WORLD)]
    tokens = torch.arange(LENGTH) + torch.tensor([[0], [1000]])
    shards = [shard(tokens[:, None, :, None].double(), view, dim=2) for view in views]
    received = lockstep([ordered._send_keys(view, x, x) for view, x in zip(views, shards, strict=True)])
    for view, own, (keys, _) in zip(views, shards, received, strict=True):
        step = ordered_step(view)
        assert (step.plan.rank, step.plan.world_size) == (0, 1)
        for placement, rows, buffered in (
            (step.plan.q, step.q_rows, own), (step.plan.kv, step.kv_rows, keys)
        ):  # fmt: skip
            for b, values in enumerate(pad(buffered[:, 0, :, 0], (0, 1), value=-1)):
                at = placement.positions(0)[b % len(rows)]
                of_step = rows[b % len(rows)].clamp(max=len(values) - 1)
                assert torch.equal(values[of_step], torch.where(at < 0, -1.0, at + 1000.0 * b))
                assert bool((at[at >= 0].diff() > 0).all())
                slots = [x[1:] for x in placement.slots[0][b % len(rows)].tolist() if x[2]]
                assert all(start // BLOCK == (start + count - 1) // BLOCK for start, count in slots)
                for (start, count), (other, _) in pairwise(slots):
                    assert other % BLOCK == 0 or other > start + count
        for b, dense in enumerate(mask.to_dense()[:, 0].expand(2, -1, -1)):
            queries, at = (x.positions(0)[b % len(x.positions(0))] for x in (step.plan.q, step.plan.kv))
            assert {-1, *queries.tolist()} == {-1, *view.positions[b % len(view.positions)].tolist()}
            assert set(dense[queries[queries >= 0]].any(0).nonzero()[:, 0].tolist()) <= set(at.tolist())
