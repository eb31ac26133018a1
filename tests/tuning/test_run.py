"""`tritoncp autotune` as a user runs it, and single launches against float32."""

from __future__ import annotations

import math
import pickle
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
import triton

from tests.tuning.stand_ins import invoke
from tritoncp.analysis import launches
from tritoncp.analysis.compile_pool import Compilers
from tritoncp.analysis.jobs import Routed
from tritoncp.analysis.launches import CallTensors, launch_of
from tritoncp.kernels import engine
from tritoncp.kernels.engine import TritonEngine
from tritoncp.kernels.tile_rules import Config
from tritoncp.measured_tiles import tile_tables
from tritoncp.perf.problem import Problem
from tritoncp.perf.suite import check
from tritoncp.tuning import search, targets
from tritoncp.tuning.device_bench import DeviceBench
from tritoncp.tuning.journal import TuningJournal
from tritoncp.tuning.targets import Target, candidates

SMALL = Target("forward", Problem("causal", 64, 2, 1, 16, 16, dtype="float32"))
CPU = torch.device("cpu")

BIAS = torch.linspace(-1, 1, 8).requires_grad_()


def biased(score, b, h, q, kv):
    """A score_mod whose captured tensor needs a gradient, as a learned bias does."""
    return score + BIAS[(q - kv) % 8]


def random_score(score, b, h, q, kv):
    return score * torch.rand(())


@triton.jit
def kernel_score(score, b, h, q, kv, caps):
    return score


def few(target, arch):
    """The rule's config and, for forward, one config that does not fit and one that does."""
    own = candidates(target, arch)[0]
    rest = [Config(128, 128, 8, 8), replace(own, num_stages=3)]
    return [own, *(rest if target.kernel == "forward" else [])]


@pytest.mark.long
def test_candidates_that_do_not_fit_are_dropped_by_the_compiler_without_a_gpu(monkeypatch, tmp_path):
    """With a score_mod and another head dim of values."""
    monkeypatch.setattr(search, "candidates", few)
    score = "tests.tuning.test_run:biased"
    requested = targets.targets(["8x2,64x32,4096"], ["full"], ["fwd", "fused"], "bfloat16", score)
    journal = TuningJournal(tmp_path / "journal.jsonl", {}, resume=False)
    with Compilers(1) as compilers:
        tuner = search.Tuner("sm_90", journal, compilers.compile_jobs, math.inf)
        forward, fused = (tuner.select(target, math.inf) for target in requested)
    own, _, fits = few(requested[0], "sm_90")
    assert forward == [own, fits] and fused == few(requested[1], "sm_90")
    assert not tuner.counts


def request(home):
    selection = targets.targets(["32x8,128,4096"], ["causal", "full"], ["fwd"], "bfloat16")
    device = tile_tables.Device("sm_90", "NVIDIA H200")
    return selection, device, 60.0, False, home, 1


def measured(home):
    table = tile_tables.table(tile_tables.Device("sm_90", "NVIDIA H200"), str(home))
    return {(key[0], key[4]): config["BLOCK_M"] for key, config in table.items()}


def test_choices_are_written_where_calls_look_for_them(compile_nothing, gpu, home):
    outcome = search.autotune(*request(home))
    assert [row["gain"] for row in outcome.rows] == [2.0, 2.0] and not outcome.interrupted
    assert measured(home) == {("forward", "causal"): 64, ("forward", "full"): 64}
    search.show_result(outcome, as_json=False)


def test_fused_kernels_are_tuned_like_others(compile_nothing, gpu, home):
    done = invoke("--shapes", "8x8,192x128,4096", "--mask", "window", "--ops", "bwd,fused")
    assert done.exit_code == 0 and "192x128" in done.stdout
    (path,) = home.glob("*/*.json")
    assert [entry["kernel"] for entry in tile_tables.entries_of(path)] == ["dq", "dkdv", "fused"]


def test_ctrl_c_ends_the_command_with_the_choices_so_far(compile_nothing, gpu, home):
    gpu.interrupt = 700
    words = ["--shapes", "8x8,128,4096", "--mask", "causal", "--ops", "fwd,bwd"]
    done = invoke(*words)
    assert done.exit_code == 130 and "pass --resume to continue" in done.stderr and "forward" in done.stdout
    (path,) = home.glob("*/*.json")
    before = len(tile_tables.entries_of(path))
    assert 0 < before < 3
    gpu.interrupt = None
    assert invoke(*words, "--resume").exit_code == 0 and len(tile_tables.entries_of(path)) == 3


def test_progress_is_shown(compile_nothing, gpu, home, capsys):
    search.autotune(*request(home))
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("forward full ") and last.endswith("best 2.00x of the rule")


def test_a_default_that_wins_is_stored(compile_nothing, gpu, home):
    """A rule that no candidate beats is written to the file, so that calls do not advise to tune again."""
    gpu.cost = lambda config: 1.0
    outcome = search.autotune(*request(home))
    own = targets.default("forward", "sm_90", 128, torch.bfloat16)
    assert [row["config"] for row in outcome.rows] == [asdict(own)] * 2 and len(measured(home)) == 2


# -- single launches ------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kernel", "v_dim", "score"),
    [
        ("forward", 32, "tests.tuning.test_run:biased"),
        ("dq", 16, "softcap(2)"),
        ("dkdv", 24, "alibi"),
        ("fused", 24, "tests.tuning.test_run:biased"),
    ],
)
def test_single_launches_are_checked_against_float32_and_timed(kernel, v_dim, score):
    bench, target = DeviceBench(CPU), Target(kernel, replace(SMALL.problem, v_dim=v_dim, score=score))
    for config in (Config(32, 16), Config(16, 64)):
        assert bench.wrong(target, config) is None
        assert bench.milliseconds(target, config) > 0
    name = {"forward": "out", "dq": "dq", "dkdv": "dv", "fused": "dk"}[kernel]
    getattr(bench._problem_for(target).expected, name)[0, 0, 5] += 1  # like a kernel with a wrong row
    assert "ValueError" in (bench.wrong(target, Config(24, 16)) or ""), "a failed launch is a reason"
    problem_text = bench.wrong(target, Config(32, 16))
    assert problem_text is not None and problem_text.startswith(f"{name} is off by")


ROUTE = Target("route", replace(SMALL.problem, seq=256))
GLUON = Routed(32, 32, ROUTE="gluon")


@pytest.mark.long
def test_routes_are_checked_against_float32_as_steps_too_and_their_lse_against_that_of_loops(monkeypatch):
    bench = DeviceBench(CPU)
    assert bench.wrong(ROUTE, Routed(32, 32)) is None
    obstacles = ["something is in the way"]
    loops = SimpleNamespace(launch=TritonEngine.loops, obstacles=lambda *args: iter(obstacles))
    for module in (launches, engine):  # a CPU runs no other route
        monkeypatch.setattr(module, "route_of", lambda name: loops)
    assert "something is in the way" in (bench.wrong(ROUTE, GLUON) or "")
    obstacles.clear()
    assert bench.wrong(ROUTE, GLUON) is None and bench.milliseconds(ROUTE, GLUON) > 0
    checked, ring = bench._problem_for(ROUTE), CallTensors.run_two_steps
    checked._lse[0, 0, 5] += 0.01
    assert (bench.wrong(ROUTE, GLUON) or "").startswith("lse is off by")
    checked._lse[0, 0, 5] -= 0.01
    monkeypatch.setattr(CallTensors, "run_two_steps", lambda *arguments: ring(*arguments) * 1.001)
    assert (bench.wrong(ROUTE, GLUON) or "").startswith("out in steps is off by")


def test_an_error_on_the_device_makes_no_other_candidate_wrong(monkeypatch):
    """Every later call on the device fails, and `--resume` would take these failures for findings."""

    def lost(*_) -> None:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    bench, target = DeviceBench(CPU), replace(SMALL, kernel="forward")
    monkeypatch.setattr(CallTensors, "launch", lost)
    assert "AcceleratorError: an illegal memory access" in (bench.wrong(target, Config(32, 16)) or "")
    monkeypatch.undo()
    for ask in (bench.wrong, bench.milliseconds):
        with pytest.raises(RuntimeError, match="that candidate is marked: continue with --resume"):
            ask(target, Config(16, 64))


def test_a_decoding_step_is_one_query_of_packed_heads_whose_keys_programs_share():
    """Uses the tiles of another GPU, since the interpreter has no tiles for few rows."""
    problem = replace(SMALL.problem, mask="full", heads=4, seq=256, queries=1)
    target, config = Target("few", problem), Config(64, 32, 4, 1)
    checked = DeviceBench(CPU)._problem_for(target)
    out = checked.call.results("few")["out"].fill_(float("nan"))
    launch = checked.call.launch("few", config, "sm_80")
    launch()
    first = launch.parts[0]
    assert (first.args["PACK"], first.args["splits"], first.config.BLOCK_N, out.shape[2]) == (4, 4, 32, 1)
    assert check.find_fault("out", out, checked.expected.out, torch.float32) is None


@pytest.mark.sample(1)
@pytest.mark.parametrize("kernel", ["forward", "dq", "fused", "few", "gluon"])
def test_offline_launches_equal_those_of_calls(kernel):
    """Every argument has the same type and the same divisibility by 16, so that Triton's cache has the kernel
    that another process compiled."""
    target = Target(
        kernel, Problem("document", 512, 4, 2, 32, 16, dtype="float16", score="tests.tuning.test_run:biased")
    )
    config = Config(64, 64, 4, 1)
    if kernel == "few":
        target = replace(target, problem=replace(target.problem, mask="full", queries=1))
    if kernel == "gluon":
        target = Target("route", Problem("document", 512, 4, 2, 64, 64))
        config = candidates(target, "sm_90")[-1]
    job = target.job("sm_90", config)
    assert job.kernel == kernel
    compiled = launch_of(pickle.loads(pickle.dumps(job)))
    launched_part = DeviceBench(CPU)._problem_for(target).call.launch(target.kernel, config, "sm_90").parts[0]
    assert (compiled.grid, compiled.config, compiled.kernel) == (
        launched_part.grid,
        launched_part.config,
        launched_part.kernel,
    )
    assert compiled.args.keys() == launched_part.args.keys()
    for name in compiled.args:
        assert kind(compiled.args[name]) == kind(launched_part.args[name]), name


def kind(x):
    """The part of an argument that a compilation depends on; constants with their values."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.data_ptr() % 16
    if hasattr(x, "block_shape"):  # a tensor descriptor
        return kind(x.base), x.shape, x.strides, x.block_shape
    return tuple(map(kind, x)) if isinstance(x, tuple | list) else x
