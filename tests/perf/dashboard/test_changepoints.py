"""Change points: detection rate of steps, false alarms of flat series, causes."""

import numpy as np
import pytest

from tritoncp.perf.dashboard.changepoints import NEAR, Cause, Change, causes, compare_latest, find_changes
from tritoncp.perf.records.history import Point, Series

SEEDS = range(100)


def times(seed: int, points: int = 120, step: float = 0.0, at: int = 0, noise: float = 0.01) -> np.ndarray:
    """Draw times with log-normal noise, 2 % of points 10 to 30 % too slow, and a step."""
    random = np.random.default_rng(seed)
    values = 2.5 * random.lognormal(0, noise, points)
    values[random.random(points) < 0.02] *= random.uniform(1.1, 1.3)
    values[at:] *= 1 + step
    return values


def hit(changes: list[Change], at: int) -> bool:
    return any(abs(change.at - at) <= 3 for change in changes)


@pytest.mark.parametrize("step", [0.03, -0.03])
@pytest.mark.parametrize("place", ["middle", "anywhere"])
def test_a_step_of_three_per_cent_is_found_within_three_points(place, step):
    wheres = [60 if place == "middle" else 10 + seed for seed in SEEDS]
    changes_by_seed = [find_changes(times(seed, step=step, at=at)) for seed, at in zip(SEEDS, wheres)]
    assert sum(hit(changes, at) for changes, at in zip(changes_by_seed, wheres)) >= 95
    assert sum(len(changes) == 1 for changes in changes_by_seed) >= 95, "and nothing besides"


def test_outliers_of_any_size_one_by_one():
    """Every outlier has a size of its own."""
    good = 0
    for seed in SEEDS:
        random = np.random.default_rng(1000 + seed)
        x = random.lognormal(0, 0.01, 120)
        x *= np.where(random.random(120) < 0.02, random.uniform(1.1, 1.3, 120), 1)
        good += not find_changes(x)
        x[60:] *= 1.03
        good += hit(find_changes(x), 60)
    assert good >= 195


@pytest.mark.parametrize("points", [120, 500])
def test_flat_series_raise_nothing(points):
    assert sum(bool(find_changes(times(seed, points))) for seed in SEEDS) <= 2


def test_several_steps_are_found_and_small_ones_ignored():
    x = times(3, 300)
    x[100:] *= 1.05
    x[200:] *= 0.93
    assert [hit([change], at) for change, at in zip(find_changes(x), (100, 200))] == [True, True] and len(
        find_changes(x)
    ) == 2
    tiny = times(4, 200, step=0.004, at=100, noise=0.0005)
    assert find_changes(tiny) == [] and hit(find_changes(tiny, least=0.002), 100)


@pytest.mark.parametrize("points", [0, 1, 5, 9, 10, 11, 12, 15])
def test_short_series_are_no_trouble(points):
    assert find_changes([1.0] * points) == []
    half = points // 2
    stepped = find_changes([1.0] * half + [2.0] * (points - half))
    assert stepped == ([Change(half, 1.0, 2.0)] if half >= 5 else [])


def test_the_unit_does_not_matter():
    x = times(5, step=0.03, at=70)
    assert [change.at for change in find_changes(x)] == [change.at for change in find_changes(1000 * x)]


def test_causes_are_nearby_changes_nearest_first():
    env = [{"torch": "1", "commit": str(i), "driver": "a" if i < 8 else "b"} for i in range(12)]
    points = [Point("r", "t", "c", Series("d"), attributes, {}) for attributes in env]
    causes_of_change = causes(points, 7)
    assert causes_of_change[0] == Cause("commit", "6", "7", 0)
    assert Cause("driver", "a", "b", 1) in causes_of_change and "torch" not in {
        cause.name for cause in causes_of_change
    }
    assert max(abs(cause.away) for cause in causes_of_change) == NEAR
    assert [abs(cause.away) for cause in causes_of_change] == sorted(
        abs(cause.away) for cause in causes_of_change
    )


@pytest.mark.parametrize(("count", "alarms", "hits"), [(5, 8, 190), (10, 5, 197), (30, 4, 199)])
def test_the_newest_point_has_few_false_alarms_and_few_misses(count, alarms, hits):
    """With 1 % noise, a few outliers before the newest point neither hide it nor raise an alarm."""
    alarms_by_kind = {"flat": 0, "slow": 0}
    for seed in range(200):
        x = times(2000 + seed, count + 1, noise=0.01)
        x[-1] = 2.5 * np.random.default_rng(seed).lognormal(0, 0.01)
        alarms_by_kind["flat"] += compare_latest(x).verdict == "slower"
        x[-1] *= 1.15
        alarms_by_kind["slow"] += compare_latest(x).verdict == "slower"
    assert alarms_by_kind["flat"] <= alarms and alarms_by_kind["slow"] >= hits, alarms_by_kind


def test_the_interval_of_the_newest_point_has_its_nominal_coverage():
    random, covered = np.random.default_rng(7), 0
    for _ in range(1000):
        latest = compare_latest(1.05 ** np.array([0] * 12 + [1]) * random.lognormal(0, 0.02, 13))
        covered += latest.low <= 1.05 <= latest.high
    assert 975 <= covered <= 999, covered
