"""History files: complete lines survive broken lines, full disks and concurrent writers."""

import json
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.perf.synthetic_history import ENV, H200, point
from tritoncp.perf import run
from tritoncp.perf.exit_codes import InputError
from tritoncp.perf.records.history import Journal, append, find_unfinished, read


def test_points_are_read_as_written(tmp_path):
    written = [point(), replace(point("other", 2.0), tags={"mask": "causal"}, goal={"flex": 1.2})]
    for written_point in written:
        append(tmp_path / "a.jsonl", written_point.as_line())
    append(tmp_path / "b.jsonl", {"kind": "resources", "kernel": "of an older history"})
    append(tmp_path / "b.jsonl", {"kind": "left out", "case": "c"})
    history = read(tmp_path)
    assert history.points == written == read(tmp_path / "a.jsonl").points
    assert history.problems == []
    with pytest.raises(FileNotFoundError, match=r"name a history file, or a folder of \*\.jsonl files"):
        read(tmp_path / "nowhere")


def test_files_of_pytest_benchmark_are_read_beside_lines(tmp_path):
    stats = {"median": 0.002, "q1": 0.0019, "q3": 0.0021, "data": [0.0019, 0.002, 0.0021]}
    machine = {"python_version": "3.11.7", "machine": "x86_64", "cpu": {"brand_raw": "A CPU"}}
    saved = {
        "machine_info": machine, "commit_info": {"id": "a" * 40, "dirty": True},
        "datetime": "2026-01-01T00:00:00+00:00", "benchmarks": [{"fullname": "t.py::f[1]", "stats": stats}],
    }  # fmt: skip
    (tmp_path / "0001_abc.json").write_text(json.dumps(saved))
    (tmp_path / "comparison.json").write_text("{}")
    append(tmp_path / "a.jsonl", point().as_line())
    history = read(tmp_path)
    assert [read_point.case for read_point in history.points] == ["t.py::f[1]", "c"] and not history.problems
    first = history.points[0]
    assert (first.ms, str(first.series), first.env["commit"]) == (2.0, "A CPU", "a" * 40 + "+")
    assert first.own["samples"] == pytest.approx([1.9, 2.0, 2.1])
    (problem,) = read(tmp_path / "comparison.json").problems
    assert "no file of pytest-benchmark: KeyError: 'commit_info'" in str(problem)


OWN = {"ms": 1.0}
BROKEN = [
    *((text, "not JSON") for text in (b'{"kind": "case", "run": "r"', b"\xff\xfe\x00", b"[" * 100_000)),
    *((text, 'no "kind"') for text in (b"[1, 2]", b'"case"')),
    (b'{"v": 2, "kind": "case"}', "version 2 of the format; this tritoncp reads version 1"),
    (b'{"v": 1, "kind": "case", "run": "r", "time": "t"}', "KeyError: 'case'"),
    *(
        (json.dumps(point().as_line() | harm).encode(), why)
        for harm, why in (
            ({"contenders": {"tritoncp": {"ms": -1.0}}}, "not positive"),
            ({"contenders": {"tritoncp": {"ms": float("nan")}}}, "NaN is no number"),
            ({"contenders": {"tritoncp": OWN | {"samples": [1.0, 0]}}}, "not positive"),
            ({"contenders": {"tritoncp": {"why": 5}}}, "neither ms nor why"),
            ({"series": {"gpu": "x"}}, "unexpected keyword"),
            ({"case": 7}, "case is no text"),
            ({"env": {"torch": float("inf")}}, "Infinity is no number"),
        )
    ),
]


@pytest.mark.parametrize("at", [0, 1, 3])
def test_broken_lines_are_named_and_spoil_no_other(at, tmp_path):
    valid_lines = [json.dumps(point(str(i)).as_line()).encode() for i in range(3)]
    lines = [*valid_lines[:at], *(text for text, _ in BROKEN), *valid_lines[at:]]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines) + b"\n\n")
    history = read(tmp_path)
    assert [valid_point.case for valid_point in history.points] == ["0", "1", "2"]
    assert [problem.line for problem in history.problems] == [at + 1 + i for i in range(len(BROKEN))]
    for problem, (_, why) in zip(history.problems, BROKEN):
        assert why in str(problem) and str(tmp_path / "a.jsonl") in str(problem)


@pytest.mark.parametrize("cut", [1, 20, -2, -1])
def test_a_writer_that_died_in_a_line_loses_only_that_line(cut, tmp_path):
    path = tmp_path / "a.jsonl"
    for i in range(2):
        append(path, point(str(i)).as_line())
    content = path.read_bytes()
    first = content.index(b"\n") + 1
    path.write_bytes(content[:first] + content[first:][:cut])
    append(path, point("after").as_line())
    history = read(path)
    complete = cut == -1  # all but the line's end was written
    assert [read_point.case for read_point in history.points] == ["0", *["1"] * complete, "after"]
    assert len(history.problems) == 1 - complete


def test_a_full_disk_is_reported_and_leaves_earlier_lines(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    append(path, point("0").as_line())
    content = path.read_bytes()
    write = os.write

    def half(file, text):
        if len(text) < 50:
            raise OSError(28, "No space left on device")
        return write(file, text[: len(text) // 2])

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(InputError, match=r"No space left on device.*--resume"):
        append(path, point("1").as_line())
    monkeypatch.undo()
    assert path.read_bytes() == content
    append(path, point("2").as_line())
    assert [read_point.case for read_point in read(path).points] == ["0", "2"]


def test_a_run_on_a_full_device_stops_with_one_clear_message():
    arguments = ["--device", "host", "--filter", "plan-*-64k", "--seconds", "0", "--out", "/dev/full"]
    result = CliRunner().invoke(run.main, arguments)
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert "/dev/full: No space left on device" in result.output and "--resume" in result.output


def _many(path: Path, name: str) -> None:
    for i in range(100):
        append(path, replace(point(f"{name}{i}"), tags={"mask": name * 3000}).as_line())


def test_two_writers_of_one_file_lose_nothing(tmp_path):
    path = tmp_path / "a.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_many, args=(path, name)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    history = read(path)
    assert history.problems == [] and len(history.points) == 200
    for name in "ab":
        own = [read_point.case for read_point in history.points if read_point.case.startswith(name)]
        assert own == [f"{name}{i}" for i in range(100)]


def test_a_run_is_resumed_only_on_the_same_code_and_device(tmp_path):
    env = ENV | {"sources": "abc"}
    journal = Journal(tmp_path / "a.jsonl", "mine", H200, env)
    journal.point("c", {"tritoncp": {"ms": 1.0}})
    run_to_resume = find_unfinished(tmp_path, H200, env | {"commit": "another, of the same sources"})
    assert run_to_resume == (tmp_path / "a.jsonl", journal.points)
    assert find_unfinished(tmp_path, H200, env | {"sources": "changed"}) is None
    assert find_unfinished(tmp_path, H200, env | {"torch": "2.14"}) is None
    assert find_unfinished(tmp_path, H200._replace(clocks="locked"), env) is None
    assert find_unfinished(tmp_path / "nowhere", H200, env) is None
