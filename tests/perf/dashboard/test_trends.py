"""Change points and the newest point: rates of detection and of false alarms, coverage, causes."""

import numpy as np
import pytest
from scipy import stats

from tests.perf.synthetic_history import ENV, line, noisy
from tritoncp.perf.dashboard.trends import (
    NEAR,
    Cause,
    Change,
    compare_newest,
    find_causes,
    find_changes,
    find_trend,
)

SEEDS = range(100)


@pytest.mark.parametrize("step", [0.03, -0.03])
def test_a_step_of_three_per_cent_is_found_within_three_points_and_nothing_besides(step):
    changes = [find_changes(noisy(seed, step=step, at=10 + seed)) for seed in SEEDS]
    assert sum(any(abs(c.at - 10 - seed) <= 3 for c in changes[seed]) for seed in SEEDS) >= 95
    assert sum(len(one) == 1 for one in changes) >= 95


@pytest.mark.parametrize("points", [120, 500])
def test_flat_series_have_no_change(points):
    assert sum(bool(find_changes(noisy(seed, points))) for seed in SEEDS) <= 2


def test_changes_of_scaled_and_reversed_series_are_the_same_changes():
    """A law: the unit does not matter, and time reversed has the same levels in reverse order."""
    times = noisy(3, 300)
    times[100:] *= 1.05
    times[200:] *= 0.93
    changes = find_changes(times)
    assert [round(change.at, -1) for change in changes] == [100, 200]
    assert [change.at for change in find_changes(1000 * times)] == [change.at for change in changes]
    backwards = find_changes(times[::-1])
    assert [300 - change.at for change in backwards[::-1]] == pytest.approx([c.at for c in changes], abs=2)
    assert [change.before for change in backwards] == pytest.approx(
        [c.after for c in changes[::-1]], rel=5e-3
    )


@pytest.mark.parametrize("points", range(13))
def test_short_series_are_no_trouble(points):
    assert find_changes([1.0] * points) == []
    half = points // 2
    stepped = find_changes([1.0] * half + [2.0] * (points - half))
    assert stepped == ([Change(half, 1.0, 2.0)] if half >= 5 else [])


@pytest.mark.parametrize(("count", "alarms", "hits"), [(5, 8, 190), (10, 5, 197), (30, 4, 199)])
def test_the_newest_point_has_few_false_alarms_and_few_misses(count, alarms, hits):
    """With 1 % noise, a few outliers before the newest point neither hide it nor raise an alarm."""
    slower = {"flat": 0, "slow": 0}
    for seed in range(200):
        times = noisy(2000 + seed, count + 1)
        times[-1] = np.random.default_rng(seed).lognormal(0, 0.01)
        slower["flat"] += compare_newest(times).status == "slower"
        times[-1] *= 1.15
        slower["slow"] += compare_newest(times).status == "slower"
    assert slower["flat"] <= alarms and slower["slow"] >= hits, slower


@pytest.mark.parametrize("count", [4, 12, 40])
def test_the_interval_of_the_newest_point_is_that_of_a_prediction(count):
    logs = np.random.default_rng(count).uniform(-0.02, 0.02, count + 1)
    newest, earlier = compare_newest(np.exp(logs)), logs[:-1]
    width = stats.t.ppf(0.995, count - 1) * earlier.std(ddof=1) * np.sqrt(1 + 1 / count)
    assert np.log([newest.low, newest.high]) == pytest.approx(logs[-1] - earlier.mean() + [-width, width])


@pytest.mark.parametrize(
    ("times", "status"),
    [
        ([1.15], "first run"),
        ([1.0, 1.05], "as before"),
        ([1.0, 1.6], "maybe slower"),
        ([1.0] * 3 + [1.15], "maybe slower"),
        ([1.0] * 3 + [0.8], "maybe faster"),
        ([None] * 9 + [1.0] * 3 + [1.15], "maybe slower"),
        ([1.0] * 4 + [1.15], "slower"),
        ([1.0] * 4 + [None] * 3 + [1.15], "slower"),
        ([1.0] * 4 + [1.005], "as before"),
        ([1.0, 1.01, 0.99, 1.0, 1.01, 0.99, 1.0, 0.96], "faster"),
        ([1.0, 1.2, 0.9, 1.1, 0.8, 1.0, 1.2, 1.08], "as before"),
        ([1.0, 1.2, 0.9, 1.1, 0.8, 1.0, 1.2, 1.25], "maybe slower"),
        ([1.0, 1.01, 0.99, 1.3, 1.0, 1.01, 0.99, 1.15], "slower"),
        ([1.0] * 10 + [1.15] * 10, "as before"),
        ([1.15] * 10 + [1.0] * 10 + [1.15], "slower"),
        ([1.0, None], "fails now"),
        ([1.0, None, None], "fails still"),
        ([None], "fails still"),
    ],
)  # fmt: skip
def test_the_newest_run_is_compared_with_its_level_and_a_large_change_is_named_however_few_runs(
    times, status
):
    newest = find_trend(line("c", times)).newest
    assert newest.status == status, newest
    assert (newest.ratio is None) == (times[-1] is None or status == "first run")


def test_failures_are_no_times_and_do_not_move_a_change():
    trend = find_trend(line("c", [1.0] * 20 + [None] * 3 + [1.0] * 10 + [1.2] * 20))
    assert [change.at for change in trend.changes] == [33] and trend.loss == pytest.approx(1.2)


def test_new_failures_come_before_regressions_and_these_before_old_losses():
    cases = {
        "fails": [1.0] * 20 + [None],
        "slow": [1.0] * 20 + [1.15],
        "perhaps": [1.0, 1.12],
        "broken": [1.0] * 10 + [None] * 2,
        "lost": [1.0] * 10 + [1.2] * 10,
        "fine": [1.0] * 20,
    }
    all_trends = [find_trend(line(name, times)) for name, times in reversed(cases.items())]
    assert [t.points[0].case for t in sorted(all_trends, key=lambda t: t.urgency)] == [*cases]


def test_causes_are_nearby_changes_nearest_first():
    envs = [ENV | {"commit": str(i), "driver": "a" if i < 8 else "b"} for i in range(12)]
    causes = find_causes(line("c", [1.0] * 12, envs=envs), 7)
    assert causes[0] == Cause("commit", "6", "7", 0) and Cause("driver", "a", "b", 1) in causes
    assert "torch" not in {cause.name for cause in causes}
    away = [abs(cause.away) for cause in causes]
    assert away == sorted(away) and max(away) == NEAR
