"""A default device, which many scripts set, does not change tensors that the package makes on the CPU."""

import pytest
import torch

import tritoncp

S, W = 96, 3


def call_results() -> list:
    """Call masks, plans, shards and attention; return all results as plain values."""
    ids = torch.arange(S, device="cpu") // 20
    traced = tritoncp.create_block_mask(
        lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv]), None, None, S, S, device="cpu", BLOCK_SIZE=16
    )
    documents = tritoncp.create_block_mask(tritoncp.document(lengths=[30, 66]), 1, 1, S, S, BLOCK_SIZE=16)
    mask = traced.with_intervals()
    x = torch.arange(S * 16.0, device="cpu").view(1, 1, S, 16) / 999
    results = [
        str(mask),
        str(documents),
        mask.rows(16, 90).to_dense().tolist(),
        mask[0, 0, 2:4].draw(),
        mask.sparsity(),
    ]
    results.append(tritoncp.from_block_mask(mask.to_block_mask()).runs.runs.tolist())
    for balancer in tritoncp.balancers:
        plan = tritoncp.make_plan(mask, world_size=W, rank=1, balancer=balancer)
        results += [str(plan), plan.imbalance, plan.explain(), tritoncp.positions(plan).tolist()]
        results.append(tritoncp.shard(x, plan, dim=2).tolist())
    results.append(tritoncp.flex_attention(x, x, x, mask).tolist())
    world = tritoncp.simulate(W)
    shards = world.shard(x, plan, dim=2)
    results.append([out.tolist() for out in world.flex_attention(shards, shards, shards, plan)])
    return results


@pytest.mark.long
@pytest.mark.parametrize("device", ["meta"])  # replaces a GPU: a tensor on it cannot be read
def test_a_default_device_does_not_affect_host_computations(device: str) -> None:
    want = call_results()
    tritoncp.plan_cache_clear()
    with torch.device(device):
        assert call_results() == want
