"""Tests of the drawing of a plan."""

import html
import re
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.planning.report.test_rasters import document_plan
from tritoncp.masks.closed_forms import sliding_window
from tritoncp.masks.mask import create_block_mask, full_mask
from tritoncp.planning.build import build
from tritoncp.planning.plan import Plan
from tritoncp.planning.report.drawing import draw_figure
from tritoncp.planning.report.facts import Facts
from tritoncp.planning.report.text import format_meaning

PLANS = {
    "documents": document_plan(4096, 4),
    "one rank": document_plan(1024, 1),
    "one block": document_plan(128, 2),  # one rank has it, and the other schedules cost next to nothing
    "many ranks": build(create_block_mask(sliding_window(512), 1, 1, 1 << 17, 1 << 17), 300),
    "several heads": build(full_mask(1000, 300, B=2, H=3, block=(64, 32)), 3),
}


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_has_a_picture_of_one_size(name: str, tmp_path: Path) -> None:
    figure = PLANS[name].plot(tmp_path / "new" / "plan.png")
    saved = Image.open(tmp_path / "new" / "plan.png")
    assert saved.size == (1500, 1220) and figure._repr_png_()[:4] == b"\x89PNG", "a notebook shows it"
    bars = [patch.get_height() for patch in figure.axes[3].patches]
    assert bars == PLANS[name].work
    remote, own = (torch.as_tensor(image.get_array().filled(-1)) for image in figure.axes[4].images)
    reads = Facts.of(PLANS[name]).reads.double().fill_diagonal_(0)
    assert torch.equal(remote, torch.where(reads > 0, reads, -1)) and own.add(1).equal(torch.eye(len(own)))


@pytest.mark.parametrize("name", PLANS)
def test_the_picture_says_the_figures_of_the_plan(name: str, tmp_path: Path) -> None:
    plan: Plan = PLANS[name]
    plan.plot(tmp_path / "plan.svg", heads=16, kv_heads=4)
    text, facts = (tmp_path / "plan.svg").read_text(), Facts.of(plan, heads=16, kv_heads=4)
    visible = " ".join(html.unescape(re.sub("<[^>]*>", " ", text)).split())
    parts = [f"{plan.imbalance:.3f}", "queries, by position", "rank that keeps them"]
    parts += [line.partition(": ")[2] for line in format_meaning(facts)]
    for estimate in facts.costs:
        times = f"{estimate.forward * 1e3:.3g} ms forward + {estimate.backward * 1e3:.3g} ms backward"
        parts += [estimate.schedule, times]
    parts += [] if facts.costs else ["nothing travels"]
    assert [part for part in parts if part not in visible] == []


def test_the_missing_library_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RuntimeError, match="pip install matplotlib"):
        draw_figure(Facts.of(PLANS["documents"]))
