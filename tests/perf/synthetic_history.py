"""Synthetic histories with specified noise, steps and failures; commands that read them."""

import datetime
from pathlib import Path

import numpy as np
from click.testing import Result

from tests.command_process import invoke
from tritoncp.perf.records.history import Point, Series, append

H200 = Series("NVIDIA H200", "700.00 W", "default")
H100 = Series("NVIDIA H100", "700.00 W", "locked 1500 MHz")
ENV = {"commit": "a" * 40, "tritoncp": "0.1.0", "torch": "2.13.0", "triton": "3.7.1", "driver": "550.1"}
FIRST = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def noisy(seed: int, points: int = 120, step: float = 0.0, at: int = 0) -> np.ndarray:
    """Draw times with 1 % log-normal noise, 2 % of points 10 to 30 % too slow, and a step."""
    random = np.random.default_rng(seed)
    times = random.lognormal(0, 0.01, points)
    times *= np.where(random.random(points) < 0.02, random.uniform(1.1, 1.3, points), 1)
    times[at:] *= 1 + step
    return times


def point(case: str = "c", ms=1.5, run: str = "r", series: Series = H200, samples=(), **env: str) -> Point:
    """Make the point of a run of tritoncp alone; None is a failure."""
    own = {"why": "it broke"} if ms is None else {"ms": ms, **({"samples": list(samples)} if samples else {})}
    return Point(run, FIRST.isoformat(), case, series, ENV | env, {"tritoncp": own})


def line(case: str, times, series: Series = H200, envs=None, flex=1.3, **parts) -> list[Point]:
    """Make the points of a case measured once a day; None is a failure; tuned flex takes ``flex`` ms."""
    points = []
    for day, ms in enumerate(times):
        own = {"why": "wrong: <b>out of tolerance</b>"}
        if ms is not None:
            own = {"ms": float(ms), "low": 0.995 * ms, "high": 1.004 * ms, "n": 20, "tflops": 300.0}
        when = (FIRST + datetime.timedelta(days=day)).isoformat()
        env = envs[day] if envs else ENV | {"commit": f"{day:04x}".ljust(40, "0")}
        took = {
            "tritoncp": own,
            "flex": {"ms": 1.1 * flex},
            "flex max-autotune": {"ms": flex},
            "cudnn": {"why": "RuntimeError: no name for this mask"},
        }
        points.append(Point(f"run{day}", when, case, series, env, took, **parts))
    return points


def write(path: Path, series: Series = H200, **cases) -> Path:
    """Write a history of cases from their times, one for each run."""
    path.touch()
    for case, times in cases.items():
        for point in line(case, times, series):
            append(path, point.as_line())
    return path


def perf(*words) -> Result:
    """Run a command of ``tritoncp perf``, which may not raise an exception."""
    result = invoke("perf", *words)
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    return result


def tags(
    mask: str = "causal", which: str = "forward", dtype: str = "bfloat16", **more: str
) -> dict[str, str]:
    return {"mask": mask, "pass": which, "dtype": dtype, "shape": "1×16384, 32/8 heads of 128", **more}
