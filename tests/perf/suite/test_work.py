"""Counted work against the visible pairs of the mask, and against the bytes that schedules send."""

from pathlib import Path

import pytest

import tritoncp
from tests.cases import Case
from tritoncp.perf.problem import Problem
from tritoncp.perf.suite.cases import CASES
from tritoncp.perf.suite.measure import work_of_plan

SHAPE = Problem("causal", 200, 4, 2, 16, 32, batch=2)


@pytest.mark.parametrize("world", [1, 3])
def test_each_rank_does_the_work_of_its_rows(world):
    """The mask differs between batch rows and heads; 200 tokens are no multiple of a block."""
    case = Case(("bits", 1), batch=2, heads=4, length=200, kv_length=200, block=(32, 64))
    plan = tritoncp.make_plan(case.block_mask(), world_size=world, rank=0)
    sizes = {"batch": 2, "kv_heads": 2, "head_dim": 16, "v_head_dim": 32, "itemsize": 2}
    for rank in range(world):
        own = plan.for_rank(rank)
        rows = [visible[:, at[at >= 0]] for visible, at in zip(case.visible(), own.positions.expand(2, -1))]
        pairs = sum(int(visible.sum()) for visible in rows)
        forward, backward = (work_of_plan(own, SHAPE, direction) for direction in ("forward", "backward"))
        assert forward.flops == 2 * pairs * (16 + 32)
        assert backward.flops == 2 * pairs * (16 + 32 + 32 + 16 + 16)
        assert forward.wire == own.bytes_sent(**sizes, backward=False)
        assert forward.wire + backward.wire == own.bytes_sent(**sizes)


def test_a_name_never_changes_its_meaning():
    """Histories are compared by name. A new case adds a line to the file; no line is ever changed."""
    case_by_name = {case.name: case for case in CASES}
    frozen = (Path(__file__).parent / "frozen_cases.txt").read_text().splitlines()
    assert len(frozen) == len(CASES), "add the new cases' lines"
    for line in frozen:
        name, *fields = line.split(" ")
        case = case_by_name[name]
        for field in fields:
            key, value = field.split("=")
            assert str(getattr(case if key == "which" else case.problem, key)) == value, (name, key)
