"""The search, on a device whose times are a formula and whose clock is a counter."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tests.tuning.stand_ins import BEST, RULE, TARGET, Compiler, Formula, Ticks, cost, tuner
from tritoncp.analysis.launches import launch_of
from tritoncp.kernels.tile_rules import default
from tritoncp.perf.problem import Problem
from tritoncp.tuning.search import MAX_TIMED, ROUNDS
from tritoncp.tuning.targets import MEASURED_KINDS, OPS, Target, candidates, targets


def test_the_fastest_right_config_is_chosen_in_few_samples(tmp_path):
    bench = Formula(cost)
    choice = tuner(tmp_path).run([TARGET], bench)[TARGET]
    assert choice.config == BEST
    assert choice.gain == pytest.approx(1 / 0.8, rel=0.01)
    assert len(bench.samples) < 5 * MAX_TIMED * (ROUNDS + 1)  # each of five halvings costs at most the first


def test_halving_is_interleaved_and_keeps_the_rule_to_the_end(tmp_path):
    """Within a round each candidate runs once, so that drift is the same for all; the first one changes from
    round to round."""
    bench = Formula(cost)
    tuner(tmp_path).run([TARGET], bench)
    assert set(bench.samples[-4:]) == {RULE, BEST} and bench.samples.count(RULE) == bench.samples.count(BEST)
    first = bench.samples[MAX_TIMED : 5 * MAX_TIMED]
    rounds = [first[i : i + MAX_TIMED] for i in range(0, len(first), MAX_TIMED)]
    assert all(set(a) == set(rounds[0]) for a in rounds) and len({a[0] for a in rounds}) == len(rounds)


def test_a_gain_below_two_per_cent_is_not_stored(tmp_path):
    near = lambda config: 0.99 if config == BEST else cost(config)  # noqa: E731
    choice = tuner(tmp_path).run([TARGET], Formula(near))[TARGET]
    assert choice.config == RULE and choice.gain == 1.0


def test_a_wrong_candidate_is_never_timed(tmp_path):
    bench = Formula(cost, wrong=[BEST])
    search = tuner(tmp_path)
    assert search.run([TARGET], bench)[TARGET].config == RULE
    assert BEST in bench.checks and BEST not in bench.samples and search.counts["failed"] == 1


def test_nothing_is_chosen_if_the_default_is_wrong(tmp_path):
    assert tuner(tmp_path).run([TARGET], Formula(cost, wrong=[RULE])) == {}


@pytest.mark.parametrize(
    "report",
    [{"spill_bytes": 8}, {"shared_bytes": 1 << 20}, {"failed": "no"}],
    ids=lambda report: next(iter(report)),
)
def test_candidates_that_compile_badly_are_dropped_but_never_the_rule(tmp_path, report):
    search = tuner(tmp_path, Compiler(s3=report))
    alive = search.select(TARGET, 1e9)
    assert [c for c in candidates(TARGET, "sm_90") if c.num_stages != 3][:MAX_TIMED] == alive
    assert alive[0] == RULE and {config.num_stages for config in alive} == {1, 2, 4}
    everything = tuner(tmp_path / "other", Compiler(s2={"spill_bytes": 8}))
    assert everything.select(TARGET, 1e9)[0] == RULE and RULE.num_stages == 2


# -- routes -------------------------------------------------------------------------------------------------

ROUTE = replace(TARGET, kernel="route")
GLUON, SECOND, *_ = (config for config in candidates(ROUTE, "sm_90") if config.ROUTE == "gluon")


def by_route(**times):
    """Times by route: the best loops take 0.8; GLUON and SECOND take the times of their names."""

    def cost_of(config):
        if getattr(config, "ROUTE", "loops") == "loops":
            return 0.8 if (config.BLOCK_M, config.num_stages) == (BEST.BLOCK_M, BEST.num_stages) else 1.0
        return times.get({GLUON: "gluon", SECOND: "second"}.get(config), 2.0)

    return cost_of


@pytest.mark.parametrize(
    ("times", "route", "gain"),
    [
        ({"gluon": 0.5, "second": 0.6}, "gluon", 1.6),
        ({"second": 0.7}, "gluon", 0.8 / 0.7),
        ({"gluon": 0.79}, "loops", 1.0),
        ({"gluon": 0.9}, "loops", 1.0),  # the rule's tiles take 1.0
    ],
)
def test_a_route_is_compared_with_the_tiles_that_won_for_loops(tmp_path, times, route, gain):
    choices_by_target = {}
    chosen = tuner(tmp_path, choices=choices_by_target).run(
        targets(["32x8,128,4096"], ["causal"], ["routes"], "bfloat16"), Formula(by_route(**times))
    )
    assert list(chosen) == [TARGET, ROUTE] and choices_by_target == chosen
    assert (chosen[ROUTE].config.ROUTE, chosen[ROUTE].gain) == (route, pytest.approx(gain, rel=0.01))
    assert chosen[TARGET].config.num_stages == BEST.num_stages


def test_routes_are_compared_only_where_loops_and_routes_are_known(tmp_path):
    assert tuner(tmp_path).run([ROUTE], Formula(by_route())) == {}
    other = tuner(tmp_path / "sm_80")
    other.arch = "sm_80"
    assert list(other.run([TARGET, ROUTE], Formula(lambda config: 1.0))) == [TARGET]


def test_a_kernel_that_never_ends_is_passed_over_by_the_next_run(tmp_path):
    """A check of another route is written down before it starts: only SIGKILL ends a process whose GPU is
    stuck."""

    class Stuck(Formula):
        def wrong(self, target, config):
            if config == GLUON:
                raise KeyboardInterrupt
            return super().wrong(target, config)

    first = tuner(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        first.run([TARGET, ROUTE], Stuck(by_route()))
    first.journal.close()
    second_bench = Formula(by_route(gluon=0.1, second=0.7))
    chosen = tuner(tmp_path, resume=True).run([TARGET, ROUTE], second_bench)
    assert chosen[ROUTE].config == SECOND and GLUON not in second_bench.checks


def test_few_rows_have_tiles_as_high_as_the_rule(tmp_path):
    target = Target("few", replace(TARGET.problem, mask="full", queries=1))
    listed = candidates(target, "sm_90")
    assert {config.BLOCK_M for config in listed} == {64} and len(listed) == len(set(listed)) > 30


def test_time_that_runs_out_leaves_the_last_finished_halving(tmp_path):
    """Every reading of the clock takes a second: a halving takes about a hundred."""
    choices_by_target = {}
    late = tuner(tmp_path, deadline=280.0, now=Ticks(1.0), choices=choices_by_target)
    assert late.run([TARGET], Formula(cost))[TARGET].config == BEST and choices_by_target[TARGET].gain > 1.2
    nothing = tuner(tmp_path / "other", deadline=60.0, now=Ticks(1.0))
    assert nothing.run([TARGET], Formula(cost)) == {}


def test_each_target_gets_its_share_of_the_time(tmp_path):
    requested = targets(["32x8,128,4096"], list(MEASURED_KINDS), list(OPS), "bfloat16")
    assert len(requested) == 21
    search = tuner(tmp_path, deadline=21 * 400.0, now=Ticks(1.0))
    assert len(search.run(requested, Formula(cost))) == 21


@pytest.mark.parametrize(("slow", "seconds"), [("compiler", 60.0), ("check", 20.0)])
def test_a_stage_that_is_too_slow_leaves_time_to_compare_some_with_the_rule(tmp_path, slow, seconds):
    """Each compilation or check takes a second, and there is time for half of them: the candidates most like
    the rule are compiled, checked and timed, and the best of them is chosen."""
    clock = Ticks()

    class Slow(Compiler):
        def __call__(self, jobs):
            for report in super().__call__(jobs):
                clock.time += slow == "compiler"
                yield report

    class Device(Formula):
        def wrong(self, target, config):
            clock.time += slow == "check"
            return super().wrong(target, config)

    search = tuner(tmp_path, Slow(), deadline=seconds, now=clock)
    bench = Device(cost)
    choice = search.run([TARGET], bench)[TARGET]
    assert choice.config == BEST and clock.time < seconds
    assert 8 < len(set(bench.samples)) < MAX_TIMED


def test_a_config_that_does_not_fit_a_step_is_dropped(tmp_path):
    """A config that fits a call without ranks only would make calls with ranks fail."""

    class Steps(Compiler):
        def __call__(self, jobs):
            for job, report in super().__call__(jobs):
                odd = job.variant and job.config == BEST
                yield job, report | ({"shared_bytes": 1 << 20} if odd else {})

    bench = Formula(cost)
    choice = tuner(tmp_path, Steps()).run([TARGET], bench)[TARGET]
    assert choice.config == RULE and BEST not in bench.checks


@pytest.mark.parametrize("kernel", ["forward", "dq", "dkdv"])
def test_both_ways_to_copy_a_tile_are_tried_where_there_are_both(kernel):
    """Default tiles of both ways are candidates, unless strides forbid a way."""
    target = replace(TARGET, kernel=kernel)
    for arch, ways in (("sm_90", {True, False}), ("sm_100", {True, False}), ("sm_80", {False})):
        configs = candidates(target, arch)
        assert {config.USE_TMA for config in configs} == ways
        assert {default(kernel, arch, 128, torch.bfloat16, tma) for tma in ways} <= set(configs)
    odd = candidates(Target(kernel, Problem("causal", 4096, dim=100, v_dim=100)), "sm_90")
    assert odd[0] == default(kernel, "sm_90", 100, torch.bfloat16, tma=False)
    assert {config.USE_TMA for config in odd} == {False}


@pytest.mark.sample(2)
@pytest.mark.parametrize("score", ["", "softcap", "table_learns", "slopes_learn"])
def test_the_first_candidate_is_the_config_of_calls_without_a_file(score):
    name = f"tests.kernels.support.scores:{score}" if "learn" in score else score
    kernels, archs = ("forward", "dq", "dkdv"), ("sm_80", "sm_90", "sm_100")
    for kernel, arch, dim in itertools.product(kernels, archs, (128, 256)):
        target = Target(kernel, Problem("causal", 1024, 8, 8, dim, dim, score=name))
        assert launch_of(target.job(arch, None)).config == candidates(target, arch)[0], (kernel, arch, dim)
        assert ("loads" in target.entry) == ("table" in score)


def test_a_fused_backward_pass_of_wide_heads_is_no_target() -> None:
    assert {target.kernel for target in targets(["4x2,512,256"], ["full"], ["fwd", "bwd"], "float16")} == {
        "forward",
        "dq",
        "dkdv",
    }
    with pytest.raises(ValueError, match="above 256 channels the backward pass is not fused"):
        targets(["4x2,64x264,256"], ["full"], ["fused"], "float16")
