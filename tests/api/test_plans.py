"""Tests of make_plan: masks that share a placement."""

import pytest
import torch

import tritoncp
from tritoncp import causal, document, make_plan
from tritoncp.reference.dense import dense_attention


def mask_of(mod, batch=1):
    return tritoncp.create_block_mask(mod, batch, 1, 64, 64, BLOCK_SIZE=16)


def test_masks_that_share_a_placement_are_weighed_together():
    late = mask_of(lambda b, h, q, kv: (q >= 48) | (q == kv))
    early = mask_of(lambda b, h, q, kv: (q < 16) | (q == kv))
    plans = make_plan({"late": late, "early": early}, world_size=2)
    assert torch.equal(plans["late"].owners, plans["early"].owners)
    total = [sum(p.work[rank] for p in plans.values()) for rank in range(2)]
    assert total[0] == total[1]
    alone = make_plan(late, world_size=2)
    assert plans["late"].mask.runs == alone.mask.runs


@pytest.mark.usefixtures("cpu_engine")
def test_layers_of_a_hybrid_model_run_on_one_placement():
    """A mask for all batch rows and a mask per row share one placement."""
    ids = torch.stack([torch.arange(64) // 40, torch.arange(64) // 9])
    documents = tritoncp.and_masks(causal(), document(ids=ids))
    masks = {"full": mask_of(causal()), "documents": mask_of(documents, batch=2)}
    plans = make_plan(masks, world_size=2)
    world = tritoncp.simulate(2)
    q = torch.randn(2, 2, 64, 16)
    shards = world.shard(q, plans["documents"], dim=2)
    for name, mask in masks.items():
        outs = world.flex_attention(shards, shards, shards, plans[name])
        expected = dense_attention(q, q, q, mask).out
        torch.testing.assert_close(world.unshard(outs, plans[name], dim=2), expected, atol=2e-6, rtol=1e-5)
