"""`tritoncp autotune` on the command line: messages, and the files it writes."""

from __future__ import annotations

import functools
import re

import pytest

from tests.tuning.stand_ins import invoke
from tritoncp.analysis.compile_pool import Compilers
from tritoncp.measured_tiles import tile_tables
from tritoncp.perf.problem import Problem
from tritoncp.tuning import search
from tritoncp.tuning.targets import Target, candidates

ONE = ["--shapes", "8x8,128,4096", "--mask", "causal", "--ops", "fwd"]
pytestmark = pytest.mark.usefixtures("compile_nothing")


@pytest.mark.usefixtures("no_gpu")
def test_autotune_says_that_there_is_no_gpu(home):
    done = invoke("--preset", "llama3-8b")
    assert done.exit_code == 2 and "torch finds no GPU" in done.output and not home.exists()


@pytest.mark.parametrize(("budget", "left_out"), [("1s", "all"), ("200s", "some"), ("100000s", "none")])
def test_candidates_without_time_are_counted(budget, left_out, monkeypatch, home, gpu, tmp_path):
    """With a clock that advances by a second at each look. There are two targets."""
    clock = iter(range(10**6))
    monkeypatch.setattr(search.time, "monotonic", lambda: 0)
    tuner = functools.partial(search.Tuner, now=lambda: next(clock))
    monkeypatch.setattr(search, "Tuner", tuner)
    words = [*ONE, "--mask", "full"]
    total = 2 * len(candidates(Target("forward", Problem("causal", 4096, 8, 8)), "sm_90"))
    done = invoke(*words, "--budget", budget, "--out", tmp_path / "out")
    match = re.search(r"the budget left out (\d+) of (\d+) candidates: pass a larger --budget", done.stderr)
    count, of = map(int, match.groups()) if match else (0, total)
    assert of == total
    assert {"all": count == total, "some": 0 < count < total, "none": count == 0}[left_out]


def test_ctrl_c_before_the_first_choice_says_that_the_table_is_empty(
    compile_nothing, monkeypatch, gpu, tmp_path
):
    def interrupt(self, jobs):
        yield jobs[0], compile_nothing
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
