"""Sums that do not depend on their order: gradients of captured tensors without chance.

Atomic additions of floats come out differently from run to run; of integers they never do. So each sum is
kept as a fixed-point number in integers, wide enough that no addition rounds (U. Kulisch's long accumulator,
cut to the range of gradients): five words of 30 bits each, in int64 with 33 bits to spare for carries.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORDS = (
    5  # the first counts units of 2^30, the next of 1, the last of 2^-90: what is smaller than that is lost
)
BITS = 30
SLOTS = WORDS + 1  # the last counts what fits nowhere: NaN, infinities, 2^60 and more


def buffer(like: Tensor, device: torch.device) -> Tensor:
    """Zeros to add the gradient of ``like`` to: int64 [*like.shape, SLOTS]."""
    return torch.zeros(*like.shape, SLOTS, dtype=torch.int64, device=device)


def total(buffer: Tensor) -> Tensor:
    """Return the sums as float64 [...]; NaN where an addend was out of range.

    >>> words = torch.zeros(SLOTS, dtype=torch.int64)
    >>> words[1], words[2] = 3, -(1 << 29)
    >>> float(total(words))
    2.5
    """
    words = _carried(buffer[..., :WORDS])
    # Below zero the other words count up from far beneath, and what is small would be lost among them.
    sign = torch.where(words[0] < 0, -1, 1)
    words = _carried(buffer[..., :WORDS] * sign[..., None])
    value = torch.zeros_like(words[0], dtype=torch.float64)
    for i in range(WORDS - 1, -1, -1):
        value = value + words[i].double() * 2.0 ** (BITS * (1 - i))
    return (value * sign).masked_fill(buffer[..., WORDS] != 0, torch.nan)


def _carried(words: Tensor) -> list[Tensor]:
    """The same number with BITS bits a word, so that only the first has a sign."""
    made = list(words.unbind(-1))
    for i in range(WORDS - 1, 0, -1):
        made[i - 1] = made[i - 1] + (made[i] >> BITS)
        made[i] = made[i] & ((1 << BITS) - 1)
    return made
