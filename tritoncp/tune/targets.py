"""What can be tuned, and what is tried."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from tritoncp.kernels.configs import Config, copies, default
from tritoncp.offline import Job

OPS = {"fwd": ("forward",), "bwd": ("dq", "dkdv")}
# Query heads, key heads, head dim, length of what people train.
PRESETS = {
    "llama3-8b": ("32x8,128,16384",),
    "llama3-70b": ("64x8,128,16384",),
    "qwen2.5-7b": ("28x4,128,16384",),
    "gpt-oss-20b": ("64x8,64,16384",),
    "gemma2-9b": ("16x8,256,8192",),
}
# Mask of perf/cases.py -> kind that a call looks up, and what stands for it in offline compilation.
MASKS = {
    "causal": ("causal", "causal"),
    "full": ("full", "full"),
    "document": ("interval", "documents"),
    "window": ("window", "window"),
}


@dataclass(frozen=True)
class Target:
    """One kernel of one shape, whose tiles are looked for."""

    kernel: str
    mask: str
    heads: int
    kv_heads: int
    head_dim: int
    seq: int
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """
        >>> Target("dq", "causal", 32, 8, 128, 16384).name
        'dq causal 32x8 d128 16384 bfloat16'
        """
        shape = f"{self.heads}x{self.kv_heads} d{self.head_dim} {self.seq}"
        return f"{self.kernel} {self.mask} {shape} {self.dtype}"

    def job(self, arch: str, config: Config) -> Job:
        return Job(self.kernel, arch, self.head_dim, self.dtype, MASKS[self.mask][1], config)


def preset(name: str) -> tuple[str, ...]:
    """The shapes of a preset."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}")
    return PRESETS[name]


def targets(shapes: Sequence[str], masks: Sequence[str], ops: Sequence[str], dtype: str) -> list[Target]:
    """shapes: HEADSxKV_HEADS,HEAD_DIM,LENGTH. Shapes that a call could not tell apart are one target: the
    first. Raises ValueError for what is written otherwise.

    >>> [target.name for target in targets(["32x8,128,4096"], ["full"], ["bwd"], "float16")]
    ['dq full 32x8 d128 4096 float16', 'dkdv full 32x8 d128 4096 float16']
    """
    found: dict[tuple[Any, ...], Target] = {}
    for given, known, what in ((masks, MASKS, "mask"), (ops, OPS, "op")):
        if unknown := [name for name in given if name not in known]:
            raise ValueError(f"unknown {what} {unknown[0]!r}; known: {', '.join(known)}")
    for shape, mask, op in itertools.product(shapes, masks, ops):
        try:
            heads, dim, seq = shape.split(",")
            q_heads, kv_heads = map(int, heads.split("x"))
            sizes = q_heads, kv_heads, int(dim), int(seq)
        except ValueError as error:
            raise ValueError(
                f"shape {shape!r} is not HEADSxKV_HEADS,HEAD_DIM,LENGTH: 32x8,128,16384"
            ) from error
        if min(sizes) < 1 or q_heads % kv_heads or sizes[2] > 256:
            raise ValueError(f"shape {shape!r}: key heads have to divide heads, head dims end at 256")
        for kernel in OPS[op]:
            found.setdefault((kernel, sizes[2], MASKS[mask][0]), Target(kernel, mask, *sizes, dtype))
    return list(found.values())


def candidates(target: Target, arch: str) -> list[Config]:
    """The rule's config, then those with tiles of half to twice its size, the most like it first; by
    descriptor and by pointer, where the rule of an architecture has both.

    >>> found = candidates(Target("forward", "causal", 32, 8, 128, 16384), "sm_90")
    >>> found[0] == default("forward", "sm_90", 128, torch.bfloat16), len(found) == len(set(found)) > 30
    (True, True)
    >>> {config.USE_TMA for config in found}
    {False, True}
    """
    dtype = getattr(torch, target.dtype)
    about = target.kernel, arch, target.head_dim, dtype
    aligned = target.head_dim * dtype.itemsize % 16 == 0  # or else strides leave nothing to descriptors
    own = default(*about, aligned)
    listed = {replace(own, HOIST=not own.HOIST)}
    for tma in (False, True) if aligned and copies(arch) else (own.USE_TMA,):
        rule = own if tma == own.USE_TMA else replace(default(*about, tma), USE_TMA=tma)
        near = [
            [n for n in (16, 32, 64, 128) if size // 2 <= n <= size * 2]
            for size in (rule.BLOCK_M, rule.BLOCK_N)
        ]
        listed |= {
            replace(rule, BLOCK_M=m, BLOCK_N=n, num_warps=warps, num_stages=stages)
            for m, n, warps, stages in itertools.product(*near, (4, 8), (1, 2, 3, 4))
        }
    values = asdict(own)

    def order(config: Config) -> tuple[Any, ...]:
        other = asdict(config)
        return sum(other[name] != values[name] for name in values), str(other)

    return [own, *sorted(listed - {own}, key=order)]
