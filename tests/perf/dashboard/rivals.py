"""Other methods of finding steps, which do not know of commits, as simple as they can be: for comparison."""

from __future__ import annotations

import numpy as np

from tests.perf.dashboard.drawn_histories import Named


def least_squares(times: np.ndarray, commits: np.ndarray, penalty: float = 4.0) -> list[Named]:
    """ruptures' KernelCPD("linear") and Pelt("l2"): pieces around their means, a penalty for each of them."""
    return _name(times, commits, _split(np.log(times), _squares, penalty * np.log(len(times))))


def absolute_values(times: np.ndarray, commits: np.ndarray) -> list[Named]:
    """asv's step detection: pieces around their medians, by absolute values, with a penalty as BIC's."""
    return _name(times, commits, _split(np.log(times), _distances, 3.0 * np.log(len(times))))


def e_divisive(times: np.ndarray, commits: np.ndarray, seed: int = 0) -> list[Named]:
    """MongoDB's E-divisive: halves by the energy distance, while few of 99 permutations have one as large."""
    random, logs, edges, queue = np.random.default_rng(seed), np.log(times), [], [(0, len(times))]
    while queue:
        start, stop = queue.pop()
        if stop - start < 4:
            continue
        at, size = _energy(logs[start:stop])
        larger = sum(_energy(random.permutation(logs[start:stop]))[1] >= size for _ in range(99))
        if larger < 2:
            edges.append(start + at)
            queue += [(start, start + at), (start + at, stop)]
    return _name(times, commits, sorted(edges))


def _energy(x: np.ndarray) -> tuple[int, float]:
    """Return the best cut, with two points on either side, and the energy distance of its halves."""
    count, distances = len(x), np.abs(x[:, None] - x)
    sums = np.zeros((count + 1, count + 1))
    sums[1:, 1:] = distances.cumsum(0).cumsum(1)
    at = np.arange(2, count - 1)
    within, between = sums[at, at], sums[at, count] - sums[at, at]
    others = sums[count, count] - sums[count, at] - sums[at, count] + sums[at, at]
    n, m = at, count - at
    energy = n * m / (n + m) * (2 * between / (n * m) - within / (n * n) - others / (m * m))
    best = int(np.argmax(energy))
    return int(at[best]), float(energy[best])


def _split(x: np.ndarray, costs, penalty: float, smallest: int = 1) -> list[int]:
    """Return the edges of the best pieces, in units of the noise, by dynamic programming."""
    noise = max(1.4826 * float(np.median(np.abs(np.diff(x)))) / np.sqrt(2), 5e-4)
    cost = costs(x / noise)
    best, previous = [-penalty], [0]
    for stop in range(1, len(x) + 1):
        totals = np.array(best) + cost[:stop, stop] + penalty
        previous.append(int(np.argmin(totals)))
        best.append(float(totals.min()))
    edges, stop = [], previous[len(x)]
    while stop:
        edges.append(stop)
        stop = previous[stop]
    return edges[::-1]


def _squares(x: np.ndarray) -> np.ndarray:
    """Return the sums of squares around the mean of all pieces start:stop."""
    sums, squares = (np.concatenate([[0.0], np.cumsum(x**power)]) for power in (1, 2))
    length = np.maximum(1, np.arange(len(sums)) - np.arange(len(sums))[:, None])
    return (squares - squares[:, None]) - (sums - sums[:, None]) ** 2 / length


def _distances(x: np.ndarray) -> np.ndarray:
    """Return twice the sums of distances from the median of all pieces start:stop."""
    cost = np.zeros((len(x) + 1, len(x) + 1))
    for start in range(len(x)):
        for stop in range(start + 2, len(x) + 1):
            piece = np.sort(x[start:stop])
            half = (stop - start) // 2
            cost[start, stop] = 2 * (piece[-half:].sum() - piece[:half].sum())
    return cost


def _name(times: np.ndarray, commits: np.ndarray, edges: list[int]) -> list[Named]:
    """Name the commit of each edge, if the medians of its pieces differ by a per cent."""
    bounds = [0, *edges, len(times)]
    named = []
    for start, at, stop in zip(bounds, bounds[1:], bounds[2:]):
        ratio = np.median(times[at:stop]) / np.median(times[start:at])
        if abs(np.log(ratio)) > 0.01:
            named.append((int(commits[at]), int(commits[at]), bool(ratio > 1)))
    return named
