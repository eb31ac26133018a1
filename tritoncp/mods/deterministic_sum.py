"""Deterministic gradients of captured tensors: fixed-point sums, which do not depend on the order of
addition.

Atomic additions of floats round, so that the result depends on their order; additions of integers do not
round. Each sum is a fixed-point number so wide that no addition rounds (U. Kulisch's long accumulator, with
the range of gradients): five words of 30 bits, each in an int64 with 33 more bits for carries.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORDS = 5  # words in units of 2^30, 1, ..., 2^-90; smaller addends are lost
BITS = 30  # bits of a word
SLOTS = WORDS + 1  # the last slot counts addends out of range: NaN, infinities, 2^60 and more


def buffer(like: Tensor, device: torch.device) -> Tensor:
    """Allocate a zeroed accumulator for the gradient of ``like``: int64 [*like.shape, SLOTS]."""
    return torch.zeros(*like.shape, SLOTS, dtype=torch.int64, device=device)


def total(buffer: Tensor) -> Tensor:
    """Convert an accumulator [..., SLOTS] to float64 [...]; NaN where an addend was out of range.

    >>> words = torch.zeros(SLOTS, dtype=torch.int64)
    >>> words[1], words[2] = 3, -(1 << 29)
    >>> float(total(words))
    2.5
    """
    words = _propagate_carries(buffer[..., :WORDS])
    # Negate negative sums: their first word is negative and the others positive, which in floats would
    # cancel.
    sign = torch.where(words[0] < 0, -1, 1)
    words = _propagate_carries(buffer[..., :WORDS] * sign[..., None])
    value = torch.zeros_like(words[0], dtype=torch.float64)
    for i in range(WORDS - 1, -1, -1):
        value = value + words[i].double() * 2.0 ** (BITS * (1 - i))
    return (value * sign).masked_fill(buffer[..., WORDS] != 0, torch.nan)


def _propagate_carries(words: Tensor) -> list[Tensor]:
    """Normalise a number: at most BITS bits in each word except the first, which alone has a sign."""
    out = list(words.unbind(-1))
    for i in range(WORDS - 1, 0, -1):
        out[i - 1] = out[i - 1] + (out[i] >> BITS)
        out[i] = out[i] & ((1 << BITS) - 1)
    return out
