"""Tests of shards by raw masks and by plans, of positions, and of masks that share a placement."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask
from torch.testing._internal.distributed.fake_pg import FakeStore

import tritoncp
from tritoncp import causal, document, make_plan, positions, shard, unshard
from tritoncp.api import shards
from tritoncp.reference.dense import dense_attention

S = 32


def mask_of(mod):
    return tritoncp.create_block_mask(mod, 1, 1, S, S, BLOCK_SIZE=16)


def plan_of(world, rank):
    return make_plan(mask_of(causal()), world_size=world, rank=rank)


def test_shards_of_a_raw_mask_are_pieces_in_order():
    tokens = torch.arange(32)
    for mask in (mask_of(causal()), causal(), torch_block_mask(causal(), 1, 1, S, S, device="cpu"), None):
        pieces = []
        for rank in range(3):
            placement, at = shards.placement_of(torch.empty(32), mask, ("", 3, rank), 0, "q")
            pieces.append(tokens[placement.positions(at)[0]])
        assert torch.equal(torch.cat(pieces), tokens) and [len(p) for p in pieces] == [11, 11, 10]
    assert torch.equal(shard(tokens, mask_of(causal()), dim=0), tokens)
    assert torch.equal(unshard(tokens, mask_of(causal()), dim=0), tokens)


ORDERS = {
    "a plan": lambda world, length: world.make_plan(
        tritoncp.create_block_mask(causal(), 1, 1, length, length, BLOCK_SIZE=4)
    ),
    "a mask": lambda world, length: tritoncp.create_block_mask(causal(), 1, 1, length, length, BLOCK_SIZE=4),
    "torch's mask": lambda world, length: torch_block_mask(causal(), 1, 1, length, length, device="cpu"),
    "a closed form": lambda world, length: causal(),
    "none": lambda world, length: None,
}


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_simulated_world_has_the_shards_of_all_ranks(size, name):
    """The world shards for every order that shard takes, and unshard inverts it."""
    world = tritoncp.simulate(size)
    for length in (3, 7, 12, 24):
        x, order = torch.randn(2, length), ORDERS[name](world, length)
        parts = world.shard(x, order, dim=1)
        for rank, part in enumerate(parts):
            place = "", size, rank
            own = order.for_rank(rank) if name == "a plan" else order
            assert torch.equal(part, shards.cut(x, own, place, 1))
        assert torch.equal(world.unshard(parts, order, dim=1), x)
        if size == 1:
            assert torch.equal(unshard(shard(x, order, dim=1), order, dim=1), x)
        if name == "a plan":
            held = torch.cat(world.positions(order), 1).flatten()
            assert held[held >= 0].sort().values.tolist() == list(range(length))


def test_a_simulated_world_has_positions_and_edges_of_all_ranks():
    world, tree = tritoncp.simulate(2), tritoncp.tree([-1, 0, 0], [4, 3, 5])
    plan = world.make_plan(tritoncp.create_block_mask(tree, 1, 1, 12, 12, BLOCK_SIZE=2))
    tokens, weights = torch.arange(12) * 3, torch.rand(12)
    for rank in range(2):
        own = plan.for_rank(rank)
        assert torch.equal(world.positions(plan)[rank], positions(own))
        assert torch.equal(world.positions(plan, tree)[rank], positions(own, tree))
        want = tritoncp.tree_edges(own, tree, tokens, weights)
        assert all(map(torch.equal, world.tree_edges(plan, tree, tokens, weights)[rank], want))
    other = tritoncp.simulate(3)
    for call in (other.positions, lambda plan: other.tree_edges(plan, tree, tokens)):
        with pytest.raises(ValueError, match="the plan is for 2 ranks, this world has 3"):
            call(plan)


@pytest.fixture
def second_of_two():
    """Make this process rank 1 of a group of 2 whose messages go nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_shard_is_cut_by_the_plan_of_its_rank_and_group(second_of_two):
    """A plan made in a data loader has rank 0 by default: without the group, all ranks would get the same
    part."""
    tokens = torch.arange(S)
    assert torch.equal(
        shard(tokens, plan_of(2, 1), second_of_two, dim=0), shard(tokens, plan_of(2, 1), dim=0)
    )
    for cut in (shard, unshard):
        with pytest.raises(ValueError, match=r"is rank 0's, this is rank 1; use plan\.for_rank\(1\)"):
            cut(tokens[: S // (2 if cut is unshard else 1)], plan_of(2, 0), second_of_two, dim=0)
        with pytest.raises(ValueError, match="the plan is for 4 ranks, the mesh has 2"):
            cut(tokens, plan_of(4, 1), second_of_two, dim=0)


def test_positions_inside_documents_start_at_zero():
    ids = torch.tensor([[0] * 5 + [1] * 27, [0] * 20 + [4] * 12])
    expected = torch.stack(
        [torch.cat([torch.arange(5), torch.arange(27)]), torch.cat([torch.arange(20), torch.arange(12)])]
    )
    for rank in range(2):
        own = plan_of(2, rank)
        inside = positions(own, ids)
        assert torch.equal(inside, expected[:, own.positions[0]])
        assert torch.equal(positions(own, document(ids=ids)), inside)


# -- masks that share a placement --------------------------------------------------------------------------


def wide_mask(mod, batch=1):
    return tritoncp.create_block_mask(mod, batch, 1, 64, 64, BLOCK_SIZE=16)


@pytest.mark.parametrize("tokens", [1, S // 2, S - 1, S, S + 1, 2 * S])
def test_documents_and_trees_have_as_many_tokens_as_the_plan(tokens):
    ids = torch.arange(tokens) // 5
    kinds = (
        ids,
        ids.expand(2, -1),
        document(ids=ids),
        document(lengths=[tokens]),
        tritoncp.tree([-1], [tokens]),
    )
    for kind in kinds:
        if tokens == S:
            assert positions(plan_of(2, 1), kind).shape[1] == S // 2
        else:
            with pytest.raises(ValueError, match=f"is of {tokens} tokens, and the plan of {S}: pass"):
                positions(plan_of(2, 1), kind)


def test_masks_that_share_a_placement_are_weighed_together():
    late = wide_mask(lambda b, h, q, kv: (q >= 48) | (q == kv))
    early = wide_mask(lambda b, h, q, kv: (q < 16) | (q == kv))
    plans = make_plan({"late": late, "early": early}, world_size=2)
    assert torch.equal(plans["late"].owners, plans["early"].owners)
    total = [sum(p.work[rank] for p in plans.values()) for rank in range(2)]
    assert total[0] == total[1]
    alone = make_plan(late, world_size=2)
    assert plans["late"].mask.runs == alone.mask.runs


@pytest.mark.usefixtures("cpu_engine")
@pytest.mark.filterwarnings("error::UserWarning")
def test_layers_of_a_hybrid_model_run_on_one_placement():
    """A mask for all batch rows and a mask per row share one placement."""
    ids = torch.stack([torch.arange(64) // 40, torch.arange(64) // 9])
    documents = tritoncp.and_masks(causal(), document(ids=ids))
    masks = {"full": wide_mask(causal()), "documents": wide_mask(documents, batch=2)}
    plans = make_plan(masks, world_size=2)
    world = tritoncp.simulate(2)
    q = torch.randn(2, 2, 64, 16)
    shards = world.shard(q, plans["documents"], dim=2)
    for name, mask in masks.items():
        outs = world.flex_attention(shards, shards, shards, plans[name])
        expected = dense_attention(q, q, q, mask).out
        torch.testing.assert_close(world.unshard(outs, plans[name], dim=2), expected, atol=2e-6, rtol=1e-5)
