"""The page about balancers: its traffic is the rows that ranks fetch, and one command writes it."""

import pytest
import torch
from click.testing import CliRunner

from tritoncp import causal, create_block_mask
from tritoncp.masks import Kind
from tritoncp.perf.studies.balance import STUDIED, fetched_rows, main, measure_quality
from tritoncp.planning.balance import balancers
from tritoncp.planning.build import build
from tritoncp.planning.problem import MASKS, corpus_lengths


@pytest.mark.parametrize("balancer", sorted(balancers))
def test_traffic_is_the_remote_blocks_that_ranks_see(balancer: str) -> None:
    size, block, world_size = 4096, 128, 4
    mask = create_block_mask(MASKS["corpus"].closed(size), None, None, size, size, BLOCK_SIZE=block)
    plan = build(mask, world_size, balancer=balancer, schedule="fetch")
    listed = mask.runs.to_kinds()[0, 0] <= int(Kind.BOUNDED)
    owner = plan.owners[0]
    remote_blocks = torch.stack(
        [listed[owner == rank].any(0) & (owner != rank) for rank in range(world_size)]
    )
    assert fetched_rows(plan) == block * int(remote_blocks.sum())
    result = measure_quality(mask, world_size, balancer)
    assert result.imbalance == plan.imbalance and result.seconds > 0
    assert result.travels == pytest.approx(100 * int(remote_blocks.sum()) * block / ((world_size - 1) * size))


def test_contiguous_causal_pieces_see_all_before_them() -> None:
    mask = create_block_mask(causal(), None, None, 4096, 4096)
    assert measure_quality(mask, 4, "contiguous").travels == pytest.approx(50)


@pytest.mark.parametrize("seq", [64, 1000, 65536])
def test_documents_fill_the_sequence(seq: int) -> None:
    lengths = corpus_lengths(seq)
    assert sum(lengths) == seq and min(lengths) >= 1 and lengths == corpus_lengths(seq)


def test_one_command_makes_the_page(tmp_path) -> None:
    page = tmp_path / "docs" / "balance.md"
    arguments = ["--sizes", "2", "--worlds", "2,4", "--out", str(page)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert text.count("| 2K | 2 |") == text.count("| 2K | 4 |") == len(STUDIED) == text.count("\n## ")
    assert all(f" {name} |" in text for name in balancers)
    wrong = CliRunner().invoke(main, ["--worlds", "2,many"])
    assert wrong.exit_code == 2 and "comma-separated list of whole numbers" in wrong.output
