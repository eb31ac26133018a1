"""Counted work against brute force over the dense mask, and against the bytes that schedules send."""

from pathlib import Path

import pytest
import torch

import tritoncp
from tritoncp import and_masks, causal, create_block_mask, document, prefix_lm, sliding_window
from tritoncp.masks import full_mask
from tritoncp.perf.suite.cases import CASES
from tritoncp.perf.suite.measure import work_of_plan
from tritoncp.planning.problem import Problem

N = 200  # not a multiple of any block
MODS = {
    "causal": causal(),
    "window": sliding_window(37, 5),
    "documents": and_masks(causal(), document(lengths=[50, 3, 90, 57])),
    "documents by batch row": document(lengths=torch.tensor([[100, 100], [20, 180]])),
    "prefix": prefix_lm(61),
    "code": lambda b, h, q, kv: (q - kv) % 3 == h,
    "nothing": lambda b, h, q, kv: q < 0,
}
SHAPE = Problem("causal", N, 4, 2, 16, 32, batch=2)


def mask_of(name: str):
    if name == "full":
        return full_mask(N, N, block=32)
    heads = 4 if name == "code" else 1
    return create_block_mask(MODS[name], 2 if "batch" in name else 1, heads, N, N, BLOCK_SIZE=(32, 64))


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("name", [*MODS, "full"])
def test_each_rank_does_the_work_of_its_own_rows(name, world):
    plan = tritoncp.make_plan(mask_of(name), world_size=world, rank=0)
    dense = plan.mask.to_dense(2, 4)
    total_flops = 0
    for rank in range(world):
        rank_plan = plan.for_rank(rank)
        local = rank_plan.positions.expand(2, -1)
        visible_pairs = torch.stack(
            [rows[:, at.clamp(min=0)] for rows, at in zip(dense, local)]
        )  # [2, 4, S, N]
        visible_pairs &= (local >= 0)[:, None, :, None]
        pairs = int(visible_pairs.sum())
        forward, backward = (
            work_of_plan(rank_plan, SHAPE, direction) for direction in ("forward", "backward")
        )
        assert forward.flops == 2 * pairs * (16 + 32)
        assert backward.flops == 2 * pairs * (16 + 32 + 32 + 16 + 16)
        sizes = {"batch": 2, "kv_heads": 2, "head_dim": 16, "v_head_dim": 32, "itemsize": 2}
        assert forward.wire == rank_plan.bytes_sent(**sizes, backward=False)
        assert forward.wire + backward.wire == rank_plan.bytes_sent(**sizes)
        total_flops += forward.flops
    assert total_flops == 2 * int(dense.sum()) * (16 + 32)


def test_cases_have_unique_names_and_masks_that_torch_compiles_too():
    assert len({case.name for case in CASES}) == len(CASES)
    for problem in {case.problem for case in CASES}:
        assert (problem.closed_form() is None) == (problem.plain_mod(torch.device("cpu")) is None), problem


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
