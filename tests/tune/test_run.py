"""`tritoncp autotune` as a user runs it, and single launches against float32."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch
from click.testing import CliRunner

from tritoncp import tuned
from tritoncp.cli import main
from tritoncp.kernels.configs import Config
from tritoncp.tune import run, search, targets
from tritoncp.tune.bench import DeviceBench
from tritoncp.tune.targets import Target

SMALL = Target("forward", "causal", 2, 1, 16, 64, "float32")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    tuned.table.cache_clear()
    monkeypatch.setenv("TRITONCP_CONFIG_DIR", str(tmp_path / "configs"))
    yield tmp_path / "configs"
    tuned.table.cache_clear()


def invoke(*words):
    return CliRunner().invoke(main, ["autotune", *words])


def few(target, arch):
    """The rule's config and one that has no room."""
    own = targets.default(target.kernel, arch, target.head_dim, torch.bfloat16)
    return [own, Config(128, 128, 8, 8)]


def test_the_static_stage_compiles_and_bounds_without_a_gpu(monkeypatch, home):
    """One kernel, really compiled: the rule survives, what does not fit is dropped; a second run compiles
    nothing."""
    for module in (search, run):
        monkeypatch.setattr(module, "candidates", few)
    words = ["--target", "sm_80", "--shapes", "8x2,64,4096", "--mask", "full", "--ops", "fwd", "--json"]
    done = invoke(*words)
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)
    assert row["target"] == "forward full 8x2 d64 4096 bfloat16"
    assert row["config"]["BLOCK_M"] == 128 and 0 < row["bound"] < 1 and row["spill_bytes"] == 0
    assert "tried 2, pruned 1" in done.stderr
    assert not list(home.glob("*/*.json")), "a bound is no measurement"
    monkeypatch.setattr(run, "compile_all", lambda jobs, *rest: pytest.fail("compiled again"))
    assert json.loads(invoke(*words, "--resume").stdout) == [row]
    assert "128×64 8/3" in invoke(*words[:-1], "--resume").stdout


def test_a_dry_run_says_what_would_be_tried_and_does_nothing(home):
    words = ["--dry-run", "--target", "sm_90"]
    done = invoke(*words, "--preset", "llama3-8b", "--mask", "causal", "--ops", "bwd")
    assert done.exit_code == 0 and not home.exists()
    assert "dq causal 32x8 d128 16384 bfloat16: " in done.output and "dkdv causal" in done.output
    rows = json.loads(invoke(*words, "--json").stdout)
    assert len(rows) == 12 and all(row["candidates"] > 16 for row in rows)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--target", "h100"], "architecture 'h100'"),
        (["--target", "sm_90", "--preset", "llama9"], "known: llama3-8b"),
        (["--target", "sm_90", "--mask", "round"], "known: causal, full"),
        (["--target", "sm_90", "--ops", "sideways"], "known: fwd, bwd"),
        (["--target", "sm_90", "--budget", "soon"], "15m"),
        (["--target", "sm_90", "--shapes", "32"], "32x8,128,16384"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_does(words, said):
    done = invoke(*words)
    assert done.exit_code == 1 and said in done.output


def test_without_a_gpu_the_way_that_needs_none_is_shown(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = invoke("--preset", "llama3-8b")
    assert done.exit_code == 1 and "--target sm_90" in done.output


class Formula:
    """Tiles of 64 rows take half the time of others; Ctrl-C at the n-th sample."""

    def __init__(self, interrupt=None) -> None:
        self.interrupt, self.samples = interrupt, 0

    def wrong(self, target, config):
        return None

    def milliseconds(self, target, config):
        self.samples += 1
        if self.samples == self.interrupt:
            raise KeyboardInterrupt
        return 1.0 if config.BLOCK_M == 64 else 2.0


def compile_nothing(jobs, processes, timeout):
    for job in jobs:
        yield job, {"registers": 100, "spill_bytes": 0, "shared_bytes": 1, "bound": 0.5, "flops": 1.0}


def request(home, resume=False):
    wanted = targets.targets(["32x8,128,4096"], ["causal", "full"], ["fwd"], "bfloat16")
    device = tuned.Device("sm_90", "NVIDIA H200")
    return run.Request(tuple(wanted), device, False, 60.0, resume, home, 1, 60.0)


def measured(home):
    return {
        (row[0], row[3]): row[4]["BLOCK_M"]
        for row in json.loads(tuned.table(tuned.Device("sm_90", "NVIDIA H200"), str(home)))
    }


def test_choices_are_written_where_calls_look_for_them(monkeypatch, home):
    from rich.console import Console

    monkeypatch.setattr(run, "compile_all", compile_nothing)
    found = run.autotune(request(home), Console(stderr=True), Formula())
    assert [row["gain"] for row in found.rows] == [2.0, 2.0] and not found.interrupted
    assert measured(home) == {("forward", "causal"): 64, ("forward", "full"): 64}
    run.show(found, False, Console())


def test_ctrl_c_keeps_what_is_known_and_the_rest_is_resumed(monkeypatch, home):
    from rich.console import Console

    monkeypatch.setattr(run, "compile_all", compile_nothing)
    whole = Formula()
    run.autotune(request(home / "whole"), Console(stderr=True), whole)
    cut = Formula(interrupt=whole.samples - 100)
    found = run.autotune(request(home), Console(stderr=True), cut)
    assert found.interrupted and ("forward", "causal") in measured(home)
    rest = Formula()
    found = run.autotune(request(home, resume=True), Console(stderr=True), rest)
    assert not found.interrupted and len(measured(home)) == 2
    assert rest.samples < whole.samples / 2


def test_a_tuned_rule_is_an_answer_too(monkeypatch, home):
    """Nothing beats it: that is written, so that nobody is told to tune again."""
    from rich.console import Console

    monkeypatch.setattr(run, "compile_all", compile_nothing)
    bench = Formula()
    bench.milliseconds = lambda target, config: 1.0
    found = run.autotune(request(home), Console(stderr=True), bench)
    own = targets.default("forward", "sm_90", 128, torch.bfloat16)
    assert [row["config"] for row in found.rows] == [asdict(own)] * 2 and len(measured(home)) == 2


# -- single launches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["forward", "dq", "dkdv"])
def test_single_launches_are_checked_against_float32_and_timed(kernel):
    from dataclasses import replace

    bench, target = DeviceBench(CPU), replace(SMALL, kernel=kernel)
    for config in (Config(32, 16), Config(16, 64)):
        assert bench.wrong(target, config) is None
        assert bench.milliseconds(target, config) > 0
    problem = bench._of(target)
    name = {"forward": "out", "dq": "dq", "dkdv": "dv"}[kernel]
    getattr(problem._expected, name)[0, 0, 5] += 1  # as a kernel that is off in one row
    said = bench.wrong(target, Config(32, 16))
    assert said is not None and said.startswith(f"{name} is off by")


def test_a_launch_that_fails_is_a_reason_not_an_error(monkeypatch):
    bench = DeviceBench(CPU)
    assert "ValueError" in (bench.wrong(SMALL, Config(24, 16)) or "")
