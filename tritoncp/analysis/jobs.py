"""Compilation jobs: a kernel, a GPU architecture and a call, by name."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritoncp.kernels.options import ROUTES
from tritoncp.kernels.tile_rules import MAX_V_HEAD_DIM, Config, head_dim_fault
from tritoncp.masks.expressions import brief
from tritoncp.measured_tiles.tile_tables import kernel_and_tiles
from tritoncp.perf.problem import Problem
from tritoncp.selection.selection import Selection

S, HEADS, KV_HEADS = 1024, 8, 2


class Chosen(NamedTuple):
    """Keys that rows of queries select at random.

    top:         keys of a row, or blocks
    block_size:  keys of a block, 1 for keys alone
    query_block: queries of a row
    shares:      heads of the selection
    """

    top: int
    block_size: int = 1
    query_block: int = 1
    shares: int = 1

    @property
    def name(self) -> str:
        """The selection as text.

        >>> Chosen(64).name, Chosen(4, 64, shares=2).name
        ('64 keys of 1 head', '4 blocks of 64 keys of 2 heads')
        """
        of_blocks = f"blocks of {self.block_size} keys" if self.block_size > 1 else "keys"
        queries = f" for {self.query_block} queries" if self.query_block > 1 else ""
        return f"{self.top} {of_blocks}{queries} of {self.shares} head{'s' * (self.shares > 1)}"

    def draw(self, problem: Problem, positions: Tensor | None = None) -> Selection:
        """Draw a selection for the queries of a problem, of keys that its mask shows as far as there are
        enough; equal problems give equal selections. positions: of the queries, [n]; None: all"""
        generator = torch.Generator().manual_seed(0)
        mask, height, size = problem.block_mask(), self.query_block, self.block_size
        at = torch.arange(problem.rows) if positions is None else positions
        rows, blocks = -(-len(at) // height), -(-problem.seq // size)
        indices = torch.empty(1, self.shares, rows, self.top, dtype=torch.int32)
        visible = mask.to_dense(1, 1)[0, 0][at]
        for row in range(rows):
            seen = visible[row * height : (row + 1) * height].any(0)
            seen = torch.nn.functional.pad(seen, (0, blocks * size - problem.seq)).view(blocks, size).any(1)
            scores = torch.rand(self.shares, blocks, generator=generator) + seen
            indices[0, :, row] = scores.topk(self.top).indices.sort().values.int()
        return Selection(indices, size, height)


class Variant(NamedTuple):
    """A kind of launch in a schedule: a problem (head dims, dtype and score_mod are the job's), whether the
    launch loads a state (adds to gradients) and stores one, kernel options, and selected keys."""

    problem: Problem
    load: bool = False
    store: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    chosen: Chosen | None = None


_FULL, _CAUSAL, _DOCUMENTS = (
    Problem(mask, S, HEADS, KV_HEADS) for mask in ("full", "causal", "three-documents")
)
_GATHERED = replace(_DOCUMENTS, world=4)
_SPLIT = (("SPLIT_KV", 4),)
_LATENT = replace(_CAUSAL, heads=128, kv_heads=1)
_SELECTED = {  # keys chosen at run time
    "tokens": (_LATENT, False, False, (), Chosen(128)),  # 64 or 128 heads share a tile
    "group_tokens": (replace(_CAUSAL, heads=32), True, True, (), Chosen(128, shares=2)),  # 16 heads
    "blocks": (replace(_GATHERED, heads=32), True, True, (), Chosen(4, 64, 1, 2)),  # 16 heads
}
VARIANTS = {
    "full": Variant(_FULL),
    "causal": Variant(_CAUSAL),  # closed form: kernels compare positions
    "window": Variant(replace(_FULL, mask="two-sided-window"), load=True),
    "documents": Variant(_DOCUMENTS),  # tables and row intervals
    "state": Variant(_GATHERED, load=True, store=True),  # a step over gathered keys, from and to a state
    "mask_mod": Variant(replace(_GATHERED, mask="dilated")),
    "pointers": Variant(_GATHERED, load=True, store=True, options=(("USE_TMA", False),)),
    "few": Variant(replace(_DOCUMENTS, queries=16), load=True, options=_SPLIT),  # a tile of 4 heads
    "short": Variant(replace(_DOCUMENTS, queries=64), load=True, options=_SPLIT),  # two tiles of 4 heads
    "decode": Variant(replace(_CAUSAL, queries=1), options=_SPLIT),
    **{name: Variant(*fields) for name, fields in _SELECTED.items()},
    # all sizes are 1 where possible: Triton specialises on 1
    "single": Variant(replace(_FULL, mask="neighbours", seq=1)),
    "pair": Variant(replace(_CAUSAL, seq=1)),  # sizes of 1, without a window
}
VARIANT_OF_KIND = {kind: kind for kind in ("full", "causal", "window")} | {
    "interval": "documents",
    "mod": "mask_mod",
}
KERNELS = ("forward", "delta", "dq", "dkdv")


# Architectures with default tiles, for which Triton compiles.
TARGETS = (
    *("sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121"),
    *("gfx90a", "gfx942", "gfx950"),
)
MAX_ELEMENTS = 1 << 34  # max elements of a shape's queries


def parse_shape(shape: str) -> Problem:
    """Parse a shape HEADSxKV_HEADS,HEAD_DIM[xV_HEAD_DIM],LENGTH to a problem with the full mask. Raises
    ValueError for another format, and for a shape too large for a GPU.

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
            f"shape {brief(shape)} is not HEADSxKV_HEADS,HEAD_DIM,LENGTH: pass for example 32x8,128,16384, "
            "or with another head dim of values 128x128,192x128,8192"
        ) from error
    if min(q_heads, kv_heads, dim, v_dim, seq) < 1 or q_heads % kv_heads:
        raise ValueError(f"shape {shape!r}: all numbers have to be positive, and KV heads divide heads")
    if fault := head_dim_fault(dim) or head_dim_fault(v_dim, of_values=True):
        raise ValueError(f"shape {shape!r}: of head dims, {fault}")
    if q_heads * seq * max(dim, v_dim) > MAX_ELEMENTS:
        raise ValueError(
            f"shape {shape!r}: queries have more than {MAX_ELEMENTS >> 30}G elements, too many for a GPU"
        )
    return Problem("full", seq, q_heads, kv_heads, dim, v_dim)


def parse_chosen(text: str) -> Chosen:
    """Parse a selection COUNT[xBLOCK_SIZE][,SHARES]. Raises ValueError for another format.

    >>> parse_chosen("4x64,2")
    Chosen(top=4, block_size=64, query_block=1, shares=2)
    """
    try:
        keys, _, shares = text.partition(",")
        count, _, size = keys.partition("x")
        chosen = Chosen(int(count), int(size or 1), 1, int(shares or 1))
    except ValueError as error:
        raise ValueError(
            f"selection {brief(text)} is not COUNT, COUNTxBLOCK_SIZE, or one of them and a number of heads: "
            "pass for example 64, 4x64 or 4x64,2"
        ) from error
    if min(chosen.top, chosen.shares) < 1 or (chosen.block_size != 1 and chosen.block_size % 16):
        raise ValueError(f"selection {text!r}: counts are at least 1, and blocks multiples of 16 keys")
    return chosen


@dataclass(frozen=True)
class Job:
    """One kernel to compile, for the launch of a problem.

    kernel: one of KERNELS; "fused": dK/dV with dQ in one kernel; "few": forward with tiles for few query rows
        (variant "few" or "decode"); "combine": the launch after "few" if keys are split over several CTAs;
        "sums": the one after "dkdv" of single keys; "gluon", "specialized": routes; "dk", "dv": launches of
        "dkdv" with more than 256 channels
    variant: key of VARIANTS, for the state and options of the launch; "": the launch of a call on one device
    config: the tiles; None: the built-in default
    source: origin of a config other than the default
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
        """The job as text, unique in the table of resources.

        >>> step_job("dq", "sm_90", 128).name
        'dq sm_90 128 bfloat16 state'
        """
        words = self.kernel, self.arch, self.head_dim, self.dtype, self.variant, self.source
        return " ".join(str(word) for word in words if word)

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that a row of the job begins with."""
        names = ("name", "kernel", "arch", "head_dim", "dtype", "variant", "source")
        return {name: getattr(self, name) for name in names}


def step_job(
    kernel: str, arch: str, head_dim: int, dtype: str = "bfloat16", variant: str = "state",
    config: Config | None = None, v_head_dim: int | None = None, score: str = "", source: str = "",
) -> Job:  # fmt: skip
    """Make the job of a variant with these head dims; v_head_dim None: head_dim, or the largest."""
    problem, v_dim = VARIANTS[variant].problem, v_head_dim or min(head_dim, MAX_V_HEAD_DIM)
    problem = replace(problem, dim=head_dim, v_dim=v_dim, dtype=dtype, score=score)
    return Job(kernel, arch, problem, variant, config, source)


@dataclass(frozen=True)
class Routed(Config):
    """A route of the forward pass, and its tiles."""

    ROUTE: str = ROUTES[0]


def kernel_of(kernel: str, config: Config | None) -> tuple[str, Config | None]:
    """Return (kernel, tiles) to launch for a target's kernel and config."""
    if not isinstance(config, Routed):
        return kernel, config
    kernel, tiles = kernel_and_tiles("route", asdict(config))
    return kernel, Config(**tiles)
