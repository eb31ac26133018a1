"""`tritoncp check` in one process: its cases, its output, and its verdict on planted faults."""

import functools
import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import tritoncp
from tests import command_process
from tests.command_process import invoke
from tritoncp import doctor
from tritoncp.kernels.engine import TritonEngine
from tritoncp.self_check import cases, run
from tritoncp.self_check.cases import CheckRequest, Result, list_cases

SCHEDULES = ("one-device", "allgather", "ring", "fetch", "ulysses", "ulysses+ring")
MASKS = ("causal", "documents", "window", "score_mod", "sinks")
DTYPES = ("float16", "float32")  # the interpreter truncates bfloat16
WIDE = ("heads512", "mqa576")  # in 16 bits, with and without a state
FIELDS = {
    "schedule", "mask", "dtype", "tensor", "error", "allowed", "rank", "ranks", "right", "why",
}  # fmt: skip


def check(*options: str) -> tuple[int, dict]:
    done = invoke("check", "--json", "--budget=600", *options)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, json.loads(done.stdout)


def name(case: dict) -> tuple[str, ...]:
    return case["schedule"], case["mask"], case["dtype"]


def expected_cases(schedules: tuple[str, ...]) -> list[tuple[str, ...]]:
    wide = itertools.product(SCHEDULES[:1] + ("ring",) * ("ring" in schedules), WIDE, DTYPES[:1])
    return sorted([*itertools.product(schedules, MASKS, DTYPES), *wide])


def wrong(report: dict) -> list[dict]:
    return [case for case in report["cases"] if not case["right"]]


@pytest.mark.long
def test_the_json_has_every_schedule():
    words = "check", "--json", "--jobs=2", "--budget=600", "--only=*-window-float32"
    done = command_process.tritoncp(*words, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["right"] and report["stopped"] is None
    assert list(map(name, report["cases"])) == [(schedule, "window", "float32") for schedule in SCHEDULES]
    for case in report["cases"]:
        assert case.keys() == FIELDS
        assert case["right"] and case["why"] is None
        assert 0 < case["error"] <= case["allowed"] < 1e-4 * (2 if case["tensor"] == "lse" else 1)
        assert case["tensor"] in ("out", "lse", "dq", "dk", "dv")
    facts = report["facts"]
    assert facts["versions"]["tritoncp"] == tritoncp.__version__
    assert any("float16 replaces bfloat16" in line for line in facts["advice"])


@pytest.mark.parametrize("options", [["--budget=0.001"], ["--budget=0.001", "--strict"]])
def test_a_requested_budget_is_a_limit(options):
    done = invoke("check", "--json", *options)
    report = json.loads(done.stdout)
    assert done.exit_code == 1
    assert not report["right"]
    assert sorted(map(name, report["cases"])) == expected_cases(SCHEDULES)
    assert {case["why"] for case in report["cases"]} == {"not run: the budget of 0.001 s is over"}


def run_some(monkeypatch, count, *options):
    """Run the check so that its budget is over after ``count`` cases."""
    finished = itertools.count()
    monkeypatch.setattr(run, "run_in_processes", lambda cases, ranks, request: take(cases, request))

    def take(cases, request):
        for case in cases:
            if next(finished) == count:
                raise run.Stopped(request.late)
            yield Result(case, "out", 1e-7, 1e-6, 0, (), True)

    done = invoke("check", *options)
    return done.exit_code, done.stdout.splitlines()


def test_cases_that_do_not_run_in_a_minute_are_named_and_do_not_fail(monkeypatch):
    """The first cases are of every schedule."""
    code, lines = run_some(monkeypatch, 50)
    assert code == 0
    assert lines[0].split()[:2] == ["1/64", "right"]
    assert lines[-2].startswith("50 of 50 cases are right")
    assert lines[-1].startswith("not run: 14 more, of ") and "mqa576 float16" in lines[-1]
    assert lines[-1].endswith(": the budget of 60 s is over")
    assert run_some(monkeypatch, 12)[0] == 0
    assert run_some(monkeypatch, 64)[0] == 0


@pytest.mark.parametrize(
    ("count", "options", "said"),
    [
        (0, [], "no case ran of"),
        (4, [], "ulysses+ring"),
        (3, ["--only=ring-*"], ""),  # the only schedule that was requested
        (50, ["--strict"], "not run: 14 more"),
        (50, ["--budget=60"], "not run: 14 more"),
    ],
)
def test_a_schedule_without_a_case_fails_and_strict_fails_without_all_cases(
    count, options, said, monkeypatch
):
    code, lines = run_some(monkeypatch, count, *options)
    assert code == (1 if said else 0)
    assert said in "\n".join(lines[-2:])


def test_a_budget_that_ends_hides_no_wrong_case(monkeypatch):
    results = [Result(case, right=True) for case in list_cases(1, torch.device("cpu"))]
    right = run.CheckReport(CheckRequest(), {}, results, 1.0)
    assert right.right
    late = replace(right, stopped=right.request.late)
    assert late.right, "all cases ran"
    assert not replace(late, results=[*late.results[1:], replace(late.results[0], right=False)]).right
    assert not replace(right, stopped="a rank was lost").right


@pytest.mark.parametrize("world_size", range(1, 9))
def test_the_first_cases_are_every_schedule_in_every_dtype(world_size):
    listed = list_cases(world_size, torch.device("cpu"))
    pairs = {(case.schedule, case.dtype) for case in listed}
    assert {(case.schedule, case.dtype) for case in listed[: len(pairs)]} == pairs
    assert {case.dtype for case in listed} == {*DTYPES}
    schedules = tuple(dict.fromkeys(case.schedule for case in listed))
    assert sorted(tuple(case) for case in listed) == expected_cases(schedules)
    assert listed[-1].mask in WIDE


@pytest.mark.sample(1)
@pytest.mark.parametrize("debug", ["0", "1"])
def test_an_exception_is_a_failed_case_whose_traceback_is_for_debugging(debug, monkeypatch):
    def planted(*tensors, **options):
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setenv("TRITONCP_DEBUG", debug)
    monkeypatch.setattr(cases, "flex_attention", planted)
    done = invoke("check", "--only=one-device-causal-float32", "--budget=600")
    row, *rest = done.stdout.splitlines()
    assert done.exit_code == 1
    assert row.split()[1:] == ["FAILED", "one-device", "causal", "float32", "RuntimeError:", "first", "line"]
    assert ("Traceback (most recent call last):" in done.stdout) == (debug == "1")
    assert ("in planted" in done.stdout) == ("second line" in done.stdout) == (debug == "1")
    hint = "TRITONCP_DEBUG=1 shows the traceback of a case that failed"
    assert (hint in rest) == (debug == "0")


def test_ctrl_c_keeps_the_rows_of_a_check(monkeypatch):
    def interrupted(requested, ranks, request):
        yield from (Result(case, "out", 1e-7, 1e-6, 0, (), True) for case in requested[:7])
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_in_processes", interrupted)
    done = invoke("check")
    lines = done.stdout.splitlines()
    assert done.exit_code == 130 and lines[6].startswith(" 7/64 right")
    assert any(line.startswith("7 of 7 cases are right") for line in lines)
    assert lines[-1].startswith("not run: 57 more, of ") and lines[-1].endswith(": interrupted by Ctrl-C")
    done = invoke("check", "--json")
    report = json.loads(done.stdout)
    assert done.exit_code == 130 and report["stopped"] == "interrupted by Ctrl-C" and not report["right"]
    assert sum(case["right"] for case in report["cases"]) == 7


@pytest.mark.parametrize("terminal", [False, True])
def test_a_terminal_has_a_bar_below_the_rows(terminal, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the output for a terminal
    _, lines = run_some(monkeypatch, 50)
    assert any("━" in line and "50/64" in line for line in lines) == terminal
    rows = [line for line in lines if " right " in line]
    assert len(rows) == 50 and terminal == ("\x1b" in "".join(lines))


@pytest.mark.long
def test_ctrl_c_ends_a_check_and_its_processes():
    """SIGINT reaches all processes of the command, as Ctrl-C does. The rows so far are reported."""
    command = [sys.executable, "-m", "tritoncp", "check", "--json", "--jobs=2", "--budget=600"]
    with subprocess.Popen(
        [*command, "--only=*-causal-*"], cwd=command_process.ROOT, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "TRITON_INTERPRET": "1"},
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # also in the background
    ) as process:  # fmt: skip
        first = process.stderr.readline()
        os.killpg(process.pid, signal.SIGINT)
        output, rest = process.communicate(timeout=100)
    assert process.returncode == 130 and "right" in first.split(), first
    assert any(case["right"] for case in json.loads(output)["cases"]) and "Traceback" not in rest
    assert rest.splitlines()[-1].endswith(": interrupted by Ctrl-C")


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "why", "processes"),
    [
        ("NaN", "out has NaN or infinite values, or the wrong shape", 1),
        ("exception", "illegal memory access", 2),
        ("death", "ended with exit code 7", 2),
    ],
)
def test_a_fault_in_a_case_fails_that_case_alone(fault, why, processes, monkeypatch):
    """The cases after an exception run in another process, since the first one may have an unusable
    device."""
    attend, started = cases.flex_attention, []

    def planted(q, k, v, score_mod, *rest, sinks, **options):
        faulty = score_mod is None and sinks is None
        if faulty and fault == "exception":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if faulty and fault == "death":
            os._exit(7)
        out, lse = attend(q, k, v, score_mod, *rest, sinks=sinks, **options)
        return out * torch.nan if faulty else out, lse

    start = run.WorkerPool._start
    monkeypatch.setattr(run.WorkerPool, "_start", lambda pool: started.append(1) or start(pool))
    monkeypatch.setattr(cases, "flex_attention", planted)
    code, report = check("--only=[ao]*-causal-float32", "--jobs=1")  # simulated ranks make other calls
    assert code == 1 and report["stopped"] is None and len(started) == processes
    right = {"one-device": False, "allgather": True}
    assert {case["schedule"]: case["right"] for case in report["cases"]} == right
    (case,) = wrong(report)
    assert why in case["why"] and case["error"] is None


@pytest.mark.long
def test_gradients_of_a_captured_tensor_and_of_sinks_are_compared(monkeypatch):
    doubled = torch.autograd.grad

    def grad(outputs, inputs, *rest, **options):
        """Compute gradients with a fault: gradients of replicated parameters are twice too large."""
        grads = doubled(outputs, inputs, *rest, **options)
        return [2 * g if i >= 3 and outputs[0].dtype is torch.float32 else g for i, g in enumerate(grads)]

    monkeypatch.setattr(torch.autograd, "grad", grad)
    for mask, tensor in (("score_mod", "dbias"), ("sinks", "dsinks")):
        code, report = check(f"--only=one-device-{mask}-float32", "--jobs=1")
        assert code == 1
        assert [case["tensor"] for case in wrong(report)] == [tensor]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kernel", "tensors"), [("forward", ("out", "lse", "dq", "dk", "dv")), ("dq", ("dq",))]
)
def test_a_wrong_kernel_is_named(kernel, tensors, monkeypatch):
    """Under a window mask the kernel uses a wrong scale."""
    right = getattr(TritonEngine, kernel)

    def launch(self, *args, **options):
        tables = args[0].tables
        windowed = tables.window is not None and tables.window[0] is not None
        engine = replace(self, scale=self.scale * 1.05, launches={}) if windowed else self
        return right(engine, *args, **options)

    monkeypatch.setattr(TritonEngine, kernel, launch)
    options = ["check", "--only=ring-[cw][ai]*-float32", "--jobs=1", "--budget=600"]
    done = invoke(*options)
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    off = [" ".join(line.split()[1:]) for line in lines if " WRONG " in line]
    assert off[0].startswith("WRONG ring window float32 ") and off[0].split()[4] in tensors
    assert not any("causal" in line for line in off), "the other mask's kernels are right"
    worst = next(line for line in lines if line.startswith("worst: "))
    assert worst.startswith("worst: ring-window-float32: ") and "on rank" in worst
    report_line = lines[-1]
    assert report_line.startswith(f"for a report: tritoncp {tritoncp.__version__}, python ")
    assert report_line.endswith(worst.removeprefix("worst: "))


def test_the_error_names_numpy_where_it_is_missing(monkeypatch):
    version_of = doctor.installed_version
    without_numpy = {"numpy": lambda name: None}
    monkeypatch.setattr(doctor, "installed_version", lambda name: without_numpy.get(name, version_of)(name))
    done = invoke("check")
    assert done.exit_code == 1
    assert "pip install numpy" in done.output


def test_kernels_are_not_interpreted_beside_a_gpu(gpus):
    """With interpreted kernels on a machine with a GPU, the check would pass without testing the GPU."""
    gpus("sm_90")
    done = invoke("check")
    assert done.exit_code == 1
    assert "TRITON_INTERPRET=1 is set on a machine with a GPU" in done.output
