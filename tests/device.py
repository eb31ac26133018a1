"""The device of tests of calls: the CPU, which interprets kernels or executes compiled ones, or a GPU.

``pytest --device cuda tests/kernels`` makes the GPU torch's default device, as users do, so that tests name
no device. What depends on the device is here: sizes, repetitions, random numbers and allowed rounding.
"""

from __future__ import annotations

import os

import torch

DEVICE = torch.device(os.environ.get("TRITONCP_TESTS_DEVICE", "cpu"))
ON_GPU = DEVICE.type != "cpu"
TOKENS = 1000 if ON_GPU else 150  # of a usual call: several tiles, the last one ragged
LONG = 4096 if ON_GPU else 48  # of a call in which many programs may meet
REPEATS = 25 if ON_GPU else 1  # runs after a first one, with which they have to agree


def generator(seed: int) -> torch.Generator:
    """Return a source of random numbers for tensors of the device."""
    return torch.Generator(DEVICE).manual_seed(seed)


def rounding(name: str) -> int:
    """Return the factor of the error that is allowed on the CPU, for an answer of this name: tensor cores
    truncate the terms of sums, and a GPU's exp2 is approximate."""
    statistic = name in ("lse", "max_scores")
    return (10 if statistic else 4) if ON_GPU else 1
