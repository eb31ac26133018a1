"""Cases of several ranks: the answer of one device, one line from all, PyTorch's context parallelism."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.command_process import run_code
from tests.multiprocess import ranks
from tritoncp.perf.problem import Problem
from tritoncp.perf.records import history
from tritoncp.perf.suite import baselines, check, measure, timing
from tritoncp.perf.suite.cases import CASES, Case, select

CPU = torch.device("cpu")


def run_in_new_process(check: Callable[[], None]) -> None:
    """Run a check in a new interpreter, whose forked ranks compile with torch: in ranks forked from a process
    that has compiled much before, torch's compiler did not come to an end."""
    run_code(f"from {check.__module__} import {check.__name__}; {check.__name__}()")


def case_of(schedule: str, mask: str = "document", **more) -> Case:
    return Case(Problem(mask, 16384, world=2, schedule=schedule, **more), "forward").shrunk()


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["allgather", "ring", "fetch", "ulysses"])
def test_all_ranks_on_one_device_give_the_answer(schedule):
    case = case_of(schedule, together=True).problem
    tensors = baselines.inputs(case, CPU)
    contender = baselines.contenders(case, tensors, [])["tritoncp"]()
    for actual, expected in zip((contender.forward(), *contender.backward()), check.reference(case, tensors)):
        assert check.find_fault("a result", actual, expected, torch.float32) is None


@pytest.mark.long
def test_a_group_measures_together_and_writes_one_line():
    run_in_new_process(measure_together)


def measure_together():
    scratch = tempfile.TemporaryDirectory()
    case, folder = case_of("ring"), Path(scratch.name)

    def work(group):
        journal = history.Journal(folder / f"{group.rank()}.jsonl", "r", history.Series("CPU"), {})
        bench = measure.Bench(CPU, journal, time.monotonic() + 60, 0.01, group=group)
        bench._measure_problem([case], [])
        return bench.failures

    assert ranks.run(2, work) == [0, 0]
    first, second = (history.read(folder / f"{rank}.jsonl").points[0] for rank in range(2))
    assert first.own["ms"] == second.own["ms"], "the slowest rank counts, on every rank"
    assert first.work["wire_bytes"] > 0
    assert "does not support backward on CPU" in first.contenders["torch"]["why"]


@pytest.mark.long
def test_pytorchs_context_parallelism_computes_the_same_case():
    run_in_new_process(compare_with_torch)


def compare_with_torch():
    """Compare the forward pass only: torch refuses to differentiate flex attention on a CPU."""
    case = case_of("allgather").problem

    def work(group):
        tensors = baselines.inputs(case, CPU)
        frozen = baselines.Inputs(*(x.detach() for x in (tensors.q, tensors.k, tensors.v, tensors.dout)))
        actual = baselines.torch_split(case, frozen, group).forward()
        return check.find_fault("out", actual, check.reference(case, tensors).out, torch.float32)

    assert ranks.run(2, work) == [None, None]


def test_a_rank_that_fails_stops_the_contender_everywhere():
    case = case_of("ring")

    def work(group):
        journal = history.Journal(history.Path("/dev/null"), "r", history.Series("CPU"), {})
        bench = measure.Bench(CPU, journal, time.monotonic() + 60, group=group)

        def make():
            if group.rank() == 1:
                raise MemoryError("no room here")
            return baselines.one_device(case.problem, tensors)

        tensors = baselines.inputs(case.problem, CPU)
        expected = check.reference(case.problem, tensors)
        contender, result = bench._check_contender(case, make, expected, ["forward"])
        return contender is None, result["why"]

    assert ranks.run(2, work) == [(True, "failed on another rank"), (True, "MemoryError: no room here")]


def test_a_group_clock_agrees_on_the_slowest():
    def work(group):
        clock = timing.GroupClock(timing.WallClock(), CPU)
        sample = clock.sample(lambda: time.sleep(0.05 * group.rank()))
        return sample.device, clock.agree(float(group.rank()))

    (slow, agreed), other = ranks.run(2, work)
    assert (slow, agreed) == other and slow > 45 and agreed == 1.0


def test_processes_measure_the_cases_of_their_number():
    assert all(case.problem.world == 4 and not case.problem.together for case in select("full", world=4))
    assert {case.problem.world for case in select("full")} == {1, 2, 8} and len(select("full", world=4)) == 8
    assert all(case.problem.seq % (128 * case.problem.world) == 0 for case in CASES), "as PyTorch's needs it"
