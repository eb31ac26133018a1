"""The tables about balancers: traffic is the rows that ranks fetch, and one command writes them."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from tritoncp import causal, create_block_mask
from tritoncp.masks import Kind
from tritoncp.planning.balance import balancers
from tritoncp.planning.build import build
from tritoncp.planning.problem import MASKS, corpus_lengths

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
tables = importlib.import_module("tables")


@pytest.mark.parametrize("balancer", sorted(balancers))
def test_traffic_is_the_remote_blocks_that_ranks_see(balancer: str) -> None:
    size, block, world_size = 4096, 128, 4
    mask = create_block_mask(MASKS["corpus"].closed(size), None, None, size, size, BLOCK_SIZE=block)
    plan = build(mask, world_size, balancer=balancer, schedule="fetch")
    listed = mask.runs.to_kinds()[0, 0] <= int(Kind.BOUNDED)
    owner = plan.owners[0]
    remote = torch.stack([listed[owner == rank].any(0) & (owner != rank) for rank in range(world_size)])
    assert tables.fetched_rows(plan) == block * int(remote.sum())
    for schedule in ("fetch", "auto", "ring"):
        result = tables.measure_quality(mask, world_size, balancer, schedule)
        assert result.imbalance == plan.imbalance and result.schedule in (
            schedule,
            build(mask, 4, balancer=balancer).schedule,
        )
        assert result.travels == pytest.approx(100 * int(remote.sum()) * block / ((world_size - 1) * size))


def test_contiguous_causal_pieces_see_all_before_them() -> None:
    mask = create_block_mask(causal(), None, None, 4096, 4096)
    assert tables.measure_quality(mask, 4, "contiguous").travels == pytest.approx(50)


@pytest.mark.parametrize("seq", [64, 1000, 65536])
def test_documents_fill_the_sequence(seq: int) -> None:
    lengths = corpus_lengths(seq)
    assert sum(lengths) == seq and min(lengths) >= 1 and lengths == corpus_lengths(seq)
