"""Tests of tritoncp/kernels/program_order.py: every order of the programs computes every tile once."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import tritoncp
from tests.kernels.support.harness import cotangents, qkv, run
from tritoncp.core.opaque_integers import opaque
from tritoncp.kernels import program_order
from tritoncp.kernels.engine import TritonEngine
from tritoncp.kernels.opaque_integers import integer
from tritoncp.kernels.operands import Mods
from tritoncp.kernels.program_order import (
    L2_BYTES,
    arrange_programs,
    check_grid,
    locate_program,
    section_heads,
)
from tritoncp.planning import step_tables


@triton.jit
def count_kernel(visits, order, splits, TILES: tl.constexpr, LAST_FIRST: tl.constexpr):
    """Count the programs of each (batch row, head, tile, part of the keys), and note when each started."""
    i_b = tl.program_id(2)
    i_tile, i_head, i_split = locate_program(order, i_b, splits, TILES, LAST_FIRST)
    if order.heads is None:
        n_heads, n_tiles = tl.num_programs(0), tl.num_programs(1)
    else:
        n_heads, n_tiles = (
            tl.num_programs(1) * integer(order.heads),
            tl.num_programs(0) // integer(order.heads),
        )
    if splits is not None:
        i_tile = i_tile * splits + i_split
    tl.atomic_add(visits + ((i_b * n_heads + i_head) * n_tiles + i_tile), 1)


@pytest.mark.sample(8)
@pytest.mark.parametrize(("section", "has_sections"), [(1, True), (2, True), (4, True), (4, False)])
@pytest.mark.parametrize("max_tiles", [1, 12])
@pytest.mark.parametrize("splits", [None, 2])
@pytest.mark.parametrize("table", ["none", "shared", "by row"])
def test_every_tile_has_one_program(
    section: int, has_sections: bool, max_tiles: int, splits: int | None, table: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(program_order, "MAX_TILES", max_tiles)
    batch, heads, slots, tiles = 2, 4, 3, 2
    order = torch.stack([torch.randperm(slots, dtype=torch.int32) for _ in range(batch)])
    slots_table = {"none": None, "shared": order[:1], "by row": order}[table]
    count = slots * tiles * (splits or 1)
    visits = torch.zeros(batch, heads, count, dtype=torch.int32)
    argument, grid = arrange_programs(slots_table, count, heads, section, batch, has_sections=has_sections)
    assert (argument.heads is None) == (section == heads and count <= max_tiles and not has_sections)
    assert argument.stride_b == opaque(slots if table == "by row" else 0)
    for last_first in (False, True):
        count_kernel[grid](visits.zero_(), argument, splits, tiles, last_first)
        assert bool((visits == 1).all())


def test_a_section_has_as_many_heads_as_fit_the_cache() -> None:
    """The number divides the heads; a section of 8 heads or fewer always fits."""
    for heads, size, (arch, cache) in product(range(1, 41), (0, 1 << 20, 3 << 20, 1 << 30), L2_BYTES.items()):
        fit = {n for n in range(1, 41) if heads % n == 0 and (n <= 8 or n * size <= cache)}
        assert section_heads(heads, size, arch) == max(fit)


def test_no_dimension_of_a_grid_passes_the_limits_of_a_gpu() -> None:
    for section in (1, 4):
        _, (x, y, z) = arrange_programs(None, 1 << 20, 4, section, 65_535)
        assert x < 1 << 31 and max(y, z) < 1 << 16 and x * y == 4 << 20
    assert check_grid(1 << 20, 65_535, 65_535) == (1 << 20, 65_535, 65_535)
    with pytest.raises(ValueError, match="65536 batch rows"):
        arrange_programs(None, 1, 8, 8, 65_536)
    with pytest.raises(ValueError, match="65536 heads"):  # two programs share the keys of each
        run(qkv(1, heads=65_536), start=None, SPLIT_KV=2)
    engine = TritonEngine(Mods(), 1.0)
    for rows in range(1, 200):
        x = torch.zeros(()).expand(3, 2, rows, 16)
        assert engine.delta(x, x, None, x[..., 0]).grid == (-(-rows // 64), 2, 3)
    for batch, heads, text in ((65_536, 1, "batch rows"), (1, 65_536, "heads")):
        x = torch.zeros(()).expand(batch, heads, 1, 16)
        with pytest.raises(ValueError, match=f"65536 {text}"):
            engine.delta(x, x, None, x[..., 0])


def shuffled(runs: Any) -> Tensor:
    return torch.stack([torch.randperm(runs.shape[2]) for _ in range(runs.shape[0])]).to(torch.int32)


MASKS = {
    "documents": tritoncp.and_masks(tritoncp.causal(), tritoncp.document(lengths=[21, 3, 16])),
    "by head": lambda b, h, q, kv: (q - kv) * (h + 1) < 20,
    "causal": tritoncp.causal(),
}


@pytest.mark.long
@pytest.mark.parametrize(
    "mask", [x if x == "by head" else pytest.param(x, marks=pytest.mark.long) for x in MASKS]
)
@pytest.mark.parametrize("few", [False, pytest.param(True, marks=pytest.mark.long)])
def test_results_do_not_depend_on_the_order(mask: str, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random orders of the slots, and sections of one head or of all, have the same bits: no program reads
    another's results."""
    x = qkv(40, batch=1 + few, heads=4, kv_heads=2)
    start = cotangents(x)
    options: dict[str, Any] = {"PACK_GQA": few, "SPLIT_KV": 2 if few else 1}
    results = []
    for heads, random_order in product((1, 1 << 30), (False, True)):
        monkeypatch.setattr(program_order, "SHARED_HEADS", heads)
        monkeypatch.setattr(program_order, "DEFAULT_L2_BYTES", heads)
        if random_order:
            monkeypatch.setattr(step_tables, "_falling_work", shuffled)
        block_mask = tritoncp.create_block_mask(MASKS[mask], 1, 4, 40, 40, BLOCK_SIZE=16)
        results.append(run(x, block_mask, start=start, **options))
        monkeypatch.undo()
    for result in results[1:]:
        for a, b in zip((*results[0][:3], *results[0].grads), (*result[:3], *result.grads), strict=True):
            assert torch.equal(a, b)


def test_slots_start_by_descending_work() -> None:
    """Work is summed over all heads of a batch row, ties are ordered by position; a closed-form window has no
    table."""
    lengths = [16, 64, 48]
    mask = tritoncp.create_block_mask(tritoncp.document(lengths=lengths), 1, 1, 128, 128, BLOCK_SIZE=16)
    tables = tritoncp.make_plan(mask, world_size=1).tables("cpu", 1, 1)
    assert tables.row_order is not None and tables.col_order is not None
    for order in (tables.row_order, tables.col_order):
        assert order.tolist() == [[1, 2, 3, 4, 5, 6, 7, 0]]
        assert order.dtype == torch.int32
    window = tritoncp.create_block_mask(tritoncp.causal(), 1, 1, 128, 128, BLOCK_SIZE=16)
    tables = tritoncp.make_plan(window, world_size=1).tables("cpu", 1, 1)
    assert tables.row_order is None and tables.col_order is None
