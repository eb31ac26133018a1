"""Fair times: everyone in turn, cold caches, device clocks, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch

Run = Callable[[], object]


class Sample(NamedTuple):
    """One execution: milliseconds on the device, and of Python until everything was queued."""

    device: float
    host: float


class Clock(Protocol):
    def sample(self, run: Run) -> Sample: ...


class DeviceClock:
    """Device events around one execution that finds an L2 cache full of something else.

    The device is kept busy while Python queues the work, so that slow Python is not measured as a slow
    kernel; a host time beyond about a millisecond says that it was.
    """

    _CYCLES = 2_000_000

    def __init__(self, device: torch.device) -> None:
        self._junk = torch.empty(256 << 20, dtype=torch.int8, device=device)
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample(self, run: Run) -> Sample:
        self._junk.zero_()
        torch.cuda._sleep(self._CYCLES)
        self._start.record()
        begin = time.perf_counter()
        run()
        host = time.perf_counter() - begin
        self._end.record()
        torch.cuda.synchronize()
        return Sample(self._start.elapsed_time(self._end), 1e3 * host)


class WallClock:
    """Host time of everything; for checking the benchmark itself without a GPU."""

    def sample(self, run: Run) -> Sample:
        begin = time.perf_counter()
        run()
        passed = 1e3 * (time.perf_counter() - begin)
        return Sample(passed, passed)


class Figure(NamedTuple):
    """Medians of one contender, and the middle half of its device times."""

    ms: float
    low: float
    high: float
    host_ms: float
    samples: int

    def rounded(self) -> dict[str, float]:
        """As JSON wants it: to ten nanoseconds."""
        return {name: round(value, 5) for name, value in self._asdict().items()}


def figure(samples: list[Sample]) -> Figure:
    """
    >>> figure([Sample(1.0, 0.1), Sample(2.0, 0.1), Sample(9.0, 0.1)])
    Figure(ms=2.0, low=1.5, high=5.5, host_ms=0.1, samples=3)
    """
    times = sorted(sample.device for sample in samples)
    low, _, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    host = statistics.median(sample.host for sample in samples)
    return Figure(statistics.median(times), low, high, host, len(times))


def interleaved(
    runs: Mapping[str, Callable[[], Run]], clock: Clock, seconds: float, least: int = 7, most: int = 40
) -> dict[str, Figure]:
    """Everyone once a round, each round beginning with the next one, for about so many seconds.

    runs: by name, what prepares an execution (not timed) and returns it. A first round is thrown away.
    """
    names = list(runs)
    begin = time.perf_counter()
    for name in names:
        clock.sample(runs[name]())
    warm = time.perf_counter() - begin
    rounds = max(least, min(most, int(seconds / max(warm, 1e-6))))
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    for i in range(rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(clock.sample(runs[name]()))
    return {name: figure(taken) for name, taken in samples.items()}
