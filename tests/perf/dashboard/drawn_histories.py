"""Random histories with known steps, for several step sizes, noises, outliers, drifts and numbers of runs per
commit, and counts of the steps that a method finds in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

RUNS = 3  # runs since a step, after which it should be named
Named = tuple[int, int, bool]  # the first and last commit that a method names, and whether it says slower
Method = Callable[[np.ndarray, np.ndarray], Sequence[Named]]


class Drawn(NamedTuple):
    """Times of runs, the number of each one's commit from 0 on, and by commit whether a step is slower."""

    times: np.ndarray
    commits: np.ndarray
    truth: dict[int, bool]

    def until(self, end: int) -> Drawn:
        """Return its first ``end`` runs."""
        commits = self.commits[:end]
        return Drawn(
            self.times[:end], commits, {at: up for at, up in self.truth.items() if at <= commits[-1]}
        )


def draw(seed: int, steps: int = 1) -> Drawn:
    """Draw a history of 5 to 60 commits with 1, 2, 3 or 5 runs; one run in ten is missing.

    Noise of 0.2 to 1 %, no or 2 % of runs 10 to 30 % too slow, a drift of at most 1 %. steps: 0; 1, in the
    newest commits as often as in any; 2, two in the same direction or one that goes back
    """
    random = np.random.default_rng([seed, steps])
    count, runs = int(random.integers(5, 61)), int(random.choice([1, 2, 3, 5]))
    first = -(-4 // runs) if runs < 3 else 1  # commits before a step, with four runs or one commit
    commits = np.repeat(np.arange(count), runs)
    commits = commits[(random.random(len(commits)) > 0.1) | (commits <= first)]
    commits = np.unique(commits, return_inverse=True)[1]
    count = int(commits[-1]) + 1
    noise = random.uniform(0.002, 0.01)
    logs = random.normal(0, noise, len(commits)) + np.linspace(0, random.uniform(-0.01, 0.01), len(commits))
    slowed = random.random(len(commits)) < random.choice([0, 0.02])
    logs += np.where(slowed, np.log(random.uniform(1.1, 1.3, len(commits))), 0)
    apart = -(-4 // runs)
    newest = random.random() < 0.5
    last = count - 1 - int(random.integers(0, apart + 1)) if newest else int(random.integers(first, count))
    places = [max(first, last)][:steps]
    if steps == 2 and places[0] - apart >= first:
        places.insert(0, int(random.integers(first, places[0] - apart + 1)))
    truth, up = {}, bool(random.random() < 0.7)
    for place in places:
        size = np.log1p(random.uniform(0.05, 0.2))
        logs[commits >= place] += size if up else -size
        truth[place] = up
        up = up if random.random() < 0.5 else not up
    return Drawn(np.exp(logs), commits, truth)


def moments(drawn: Drawn) -> Iterator[Drawn]:
    """Yield the history as it was after each of the first runs since its newest step, and its end."""
    start = int(np.argmax(drawn.commits >= max(drawn.truth, default=0))) if drawn.truth else 0
    if drawn.truth:
        for end in range(start + 1, min(start + RUNS, len(drawn.times)) + 1):
            yield drawn.until(end)
    if not drawn.truth or start + RUNS < len(drawn.times):
        yield drawn


def judge(method: Method, histories: Sequence[Drawn]) -> Counter[str]:
    """Count the histories, and how often a method names another commit, names the newest step after RUNS runs
    (``right``), names only that step (``exact``), or does not (``late``)."""
    counts: Counter[str] = Counter(histories=len(histories))
    for drawn in histories:
        wrong = False
        for moment in moments(drawn):
            named = method(moment.times, moment.commits)
            wrong |= any(
                not any(first <= at <= last and up == slower for at, up in moment.truth.items())
                for first, last, slower in named
            )
            newest = max(moment.truth, default=None)
            since = int((moment.commits >= newest).sum()) if newest is not None else 0
            if since == RUNS:
                sets = [n for n in named if n[0] <= newest <= n[1] and n[2] == moment.truth[newest]]
                counts["asked"] += 1
                counts["right"] += bool(sets)
                counts["late"] += not sets
                counts["exact"] += any(n[0] == n[1] for n in sets)
        counts["wrong"] += wrong
    return counts
