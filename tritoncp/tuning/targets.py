"""Targets of the autotuner, and their candidate configs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from tritoncp.analysis.jobs import Call, Job, Routed, kernel_of
from tritoncp.kernels.options import ROUTES
from tritoncp.kernels.tile_rules import FEW, Config, copies, default, specialises, weight
from tritoncp.kernels.toolchain import UNSAFE, fused_fault, multiplies_transposed
from tritoncp.masks.expressions import brief, score_of
from tritoncp.mods import Untranslatable, hand_written, score_mod
from tritoncp.perf.records.history import Point
from tritoncp.perf.suite.cases import CASES, Case

# "fused" is tuned only for calls that request it, and is not part of "bwd": it adds up dQ in a varying order,
# and a file of tiles must not make a deterministic call nondeterministic.  "few" is a decoding step.
# "routes" compares the other forward kernels with the best tiles of loops, which therefore are tuned first.
OPS = {
    "fwd": ("forward",),
    "bwd": ("dq", "dkdv"),
    "fused": ("fused",),
    "few": ("few",),
    "routes": ("forward", "route"),
}
# Query heads, key heads, head dim and length of known models.
PRESETS = {
    "llama3-8b": ("32x8,128,16384",),
    "llama3-70b": ("64x8,128,16384",),
    "qwen2.5-7b": ("28x4,128,16384",),
    "gpt-oss-20b": ("64x8,64,16384",),
    "gemma2-9b": ("16x8,256,8192",),
    "deepseek-v3": ("128x128,192x128,8192",),
}
# Mask of perf/suite/cases.py -> the kind that a call looks up, and its variant in offline compilation.
MASKS = {
    "causal": ("causal", "causal"),
    "full": ("full", "full"),
    "document": ("interval", "documents"),
    "window": ("window", "window"),
}
MAX_ELEMENTS = 1 << 34  # elements of a shape's queries
# Mask name of perf/suite/cases.py -> mask and score_mod, for cases with a score_mod.
SCORED = {"softcap": ("causal", "softcap"), "alibi": ("causal", "alibi")}


@dataclass(frozen=True)
class Target:
    """A kernel of one shape, whose tiles are tuned.

    kernel: forward, dq, dkdv, fused; "few": forward of a single query; "route": routes of the forward pass
    v_head_dim: channels of values; None = those of queries and keys. score: a score_mod by its name
    """

    kernel: str
    mask: str
    heads: int
    kv_heads: int
    head_dim: int
    seq: int
    dtype: str = "bfloat16"
    v_head_dim: int | None = None
    score: str = ""

    @property
    def v_dim(self) -> int:
        return self.v_head_dim or self.head_dim

    @property
    def queries(self) -> int:
        """The number of queries if it differs from that of keys; else 0."""
        return 1 if self.kernel == "few" else 0

    @property
    def shape(self) -> str:
        """The shape in the format that :func:`targets` parses."""
        width = f"{self.head_dim}x{self.v_dim}" if self.v_dim != self.head_dim else f"{self.head_dim}"
        return f"{self.heads}x{self.kv_heads},{width},{self.seq}"

    @property
    def name(self) -> str:
        """The target in words.

        >>> Target("dq", "causal", 32, 8, 128, 16384).name
        'dq causal 32x8 d128 16384 bfloat16'
        >>> Target("forward", "full", 8, 8, 192, 4096, v_head_dim=128, score="softcap").name
        'forward full softcap 8x8 d192x128 4096 bfloat16'
        """
        heads, width, seq = self.shape.split(",")
        return " ".join(
            filter(None, (self.kernel, self.mask, self.score, heads, f"d{width}", seq, self.dtype))
        )

    def job(self, arch: str, config: Config | None) -> Job:
        """The launch to time."""
        call = Call(self.mask, self.heads, self.kv_heads, self.seq, self.queries)
        return replace(self.step(arch, config), variant=MASKS[self.mask][1], call=call)

    def step(self, arch: str, config: Config | None) -> Job:
        """The same kernel as a step of a schedule, which needs the most registers."""
        kernel, tiles = kernel_of(self.kernel, config)
        variant = "few" if kernel == "few" else "state"
        return Job(kernel, arch, self.head_dim, self.dtype, variant, tiles, self.v_head_dim, self.score)

    @property
    def entry(self) -> dict[str, Any]:
        """The key of an entry as files store it, and the shape that was measured."""
        key = {"kernel": self.kernel, "dtype": self.dtype, "head_dim": self.head_dim}
        key |= {"v_head_dim": self.v_dim} if self.v_dim != self.head_dim else {}
        key |= {"score": self.score} if self.score else {}
        key |= {"loads": 2} if _loads(self.score)[0] == 2 else {}
        return {**key, "mask": MASKS[self.mask][0], "shape": self.shape}


def preset(name: str) -> tuple[str, ...]:
    """The shapes of a preset."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}")
    return PRESETS[name]


def targets(
    shapes: Sequence[str], masks: Sequence[str], ops: Sequence[str], dtype: str, score: str = ""
) -> list[Target]:
    """Make the targets for shapes: HEADSxKV_HEADS,HEAD_DIM,LENGTH, or HEAD_DIMxV_HEAD_DIM where they differ.
    Of shapes for which calls look up the same tiles, only the first is a target. Raises ValueError for a name
    that is unknown or a shape in another format.

    >>> [target.name for target in targets(["32x8,128,4096"], ["full"], ["bwd"], "float16")]
    ['dq full 32x8 d128 4096 float16', 'dkdv full 32x8 d128 4096 float16']
    """
    targets_by_key: dict[tuple[Any, ...], Target] = {}
    for names, choices, what in ((masks, MASKS, "mask"), (ops, OPS, "op")):
        if unknown := [name for name in names if name not in choices]:
            raise ValueError(f"unknown {what} {unknown[0]!r}; known: {', '.join(choices)}")
    for shape, mask, op in itertools.product(shapes, masks, ops):
        try:
            heads, width, length = shape.split(",")
            q_heads, kv_heads = map(int, heads.split("x"))
            dim, *rest = map(int, width.split("x"))
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
            raise ValueError(
                f"shape {shape!r}: queries of more than {MAX_ELEMENTS >> 30}G numbers fit no GPU"
            )
        if score:
            _check(score, q_heads)
        other = v_dim if v_dim != dim else None
        if op == "few" and q_heads // kv_heads > FEW:
            raise ValueError(f"shape {shape!r}: up to {FEW} query heads of a key head are few rows")
        for kernel in OPS[op]:
            mask_name = "full" if kernel == "few" else mask
            target = Target(kernel, mask_name, q_heads, kv_heads, dim, seq, dtype, other, score)
            targets_by_key.setdefault((kernel, dim, v_dim, MASKS[mask_name][0]), target)
    return list(targets_by_key.values())


def without_faults(requested: Sequence[Target], arch: str) -> tuple[list[Target], list[str]]:
    """Select the targets that this Triton compiles right for ``arch``. Returns them, and a line with the
    reason for each kind that is left out. Raises ValueError where no target remains."""
    why = fused_fault(arch)
    right = [target for target in requested if target.kernel != "fused" or why is None]
    if len(right) == len(requested):
        return right, []
    line = f"fused is left out: {why}, or leave it out of --ops; {UNSAFE}=1 tunes it"
    if not right:
        raise ValueError(line)
    return right, [line]


def _check(score: str, heads: int) -> None:
    """Check that kernels and torch (the reference) can run a score_mod. Raises ValueError."""
    fn = score_of(score, heads)
    if hand_written(fn):
        raise ValueError(
            f"{score} is @triton.jit code, which has no reference to check results against; give it in Python"
        )
    try:
        score_mod(fn)
    except Untranslatable as error:
        raise ValueError(str(error)) from error


def select_worst_case(points: Iterable[Point], device: str | None) -> tuple[str, list[Target]]:
    """Select the case to tune: the one that is farthest below its goal in the newest runs on a device (None:
    any); if no case has a goal, the one farthest behind the fastest baseline; without any comparison, the
    forward pass of Llama-3 8B. Cases that failed do not count, since better tiles would not help them.
    Returns a description, and targets: the kernels of the pass, of a forward pass also the routes.

    The newest runs are the newest one and all runs of the same sources. Of each case the last line with a
    baseline counts.
    """
    ordered = sorted((p for p in points if device in (None, p.series.device)), key=lambda point: point.time)
    cases = {case.name: case for case in CASES}
    last = {
        point.case: point
        for point in ordered
        if _is_current(point, ordered[-1]) and point.worst is not None and _tunable(cases.get(point.case))
    }
    rated = [(not point.goal, point.worst or 0.0, point.case) for point in last.values()]
    if not rated:
        why = "no comparison with a baseline on this device: Llama-3 8B instead"
        return why, targets(preset("llama3-8b"), ["causal"], ["fwd"], "bfloat16")
    aimless, worst, name = min(rated)
    case = cases[name]
    mask, score = SCORED.get(case.mask, (case.mask, ""))
    shape = f"{case.heads}x{case.kv_heads},{case.dim}x{case.v_dim},{case.seq}"
    forward = "few" if case.queries else "fwd" if score else "routes"
    op = {"forward": forward, "backward": "bwd"}[case.which]
    of = "the fastest baseline" if aimless else "its goal"
    return f"{name}, {worst:.2f} of {of}", targets([shape], [mask], [op], case.dtype, score)


def _is_current(point: Point, newest: Point) -> bool:
    """Whether a point belongs to the newest run, or to one that measured the same code."""
    same_code = "sources" in newest.env and point.env.get("sources") == newest.env["sources"]
    return point.run == newest.run or same_code


def _tunable(case: Case | None) -> bool:
    return case is not None and case.world == case.batch == 1 and case.mask in (*MASKS, *SCORED)


def candidates(target: Target, arch: str, loops: Config | None = None) -> list[Config]:
    """List the rule's config, then configs with tiles of half to twice its size, the most like it first; by
    descriptor and by pointer, where the rule of an architecture has both.  For "route": loops with these
    tiles (None: the rule's), then the other routes, where an architecture has any.

    >>> configs = candidates(Target("forward", "causal", 32, 8, 128, 16384), "sm_90")
    >>> configs[0] == default("forward", "sm_90", 128, torch.bfloat16), len(configs) == len(set(configs)) > 30
    (True, True)
    >>> {config.USE_TMA for config in configs}
    {False, True}
    >>> route = Target("route", "causal", 32, 8, 128, 16384)
    >>> [list(dict.fromkeys(c.ROUTE for c in candidates(route, arch))) for arch in ("sm_90", "sm_80")]
    [['loops', 'specialised', 'gluon'], ['loops']]
    """
    if target.kernel == "route":
        return list(_routes(target, arch, loops or _rule(replace(target, kernel="forward"), arch)))
    aligned, own = _aligned(target), _rule(target, arch)
    configs = {replace(own, HOIST=not own.HOIST)}
    for tma in (False, True) if aligned and copies(arch) else (own.USE_TMA,):
        rule = own if tma == own.USE_TMA else replace(_rule(target, arch, tma), USE_TMA=tma)
        near = [
            [n for n in (16, 32, 64, 128) if size // 2 <= n <= size * 2]
            for size in (rule.BLOCK_M, rule.BLOCK_N)
        ]
        near[0] = [rule.BLOCK_M] if target.kernel == "few" else near[0]  # a tile is as high as rows are many
        plain = replace(rule, FLIP=False, maxnreg=None)
        sized = [replace(plain, BLOCK_M=m, BLOCK_N=n) for m, n in itertools.product(*near)]
        configs |= {
            replace(config, num_warps=warps, num_stages=stages)
            for config, warps, stages in itertools.product(sized, (4, 8), (1, 2, 3, 4))
        }
        if not arch.startswith("gfx"):  # two programs on a multiprocessor
            configs |= {replace(config, num_warps=8, maxnreg=128) for config in sized}
        if target.kernel not in ("forward", "few") and multiplies_transposed(arch):
            configs |= {replace(config, FLIP=True) for config in sized}
    values = asdict(own)

    def order(config: Config) -> tuple[Any, ...]:
        other = asdict(config)
        return sum(other[name] != values[name] for name in values), str(other)

    return [own, *sorted(configs - {own}, key=order)]


def _aligned(target: Target) -> bool:
    """Whether strides allow copies by tensor descriptor."""
    size = getattr(torch, target.dtype).itemsize
    return all(width * size % 16 == 0 for width in (target.head_dim, target.v_dim))


def _rule(target: Target, arch: str, tma: bool = True) -> Config:
    widest, dtype = max(target.head_dim, target.v_dim), getattr(torch, target.dtype)
    score = weight(target.kernel, *_loads(target.score)) if target.score else ""
    return default(target.kernel, arch, widest, dtype, tma and _aligned(target), score)


@functools.lru_cache
def _loads(score: str) -> tuple[int, bool]:
    """The number of tile dimensions that loads of a named score_mod depend on, and whether its captures have
    gradients."""
    mod = score_mod(score_of(score, 1)) if score else None
    return (mod.loads, bool(mod.wants)) if mod else (0, False)


def _routes(target: Target, arch: str, loops: Config) -> Iterator[Routed]:
    """List the routes that an architecture has; other obstacles, such as a score_mod, appear at
    compilation."""
    yield Routed(**asdict(loops))
    widest, dtype = max(target.head_dim, target.v_dim), getattr(torch, target.dtype)
    for route in ROUTES[1:]:
        if widest > specialises(arch, route) or dtype.itemsize > 2 or not _aligned(target):
            continue
        rule = asdict(default(route, arch, widest, dtype)) | {"ROUTE": route}
        sizes = [n for n in (64, 128) if rule["BLOCK_N"] // 2 <= n <= rule["BLOCK_N"] * 2]
        settings = [{}, *({"BLOCK_N": n, "num_stages": s} for n, s in itertools.product(sizes, (2, 3, 4)))]
        yield from dict.fromkeys(Routed(**rule | one) for one in settings)
