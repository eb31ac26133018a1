"""Timing of contenders: interleaved rounds, cold L2 cache, device events, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import distributed as dist

from tritoncp.perf.records.history import OURS

Run = Callable[[], object]


class Sample(NamedTuple):
    """One execution: milliseconds on the device, and of the host until all work was queued."""

    device: float
    host: float


class Clock(Protocol):
    def sample(self, run: Run) -> Sample: ...

    def agree(self, x: float) -> float:
        """Return the maximum of x over ranks."""
        return x


class DeviceClock(Clock):
    """Clock by device events around one execution, with a cold L2 cache.

    A sleep kernel runs while Python queues the work, so that Python does not add to the device time if it
    takes less than about a millisecond.
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


class WallClock(Clock):
    """Clock of host time, for tests of the benchmark without a GPU."""

    def sample(self, run: Run) -> Sample:
        begin = time.perf_counter()
        run()
        elapsed = 1e3 * (time.perf_counter() - begin)
        return Sample(elapsed, elapsed)


class GroupClock(Clock):
    """Clock of the slowest rank of the default process group; all ranks start together."""

    def __init__(self, clock: Clock, device: torch.device) -> None:
        self._clock, self._device = clock, device

    def sample(self, run: Run) -> Sample:
        dist.barrier()
        sample = self._clock.sample(run)
        host, device = self._worst(sample.host, sample.device)
        return Sample(device, host)

    def agree(self, x: float) -> float:
        return self._worst(x)[0]

    def _worst(self, *numbers: float) -> list[float]:
        worst = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        return worst.tolist()


def summarise(samples: list[Sample], keep: bool) -> dict[str, Any]:
    """Return medians, and quartiles of the device times, rounded to ten nanoseconds. keep: also all times

    >>> summarise([Sample(1.0, 0.1), Sample(2.0000001, 0.1), Sample(9.0, 0.1)], keep=True)
    {'ms': 2.0, 'low': 1.5, 'high': 5.5, 'host_ms': 0.1, 'samples': [1.0, 2.0, 9.0]}
    """
    times = [sample.device for sample in samples]
    low, ms, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    host = statistics.median(sample.host for sample in samples)
    medians = {"ms": ms, "low": low, "high": high, "host_ms": host}
    line: dict[str, Any] = {name: round(x, 5) for name, x in medians.items()}
    return line | ({"samples": [round(x, 5) for x in times]} if keep else {})


def time_interleaved(
    runs: Mapping[str, Callable[[], Run]], clock: Clock, seconds: float, least: int = 7, most: int = 40
) -> dict[str, dict[str, Any]]:
    """Time contenders in interleaved rounds for about ``seconds``; each round begins with the next contender.
    Return the figures of each. All times are kept only for tritoncp, whose runs are compared.

    runs: name -> function that prepares an execution (not timed) and returns it

    The first round is dropped.
    """
    names = list(runs)
    begin = time.perf_counter()
    for name in names:
        clock.sample(runs[name]())
    warm = clock.agree(time.perf_counter() - begin)
    rounds = max(least, min(most, int(seconds / max(warm, 1e-6))))
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    for i in range(rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(clock.sample(runs[name]()))
    return {name: summarise(of_name, keep=name == OURS) for name, of_name in samples.items()}
