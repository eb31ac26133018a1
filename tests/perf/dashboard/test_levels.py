"""The law of steps: over drawn histories no other commit is named, and the right one soon is."""

import numpy as np
import pytest

from tests.perf.dashboard import rivals
from tests.perf.dashboard.drawn_histories import Named, draw, judge
from tritoncp.perf.dashboard.levels import find_steps, fit, pool


def ours(times: np.ndarray, commits: np.ndarray) -> list[Named]:
    steps = find_steps(times.tolist(), commits.tolist())
    return [(step.first, step.last, step.up) for step in steps if step.likely]


@pytest.mark.long
@pytest.mark.parametrize("count", [100, pytest.param(400, marks=pytest.mark.long)])
@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=pytest.mark.long)])
def test_no_other_commit_is_named_and_the_right_one_is_within_three_runs(steps, count):
    found = judge(ours, [draw(seed, steps) for seed in range(count)])
    print(dict(found))
    assert found["wrong"] == 0 and found["right"] >= 0.95 * found["asked"], found
    assert found["exact"] >= (0.9 if steps == 1 else 0.85) * found["asked"], "sets of commits are exceptions"


@pytest.mark.long
@pytest.mark.parametrize("count", [100, pytest.param(400, marks=pytest.mark.long)])
def test_histories_without_a_step_have_none(count):
    found = judge(ours, [draw(seed, steps=0) for seed in range(count)])
    print(dict(found))
    assert found["wrong"] <= 0.005 * count, found


@pytest.mark.long
@pytest.mark.parametrize("count", [8, pytest.param(80, marks=pytest.mark.long)])
def test_a_new_run_of_an_unchanged_case_is_a_false_alarm_once_in_200_times_at_most(count):
    runs, named, doubted = 0, 0, 0
    for seed in range(count):
        drawn = draw(seed, steps=0)
        for end in range(2, len(drawn.times) + 1, 3):
            times, commits = drawn.times[:end], drawn.commits[:end]
            steps = find_steps(times.tolist(), commits.tolist())
            runs += 1
            named += any(step.likely for step in steps)
            doubted += any(not step.likely and step.last > commits[-1] - 3 for step in steps)
    print(f"{runs} runs: a step is named in {named}, to be measured again in {doubted}")
    assert named <= 0.005 * runs and doubted <= 0.05 * runs, (runs, named, doubted)


def test_cases_of_a_device_tell_each_other_their_noise():
    """Two commits of three runs each are too few for one case alone, and enough for one of twelve."""
    commits, alone, pooled = [0, 0, 0, 1, 1, 1], 0, 0
    for seed in range(40):
        random = np.random.default_rng(seed)
        times = random.lognormal(0, random.uniform(0.002, 0.01), (12, 6))
        times[0, 3:] *= random.uniform(1.05, 1.2)
        fits = [fit(row.tolist(), commits) for row in times]
        steps = [found.steps(prior) for found, prior in zip(fits, pool(fits))]
        assert not any(step.likely for case in steps[1:] for step in case), seed
        alone += any(step.likely for step in fits[0].steps())
        pooled += any(step.likely for step in steps[0])
    assert pooled >= 36 > alone, (pooled, alone)


@pytest.mark.long
@pytest.mark.parametrize("rival", [rivals.least_squares, rivals.absolute_values, rivals.e_divisive])
def test_methods_that_do_not_know_of_commits_and_outliers_name_others(rival):
    histories = [draw(seed, steps) for seed in range(100) for steps in (0, 1)]
    theirs, found = judge(rival, histories), judge(ours, histories)
    print(rival.__name__, dict(theirs), dict(found))
    assert found["wrong"] == 0 < theirs["wrong"]


@pytest.mark.parametrize("size", [1.05, 1.1, 1.2])
@pytest.mark.parametrize("count", [4, 10, 20])
def test_a_step_in_the_newest_commit_of_three_runs_is_named_at_once(size, count):
    """With noise of 1 %, as the workflow measures."""
    random, named = np.random.default_rng([count, int(100 * size)]), 0
    commits = np.repeat(np.arange(count), 3)
    for _ in range(20):
        times = random.lognormal(0, 0.01, 3 * count) * np.where(commits == count - 1, size, 1)
        found = ours(times, commits)
        assert all(first <= count - 1 == last and slower for first, last, slower in found)
        named += len(found)
    assert named >= (18 if size > 1.05 or count > 4 else 1), named


@pytest.mark.parametrize(("runs", "slow", "certain"), [(1, 1, False), (2, 2, True), (3, 3, True)])
def test_the_certainty_of_a_step_depends_on_its_runs(runs, slow, certain):
    times = [1.0, 1.01, 0.99, 1.0, 1.01, 0.99, 1.0, 1.01] + [1.15] * slow + [1.0] * (runs - slow)
    steps = find_steps(times, [*range(8), *[8] * runs])
    assert [step.best for step in steps] == [8], "also if it is only to be measured again"
    assert steps[0].certain == certain, steps


def test_steps_of_scaled_and_reversed_series_are_the_same_steps():
    """A law: the unit does not matter, and time reversed has the same levels in reverse order."""
    times = np.random.default_rng(3).lognormal(0, 0.005, 300)
    times[99:] *= 1.05
    times[201:] *= 0.93
    commits = np.arange(300) // 3
    found = ours(times, commits)
    assert found == [(33, 33, True), (67, 67, False)] == ours(1000 * times, commits)
    assert ours(times[::-1], commits) == [(33, 33, True), (67, 67, False)]


def test_a_step_between_runs_of_one_commit_is_not_reported():
    assert ours(np.array([1.0] * 6 + [1.2] * 6), np.array([0] * 12)) == []
    found = ours(np.array([1.0] * 5 + [1.2] * 7), np.repeat([0, 1, 2, 3], 3))
    assert all(first <= 1 <= last or first <= 2 <= last for first, last, _ in found)


@pytest.mark.parametrize(("noise", "alone"), [(0.003, 0.9), (0.01, 0.6)])
def test_with_one_run_a_commit_the_commits_that_are_named_hold_the_right_one(noise, alone):
    """Three runs after a step of 8 % in the 18th of 20 commits."""
    exact = 0
    for seed in range(50):
        times = np.random.default_rng(seed).lognormal(0, noise, 20)
        times[17:] *= 1.08
        ((first, last, slower),) = ours(times, np.arange(20))
        assert first <= 17 <= last and slower, seed
        exact += first == last
    assert exact >= 50 * alone, exact
