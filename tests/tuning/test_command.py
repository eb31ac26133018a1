"""`tritoncp autotune` on the command line: requests that need no GPU, messages, and the files it writes."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from click.testing import CliRunner

from tritoncp.analysis.compile_pool import Compilers
from tritoncp.cli import main
from tritoncp.ops import tile_tables
from tritoncp.planning.problem import Problem
from tritoncp.tuning import search, search_run
from tritoncp.tuning.targets import Target, candidates

REPORT = {"registers": 100, "spill_bytes": 0, "shared_bytes": 1, "tma": 0}
ONE = ["--shapes", "8x8,128,4096", "--mask", "causal", "--ops", "fwd"]


def invoke(*words):
    return CliRunner().invoke(main, ["autotune", *map(str, words)])


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """A home without a GPU, and a compiler that returns a fixed report."""
    tile_tables.forget()
    monkeypatch.setenv("TRITONCP_CONFIG_DIR", str(tmp_path / "configs"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(Compilers, "compile_jobs", lambda self, jobs: ((job, REPORT) for job in jobs))
    yield tmp_path / "configs"
    tile_tables.forget()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--preset", "llama9"], "pass one of llama3-8b"),
        (["--mask", "round"], "pass one of causal, full"),
        (["--ops", "sideways"], "pass one of fwd, bwd, fused, few, routes"),
        (["--ops", "few", "--shapes", "128x1,128,4096"], "64 query heads per KV head"),
        (["--score-mod", "hardcap"], "pass softcap"),
        (["--score-mod", "math:pi"], "float, not a score_mod"),
        (["--score-mod", "tests.tuning.test_run:random_score"], "cannot be translated"),
        (["--score-mod", "tests.tuning.test_run:kernel_score"], "pass a Python function"),
        (["--shapes", "8x8,64x64x64,128"], "128x128,192x128,8192"),
        (["--budget", "soon"], "15m"),
        (["--shapes", "32"], "32x8,128,16384"),
        (["--shapes", ""], "32x8,128,16384"),
        (["--shapes", "32x5,128,4096"], "divide"),
        (["--shapes", "8x8,512,64"], "256"),
        (["--shapes", f"{'9' * 30}x1,64,64"], "too many for a GPU"),
        (["--shapes", f"{'9' * 5000}x1,64,64"], "HEADSxKV_HEADS"),
    ],
)
def test_refusals_name_valid_values(words, said):
    done = invoke(*words)
    assert done.exit_code == 2 and said in done.output, "also on a machine without a GPU"


def test_without_a_gpu_the_error_says_so(home):
    done = invoke("--preset", "llama3-8b")
    assert done.exit_code == 1 and "torch finds no GPU" in done.output and not home.exists()


@pytest.mark.parametrize(("budget", "left_out"), [("1s", "all"), ("200s", "some"), ("100000s", "none")])
def test_candidates_without_time_are_counted(budget, left_out, monkeypatch, home, gpu, tmp_path):
    """With a clock that advances by a second at each look. There are two targets."""
    clock = iter(range(10**6))
    monkeypatch.setattr(search_run.time, "monotonic", lambda: 0)
    tuner = functools.partial(search.Tuner, now=lambda: next(clock))
    monkeypatch.setattr(search_run, "Tuner", tuner)
    words = [*ONE, "--mask", "full"]
    total = 2 * len(candidates(Target("forward", Problem("causal", 4096, 8, 8)), "sm_90"))
    done = invoke(*words, "--budget", budget, "--out", tmp_path / "out")
    match = re.search(r"the budget left out (\d+) of (\d+) candidates: pass a larger --budget", done.stderr)
    count, of = map(int, match.groups()) if match else (0, total)
    assert of == total
    assert {"all": count == total, "some": 0 < count < total, "none": count == 0}[left_out]


def test_ctrl_c_before_the_first_choice_says_that_the_table_is_empty(monkeypatch, gpu, tmp_path):
    def interrupt(self, jobs):
        yield jobs[0], REPORT
        raise KeyboardInterrupt

    monkeypatch.setattr(Compilers, "compile_jobs", interrupt)
    done = invoke(*ONE, "--out", tmp_path / "out")
    assert done.exit_code == 130 and done.stdout == ""
    assert "interrupted: nothing was chosen yet; the journal is" in done.stderr
    assert str(tmp_path / "out") in done.stderr and "pass --resume to continue" in done.stderr


def files_below(folder) -> list[str]:
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    )


def test_journals_are_written_where_out_says_and_nowhere_else(gpu, home, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert invoke(*ONE, "--out", tmp_path / "out").exit_code == 0
    version = tile_tables.installed_version("triton")
    names = [f"out/sm_90/nvidia-h200-triton-{version}.{kind}" for kind in ("json", "jsonl")]
    assert files_below(tmp_path) == names
    monkeypatch.setenv("TRITONCP_CONFIG_DIR", "-")
    done = invoke(*ONE)
    assert done.exit_code == 2 and "pass --out with a folder for the results" in done.output
    assert files_below(tmp_path) == names


def test_a_table_in_a_pipe_is_not_cut(gpu, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "30")
    words = ["--shapes", "128x128,192x128,8192", "--mask", "document", "--ops", "fwd"]
    done = invoke(*words, "--out", tmp_path / "out")
    (row,) = (line.split() for line in done.stdout.splitlines() if "192x128" in line)
    assert row[:2] == ["forward", "interval"] and row[-1] == "2.00"
