"""Steps of a series of times: the borders at which the level changed, and the probability of each.

A model of the logarithms of the times, after Fearnhead (Exact and efficient Bayesian inference for multiple
changepoint problems, 2006), on a grid of levels as in a hidden Markov model:

- All runs of a block (a commit, with its versions and driver) have the same level, so steps are at borders.
- At a border the level steps with probability STEP to any other, or moves by a cell of the grid with
  probability 2 DRIFT, as on a machine that slowly becomes warm.
- A run is off its level by a normal noise; or it was disturbed and says nothing, except that it is seldom
  too fast. The size of the noise and the share of disturbed runs are unknown: each of NOISES and OUTLIERS is
  tried, and weighted by its probability, given the history and the other cases of the device (`pool`).

The forward-backward algorithm gives the probability of a step at each border. Since a single run may be
disturbed, one run of a new commit proves little however slow it is; three runs of it do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

LEAST = 0.01  # min step that is looked for, in logarithms
CELL = LEAST / 8  # distance of levels on the grid
MAX_CELLS = 2000  # a wider range of levels gets a coarser grid
NOISES = LEAST / 4 * 1.6 ** np.arange(12)  # standard deviations that are tried: 0.25 to 44 %
ENOUGH = 20  # from so many points on, only values near an estimate are tried
STEP = 1 / 100  # probability of a step at a border
SIZE = 2.0  # density of the size of a step, in logarithms
DRIFT = 0.05  # probability that the level moves by a cell at a border, on each side
OUTLIERS = np.array([0.003, 0.01, 0.04])  # probabilities of a disturbed run that are tried
TRIED = [(noise, outlier) for noise in NOISES for outlier in OUTLIERS]
UNIFORM = np.full(len(TRIED), 1 / len(TRIED))
TOO_FAST = 0.05  # density of the logarithm of a disturbed run below its level; above, it is 1
POOLED = 0.9  # the share of a prior that comes from other cases; this case may be different
SURE = 0.999  # probability at which no more borders are added to a set
CERTAIN = 0.999  # min probability of a certain step; its place may be one of several
LIKELY = 0.99  # min probability of a reported step
WIDEST = 6  # max number of borders at which a reported step can be
DOUBT = 0.05  # min probability of a step for which the newest commit should be measured again
NEGLIGIBLE = 2e-4  # min probability of a border that is added to a set

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
        """Whether the step is likely, and few commits can have made it."""
        return self.probability >= LIKELY and self.last - self.first < WIDEST

    @property
    def certain(self) -> bool:
        return self.likely and self.probability >= CERTAIN


class Fit(NamedTuple):
    """Probabilities of the times of a case, and of steps, for each noise and share of disturbed runs.

    tried: indices in TRIED, of length n; evidence: logarithms of the probabilities of the times, (n,); up,
    down: probabilities of a step before each block, (blocks, n)
    """

    tried: NDArray[np.int_]
    evidence: Array
    up: Array
    down: Array

    def weights(self, prior: Array = UNIFORM) -> Array:
        """Return the probability of each of TRIED, by these times and a prior."""
        weights = np.zeros(len(TRIED))
        weights[self.tried] = prior[self.tried] * np.exp(self.evidence - self.evidence.max())
        return weights / weights.sum()

    def steps(self, prior: Array = UNIFORM) -> list[LevelStep]:
        """Return the steps in order of time, including steps in DOUBT."""
        weights = self.weights(prior)[self.tried]
        up, down = self.up @ weights, self.down @ weights
        return sorted([*_collect(up, True), *_collect(down, False)], key=lambda step: step.best)


def find_steps(values: Sequence[float], blocks: Sequence[int]) -> list[LevelStep]:
    """Find the steps of positive numbers in order of time, including steps in DOUBT. blocks: block number of
    each time, from 0 on

    >>> times = [1.0, 1.01, 0.99, 1.0, 1.01, 1.0, 1.1, 1.11, 1.1]
    >>> (step,) = find_steps(times, [0, 0, 0, 1, 1, 1, 2, 2, 2])
    >>> step.best, step.up, step.certain
    (2, True, True)
    """
    found = fit(values, blocks)
    return found.steps() if found else []


def pool(fits: Sequence[Fit | None]) -> list[Array]:
    """Return a prior of noise and disturbed runs for each case of a device, from its other cases.

    >>> times, blocks = [1.0, 1.001, 0.999] * 8, [i // 3 for i in range(24)]
    >>> unknown, calm = fit([1.0, 1.02], [0, 1]), fit(times, blocks)
    >>> priors = pool([unknown, calm, None])
    >>> bool(priors[0][:3].sum() > 0.8), np.allclose(priors[1], UNIFORM, atol=0.2)
    (True, True)
    """
    all_weights = [None if found is None else found.weights() for found in fits]
    total = sum((weights for weights in all_weights if weights is not None), np.zeros(len(TRIED)))
    priors = []
    for weights in all_weights:
        others = total if weights is None else total - weights
        count = others.sum()
        priors.append(UNIFORM if count < 0.5 else (1 - POOLED) * UNIFORM + POOLED * others / count)
    return priors


def fit(values: Sequence[float], blocks: Sequence[int]) -> Fit | None:
    """Fit positive numbers in order of time; None if all are of one block."""
    if not values or blocks[-1] == 0:
        return None
    logs, numbers = np.log(np.asarray(values, dtype=np.float64)), np.asarray(blocks)
    cell = max(CELL, float(np.ptp(logs)) / MAX_CELLS)
    levels = np.arange(logs.min() - 2 * cell, logs.max() + 3 * cell, cell)
    tried = _choose_tried(logs)
    noises, outliers = np.array(TRIED)[tried].T[..., None]
    away = logs[:, None, None] - levels
    normal = np.exp(-0.5 * (away / noises) ** 2) / (noises * np.sqrt(2 * np.pi))
    disturbed = outliers * np.where(away > 0, 1.0, TOO_FAST)
    starts = np.searchsorted(numbers, np.arange(blocks[-1] + 1))
    likelihoods = np.add.reduceat(np.log((1 - outliers) * normal + disturbed), starts)
    # Scaled by their maximum; the logarithms of all scales sum up to the logarithm of the evidence.
    tops = likelihoods.max(axis=2, keepdims=True)
    jump = STEP * SIZE * cell
    forward, backward, evidence = _pass_messages(np.exp(likelihoods - tops), jump)
    # Below each level, by LEAST or more.
    apart = max(1, round(LEAST / cell))
    below = np.zeros_like(forward[:-1])
    below[..., apart:] = np.cumsum(forward[:-1], axis=2)[..., :-apart]
    above = np.zeros_like(below)
    above[..., :-apart] = np.cumsum(forward[:-1, :, ::-1], axis=2)[..., ::-1][..., apart:]
    after = backward[1:]
    total = (((1 - STEP) * _drift(forward[:-1]) + jump) * after).sum(axis=2)
    first = np.zeros((1, len(tried)))
    up, down = (np.concatenate([first, jump * (part * after).sum(axis=2) / total]) for part in (below, above))
    return Fit(tried, evidence + tops.sum(axis=(0, 2)), up, down)


def _pass_messages(likelihoods: Array, jump: float) -> tuple[Array, Array, Array]:
    """Return the forward and backward messages of each block, and the logarithm of the evidence.

    likelihoods: (blocks, tried, levels); backward messages contain the likelihood of the block itself
    """
    forward, backward = np.empty_like(likelihoods), np.empty_like(likelihoods)
    evidence = np.zeros(likelihoods.shape[1])
    for i, likelihood in enumerate(likelihoods):
        # A row of forward adds up to 1.
        moved = (1 - STEP) * _drift(forward[i - 1]) + jump if i else 1.0
        forward[i] = moved * likelihood
        total = forward[i].sum(axis=1, keepdims=True)
        forward[i] /= total
        evidence += np.log(total[:, 0])
    backward[-1] = likelihoods[-1]
    for i in range(len(likelihoods) - 2, -1, -1):
        later = backward[i + 1] / backward[i + 1].sum(axis=1, keepdims=True)
        backward[i] = ((1 - STEP) * _drift(later) + jump) * likelihoods[i]
    return forward, backward, evidence


def _choose_tried(logs: Array) -> NDArray[np.int_]:
    """Return the indices of TRIED to try; for many numbers, only noises near an estimate."""
    noises = np.array(TRIED)[:, 0]
    if len(logs) < ENOUGH:
        return np.arange(len(TRIED))
    estimate = 1.4826 * float(np.median(np.abs(np.diff(logs)))) / np.sqrt(2.0)
    nearest = int(np.argmin(np.abs(np.log(NOISES / max(estimate, NOISES[0])))))
    return np.flatnonzero(np.isin(noises, NOISES[max(0, nearest - 1) : nearest + 2]))


def _drift(levels: Array) -> Array:
    """Move levels by a cell, on the last axis; at the ends they stay."""
    moved = (1 - 2 * DRIFT) * levels
    moved[..., 1:] += DRIFT * levels[..., :-1]
    moved[..., :-1] += DRIFT * levels[..., 1:]
    moved[..., 0] += DRIFT * levels[..., 0]
    moved[..., -1] += DRIFT * levels[..., -1]
    return moved


def _collect(probabilities: Array, up: bool) -> list[LevelStep]:
    """Collect the steps in one direction: for each likely border, the min set of borders that surely contains
    the step."""
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
