"""The scaling study: its lines have the figures of plans, and a stopped run is resumed."""

import json

import pytest
import torch
from click.testing import CliRunner

from tritoncp.perf.studies import plan_costs
from tritoncp.perf.studies.plan_costs import (
    LAYER,
    MASKS,
    MIB,
    SCHEDULES,
    Point,
    list_points,
    measure,
    plan_cost,
    read_lines,
)
from tritoncp.perf.studies.scale import main
from tritoncp.perf.studies.scale_charts import PICTURES
from tritoncp.perf.suite.machine import PeakMemory
from tritoncp.planning.balance import balancers
from tritoncp.planning.build import build
from tritoncp.planning.problem import Problem


def test_a_line_has_the_figures_of_the_plan() -> None:
    seq, point = 16 * 1024, Point("documents", 16, 8, "per_document")
    mask = Problem("corpus", seq).block_mask()
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
    assert 15 < memory.growth() / MIB < 64
    del lump
    assert memory.growth() / MIB > 15, "the most, not what is left"


def test_points_cover_every_mask_and_balancer_and_leave_ranks_some_blocks() -> None:
    listed = list_points((128, 8192), (8, 1024))
    assert {point.mask for point in listed} == set(MASKS)
    assert {point.balancer for point in listed} == set(balancers)
    assert all(point.tokens >= point.world for point in listed) and len(set(listed)) == len(listed)


def test_one_command_makes_the_page_and_resumes_a_stopped_study(tmp_path, monkeypatch) -> None:
    results, page = tmp_path / "scale.jsonl", tmp_path / "scaling.md"
    words = ["--sizes", "16,32", "--worlds", "2,4", "--results", str(results), "--out", str(page)]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
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
    inner = plan_costs.measure
    monkeypatch.setattr(
        plan_costs, "measure", lambda mask, point: measured.append(point) or inner(mask, point)
    )
    assert CliRunner().invoke(main, words).exit_code == 0
    assert len(measured) == 2 and len(read_lines(results)) == len(lines)
