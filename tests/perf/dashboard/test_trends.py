"""Trends: the status of a case, the commit since which it is so, accepted changes, causes."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.perf.synthetic_history import ENV, line
from tritoncp.perf.dashboard.case_details import since_text
from tritoncp.perf.dashboard.page import order_by_runs
from tritoncp.perf.dashboard.trends import (
    ACCEPTED,
    NEAR,
    Cause,
    Newest,
    find_causes,
    find_trend,
    read_acceptances,
)
from tritoncp.perf.exit_codes import InputError
from tritoncp.perf.records.history import Point, read


@pytest.mark.parametrize(
    ("times", "status"),
    [
        ([1.15], "first run"),
        ([1.0, 1.05], "as before"),
        ([1.0, 1.6], "measure again"),
        ([1.0] * 3 + [1.15], "measure again"),
        ([1.0] * 3 + [0.8], "measure again"),
        ([1.0] * 5 + [1.15] * 2, "slower"),
        ([1.0] * 4 + [None] * 3 + [1.15], "measure again"),
        ([1.0] * 5 + [1.15] * 3, "slower"),
        ([1.0] * 10 + [1.15] * 10, "slower"),
        ([1.0] * 10 + [1.15] * 10 + [1.0] * 4, "as before"),
        ([1.15] * 10 + [1.0] * 10 + [1.15], "measure again"),
        ([1.0] * 10 + [1.1] * 10 + [1.05] * 10, "slower"),
        ([1.0] * 10 + [0.9] * 3, "faster"),
        ([1.0] * 10 + [0.9] * 30, "as before"),
        ([1.0] * 4 + [1.005], "as before"),
        ([1.0, 1.2, 0.9, 1.1, 0.8, 1.0, 1.2, 1.08], "as before"),
        ([1.0, 1.01, 0.99, 1.3, 1.0, 1.01, 0.99, 1.0], "as before"),
        ([1.0, None], "fails now"),
        ([1.0, None, None], "fails still"),
        ([None], "fails still"),
    ],
)  # fmt: skip
def test_a_case_is_slower_until_its_level_returns_and_is_measured_again_if_runs_are_too_few(times, status):
    newest = find_trend(line("c", times)).newest
    assert newest.status == status, newest
    assert (newest.ratio is None) == (times[-1] is None or status == "first run")


def three_runs(case: str, times, **more) -> list[Point]:
    """Make three points for each time, of one commit."""
    envs = [ENV | {"commit": f"{i // 3:040x}"} for i in range(3 * len(times))]
    return line(case, np.repeat(times, 3), envs=envs, **more)


@pytest.mark.parametrize("after", [1, 5, 20])
def test_the_status_names_the_commit_since_which_a_case_is_slower(after):
    points = three_runs("c", [1.0] * 4 + [1.1] * after)
    newest = find_trend(points).newest
    assert newest.status == "slower" and newest.ratio == pytest.approx(1.1)
    assert since_text(points, newest.since) == f"{4:040x}"[:10] and newest.runs == (12, 3 * after)


def test_a_host_case_is_compared_by_its_baseline_in_the_same_runs():
    """The whole machine becomes slower, then the case alone; without a baseline it is not compared."""
    busy = np.repeat([1.0, 1.0, 1.4, 1.4, 1.0, 1.4], 6)
    own = busy * np.repeat([1.0] * 5 + [1.1], 6)
    points = line("plan", own, tags={"pass": "plan"})
    for point, pace in zip(points, busy):
        point.contenders["torch"] = {"ms": 3.0 * pace}
        del point.contenders["flex"], point.contenders["flex max-autotune"]
    assert find_trend(points[:30]).newest.status == "as before" and find_trend(points[:30]).changes == []
    newest = find_trend(points).newest
    assert newest.status == "slower" and newest.ratio == pytest.approx(1.1) and newest.since.at == 30
    for point in points:
        del point.contenders["torch"]
    assert find_trend(points).newest == Newest("not compared")


def test_the_history_of_this_repository_opens_without_noise():
    history = read(Path(__file__).parents[3] / "perf/history")
    _, lines = order_by_runs(history.points)
    statuses = Counter(find_trend(points).newest.status for points in lines)
    assert not {"slower", "likely slower", "faster", "likely faster"} & statuses.keys(), statuses
    assert statuses["measure again"] <= 3, statuses


def test_a_new_driver_is_a_border_within_a_commit():
    envs = [ENV | {"driver": "550" if i < 6 else "560"} for i in range(12)]
    (change,) = find_trend(line("c", [1.0] * 6 + [1.1] * 6, envs=envs)).changes
    assert (change.at, change.certain) == (6, True)
    assert find_trend(line("c", [1.0] * 6 + [1.1] * 6, envs=[ENV] * 12)).changes == []


def test_an_accepted_change_is_not_slower_until_the_next_one(tmp_path):
    (tmp_path / ACCEPTED).write_text(f"# case commit reason\n\nc* {4:040x} checks its bounds now\n")
    accepted = read_acceptances([tmp_path / "a.jsonl", tmp_path])
    times = [1.0] * 4 + [1.1] * 4
    newest = find_trend(three_runs("c", times), accepted).newest
    assert (newest.status, newest.reason) == ("accepted", "checks its bounds now")
    assert find_trend(three_runs("other", times), accepted).newest.status == "slower"
    again = find_trend(three_runs("c", [*times, 1.3]), accepted).newest
    assert again.status == "slower" and again.since.at == 24
    (tmp_path / ACCEPTED).write_text("c 12345678\n")
    with pytest.raises(InputError, match=r"accepted.txt:1: .* reason: write"):
        read_acceptances([tmp_path])


def test_failures_do_not_count_as_times_and_do_not_move_a_change():
    trend = find_trend(line("c", [1.0] * 20 + [None] * 3 + [1.0] * 10 + [1.2] * 20))
    (change,) = trend.changes
    assert change.first <= 33 <= change.last <= 34 and trend.loss == pytest.approx(1.2)


def test_new_failures_come_before_certain_regressions_and_these_before_unsure_ones():
    cases = {
        "fails": [1.0] * 20 + [None],
        "slow": [1.0] * 20 + [1.15] * 10,
        "slower": [1.0] * 20 + [1.1] * 10,
        "again": [1.0] * 20 + [1.5],
        "broken": [1.0] * 10 + [None] * 2,
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
