"""Steps of a series of times: at which borders the level changed, and how sure that is.

A model of the logarithms of the times, after Fearnhead (Exact and efficient Bayesian inference for multiple
changepoint problems, 2006), on a grid of levels as in a hidden Markov model:

- All runs of a block (a commit, with its versions and driver) have the same level, so steps are at borders.
- At a border the level steps with probability STEP to any other, or moves by a cell of the grid with
  probability 2 DRIFT, as on a machine that slowly becomes warm.
- A run is off its level by a normal noise, whose size is unknown; or, with probability OUTLIER, it was
  disturbed and says nothing, except that it is seldom too fast.

The forward-backward algorithm gives the probability of a step at each border. Since a single run may be an
outlier, one run of a new commit proves nothing however slow it is; three runs of it do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

LEAST = 0.01  # smallest step that is looked for, in logarithms
CELL = LEAST / 8  # distance of levels on the grid
MAX_CELLS = 2000  # a wider range of levels gets a coarser grid
NOISES = LEAST / 4 * 1.6 ** np.arange(12)  # standard deviations that are tried: 0.25 to 44 %
ENOUGH = 20  # points, from which on only those near an estimate are tried
STEP = 1 / 100  # probability of a step at a border
SIZE = 2.0  # density of the size of a step, in logarithms
DRIFT = 0.05  # probability that the level moves by a cell at a border, on each side
OUTLIER = 0.03  # probability that a run is disturbed; the density of its logarithm is then 1
TOO_FAST = 0.05  # the part of that density below the level
SURE = 0.9999  # probability at which a set of borders gets no more
CERTAIN = 0.999  # least probability of a step that is certain; its place may be one of several
LIKELY = 0.99  # least probability of a step that is reported
WIDEST = 6  # borders at most, at which a step that is reported can be
DOUBT = 0.05  # least probability of a step for which the newest commit should be measured again
NEGLIGIBLE = 5e-5  # a border of less probability is not added to a set

Array = NDArray[np.floating[Any]]


class LevelStep(NamedTuple):
    """A step of the level, up or down, at a border from ``first`` to ``last``, most probably at ``best``.

    Borders are numbered by the block after them. probability: that there is a step at one of them.
    """

    first: int
    best: int
    last: int
    up: bool
    probability: float

    @property
    def likely(self) -> bool:
        """Whether it is likely, and a few commits can have made it."""
        return self.probability >= LIKELY and self.last - self.first < WIDEST

    @property
    def certain(self) -> bool:
        return self.likely and self.probability >= CERTAIN


def find_steps(values: Sequence[float], blocks: Sequence[int]) -> list[LevelStep]:
    """Find the steps of positive numbers in order of time, also those in DOUBT. blocks: the number of each
    one's block, from 0 on

    >>> times = [1.0, 1.01, 0.99, 1.0, 1.01, 1.0, 1.1, 1.11, 1.1]
    >>> (step,) = find_steps(times, [0, 0, 0, 1, 1, 1, 2, 2, 2])
    >>> step.best, step.up, step.certain
    (2, True, True)
    """
    if not values or blocks[-1] == 0:
        return []
    up, down = _step_probabilities(np.log(np.asarray(values, dtype=np.float64)), np.asarray(blocks))
    return sorted([*_collect(up, True), *_collect(down, False)], key=lambda step: step.best)


def _step_probabilities(logs: Array, blocks: NDArray[np.int_]) -> tuple[Array, Array]:
    """Return the probabilities of a step up and of a step down before each block; 0 before the first."""
    cell = max(CELL, float(np.ptp(logs)) / MAX_CELLS)
    levels = np.arange(logs.min() - 2 * cell, logs.max() + 3 * cell, cell)
    noises = _noises(logs)[:, None]
    count, jump = int(blocks[-1]) + 1, STEP * SIZE * cell
    away = logs[:, None, None] - levels
    normal = np.exp(-0.5 * (away / noises) ** 2) / (noises * np.sqrt(2 * np.pi))
    disturbed = np.where(away > 0, OUTLIER, OUTLIER * TOO_FAST)
    starts = np.searchsorted(blocks, np.arange(count))
    likelihoods = np.add.reduceat(np.log((1 - OUTLIER) * normal + disturbed), starts)
    # Scaled by their maximum; the sum of the logarithms of all scales is that of the evidence of a noise.
    tops = likelihoods.max(axis=2, keepdims=True)
    likelihoods = np.exp(likelihoods - tops)
    evidence = tops.sum(axis=(0, 2))
    forward, backward = np.empty_like(likelihoods), np.empty_like(likelihoods)
    for i in range(count):
        if i:
            moved = (1 - STEP) * _drift(forward[i - 1]) + jump  # a row of forward adds up to 1
            forward[i] = moved * likelihoods[i]
        else:
            forward[i] = likelihoods[i]
        total = forward[i].sum(axis=1, keepdims=True)
        forward[i] /= total
        evidence += np.log(total[:, 0])
    backward[-1] = likelihoods[-1]  # with the likelihood of the block itself
    for i in range(count - 2, -1, -1):
        later = backward[i + 1] / backward[i + 1].sum(axis=1, keepdims=True)
        backward[i] = ((1 - STEP) * _drift(later) + jump) * likelihoods[i]
    weights = np.exp(evidence - evidence.max())
    weights /= weights.sum()
    # Below each level, by LEAST or more.
    apart = max(1, round(LEAST / cell))
    below = np.zeros_like(forward[:-1])
    below[..., apart:] = np.cumsum(forward[:-1], axis=2)[..., :-apart]
    above = np.zeros_like(below)
    above[..., :-apart] = np.cumsum(forward[:-1, :, ::-1], axis=2)[..., ::-1][..., apart:]
    after = backward[1:]
    everything = ((1 - STEP) * _drift(forward[:-1]) + jump) * after
    total = everything.sum(axis=2)
    probabilities = (
        np.concatenate([[0.0], (jump * (part * after).sum(axis=2) / total) @ weights])
        for part in (below, above)
    )
    up, down = probabilities
    return up, down


def _noises(logs: Array) -> Array:
    """Return the noises that are tried."""
    if len(logs) < ENOUGH:
        return NOISES
    estimate = 1.4826 * float(np.median(np.abs(np.diff(logs)))) / np.sqrt(2.0)
    nearest = int(np.argmin(np.abs(np.log(NOISES / max(estimate, NOISES[0])))))
    return NOISES[max(0, nearest - 1) : nearest + 2]


def _drift(levels: Array) -> Array:
    """Move levels by a cell, on the last axis; at the ends they stay."""
    moved = (1 - 2 * DRIFT) * levels
    moved[..., 1:] += DRIFT * levels[..., :-1]
    moved[..., :-1] += DRIFT * levels[..., 1:]
    moved[..., 0] += DRIFT * levels[..., 0]
    moved[..., -1] += DRIFT * levels[..., -1]
    return moved


def _collect(probabilities: Array, up: bool) -> list[LevelStep]:
    """Collect the steps in one direction: around each likely border, as few borders as surely hold it."""
    steps, left = [], probabilities.copy()
    while (best := int(np.argmax(left))) and left[best] >= DOUBT / 5:
        first = last = best
        total = float(left[best])
        while total < SURE:
            sides = left[first - 1] if first > 1 else 0.0, left[last + 1] if last + 1 < len(left) else 0.0
            if max(sides) < NEGLIGIBLE:
                break
            total += float(max(sides))
            first, last = (first - 1, last) if sides[0] >= sides[1] else (first, last + 1)
        left[first : last + 1] = 0.0
        if total >= DOUBT:
            steps.append(LevelStep(first, best, last, up, min(total, 1.0)))
    return steps
