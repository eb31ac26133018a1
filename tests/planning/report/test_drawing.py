"""Tests of the drawing of a plan, as a picture and as a page."""

import re
import sys
from html.parser import HTMLParser
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


class Page(HTMLParser):
    """Collect every attribute of a page that could fetch a resource, and its visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "iframe")
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href") and value]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


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
def test_the_page_is_self_contained_and_has_the_figures_of_the_plan(name: str, tmp_path: Path) -> None:
    plan: Plan = PLANS[name]
    plan.plot(tmp_path / "plan.html", heads=16, kv_heads=4)
    text = (tmp_path / "plan.html").read_text()
    page, facts = Page(text), Facts.of(plan, heads=16, kv_heads=4)
    assert all(link.startswith(("data:image/png;base64,", "#")) for link in page.links)
    assert "http" not in re.sub(r"base64,[\w+/=\s]*", "", text) and not re.search(r"url\((?!#)", text)
    assert "prefers-color-scheme: dark" in text
    assert set(re.findall(r"var\(--(\w+)\)", text)) <= set(re.findall(r"--(\w+):", text))
    visible = " ".join(" ".join(page.words).split())
    parts = [f"{plan.imbalance:.3f}", "queries, by position", "rank that keeps them"]
    parts += [line.partition(": ")[2] for line in format_meaning(facts)]
    for estimate in facts.costs:
        times = f"{estimate.forward * 1e3:.3g} ms forward + {estimate.backward * 1e3:.3g} ms backward"
        parts += [estimate.schedule, times]
    parts += [] if facts.costs else ["nothing travels"]
    assert [part for part in parts if part not in visible] == []


def test_plot_refuses_other_kinds_of_files_and_names_the_missing_library(monkeypatch) -> None:
    with pytest.raises(ValueError, match=r"'plan.pdf'.*\.png.*\.html"):
        PLANS["documents"].plot("plan.pdf")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RuntimeError, match="pip install matplotlib"):
        draw_figure(Facts.of(PLANS["documents"]))
