"""`tritoncp perf ingest`: each result is imported once, and only if it can be trusted."""

import json
import multiprocessing
import os
import random
import shutil
import time
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from tests.perf.synthetic_history import mutated
from tests.tuning.stand_ins import Compiler, Formula
from tritoncp.kernels.tile_rules import default
from tritoncp.ops import tile_tables
from tritoncp.perf.cli import perf
from tritoncp.perf.records.history import Journal as History
from tritoncp.perf.records.history import Series, append, read
from tritoncp.perf.records.ingest import ingest
from tritoncp.tuning.journal import Journal
from tritoncp.tuning.search import Tuner
from tritoncp.tuning.targets import Target

H200 = tile_tables.Device("sm_90", "NVIDIA H200")
TARGET = Target("forward", "causal", 32, 8, 128, 4096)
SCORED = Target("dq", "causal", 128, 128, 192, 4096, v_head_dim=128, score="softcap")
RULES = {t: default(t.kernel, "sm_90", max(t.head_dim, t.v_dim), torch.bfloat16) for t in (TARGET, SCORED)}
ABOUT = {"device": H200.name, "arch": H200.arch, "triton": "3.6.0", "code": "abc"}


def best_of(target):
    return replace(RULES[target], num_stages=4)


def cost(config):
    if config in map(best_of, RULES):
        return 0.8
    return 1.0 if config in RULES.values() else 1.5 + config.BLOCK_N / 1e3


@pytest.fixture
def places(tmp_path):
    """A results folder of make gpu, a history, and a folder of shipped tile shapes."""
    gpu = tmp_path / "gpu"
    history = History(gpu / "2026-01-01-nvidia-h200.jsonl", "r", Series(H200.name), {"torch": "2.11"})
    gpu.mkdir()
    for case in ("causal-16k-fwd", "causal-16k-bwd"):
        history.point(case, {"tritoncp": {"ms": 1.5}, "flex": {"ms": 2.0}})
    history.write({"kind": "left out", "case": "full-16k-fwd", "why": "the time budget is used up"})
    tune(gpu)
    return gpu, tmp_path / "history", tmp_path / "configs"


def journal_of(gpu):
    return tile_tables.path_in(gpu / "configs", H200, "3.6.0").with_suffix(".jsonl")


def tune(gpu, bench=None, targets=(TARGET, SCORED), **facts):
    journal = Journal(journal_of(gpu), ABOUT | facts, resume=False)
    tuner = Tuner("sm_90", journal, Compiler(), 1e9, now=lambda: 0.0)
    chosen = tuner.run(targets, bench or Formula(cost))
    journal.close()
    return chosen


def shipped(configs, device=H200):
    tile_tables.forget()
    path = tile_tables.path_in(configs, device, "3.6.0")
    return (
        {tile_tables.entry_key(entry): entry for entry in tile_tables.entries_of(path)}
        if path.exists()
        else {}
    )


def edited(path, change):
    """Rewrite a file by ``change``, which maps the JSON of a line to another line, or None to drop it."""
    lines = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text(
        "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines if line)
    )


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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


def change_lines(stage, change):
    """Return a change of the lines of a stage: new values of fields, or None to drop the lines."""
    return lambda line: line if line["stage"] != stage else None if change is None else line | change


def change_best(stage, result):
    """Return a change of the results of the winning config."""

    def change(line):
        is_best = line["stage"] == stage and line["config"] == vars(best_of(TARGET))
        return line | {"found": result} if is_best else line

    return change


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
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(4, 60))]
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
