"""Named score_mods that compiler processes can import, one for each kind of captured load and gradient."""

import torch
from torch import Tensor

from tritoncp.analysis.jobs import HEADS, S

TABLE = torch.zeros(HEADS, 2 * S - 1)
SLOPES, LEARNED = torch.zeros(HEADS, requires_grad=True), torch.zeros(HEADS, 2 * S - 1, requires_grad=True)
BIAS = torch.zeros(HEADS, S, S, requires_grad=True)


def table(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """A bias for each distance."""
    return score + TABLE[h, q - kv + S - 1]


def table_learns(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score + LEARNED[h, q - kv + S - 1]


def bias_learns(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """A bias for each pair."""
    return score + BIAS[h, q, kv]


def slopes_learn(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """ALiBi, whose gradient of a slope is a sum over a tile."""
    return score - SLOPES[h] * (q - kv).abs()
