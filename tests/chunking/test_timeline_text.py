"""Tests of the text of timelines and of the command that shows them."""

import json
from functools import cache

import pytest
from click.testing import CliRunner

from tests.chunking.graphs import ATEN, UNIT, Builder
from tritoncp.chunking.demo import command
from tritoncp.chunking.streams.timeline import Timeline, simulate
from tritoncp.chunking.streams.timeline_text import format_timeline, format_timelines
from tritoncp.cli import main


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


def test_an_empty_timeline_has_a_text():
    b = Builder()
    empty = simulate(b.module(b.input("x", 4)), UNIT)
    assert format_timeline(empty, width=4).endswith("messages |    |")


@pytest.fixture
def traced_once(monkeypatch):
    """Trace and order the demo's graphs once for all commands."""
    monkeypatch.setattr(command, "run_demo", run_demo)


run_demo = cache(command.run_demo)


@pytest.mark.long
@pytest.mark.usefixtures("traced_once")
def test_the_command_prints_both_timelines():
    done = CliRunner().invoke(main, ["chunk", "--demo"])
    assert done.exit_code == 0, done.output
    assert "2 by seq of 512 of 1024 rows" in done.output and "nothing was timed on a GPU" in done.output
    assert done.output.count("messages |") == 2


@pytest.mark.long
@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize("cut", ["sequence", "experts"])
def test_the_command_in_json(cut):
    done = CliRunner().invoke(main, ["chunk", "--demo", "--cut", cut, "--json"])
    report = json.loads(done.output)
    assert (report["cut"], report["chunks"]) == (cut, 2)
    assert report["chunked"]["ordered"]["exposed_s"] < report["whole"]["as_written"]["exposed_s"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "pass --demo"),
        (["--demo", "--cut", "batch", "--chunks", "4"], "batch has 4 rows"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    done = CliRunner().invoke(main, ["chunk", *options])
    assert done.exit_code == 2 and message in done.output
