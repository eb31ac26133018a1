"""Tile shapes: which (BLOCK_M, BLOCK_N, warps, stages) a kernel is launched with.

A rule per architecture, checked offline: every default compiles without a spilled byte and within shared
memory (``tests/kernels/test_offline.py``).  Nothing here times anything.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

PASSES = ("forward", "dq", "dkdv")


@dataclass(frozen=True)
class Config:
    """Tile shape of one launch: BLOCK_M query rows by BLOCK_N key rows."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int = 4
    num_stages: int = 2


def pieces(dim: int) -> tuple[int, int]:
    """Cut a head dim into at most two powers of two, 16 to 128, that sum to at least ``dim``.

    Two pieces of 128 need fewer registers than one of 256, whose loads are all in flight at once.

    >>> [pieces(d) for d in (16, 40, 64, 80, 96, 128, 192, 256)]
    [(16, 0), (32, 16), (64, 0), (64, 16), (64, 32), (128, 0), (128, 64), (128, 128)]
    """
    first = min(128, max(16, 1 << (dim.bit_length() - 1)))
    if first >= dim:
        return first, 0
    rest = max(16, 1 << (dim - first - 1).bit_length())
    return (first * 2, 0) if rest == first < 128 else (first, rest)


def fit(tile: int, block: int) -> int:
    """The tile to use with a mask block: the largest power of two that divides the block and is at most
    ``tile``; a block with none >= 16 (say 100 or 8) is covered with ragged tiles instead.

    >>> fit(128, 128), fit(128, 64), fit(64, 96), fit(128, 100), fit(64, 8)
    (128, 64, 32, 128, 16)
    """
    even = min(block & -block, tile)
    return even if even >= 16 else max(16, min(tile, 1 << (block - 1).bit_length()))


# (arch family, pass) -> largest head dim -> config, 16-bit inputs.  anchors: sm_90 128x128 needs 8 warps.
_RULES: dict[tuple[str, str], dict[int, Config]] = {}
_FP32 = {"forward": Config(32, 32, 4, 1), "dq": Config(16, 16, 4, 1), "dkdv": Config(16, 16, 4, 1)}


def default(kind: str, arch: str, head_dim: int, dtype: torch.dtype) -> Config:
    """The config of pass ``kind`` on ``arch`` ("interpreter", "sm_80", "sm_90", "sm_100", "gfx942")."""
    if arch == "interpreter":
        return Config(128, 128)
    if dtype == torch.float32:
        return _FP32[kind]
    rules = _RULES.get((arch, kind)) or _RULES[("sm_80", kind)]
    return next(config for dim, config in rules.items() if head_dim <= dim)


def choose(
    kind: str,
    arch: str,
    head_dim: int,
    dtype: torch.dtype,
    q_block: int,
    kv_block: int,
    options: dict[str, Any],
) -> Config:
    """The default, the user's ``kernel_options`` over it, fitted to the mask's blocks.

    Options bear torch's names: BLOCK_M, BLOCK_N, num_warps, num_stages with optional ``fwd_``/``bwd_``
    prefix; BLOCK_M1/BLOCK_N1 (dK/dV) and BLOCK_M2/BLOCK_N2 (dQ) for the backward pass.
    """
    config = default(kind, arch, head_dim, dtype)
    prefix, suffix = {"forward": ("fwd_", ""), "dq": ("bwd_", "2"), "dkdv": ("bwd_", "1")}[kind]
    given = {}
    for field in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"):
        plain = field + suffix if field.startswith("BLOCK") else field
        for name in (plain, prefix + plain):
            if name in options:
                given[field] = int(options[name])
    config = replace(config, **given)
    return replace(config, BLOCK_M=fit(config.BLOCK_M, q_block), BLOCK_N=fit(config.BLOCK_N, kv_block))


def architecture(device: torch.device) -> str:
    """The name of a device's architecture in the tables above."""
    if device.type == "cpu":
        return "interpreter"
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
