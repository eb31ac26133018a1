"""`pytest perf/`: times tritoncp on the cases under pytest-benchmark.

`pytest perf/ --benchmark-json out.json`, then `tritoncp perf import out.json --out history.jsonl`. Without a
GPU: the cases of host.py. `tritoncp perf run` adds baselines, cold caches and device events.
"""

import os
from typing import Any

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

from tritoncp.perf.records.history import OURS, Series  # noqa: E402
from tritoncp.perf.suite import baselines, check, host_cases, machine, measure  # noqa: E402
from tritoncp.perf.suite.cases import Case, select  # noqa: E402

ROUNDS = {"rounds": 15, "warmup_rounds": 2}
CASES: list[Any] = [*(select("core") if HAS_GPU else ()), *host_cases.select("core")]


@pytest.fixture(scope="session")
def env() -> dict[str, Any]:
    return machine.environment(torch.device("cuda" if HAS_GPU else "cpu"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Any, env: dict[str, Any], benchmark: Any) -> None:
    on_gpu = isinstance(case, Case)
    series = machine.series(torch.device("cuda")) if on_gpu else Series(machine.processor())
    benchmark.extra_info |= {"series": series._asdict(), "env": env, "tags": case.tags}
    (attention if on_gpu else on_host)(case, benchmark)


def on_host(case: host_cases.HostCase, benchmark: Any) -> None:
    torch.set_num_threads(1)
    makers, _ = host_cases.make_contenders(case)
    with host_cases.surroundings(case):
        benchmark.pedantic(lambda run: run(), setup=lambda: ((makers[OURS](),), {}), **ROUNDS)


def attention(case: Case, benchmark: Any) -> None:
    tensors = baselines.inputs(case.problem, torch.device("cuda"))
    contender, expected = baselines.one_device(case.problem, tensors), check.reference(case.problem, tensors)
    errors = check.errors(contender.forward(), expected.out)
    assert check.acceptable(errors, case.problem.torch_dtype)

    def run(timed_run: Any) -> None:
        timed_run()
        torch.cuda.synchronize()

    def setup() -> Any:
        timed_run = measure.prepare_pass(contender, case.which)
        torch.cuda.synchronize()
        return (timed_run,), {}

    benchmark.pedantic(run, setup=setup, **ROUNDS)
