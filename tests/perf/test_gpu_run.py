"""`make gpu` runs its parts in order and in time, reports failures, and needs only documented packages."""

import contextlib
import datetime
import importlib.metadata
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.perf.synthetic_history import H200
from tritoncp.kernels.options import check_options
from tritoncp.ops import tile_tables
from tritoncp.perf import gpu_parts, gpu_summary
from tritoncp.perf.cli import perf
from tritoncp.perf.gpu_parts import PARTS, batches, timetable
from tritoncp.perf.records.history import Point, append, read, variant
from tritoncp.perf.suite.baselines import FLEX
from tritoncp.perf.suite.cases import select

ROOT = Path(__file__).parents[2]
NAMES = [part.name for part in PARTS]
WRONG = {"schedule": "ring", "mask": "causal", "dtype": "bfloat16", "pass": "forward", "tensor": "out"}
WRONG |= {"error": 0.5, "allowed": 0.01, "ms": 1.0, "rank": 1, "right": False}
CHECK = {"facts": {"ptxas": "13.1"}, "cases": [WRONG | {"right": True}], "seconds": 1.0, "right": True}
# A stand-in for a Python with torch and a GPU: logs the commands that it gets, and fails on request.
STAND_IN = """#!/bin/sh
case "$*" in
    *sys.executable*) echo "$0"; exit ;;
    *is_available*) echo "NVIDIA H200"; exit $NO_GPU ;;
    *gpu_run*) exec "$REAL" "$@" ;;
    *collect-only*) for test in $TESTS; do echo "tests/gpu/test_$test.py::test_x[a rule]"; done ;;
esac
echo "$*" >> "$LOG"; echo "said $*" >&2
case "$*" in "-m tritoncp check --json"*) echo "$CHECK" ;; esac
case "$*" in $HANG) trap '' INT; setsid sleep 300 & echo $! > "$LOG.pid"; sleep 300 ;; $FAIL) exit 1 ;; esac
"""
# Runs the real commands without a GPU: collects tests, measures tiny cases on the CPU, lists kernels.
REAL = """#!/bin/sh
export PYTHONPATH="$SITE:$PYTHONPATH" TRITON_INTERPRET=0
case "$*" in
    *sys.executable*) echo "$0"; exit ;;
    *is_available*) echo "NVIDIA H200"; exit ;;
    *tritoncp\\ check*) echo "$CHECK"; exit ;;
    *collect-only*) ;;
    *"-m pytest"*test_smoke*) exit ;;
    *"-m pytest"*) set -- "$@" --collect-only -q ;;
    *perf.run*cudnn*whole*)
        export TRITON_INTERPRET=1
        set -- "$@" --device cpu --tier smoke --only causal-1k-fwd --seconds 0.01 ;;
    *perf.run*) exit ;;
    *autotune*) set -- "$@" --target sm_90 --dry-run ;;
esac
exec "$BARE" -S "$@"
"""


def stand_in(folder: Path, script: str = STAND_IN) -> Path:
    python = folder / "python"
    python.write_text(script)
    python.chmod(0o755)
    return python


def environment(folder: Path, **more: str) -> dict[str, str]:
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    tools = folder / "tools"
    tools.mkdir()
    (tools / "compute-sanitizer").write_text('#!/bin/sh\nshift 4; exec "$@"\n')
    (tools / "compute-sanitizer").chmod(0o755)
    variables = {"LOG": str(folder / "log"), "REAL": sys.executable, "CHECK": json.dumps(CHECK)}
    variables |= {"TESTS": "worlds gluon other answers", "FAIL": "-", "HANG": "-", "NO_GPU": "0"}
    return outside | variables | {"PATH": f"{tools}{os.pathsep}{outside['PATH']}"} | more


def make_gpu(folder: Path, script: str, *words: str, **more: str) -> tuple[int, str]:
    python = stand_in(folder, script)
    command = ["make", "gpu", f"PYTHON={python}", f"OUT={folder / 'out'}", *words]
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(folder, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
    )
    return result.returncode, result.stdout


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "out/summary.json").read_text())


@pytest.mark.parametrize(
    ("fail", "wrong"),
    [
        ("-", []),
        pytest.param("*check*", ["check"], marks=pytest.mark.long),
        ("*perf.run*", ["routes", "tiles", "flex"]),
        pytest.param("*test_gluon*", ["tests"], marks=pytest.mark.long),
        ("*", NAMES),
    ],
)
def test_all_parts_run_in_order_and_the_exit_code_reports_failures(tmp_path, fail, wrong):
    status, output = make_gpu(tmp_path, STAND_IN, "GPU_RUN=--jobs 2", FAIL=fail)
    commands = (tmp_path / "log").read_text().splitlines()
    own = ["tritoncp check --json", "--warm", "--contenders whole", "fwd_maxnreg", "flex max-autotune"]
    own += ["test_smoke.py", "--collect-only", "::test_x", "tritoncp autotune --worst", "test_smoke.py"]
    at = 0
    for words in own:
        at = next(i for i in range(at, len(commands)) if words in commands[i]) + 1
    assert at == len(commands), "the sanitizer runs last"
    assert all(f"said {words}" in output for words in commands)
    for part, words in (("check", commands[0]), ("autotune", commands[-2]), ("sanitizer", commands[-1])):
        assert f"said {words}\n" in (tmp_path / f"out/{part}.log").read_text()
    summary = summary_of(tmp_path)
    assert [part["part"] for part in summary["parts"]] == NAMES and summary["device"] == "NVIDIA H200"
    assert [part["part"] for part in summary["parts"] if part["outcome"] == "failed"] == wrong
    assert bool(status) == bool(wrong) and (f"make gpu: failed: {' '.join(wrong)}\n" in output) == bool(wrong)


def test_gpu_tests_run_in_order_of_importance_and_hanging_ones_last(tmp_path):
    make_gpu(tmp_path, STAND_IN, "GPU_RUN=--jobs 1 --only tests", "ARGS=-k 'a rule'")
    *_, collected, first, last = (tmp_path / "log").read_text().splitlines()
    assert collected.endswith("tests/gpu -k a rule")
    assert re.findall(r"test_(\w+)\.py", first) == ["answers", "worlds", "other"]
    assert re.findall(r"test_(\w+)\.py", last) == ["gluon"]
    names = [f"tests/gpu/test_{name}.py::{i}" for name in ("gluon", "specialised", "x") for i in range(25)]
    shared = batches(names)
    assert sorted(itertools.chain(*shared)) == sorted(names) and max(map(len, shared)) == 10
    assert ["".join({re.search("test_(.)", name)[1] for name in batch}) for batch in shared] == [
        *"xxx", *"sss", *"ggg"
    ]  # fmt: skip


def test_a_collection_without_a_test_is_a_failure(tmp_path):
    status, output = make_gpu(tmp_path, STAND_IN, "GPU_RUN=--only tests", TESTS="")
    assert status and "no test was collected" in output and "make gpu: failed: tests\n" in output


def test_wrong_cases_are_named_at_the_end_and_do_not_stop_the_run(tmp_path):
    report = CHECK | {"cases": [*CHECK["cases"], WRONG], "right": False}
    words = "GPU_RUN=--only check --only tiles"
    status, output = make_gpu(tmp_path, STAND_IN, words, CHECK=json.dumps(report), FAIL="*check*")
    assert status and "ring causal bfloat16 forward: out is off by 0.5, allowed is 0.01 (rank 1)" in output
    assert "fwd_maxnreg" in (tmp_path / "log").read_text()
    assert summary_of(tmp_path)["check"]["wrong"] == [WRONG]
    assert summary_of(tmp_path)["check"]["facts"] == CHECK["facts"]


def test_cases_without_an_answer_differ_from_wrong_ones(tmp_path):
    bare = {"tensor": None, "error": None, "allowed": None, "rank": None}
    broken = WRONG | bare | {"why": "RuntimeError: no room"}
    left_out = WRONG | bare | {"why": "not run: the budget of 44 s is over (--budget)"}
    report = CHECK | {"cases": [*CHECK["cases"], broken, left_out, left_out], "right": False}
    words = "GPU_RUN=--only check"
    _, output = make_gpu(tmp_path, STAND_IN, words, CHECK=json.dumps(report), FAIL="*check*")
    assert "check: 1 of 4 cases wrong, 2 not run" in output
    assert "ring causal bfloat16 forward: RuntimeError: no room" in output and "None" not in output
    assert summary_of(tmp_path)["check"]["wrong"] == [broken]


def test_kernels_run_on_the_gpu_even_if_the_shell_sets_the_interpreter(tmp_path):
    script = STAND_IN.replace('echo "$*" >>', 'echo "interpret=$TRITON_INTERPRET $*" >>')
    make_gpu(tmp_path, script, "GPU_RUN=--only check --only tiles", TRITON_INTERPRET="1")
    assert (tmp_path / "log").read_text().count("interpret=0 ") == 2


def test_without_a_gpu_nothing_runs(tmp_path):
    status, output = make_gpu(tmp_path, STAND_IN, NO_GPU="1")
    assert status and "torch finds no GPU here" in output and not (tmp_path / "log").exists()


def test_a_missing_sanitizer_is_reported_but_is_not_a_failure(tmp_path):
    words = [sys.executable, "-m", "tritoncp.perf.gpu_run", "--only", "sanitizer"]
    words += ["--python", str(stand_in(tmp_path)), "--out", str(tmp_path / "out")]
    env = environment(tmp_path, PATH=str(tmp_path))
    result = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0 and "compute-sanitizer is not on PATH" in result.stdout


# -- time ----------------------------------------------------------------------------------------------------


def test_all_parts_together_take_less_than_nine_minutes():
    ends = [end for _, _, end in timetable(PARTS, gpu_parts.BUDGET)]
    begins = [begin for _, begin, _ in timetable(PARTS, gpu_parts.BUDGET)]
    assert gpu_parts.BUDGET == 540 and begins == [gpu_parts.START, *ends[:-1]]
    assert ends[-1] == gpu_parts.START + sum(part.seconds for part in PARTS) <= 535
    assert (PARTS[0].name, PARTS[0].seconds) == ("check", 60) and PARTS[1].seconds <= 95
    assert all(part.seconds > 2 * gpu_parts.GRACE for part in PARTS)


def test_a_dry_run_prints_the_order_and_the_time_table_and_runs_nothing(tmp_path):
    status, output = make_gpu(tmp_path, STAND_IN, "GPU_RUN=--dry-run --jobs 7")
    assert status == 0 and not (tmp_path / "log").exists() and not (tmp_path / "out").exists()
    rows = re.findall(r"^(\w+) +(\d+) +(\d):(\d\d)  \w", output, re.MULTILINE)
    assert [row[0] for row in rows] == NAMES
    clock = [60 * int(minutes) + int(seconds) for _, _, minutes, seconds in rows]
    assert clock == [begin for _, begin, _ in timetable(PARTS, 540)]
    assert [int(row[1]) for row in rows] == [part.seconds for part in PARTS]
    assert re.search(r"tritoncp check --json --budget 4\d\n", output) and "7 at a time" in output
    budgets = [int(n) for line in output.splitlines() for n in re.findall(r"--budget (\d+)", line)]
    flex = [int(n) for n in re.findall(r"--budget (\d+).* flex", output)]
    assert max(n for n in budgets if n not in flex) <= 105, "it is to end by itself"
    assert min(flex) > 105, "the tuned baseline starts, however little time is left"


@pytest.fixture
def strays(tmp_path):
    """End the process that a hanging command has started in another session."""
    yield
    with contextlib.suppress(OSError, ValueError):
        os.kill(int((tmp_path / "log.pid").read_text()), signal.SIGKILL)


@pytest.mark.usefixtures("strays")
def test_a_hanging_command_is_killed_and_the_next_part_runs(tmp_path):
    """It may ignore SIGINT, or a process outside its group may keep its output open."""
    words = "GPU_RUN=--budget 12 --jobs 1 --only check --only tests"
    status, output = make_gpu(tmp_path, STAND_IN, words, HANG="*check*")
    assert status and "make gpu: failed: check\n" in output
    check, tests = summary_of(tmp_path)["parts"]
    assert check["why"] == "out of time" and tests["outcome"] == "done"
    assert "test_smoke.py" in (tmp_path / "log").read_text()


@pytest.mark.usefixtures("strays")
def test_commands_without_time_are_counted(tmp_path):
    words = "GPU_RUN=--budget 6 --jobs 1 --only tests"
    status, _ = make_gpu(tmp_path, STAND_IN, words, HANG="*::*", TESTS="answers gluon")
    assert status and summary_of(tmp_path)["parts"][0]["why"] == "out of time, 1 commands not started"


@pytest.mark.usefixtures("strays")
def test_an_interrupt_ends_the_commands_and_keeps_the_summary(tmp_path):
    words = [sys.executable, "-m", "tritoncp.perf.gpu_run", "--python", str(stand_in(tmp_path))]
    env = environment(tmp_path, HANG="*check*")
    process = subprocess.Popen([*words, "--out", str(tmp_path / "out")], cwd=ROOT, env=env)
    pid = tmp_path / "log.pid"
    while not (pid.exists() and pid.read_text().strip()):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=100) == 130
    outcomes = [part["why"] for part in summary_of(tmp_path)["parts"]]
    assert outcomes == ["interrupted", *["not run: interrupted"] * (len(PARTS) - 1)]


# -- the cases -----------------------------------------------------------------------------------------------


def commands_of(name: str) -> list[str]:
    (part,) = (part for part in PARTS if part.name == name)
    return [command for step in part.steps for command in step.commands]


def options_of(command: str, option: str) -> list[str]:
    words = gpu_parts.fill(command, dict.fromkeys(("python", "out", "jobs", "seconds", "arguments"), "x"))
    return [value for name, value in itertools.pairwise(words) if name == option]


def test_the_commands_name_cases_options_and_contenders_that_exist():
    names = [case.name for case in select("full")]
    races = commands_of("routes")[-1], commands_of("tiles")[-1]
    options_list = [json.loads(text) for command in races for text in options_of(command, "--try")]
    for options in options_list:
        check_options(options)
    contenders = {"flash", "cudnn", "whole", "tritoncp*", "tritoncp", *FLEX, *map(variant, options_list)}
    for command in (*commands_of("routes"), *commands_of("tiles"), *commands_of("flex")):
        assert set(options_of(command, "--contenders")) <= contenders
        for pattern in options_of(command, "--only"):
            assert select("full", pattern), pattern
    measured = [case.name for case in select("full", options_of(races[0], "--only"))]
    assert measured[:2] == ["causal-16k-fwd", "causal-16k-bwd"] and measured[-1] == "causal-s8-ring-32k-fwd"
    for required in ("window-8k-bwd", "causal-h64x8-d64x64-16k-fwd", "causal-s2-ring-16k-bwd"):
        assert required in measured and required in names
    assert not any("flex" in name for name in options_of(races[0], "--contenders"))
    assert {"flex", "flex max-autotune", "flex flash"} <= set(
        options_of(commands_of("flex")[0], "--contenders")
    )


def test_make_gpu_needs_only_the_documented_packages(tmp_path):
    """The environment has torch, Triton, pytest and the command line's two packages, with their requirements,
    and NumPy, which only interpreted kernels need: no hypothesis, no xdist, no platformdirs, no plotting. The
    results, with a line of a GPU beside them, become history, the default route and figures of the README."""
    packages = "torch", "triton", "pytest", "pytest-benchmark", "click", "rich", "numpy"
    installed = linked(tmp_path / "site", packages)
    assert not installed & {"hypothesis", "platformdirs", "execnet", "bokeh", "PIL", "einops"}
    site = str(tmp_path / "site")
    status, output = make_gpu(tmp_path, REAL, "ARGS=-k test_masks", BARE=sys.executable, SITE=site)
    assert status == 0, output
    out = tmp_path / "out"
    assert re.search(r"\b[1-9]\d* tests collected", (out / "tests.log").read_text())
    (lines,) = out.glob("*.jsonl")
    (point,) = read(lines).points
    assert point.ms > 0 and point.contenders["tritoncp ROUTE=loops"]["ms"] > 0
    assert "why" in point.contenders["tritoncp ROUTE=gluon"], "it needs a GPU"
    assert "forward causal 32x8 d128 16384 bfloat16: " in (out / "autotune.log").read_text()
    rows = {(row["case"], row["contender"]): row for row in summary_of(tmp_path)["figures"]}
    assert rows[point.case, "tritoncp"]["ms"] == point.ms

    took = {"tritoncp": {"ms": 5.0, "tflops": 440.0}, variant({"ROUTE": "loops"}): {"ms": 5.0}}
    took |= {variant({"ROUTE": "gluon"}): {"ms": 4.0}, "flash": {"ms": 6.0}}
    env = {"arch": "sm_90", "triton": "3.6.0", "sources": "abc", "cuda": "13.0"}
    gpu = Point("r", "2026-02-03T00:00:00+00:00", "causal-16k-fwd", H200, env, took)
    append(out / "2026-02-03-nvidia-h200.jsonl", gpu.as_line())
    page = shutil.copy(ROOT / "README.md", tmp_path / "page.md")
    places = "--history", str(tmp_path / "history"), "--configs", str(tmp_path / "configs"), "--readme", page
    for added in (2, 0):
        result = CliRunner().invoke(perf, ["ingest", str(out), *places])
        assert result.exit_code == 0 and f"{added} lines added" in result.output, result.output
    path = tile_tables.path_in(tmp_path / "configs", tile_tables.Device("sm_90", "NVIDIA H200"), "3.6.0")
    (entry,) = tile_tables.read(path)
    assert (entry["kernel"], entry["mask"], entry["config"]) == ("route", "causal", {"ROUTE": "gluon"})
    assert "| causal-16k-fwd | 5 | 440 | – | 1.20 | – |" in Path(page).read_text()


def linked(folder: Path, names: tuple[str, ...]) -> set[str]:
    """Make a folder of links to the packages that some distributions need; return their top-level names."""
    folder.mkdir()
    todo, visited = list(names), set()
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform
        if name not in visited:
            visited.add(name)
            todo += [
                re.match(r"[\w.-]+", line)[0]
                for line in distribution.requires or ()
                if "extra ==" not in line
            ]
            for top in {path.parts[0] for path in distribution.files or ()} - {"..", "__pycache__"}:
                if not (folder / top).exists():  # several distributions share a top-level name
                    (folder / top).symlink_to(distribution.locate_file(top))
    return {path.name for path in folder.iterdir()}


def test_the_summary_names_the_worst_cases_and_those_without_time(tmp_path):
    """Only lines since the run began count, and no case of several ranks."""
    began = datetime.datetime(2026, 2, 3, tzinfo=datetime.UTC)

    def line(case, flash, day=3, **parts):
        took = {"tritoncp": {"ms": 2.0, "tflops": 400.0, "rank_ms": 1.0}, "flash": {"ms": flash}}
        took["tritoncp FUSED_BACKWARD=True"] = {"why": "wrong: relative error"}
        return Point("r", f"2026-02-0{day}T00:00:00+00:00", case, H200, {"ptxas": "13.1"}, took, **parts)

    path = tmp_path / "2026-02-03-nvidia-h200.jsonl"
    for point in (
        line("causal-16k-fwd", 0.1, day=1, goal={"flash": 1.0}),
        line("causal-16k-fwd", 3.0, goal={"flash": 1.0}),
        line("full-16k-fwd", 1.8, goal={"flash": 1.0}),
        line("causal-s8-ring-32k-fwd", 0.1, tags={"ranks": "8 in one, ring"}),
    ):
        append(path, point.as_line())
    for case in ("full-16k-fwd", "window-8k-bwd"):
        append(path, {"kind": "left out", "case": case, "why": "the time budget is used up"})
    parts = [{"part": "routes", "outcome": "done", "seconds": 1.0, "why": ""}]
    summary = gpu_summary.collect(tmp_path, "NVIDIA H200", began, parts)
    assert [row["case"] for row in summary["worst"]] == ["full-16k-fwd", "causal-16k-fwd"]
    assert summary["left_out"] == ["window-8k-bwd"] and summary["environment"] == {"ptxas": "13.1"}
    assert len(summary["figures"]) == 9 and not summary["check"]["right"]
    text = "\n".join(gpu_summary.lines(summary))
    for words in ("full-16k-fwd 0.90, causal-16k-fwd 1.50", "no time for: window-8k-bwd", "1 ms a rank",
                  "full-16k-fwd: tritoncp FUSED_BACKWARD=True: wrong"):  # fmt: skip
        assert words in text
