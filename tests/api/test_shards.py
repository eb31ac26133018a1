"""Tests of shards by raw masks, and of positions."""

import torch
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask

import tritoncp
from tritoncp import causal, document, make_plan, positions, shard, unshard
from tritoncp.frontend import validate

S = 32


def mask_of(mod):
    return tritoncp.create_block_mask(mod, 1, 1, S, S, BLOCK_SIZE=16)


def test_shards_of_a_raw_mask_are_pieces_in_order():
    tokens = torch.arange(32)
    for mask in (mask_of(causal()), causal(), torch_block_mask(causal(), 1, 1, S, S, device="cpu"), None):
        pieces = []
        for rank in range(3):
            placement, at = validate.placement_of(mask, 3, rank, "q", 32)
            pieces.append(tokens[placement.positions(at)[0]])
        assert torch.equal(torch.cat(pieces), tokens) and [len(p) for p in pieces] == [11, 11, 10]
    assert torch.equal(shard(tokens, mask_of(causal()), dim=0), tokens)
    assert torch.equal(unshard(tokens, mask_of(causal()), dim=0), tokens)


def test_positions_inside_documents_start_at_zero():
    ids = torch.tensor([[0] * 5 + [1] * 27, [0] * 20 + [4] * 12])
    expected = torch.stack(
        [torch.cat([torch.arange(5), torch.arange(27)]), torch.cat([torch.arange(20), torch.arange(12)])]
    )
    for rank in range(2):
        own = make_plan(mask_of(causal()), world_size=2, rank=rank)
        inside = positions(own, ids)
        assert torch.equal(inside, expected[:, own.positions[0]])
        assert torch.equal(positions(own, document(ids=ids)), inside)
