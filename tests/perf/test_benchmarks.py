"""Benchmarks of perf/benchmarks: each has the contender that it names, and runs what it times."""

import runpy
from pathlib import Path

import pytest

from tritoncp.perf.suite import host_cases

FILE = Path(__file__).parents[2] / "perf/benchmarks/bench_host.py"


class Benchmark:
    """What pytest-benchmark passes to a test, for one round."""

    group = ""

    def pedantic(self, target, setup, rounds, warmup_rounds) -> None:
        arguments, keywords = setup()
        self.result = target(*arguments, **keywords)
        assert rounds > warmup_rounds == 1


@pytest.fixture(scope="module")
def names() -> dict:
    return runpy.run_path(str(FILE))


def test_every_case_but_the_long_ones_has_a_benchmark(names):
    benchmarked = {case.name for case, contender in names["CONTENDERS"] if contender == "tritoncp"}
    assert benchmarked == {case.name for case in host_cases.CASES if case.tier != "full"}
    assert len(set(names["CONTENDERS"])) == len(names["CONTENDERS"]) > len(benchmarked)


@pytest.mark.long
def test_a_benchmark_runs_the_contender_of_its_case(names):
    small = [pair for pair in names["CONTENDERS"] if pair[0].name in ("mask-causal-4k", "cpu-causal-1k-fwd")]
    results = {}
    for case, contender in small:
        benchmark = Benchmark()
        names["test_host_case"](benchmark, case, contender)
        assert benchmark.group == case.name
        results[case.name, contender] = benchmark.result
    assert len(results) == 4
    assert results["mask-causal-4k", "tritoncp"].seq_lengths == (4096, 4096)
    assert results["mask-causal-4k", "torch"].seq_lengths == (4096, 4096)
