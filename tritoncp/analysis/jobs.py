"""Compilation jobs: a kernel, a GPU architecture and a call, by name."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from tritoncp.kernels.options import ROUTES
from tritoncp.kernels.tile_rules import Config
from tritoncp.masks.expressions import brief
from tritoncp.planning.problem import Problem

S, HEADS, KV_HEADS = 1024, 8, 2


class Variant(NamedTuple):
    """A launch in a schedule: a problem, of which a job sets head dims, dtype and score_mod; whether the
    launch goes on from a state (adds to gradients) and leaves one; kernel options."""

    problem: Problem
    load: bool = False
    store: bool = False
    options: tuple[tuple[str, Any], ...] = ()


_FULL, _CAUSAL, _DOCUMENTS, _DILATED = (
    Problem(mask, S, HEADS, KV_HEADS) for mask in ("full", "causal", "three-documents", "dilated")
)
_GATHERED = replace(_DOCUMENTS, world=4)
_SPLIT = (("SPLIT_KV", 4),)
VARIANTS = {
    "full": Variant(_FULL),
    "causal": Variant(_CAUSAL),  # closed form: positions alone
    "window": Variant(replace(_FULL, mask="two-sided-window"), load=True),
    "documents": Variant(_DOCUMENTS),  # tables and row intervals
    "state": Variant(_GATHERED, load=True, store=True),  # the same over gathered keys, step by step
    "mask_mod": Variant(replace(_DILATED, world=4)),
    "mask_mod_local": Variant(_DILATED),  # one buffer of keys, as torch's templates have it
    "pointers": Variant(_GATHERED, load=True, store=True, options=(("USE_TMA", False),)),
    "few": Variant(replace(_DOCUMENTS, queries=16), load=True, options=_SPLIT),  # a tile of 4 heads
    "short": Variant(replace(_DOCUMENTS, queries=64), load=True, options=_SPLIT),  # two such tiles
    "decode": Variant(replace(_CAUSAL, queries=1), options=_SPLIT),
    # everything that can be 1 is: Triton makes constants of those
    "single": Variant(replace(_FULL, mask="neighbours", seq=1)),
    "pair": Variant(replace(_CAUSAL, seq=1)),  # the same, without a window
}
VARIANT_OF_KIND = {kind: kind for kind in ("full", "causal", "window")} | {
    "interval": "documents",
    "mod": "mask_mod",
}
KERNELS = ("forward", "delta", "dq", "dkdv")


MAX_ELEMENTS = 1 << 34  # elements of a shape's queries


def parse_shape(shape: str) -> Problem:
    """Make the problem of a command's shape, HEADSxKV_HEADS,HEAD_DIM[xV_HEAD_DIM],LENGTH, with the full mask.
    Raises ValueError for another format, and for a shape that no GPU can hold.

    >>> parse_shape("128x128,192x128,8192").shape
    '128x128,192x128,8192'
    """
    try:
        heads, width, length = shape.split(",")
        (q_heads, kv_heads), (dim, *rest) = map(int, heads.split("x")), map(int, width.split("x"))
        (v_dim,) = rest or [dim]
        seq = int(length)
    except ValueError as error:
        raise ValueError(
            f"shape {brief(shape)} is not HEADSxKV_HEADS,HEAD_DIM,LENGTH: 32x8,128,16384, or with "
            "another head dim of values: 128x128,192x128,8192"
        ) from error
    if min(q_heads, kv_heads, dim, v_dim, seq) < 1 or q_heads % kv_heads or max(dim, v_dim) > 256:
        raise ValueError(f"shape {shape!r}: key heads have to divide heads, head dims end at 256")
    if q_heads * seq * max(dim, v_dim) > MAX_ELEMENTS:
        raise ValueError(f"shape {shape!r}: queries of more than {MAX_ELEMENTS >> 30}G numbers fit no GPU")
    return Problem("full", seq, q_heads, kv_heads, dim, v_dim)


@dataclass(frozen=True)
class Job:
    """One kernel to compile, in the launch of a problem.

    kernel: one of KERNELS; "fused": dK/dV that adds up dQ too; "few": forward with tiles for few rows
        (variant "few" or "decode"); "combine": the launch after it, where several programs share its keys;
        "gluon": the launch of that route
    variant: a key of VARIANTS, whose state and options the launch has; "": the launch of a call on one device
    config: the tiles; None = those of the rule
    source: origin of the config, unless it is the rule
    """

    kernel: str
    arch: str
    problem: Problem
    variant: str = ""
    config: Config | None = None
    source: str = ""

    @property
    def head_dim(self) -> int:
        return self.problem.dim

    @property
    def dtype(self) -> str:
        return self.problem.dtype

    @property
    def name(self) -> str:
        """The job in words.

        >>> step_job("dq", "sm_90", 128).name
        'dq sm_90 d128 bfloat16 state'
        """
        return f"{self.kernel} {self.arch} d{self.head_dim} {self.dtype} {self.variant}"

    @property
    def identity(self) -> dict[str, Any]:
        """The key of the job's row in the table of resources; ``source`` only if the config has one."""
        key = {"kernel": self.kernel, "arch": self.arch, "head_dim": self.head_dim}
        key |= {"source": self.source} if self.source else {}
        return key | {"dtype": self.dtype, "variant": self.variant}


def step_job(
    kernel: str, arch: str, head_dim: int, dtype: str = "bfloat16", variant: str = "state",
    config: Config | None = None, v_head_dim: int | None = None, score: str = "", source: str = "",
) -> Job:  # fmt: skip
    """Make the job of a variant with heads of ``head_dim`` channels, values of ``v_head_dim`` (None: the
    same)."""
    problem = VARIANTS[variant].problem
    problem = replace(problem, dim=head_dim, v_dim=v_head_dim or head_dim, dtype=dtype, score=score)
    return Job(kernel, arch, problem, variant, config, source)


@dataclass(frozen=True)
class Routed(Config):
    """A route of the forward pass, and its tiles."""

    ROUTE: str = ROUTES[0]

    @property
    def kernel(self) -> str:
        return self.ROUTE if self.ROUTE in ROUTES[1:] else "forward"

    @property
    def tiles(self) -> Config:
        return Config(**{name: getattr(self, name) for name in Config.__dataclass_fields__})


def kernel_of(kernel: str, config: Config | None) -> tuple[str, Config | None]:
    """The kernel and tiles that are launched for a config of a target's kernel."""
    return (config.kernel, config.tiles) if isinstance(config, Routed) else (kernel, config)


def options_of(kernel: str, config: Config | None) -> dict[str, Any]:
    """The engine options that select this config for a kernel; empty for None, the rule's config."""
    return {"CONFIGS": ((kernel, tuple(asdict(config).items())),)} if config else {}
