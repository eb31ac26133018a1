"""What `print(plan)` shows is what the plan says."""

import pytest

from tritoncp.closed_forms import and_masks, causal, document
from tritoncp.draw import WIDTH, blocks, picture, spans
from tritoncp.masks import create_block_mask
from tritoncp.plan import build


def plan(size=1024, world_size=4, balancer="ptrr"):
    mask = create_block_mask(
        and_masks(causal(), document(lengths=[size // 4, size - size // 4])), 1, 1, size, size
    )
    return build(mask, world_size, world_size - 1, balancer=balancer)


@pytest.mark.parametrize("balancer", ["ptrr", "head_tail", "contiguous"])
def test_every_block_is_labelled_with_its_owner(balancer):
    drawn = plan(balancer=balancer)
    lines = picture(drawn).splitlines()[3:11]
    assert [line.rank for line in blocks(drawn)[1:]] == drawn.owners[0].tolist()
    assert [int(line.split()[0]) for line in lines] == drawn.owners[0].tolist()
    assert [line.split()[1] for line in lines] == drawn.mask.draw().splitlines()


def test_work_and_imbalance_are_the_plans():
    drawn = plan()
    _, _, work, _ = picture(drawn).split("\n\n")
    title, *bars = work.splitlines()
    assert f"max/mean {drawn.imbalance:.3f}" in title
    assert [float(bar.split()[-1]) for bar in bars] == drawn.work
    assert max(bar.count("█") for bar in bars) == 32


def test_a_long_plan_fits_a_screen():
    lines = picture(plan(size=128 * 200, world_size=64)).splitlines()
    assert len(lines) <= WIDTH + 6 + 8
    assert all(len(line) <= 2 * WIDTH for line in lines[1:])


def test_a_world_of_one_is_drawn():
    assert picture(plan(world_size=1)).startswith(
        "Plan: 1024 queries × 1024 keys, blocks of 128 × 128; 1 rank;"
    )


def test_spans():
    assert spans([0, 2, 3, 4, 9]) == "0,2-4,9"
