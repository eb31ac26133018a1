"""Ready-made score_mods, which torch's flex_attention takes too. They do not need Triton."""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor

from tritoncp.core.host_copy import normal_tensors
from tritoncp.mods.tracing import Mod


def softcap(cap: float = 50.0) -> Mod:
    """Return the score_mod that bounds scores to (-cap, cap): ``cap * tanh(score / cap)``.

    >>> softcap(30.0)(torch.tensor([1.0, 1e9]), 0, 0, 0, 0)
    tensor([ 0.9996, 30.0000])

    Gemma 2 uses 50 in attention (Gemma Team 2024, arXiv 2408.00118, section 2). The form is that of
    FlexAttention's examples ("attention-gym", soft-capping), without their approximation of tanh.

    Args:
        cap: bound of the scores, greater than 0.

    Returns:
        A score_mod (score, b, h, q_idx, kv_idx) -> score, where score is the scaled product of a query and a
        key, a tensor of any shape.

    Raises:
        ValueError: for a cap that is not finite and greater than 0.
    """
    if not 0 < cap < math.inf:
        raise ValueError(f"softcap({cap}): the cap bounds scores, so it is a finite number greater than 0")
    return lambda score, b, h, q, kv: cap * torch.tanh(score / cap)


def alibi(heads: int | Tensor, device: torch.device | str | None = None) -> Mod:
    """Return the score_mod of ALiBi, ``score + slopes[h] * (kv - q)``: a penalty that grows with distance.

    >>> alibi(8)(torch.tensor(0.0), 0, 0, 5, torch.tensor([5, 4, 3]))
    tensor([ 0.0000, -0.5000, -1.0000])
    >>> alibi(torch.tensor([0.25, 0.125]))(torch.tensor(1.0), 0, 1, 8, 0)       # slopes of two heads
    tensor(0.)

    It is meant for causal masks: keys after the query would get a bonus.

    For a power of two the slopes are 2^(-8 i / H), i = 1 .. H (Press et al. 2021, arXiv 2108.12409, section
    3). Any other H has the slopes of the power of two below it, then every other slope of the power of two
    above it, as in the authors' code.

    Args:
        heads: number of query heads H, or the slopes, a floating-point tensor [H], captured and not copied.
        device: device of the slopes that are computed for a number of heads; None: torch's default device.

    Returns:
        A score_mod (score, b, h, q_idx, kv_idx) -> score.

    Raises:
        ValueError: for fewer than one head, and for slopes of another shape or dtype.
        TypeError: for other types.
    """
    if isinstance(heads, Tensor):
        if heads.ndim != 1 or not heads.is_floating_point():
            shape = f"{heads.dtype} {list(heads.shape)}"
            raise ValueError(f"alibi: slopes must be a floating-point tensor [heads], got {shape}")
        slopes = heads
    else:
        with normal_tensors():  # autograd saves them
            slopes = _alibi_slopes(operator.index(heads), device)
    return lambda score, b, h, q, kv: score + slopes[h] * (kv - q)


def _alibi_slopes(heads: int, device: torch.device | str | None) -> Tensor:
    """Return ALiBi's slopes for a number of heads: float32 [heads]."""
    if heads < 1:
        raise ValueError(f"alibi({heads}): pass the number of query heads, at least 1, or a tensor of slopes")
    power = 1 << (heads.bit_length() - 1)  # the largest power of two up to heads
    slopes = torch.exp2(-8.0 * torch.arange(1, power + 1, device=device) / power)
    if power == heads:
        return slopes
    return torch.cat([slopes, _alibi_slopes(2 * power, device)[::2][: heads - power]])
