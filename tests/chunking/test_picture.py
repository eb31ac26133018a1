"""Tests of the pictures of timelines and of the command that shows them."""

import json
import sys
from functools import cache

import pytest
from click.testing import CliRunner
from PIL import Image

from tests.chunking.graphs import ATEN, UNIT, Builder
from tritoncp.chunking.demo import command, figures
from tritoncp.chunking.streams.picture import (
    LEFT,
    NO_CHUNK,
    ROW,
    WIDTH,
    draw_timelines,
    format_timeline,
    format_timelines,
)
from tritoncp.chunking.streams.timeline import Timeline, simulate
from tritoncp.cli import main
from tritoncp.planning.report import colours


def timeline(marked: bool = True) -> Timeline:
    """Simulate a message of 50 s under 20 s of chunk 0, before 80 s of chunk 1."""
    b = Builder()
    x = b.input("x", 100)
    sent = b.send(x)
    first = b.call(ATEN.neg.default, b.call(ATEN.slice.Tensor, x, 0, 0, 10))
    arrived = b.wait(sent)
    last = b.call(ATEN.neg.default, b.call(ATEN.slice.Tensor, arrived, 0, 0, 40))
    for node, chunk in ((sent, 1), (first, 0), (last, 1)) if marked else ():
        node.meta["custom"] = {"tritoncp_chunk": ("layers.0", chunk)}
    return simulate(b.module(first, last), UNIT)


def test_text_shows_both_streams_and_the_chunks_in_proportion():
    lines = format_timeline(timeline(), width=13).splitlines()
    assert "30 s" in lines[0].replace("3e+04 ms", "30 s")
    assert lines[1:] == [
        " compute |--   --------|",
        "   chunk |00   11111111|",
        "messages |=====        |",
        "   chunk |11111        |",
    ]


def test_text_of_a_graph_without_chunks_has_no_chunks():
    lines = format_timeline(timeline(marked=False), width=13).splitlines()
    assert lines[1:] == [" compute |--   --------|", "messages |=====        |"]


def test_timelines_share_one_scale():
    text = format_timelines({"before": timeline(), "after": timeline(False)}, width=26)
    assert text.count("----") >= 2 and "before: " in text and "after: " in text and "products" in text


def test_an_empty_timeline_has_a_picture():
    b = Builder()
    empty = simulate(b.module(b.input("x", 4)), UNIT)
    assert format_timeline(empty, width=4).endswith("messages |    |")
    assert draw_timelines({"empty": empty}).width > WIDTH


def test_the_image_has_each_span_in_its_chunks_colour():
    image = draw_timelines({"one": timeline(), "two": timeline(marked=False)})
    paint = colours(2)

    def pixel(seconds: float, row: int, at: int = 0) -> tuple[int, ...]:
        y = image.height - 60 - 2 * (image.height - 60) // 2 + at * (image.height - 60) // 2
        return image.getpixel((LEFT + round(seconds * WIDTH / 130), 20 + y + 50 + row * ROW + 10))

    assert [pixel(seconds, 0) for seconds in (10, 35, 90)] == [paint[0], (255, 255, 255), paint[1]]
    assert [pixel(seconds, 1) for seconds in (25, 90)] == [paint[1], (255, 255, 255)]
    assert [pixel(seconds, 0, at=1) for seconds in (10, 90)] == [NO_CHUNK, NO_CHUNK]


def test_an_image_without_pillow_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(RuntimeError, match="needs Pillow: pip install pillow"):
        draw_timelines({"one": timeline()})


@pytest.fixture
def traced_once(monkeypatch):
    """Trace and order the demo's graphs once for all commands."""
    monkeypatch.setattr(command, "run_demo", run_demo)


run_demo = cache(command.run_demo)


@pytest.mark.usefixtures("traced_once")
def test_the_command_prints_both_timelines_and_writes_the_picture(tmp_path):
    path = tmp_path / "pictures" / "chunks.png"
    done = CliRunner().invoke(main, ["chunk", "--demo", "--png", str(path)])
    assert done.exit_code == 0, done.output
    assert "2 by seq of 512 of 1024 rows" in done.output and "nothing was timed on a GPU" in done.output
    assert done.output.count("messages |") == 2
    assert Image.open(path).width > WIDTH


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize("cut", ["sequence", pytest.param("experts", marks=pytest.mark.long)])
def test_the_command_in_json(cut):
    done = CliRunner().invoke(main, ["chunk", "--demo", "--cut", cut, "--json"])
    report = json.loads(done.output)
    assert (report["cut"], report["chunks"]) == (cut, 2)
    assert report["chunked"]["ordered"]["exposed_s"] < report["whole"]["as_written"]["exposed_s"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "pass --demo"),
        (["--demo", "--png", "chunks.pdf"], "has to be called *.png"),
        (["--demo", "--cut", "batch", "--chunks", "4"], "batch has 4 rows"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    done = CliRunner().invoke(main, ["chunk", *options])
    assert done.exit_code == 2 and message in done.output


def test_the_page_says_that_nothing_was_timed(monkeypatch):
    monkeypatch.setattr(figures, "order_cuts", lambda model, hardware: ordered_once())
    page = figures.format_page(tokens=(256,), ranks=(8,))
    assert "Nothing here was timed on a GPU" in page and "## 256 tokens a row, 8 ranks" in page
    assert page.count("| whole |") == 4


def ordered_once():
    """Order a graph of one message, under the name of the whole."""
    from tritoncp.chunking.streams.node_order import order

    b = Builder()
    x = b.input("x", 100)
    result = order(b.module(b.call(ATEN.neg.default, b.wait(b.send(x)))), UNIT)
    return {"whole": figures.Orders(result, [result, result])}
