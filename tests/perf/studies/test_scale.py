"""The scaling study: its lines have the figures of plans, and a stopped run is resumed."""

import json

import pytest
import torch
from click.testing import CliRunner

from tritoncp.masks import create_block_mask
from tritoncp.perf.studies import scale
from tritoncp.perf.studies.scale import (
    LAYER,
    MASKS,
    PICTURES,
    SCHEDULES,
    PeakMemory,
    Point,
    main,
    measure,
    plan_cost,
    points,
)
from tritoncp.planning.balance import balancers
from tritoncp.planning.plan import build


def test_a_line_has_the_figures_of_the_plan() -> None:
    seq, point = 16 * 1024, Point("documents", 16, 8, "per_document")
    mask = create_block_mask(MASKS["documents"](seq), 1, 1, seq, seq)
    line = measure(mask, point)
    plan = build(mask, 8, balancer="per_document")
    assert (line["imbalance"], line["auto"]) == (plan.imbalance, plan.schedule)
    layer = {"batch": 1, "heads": LAYER.heads, "kv_heads": LAYER.kv_heads, "head_dim": LAYER.head_dim}
    for name in SCHEDULES:
        views = [build(mask, 8, rank, balancer="per_document", schedule=name) for rank in range(8)]
        assert line["schedules"][name]["sent"] == max(view.bytes_sent(**layer) for view in views)
    fetched = [
        build(mask, 8, rank, balancer="per_document", schedule="fetch").fetch.takes for rank in range(8)
    ]
    assert line["travels"] == pytest.approx(100 * sum(map(sum, fetched)) / (7 * seq))
    assert plan_cost(line)["s"] > 0
    assert json.loads(json.dumps(line)) == line


def test_peak_memory_counts_allocations_of_torch() -> None:
    memory = PeakMemory()
    lump = torch.full((16 << 20,), 1, dtype=torch.uint8)  # 16 MiB that tracemalloc does not see
    assert 15 < memory.peak_mib() < 64
    del lump
    assert memory.peak_mib() > 15, "the most, not what is left"


def test_points_cover_every_mask_and_balancer_and_leave_ranks_some_blocks() -> None:
    listed = points((128, 8192), (8, 1024))
    assert {point.mask for point in listed} == set(MASKS)
    assert {point.balancer for point in listed} == set(balancers)
    assert all(point.tokens >= point.world for point in listed) and len(set(listed)) == len(listed)


def test_one_command_makes_the_page_and_resumes_a_stopped_study(tmp_path, monkeypatch) -> None:
    results, page = tmp_path / "scale.jsonl", tmp_path / "scaling.md"
    words = ["--sizes", "16,32", "--worlds", "2,4", "--results", str(results), "--out", str(page)]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    lines = results.read_text().splitlines()
    assert len(lines) == 2 * 2 * len(MASKS) * len(balancers)
    text = page.read_text()
    assert all(f"| {mask} | {name} |" in text for mask in MASKS for name in balancers)
    for name in PICTURES:
        assert f"(scaling/{name}.svg)" in text
        drawn = (tmp_path / "scaling" / f"{name}.svg").read_text()
        assert drawn.startswith("<?xml") and "ranks" in drawn + text

    results.write_text("\n".join([*lines[:-2], lines[-1][: len(lines[-1]) // 2]]))  # killed while writing
    measured: list[Point] = []
    inner = scale.measure
    monkeypatch.setattr(scale, "measure", lambda mask, point: measured.append(point) or inner(mask, point))
    assert CliRunner().invoke(main, words).exit_code == 0
    assert len(measured) == 2 and len(scale.read(results)) == len(lines)
