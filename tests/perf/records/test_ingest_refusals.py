"""Imports of results that `make gpu` never writes: refused or named, and nothing is written outside."""

import json
import os
import random
import shutil

import pytest
from click.testing import CliRunner

from tests.perf.autotune_results import H200, change_best, change_lines, edited, files, journal_of, shipped
from tests.perf.synthetic_history import mutated
from tritoncp.ops import tile_tables
from tritoncp.perf.cli import perf


def command(places) -> tuple[int, str]:
    """Run the command; return its status and output. It must not raise an exception."""
    gpu, history, configs = map(str, places)
    result = CliRunner().invoke(perf, ["ingest", gpu, "--history", history, "--configs", configs])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    return result.exit_code, result.output


def edited_facts(**changed):
    return lambda line: line | {"about": line["about"] | changed} if line["stage"] == "begin" else line


def raw(text):
    """Return a change of the lines of stage "steps" to a text."""
    return lambda line: text + "\n" if line["stage"] == "steps" else line


NAMES = [
    "../../x",
    "/tmp/x",
    "..",
    ".",
    "a/b",
    "sm_90/../../x",
    "sm_90\0",
    "sm_90\n",
    "x" * 300,
    "C:\\x",
    "~",
]


@pytest.mark.parametrize("field", ["arch", "triton"])
@pytest.mark.parametrize("name", NAMES)
def test_a_journal_whose_names_lead_elsewhere_is_refused_and_nothing_is_written(
    field, name, places, tmp_path
):
    edited(journal_of(places[0]), edited_facts(**{field: name}))
    before = files(tmp_path)
    status, output = command(places)
    assert status == 2 and "no file is called after it" in output and f"{journal_of(places[0])}:1: " in output
    assert files(tmp_path) == before and not places[1].exists() and not places[2].exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (raw("[" * 100_000), "nested more than 64 levels"),
        (raw('{"stage": ' + "[" * 900 + "]" * 900 + "}"), "nested more than 64 levels"),
        (
            raw('{"stage": "steps", "x": ' + '{"a":' * 90 + "1" + "}" * 90 + "}"),
            "nested more than 64 levels",
        ),
        (raw('{"stage": "steps", "x": NaN}'), "a number is NaN or infinite"),
        (raw('{"stage": "steps", "x": [-Infinity]}'), "a number is NaN or infinite"),
        (raw('{"stage": "steps", "x": ' + "9" * 5000 + "}"), "Exceeds the limit"),
        (raw('{"stage": "steps", "x": "\\ud800"}'), "surrogates not allowed"),
        (change_lines("begin", {"time": float("nan")}), "a number is NaN or infinite"),
        (change_best("time", {"ms": float("nan")}), "a number is NaN or infinite"),
    ],
    ids=["open", "deep", "objects", "NaN", "infinite", "digits", "surrogate", "when", "time"],
)
def test_a_journal_that_no_autotune_wrote_is_refused_and_nothing_is_written(
    change, message, places, tmp_path
):
    edited(journal_of(places[0]), change)
    before = files(tmp_path)
    status, output = command(places)
    assert status == 2 and message in output and str(journal_of(places[0])) in output
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    "text",
    ["null", "7", "[]", '"begin"', "{}", '{"stage": []}', '{"stage": "check", "target": "t"}', "\x00\x01",
     '{"stage": "time", "target": {}, "config": [], "found": 1}',
     '{"stage": "target", "target": "t", "entry": 5, "rule": "x"}'],
)  # fmt: skip
def test_a_line_of_the_wrong_type_is_named_and_costs_no_other(text, places):
    edited(journal_of(places[0]), raw(text))
    status, output = command(places)
    assert status == 2 and "not a line of tritoncp autotune" in output and len(shipped(places[2])) == 2


@pytest.mark.parametrize("when", [1e308, 10**400, 1e12, 4e9, -1, 0, "now", None, True])
def test_a_run_that_began_at_no_time_yet_is_left_out(when, places):
    """A time in the far future would count as the newest for ever."""
    edited(journal_of(places[0]), change_lines("begin", {"time": when}))
    status, output = command(places)
    assert status == 2 and "not a line of tritoncp autotune" in output and not list(places[2].rglob("*"))


@pytest.mark.parametrize("value", [5, None, [], {}, ["sm_90"], "", True])
@pytest.mark.parametrize("field", ["arch", "triton", "device", "code"])
def test_a_run_whose_names_are_no_text_is_left_out(field, value, places):
    edited(journal_of(places[0]), edited_facts(**{field: value}))
    status, output = command(places)
    assert status == 2 and "have to be text" in output and not list(places[2].rglob("*"))


@pytest.mark.parametrize(
    "where", ["history", "journal", "architecture", "configs", "dangling", "pipe", "folder"]
)
def test_links_and_special_files_are_refused_and_nothing_is_written(where, places, tmp_path):
    gpu = places[0]
    (history,), journal = gpu.glob("*.jsonl"), journal_of(gpu)
    path = {
        "history": history,
        "journal": journal,
        "architecture": journal.parent,
        "configs": gpu / "configs",
    }.get(where)
    if path:
        real = tmp_path / "elsewhere" / path.name
        real.parent.mkdir()
        path.rename(real)
        path.symlink_to(real)
    elif where == "dangling":
        (gpu / "x.jsonl").symlink_to(tmp_path / "nowhere")
    elif where == "pipe":
        os.mkfifo(gpu / "x.jsonl")
    else:
        (gpu / "x.jsonl").mkdir()
    status, output = command(places)
    assert status == 2 and ("is a symbolic link" in output) == (where not in ("pipe", "folder"))
    assert not places[1].exists() and not places[2].exists()


@pytest.mark.parametrize(
    "name", ["-x.jsonl", ".x.jsonl", "a b.jsonl", "é.jsonl", "a\nb.jsonl", "x" * 150 + ".jsonl"]
)
def test_a_history_file_has_a_plain_name(name, places):
    (source,) = places[0].glob("*.jsonl")
    source.rename(source.with_name(name))
    status, output = command(places)
    assert status == 2 and "is not the name of a history file" in output and not places[2].exists()


@pytest.mark.parametrize("target", ["history", "architecture", "file"])
def test_nothing_is_written_through_a_link_in_the_repository(target, places, tmp_path):
    gpu, history, configs = places
    outside = tmp_path / "outside"
    outside.mkdir()
    path = tile_tables.path_in(configs, H200, "3.6.0")
    if target == "history":
        history.mkdir()
        (history / next(gpu.glob("*.jsonl")).name).symlink_to(outside / "x.jsonl")
    elif target == "architecture":
        configs.mkdir()
        path.parent.symlink_to(outside, target_is_directory=True)
    else:
        path.parent.mkdir(parents=True)
        path.symlink_to(outside / "x.json")
    status, output = command(places)
    assert status == 2 and "leads out of" in output and not list(outside.iterdir())
    assert not list(history.glob("*")) or target == "history"


def test_a_shipped_file_of_a_hundred_thousand_brackets_is_named_and_unchanged(places):
    path = tile_tables.path_in(places[2], H200, "3.6.0")
    path.parent.mkdir(parents=True)
    path.write_text("[" * 100_000)
    status, output = command(places)
    assert status == 2 and "mend or remove it" in output and path.read_text() == "[" * 100_000


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 60))]
)
def test_no_journal_ends_in_a_traceback_or_leads_out(seed, places, tmp_path):
    """Parts of lines are replaced: shipped files can be read, and lie in their folder."""
    draw, journal = random.Random(seed), journal_of(places[0])
    all_lines = [json.loads(text) for text in journal.read_text().splitlines()]
    before = set(files(tmp_path))
    for _ in range(25):
        lines = list(all_lines)
        for at in [0] * (draw.random() < 0.5) + draw.choices(range(len(lines)), k=draw.choice((0, 1, 4))):
            lines[at] = mutated(lines[at], draw)
        journal.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
        assert command(places)[0] in (0, 2)
        written = set(files(tmp_path)) - before
        assert all(places[1] in path.parents or places[2] in path.parents for path in written)
        for path in places[2].rglob("*.json"):
            tile_tables.read(path)
        shutil.rmtree(places[2], ignore_errors=True)
