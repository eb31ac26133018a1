"""`tritoncp perf ingest`: each result is imported once, only if it can be trusted, and nothing leads out."""

import json
import multiprocessing
import os
import random
import shutil
import time

import pytest
from click.testing import CliRunner

from tests.perf.records.tuned_tiles import (
    DQ,
    FORWARD,
    H200,
    ROUTE,
    TRITON,
    edit,
    entry_of,
    files,
    shipped,
    tune,
)
from tests.perf.synthetic_history import mutated
from tritoncp.ops import tile_tables
from tritoncp.perf.cli import perf
from tritoncp.perf.records.history import append, read
from tritoncp.perf.records.ingest import ingest


def command(places) -> tuple[int, str]:
    """Run the command; return its status and output. It must not raise an exception."""
    gpu, history, configs = map(str, places)
    result = CliRunner().invoke(perf, ["ingest", gpu, "--history", history, "--configs", configs])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    return result.exit_code, result.output


def table_of(places):
    return tile_tables.path_in(places[0] / "configs", H200, TRITON)


def test_everything_is_imported_once(places):
    _, history, configs = places
    result = ingest(*places)
    assert (result.added, result.present, result.problems) == (3, 0, [])
    assert [point.case for point in read(history).points] == ["causal-16k-fwd", "causal-16k-bwd"]
    path = tile_tables.path_in(configs, H200, TRITON)
    assert result.shipped == {path: (2, 0)} and path.name == "nvidia-h200-triton-3.6.0.json"
    entry = shipped(configs)[FORWARD]
    assert entry["config"]["num_stages"] == 4 and entry["code"] == "abc" and entry["time"].startswith("2026")
    before = files(configs) | files(history)
    second = ingest(*places)
    assert (second.added, second.present, second.shipped) == (0, 3, {})
    assert files(configs) | files(history) == before


def test_the_shipped_files_are_where_calls_look(places, monkeypatch, tmp_path):
    tune(places[0], entry_of(ROUTE, 0.5))
    ingest(*places)
    monkeypatch.setattr(tile_tables, "SHIPPED", places[2])
    monkeypatch.setattr(tile_tables, "user_folder", lambda: None)
    monkeypatch.setattr(tile_tables, "installed_version", lambda name: TRITON)
    tile_tables.forget()
    rows = json.loads(tile_tables.table(H200, str(tmp_path / "none")))
    tile_tables.forget()
    assert [*FORWARD, shipped(places[2])[FORWARD]["config"]] in rows
    assert [*ROUTE, {"ROUTE": "gluon"}] in rows, "on that GPU with that Triton"


def test_newer_files_replace_older_ones_and_a_rule_that_has_caught_up_is_no_entry(places):
    gpu, history, configs = places
    newer = shutil.copytree(gpu, gpu.parent / "newer")
    tune(newer, entry_of(FORWARD, 0.5, num_stages=3), time="2026-01-03T00:00:00+00:00")
    edit(tile_tables.path_in(newer / "configs", H200, TRITON), lambda c: c["entries"].pop(1))
    ingest(newer, history, configs)
    assert ingest(*places).shipped == {next(configs.rglob("*.json")): (1, 0)}, (
        "dQ; the forward pass is out of date"
    )
    assert shipped(configs)[FORWARD]["config"]["num_stages"] == 3
    tune(newer, entry_of(FORWARD, 0.99), time="2026-01-04T01:00:00+01:00")
    assert list(ingest(newer, history, configs).shipped.values()) == [(0, 1)]
    assert [*shipped(configs)] == [DQ] and ingest(newer, history, configs).shipped == {}


def test_lines_that_another_file_of_the_history_holds_are_not_added(places):
    gpu, history, _ = places
    history.mkdir()
    (source,) = gpu.glob("*.jsonl")
    append(history / "by-hand.jsonl", dict(reversed(json.loads(source.read_text().splitlines()[0]).items())))
    result = ingest(*places)
    assert (result.added, result.present) == (2, 1) and len(read(history).points) == 2


def test_two_at_a_time_add_no_line_twice(places):
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=ingest, args=places) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    (path,) = places[1].glob("*.jsonl")
    assert len(path.read_text().splitlines()) == 3 and len(shipped(places[2])) == 2


def test_broken_lines_of_a_history_are_named_and_the_rest_imported(places):
    (source,) = places[0].glob("*.jsonl")
    lines = source.read_text().splitlines()
    broken = [lines[0][:40], json.dumps({"kind": "recipe"}), json.dumps(json.loads(lines[1]) | {"run": 7})]
    source.write_text("\n".join([*broken, *lines]) + "\n")
    status, output = command(places)
    assert status == 2 and "3 lines added" in output
    for line, why in enumerate(("not JSON", "lines of kind 'recipe'", "run is not text"), 1):
        assert f"{source}:{line}: " in output and why in output
    assert len(read(places[1]).points) == 2 and read(places[1]).problems == []


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (lambda c: c["entries"][0].pop("rule_ms"), 1),
        (lambda c: c["entries"][0].update(ms=-1), 1),
        (lambda c: c["entries"][0].update(ms=True), 1),
        (lambda c: c["entries"][0].update(ms=float("nan")), 1),
        (lambda c: c["entries"][0].update(kernel="odd"), 0),
        (lambda c: c["entries"][0]["config"].update(BLOCK_M=48), 0),
        (lambda c: c.pop("code"), 0),
        (lambda c: c.update(arch=[]), 0),
        (lambda c: c.update(time="now"), 0),
        (lambda c: c.update(time=5), 0),
        (lambda c: c.update(time="2999-01-01T00:00:00+00:00"), 0),
        (lambda c: c.update(time="2026-01-01"), 0),
    ],
)  # fmt: skip
def test_what_no_autotune_wrote_is_named_and_not_shipped(places, change, left):
    edit(table_of(places), change)
    status, output = command(places)
    assert status == 2 and str(table_of(places)) in output and "3 lines added" in output
    assert len(shipped(places[2])) == left


@pytest.mark.parametrize("text", ["[" * 100_000, "null", '{"entries": 5}', "\x00"])
def test_files_that_are_no_tables_are_named(places, text):
    table_of(places).write_text(text)
    assert command(places)[0] == 2 and shipped(places[2]) == {}


@pytest.mark.parametrize("field", ["arch", "triton"])
@pytest.mark.parametrize(
    "name", ["../../x", "/tmp/x", "..", "a/b", "sm_90/../../x", "sm_90\0", "x" * 300, "C:\\x"]
)
def test_names_that_lead_elsewhere_are_refused_and_nothing_is_written(field, name, places, tmp_path):
    edit(table_of(places), lambda content: content.update({field: name}))
    before = files(tmp_path)
    status, output = command(places)
    assert status == 2 and "no file is called after it" in output and files(tmp_path) == before


@pytest.mark.parametrize("where", ["history", "table", "configs", "dangling", "pipe", "folder"])
def test_links_and_special_files_are_refused_and_nothing_is_written(where, places, tmp_path):
    gpu = places[0]
    (history,) = gpu.glob("*.jsonl")
    path = {"history": history, "table": table_of(places), "configs": gpu / "configs"}.get(where)
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


@pytest.mark.parametrize("name", ["-x.jsonl", ".x.jsonl", "a b.jsonl", "a\nb.jsonl", "x" * 150 + ".jsonl"])
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
    path = tile_tables.path_in(configs, H200, TRITON)
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


@pytest.mark.parametrize("text", ["{", "[" * 100_000])
def test_a_shipped_file_that_cannot_be_read_is_named_and_unchanged(places, text):
    path = tile_tables.path_in(places[2], H200, TRITON)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    status, output = command(places)
    assert status == 2 and "mend or remove it" in output and path.read_text() == text


def test_the_entries_of_a_concurrent_writer_are_kept(places):
    """Another process holds the lock of the shipped file and writes a newer entry."""
    configs = places[2]
    ingest(*places)
    newer = shipped(configs)[FORWARD] | {"time": "2999-01-01"}
    tile_tables.write(configs, H200, [newer | {"time": "2000-01-01", "ms": 0.7}], {}, TRITON)
    fork = multiprocessing.get_context("fork")
    locked = fork.Event()

    def write_slowly() -> None:
        with tile_tables.locked(tile_tables.path_in(configs, H200, TRITON)):
            locked.set()
            time.sleep(1)
            tile_tables.write(configs, H200, [newer], {}, TRITON)

    writer = fork.Process(target=write_slowly)
    writer.start()
    assert locked.wait(60)
    assert ingest(*places).shipped == {}, "what is there is newer"
    writer.join()
    assert writer.exitcode == 0 and shipped(configs)[FORWARD] == newer


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(i, marks=pytest.mark.long) for i in range(3, 30))]
)
def test_no_folder_ends_in_a_traceback_or_leads_out(seed, places, tmp_path):
    """Parts of files are replaced: shipped files can be read, and lie in their folder."""
    draw, table = random.Random(seed), table_of(places)
    content = json.loads(table.read_text())
    before = set(files(tmp_path))
    for _ in range(25):
        table.write_text(json.dumps(mutated(content, draw)))
        assert command(places)[0] in (0, 2)
        written = set(files(tmp_path)) - before
        assert all(places[1] in path.parents or places[2] in path.parents for path in written)
        for path in places[2].rglob("*.json"):
            tile_tables.read(path)
        shutil.rmtree(places[2], ignore_errors=True)


def test_a_folder_of_something_else_is_an_error(tmp_path):
    result = CliRunner().invoke(perf, ["ingest", str(tmp_path)])
    assert result.exit_code == 2 and "no results of make gpu" in result.output
