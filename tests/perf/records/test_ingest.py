"""`tritoncp perf ingest`: each result is imported once, and only if it can be trusted."""

import json
import multiprocessing
import shutil
import time
from dataclasses import replace

import pytest
from click.testing import CliRunner

from tests.perf.autotune_results import (
    H200,
    RULES,
    SCORED,
    TARGET,
    best_of,
    change_best,
    change_lines,
    cost,
    edited,
    files,
    journal_of,
    shipped,
    tune,
)
from tests.tuning.stand_ins import Formula
from tritoncp.ops import tile_tables
from tritoncp.perf.cli import perf
from tritoncp.perf.records.history import append, read
from tritoncp.perf.records.ingest import ingest


def test_everything_is_taken_over_once(places):
    _, history, configs = places
    result = ingest(*places)
    assert (result.added, result.present, result.problems) == (3, 0, [])
    assert [point.case for point in read(history).points] == ["causal-16k-fwd", "causal-16k-bwd"]
    path = tile_tables.path_in(configs, H200, "3.6.0")
    assert result.shipped == {path: (2, 0)} and path.name == "nvidia-h200-triton-3.6.0.json"
    entry = shipped(configs)["forward", "bfloat16", 128, 128, "causal", False]
    assert entry["config"] == vars(best_of(TARGET)) and entry["code"] == "abc"
    assert entry["rule_ms"] / entry["ms"] == pytest.approx(1.25, rel=0.01)
    assert shipped(configs)["dq", "bfloat16", 192, 128, "causal", True]["config"] == vars(best_of(SCORED))
    before = files(configs) | files(history)
    second = ingest(*places)
    assert (second.added, second.present, second.shipped) == (0, 3, {})
    assert files(configs) | files(history) == before


def test_the_shipped_files_are_where_calls_look(places, monkeypatch, tmp_path):
    configs = places[2]
    ingest(*places)
    monkeypatch.setattr(tile_tables, "SHIPPED", configs)
    monkeypatch.setattr(tile_tables, "user_folder", lambda: None)
    tile_tables.forget()
    rows = json.loads(tile_tables.table(H200, str(tmp_path / "none")))
    tile_tables.forget()
    assert ["forward", "bfloat16", 128, 128, "causal", False, vars(best_of(TARGET))] in rows


def test_a_route_that_won_is_shipped_for_the_calls_that_it_was_measured_with(places):
    gpu, _, configs = places
    route = replace(TARGET, kernel="route")
    loops = lambda config: cost(getattr(config, "tiles", config))  # noqa: E731
    wins = lambda config: 0.5 if getattr(config, "ROUTE", "") == "gluon" else loops(config)  # noqa: E731
    chosen = tune(gpu, Formula(wins), [TARGET, route])
    assert chosen[route].config.ROUTE == "gluon" and ingest(*places).problems == []
    entry = shipped(configs)["route", "bfloat16", 128, 128, "causal", False]
    assert entry["config"]["ROUTE"] == "gluon" and entry["rule_ms"] / entry["ms"] == pytest.approx(
        1.6, rel=0.02
    )
    tune(gpu, Formula(loops), [TARGET, route])
    ((_, dropped),) = ingest(*places).shipped.values()
    assert dropped == 1 and ("route", "bfloat16", 128, 128, "causal", False) not in shipped(configs)
    edited(
        journal_of(gpu),
        lambda line: line | {"rule": {}} if line.get("entry", {}).get("kernel") == "route" else line,
    )
    assert any("KeyError: 'ROUTE'" in str(problem) for problem in ingest(*places).problems)


def test_lines_that_another_file_of_the_history_holds_are_not_added(places):
    gpu, history, _ = places
    history.mkdir()
    (source,) = gpu.glob("*.jsonl")
    lines = source.read_text().splitlines()
    append(history / "by-hand.jsonl", dict(reversed(json.loads(lines[0]).items())))
    result = ingest(*places)
    assert (result.added, result.present) == (2, 1) and len(read(history).points) == 2


def _ingest(places):
    ingest(*places)


def test_two_at_a_time_add_no_line_twice(places):
    writers = [multiprocessing.get_context("fork").Process(target=_ingest, args=(places,)) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    (path,) = places[1].glob("*.jsonl")
    assert len(path.read_text().splitlines()) == 3 and len(shipped(places[2])) == 2


def test_broken_lines_of_a_history_are_named_and_the_rest_imported(places):
    gpu, history, _ = places
    (source,) = gpu.glob("*.jsonl")
    all_lines = source.read_text().splitlines()
    broken = [
        all_lines[0][:40],
        json.dumps({"kind": "recipe"}),
        json.dumps(json.loads(all_lines[1]) | {"run": 7}),
    ]
    source.write_text("\n".join([*broken, *all_lines]) + "\n")
    words = ["ingest", str(gpu), "--history", str(history), "--configs", str(places[2])]
    result = CliRunner().invoke(perf, words)
    assert result.exit_code == 2 and "3 lines added" in result.output
    for line, why in enumerate(("not JSON", "lines of kind 'recipe'", "run is not text"), 1):
        assert f"{source}:{line}: " in result.output and why in result.output
    assert len(read(history).points) == 2 and read(history).problems == []


ODD = {"kernel": "odd", "dtype": "float16", "head_dim": 64, "mask": "full"}


@pytest.mark.parametrize(
    ("change", "message", "shipped_too"),
    [
        (change_lines("time", {"turn": "x"}), "not a line", False),
        (change_lines("check", None), "no line says that its answer", False),
        (change_lines("target", None), "describes this target is missing", False),
        (change_lines("target", {"entry": ODD}), "'odd'", False),
        (change_lines("begin", {"about": {}}), "belong to a run whose beginning cannot be read", False),
        (change_best("check", {"wrong": "out is off"}), "", False),
        (change_best("time", {"ms": -1}), "no positive number", False),
        (lambda line: None if line.get("turn", 0) > 8 else line, "", True),
        (lambda line: json.dumps(line)[:-20] + "\n" if line["stage"] == "steps" else line, "not a", True),
    ],
    ids=["turn", "unchecked", "nameless", "odd", "headless", "wrong", "negative", "killed", "torn"],
)
def test_only_right_and_faster_configs_are_shipped(places, change, message, shipped_too):
    gpu, _, configs = places
    edited(journal_of(gpu), change)
    result = ingest(*places)
    assert result.added == 3, "the history is another matter"
    assert bool(result.problems) == bool(message) and all(
        str(journal_of(gpu)) in str(x) for x in result.problems
    )
    assert any(message in str(problem) for problem in result.problems) or not message
    entry = shipped(configs).get(("forward", "bfloat16", 128, 128, "causal", False))
    assert (entry and entry["config"]) == (vars(best_of(TARGET)) if shipped_too else None)


def test_a_config_that_nothing_can_be_compiled_with_is_not_shipped(places):
    odd = vars(best_of(TARGET)) | {"BLOCK_M": 48}

    def change(line):
        return line | {"config": odd} if line.get("config") == vars(best_of(TARGET)) else line

    edited(journal_of(places[0]), change)
    result = ingest(*places)
    assert "BLOCK_M=48" in str(result.problems[0]) and len(shipped(places[2])) == 1


def test_newer_runs_replace_older_ones_and_a_rule_that_has_caught_up_is_no_entry(places, monkeypatch):
    gpu, history, configs = places
    older, newer = (shutil.copytree(gpu, gpu.parent / name) for name in ("older", "newer"))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 100)
    third = replace(RULES[TARGET], num_stages=3)
    tune(newer, Formula(lambda config: 0.5 if config == third else 1.0), [TARGET])
    ingest(newer, history, configs)
    assert ingest(older, history, configs).shipped == {}, "what it knows is out of date"
    forward = "forward", "bfloat16", 128, 128, "causal", False
    assert shipped(configs)[forward]["config"] == vars(third) and len(shipped(configs)) == 2
    monkeypatch.setattr(time, "time", lambda: now + 200)
    tune(gpu, Formula(lambda config: 1.0), [TARGET])
    assert list(ingest(gpu, history, configs).shipped.values()) == [(0, 1)]
    assert forward not in shipped(configs) and ingest(gpu, history, configs).shipped == {}


def test_choices_consider_the_entries_of_a_concurrent_writer(places):
    """Another process holds the lock of the shipped file and writes a newer entry."""
    configs = places[2]
    ingest(*places)
    (entry,) = (e for e in shipped(configs).values() if e["kernel"] == "forward")
    newer = entry | {"time": "2999-01-01", "config": entry["config"] | {"num_stages": 3}}
    stale = entry | {"time": "2000-01-01", "config": entry["config"] | {"num_stages": 1}}
    tile_tables.write(configs, H200, [stale], {}, "3.6.0")
    fork = multiprocessing.get_context("fork")
    locked = fork.Event()

    def write_slowly() -> None:
        with tile_tables.locked(tile_tables.path_in(configs, H200, "3.6.0")):
            locked.set()
            time.sleep(1)
            tile_tables.write(configs, H200, [newer], {}, "3.6.0")

    writer = fork.Process(target=write_slowly)
    writer.start()
    assert locked.wait(60)
    assert ingest(*places).shipped == {}, "what is there is newer"
    writer.join()
    assert writer.exitcode == 0 and newer in shipped(configs).values()


def test_a_shipped_file_that_cannot_be_read_is_not_replaced(places):
    path = tile_tables.path_in(places[2], H200, "3.6.0")
    path.parent.mkdir(parents=True)
    path.write_text("{")
    result = ingest(*places)
    assert path.read_text() == "{" and "mend or remove it" in str(result.problems[0]) and result.added == 3


def test_a_folder_of_something_else_is_an_error(tmp_path):
    result = CliRunner().invoke(perf, ["ingest", str(tmp_path)])
    assert result.exit_code == 2 and "no results of make gpu" in result.output
