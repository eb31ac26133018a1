"""Targets of the autotuner, and their candidate configs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tritoncp.analysis.jobs import Job, Routed, kernel_of, parse_shape, step_job
from tritoncp.core.environment import UNSAFE_FUSED
from tritoncp.kernels.engine import FUSED_CHANNELS
from tritoncp.kernels.options import ROUTES
from tritoncp.kernels.tile_rules import FEW, Config, copies, default, flipped_rows, weight, widest_route
from tritoncp.kernels.toolchain import flips_right, fused_fault
from tritoncp.masks.expressions import score_of
from tritoncp.measured_tiles.tile_lookup import MEASURED_KINDS
from tritoncp.mods import Untranslatable, hand_written, score_mod
from tritoncp.perf.problem import MODELS, Problem

# "fused" is not part of "bwd": it sums dQ in varying order, calls have to request it, and measured tiles must
# not make results nondeterministic. "few" is a decoding step. "routes" compares the other forward kernels
# with the best tiles of route "loops", which are tuned first.
OPS = {
    "fwd": ("forward",),
    "bwd": ("dq", "dkdv"),
    "fused": ("fused",),
    "few": ("few",),
    "routes": ("forward", "route"),
}
# Name of a preset -> (model of perf.problem.MODELS, length).
PRESETS = {
    "llama3-8b": ("Llama-3 8B", 16384),
    "llama3-70b": ("Llama-3 70B", 16384),
    "qwen2.5-7b": ("Qwen2.5 7B", 16384),
    "gpt-oss-20b": ("gpt-oss", 16384),
    "gemma2-9b": ("Gemma 2 9B", 8192),
    "deepseek-v3": ("DeepSeek-V3", 8192),
}


@dataclass(frozen=True)
class Target:
    """A kernel and a problem for which tiles are tuned.

    kernel: forward, dq, dkdv, fused; "few": forward of a single query; "route": routes of the forward pass
    """

    kernel: str
    problem: Problem

    @property
    def name(self) -> str:
        """The target as text.

        >>> Target("dq", Problem("causal", 16384)).name
        'dq causal 32x8 d128 16384 bfloat16'
        >>> Target("forward", Problem("full", 4096, 8, 8, 192, score="softcap")).name
        'forward full softcap 8x8 d192x128 4096 bfloat16'
        """
        problem = self.problem
        heads, width, seq = problem.shape.split(",")
        words = (self.kernel, problem.mask, problem.score, heads, f"d{width}", seq, problem.dtype)
        return " ".join(filter(None, words))

    def job(self, arch: str, config: Config | None) -> Job:
        """Return the job to time: the launch of a call on one device."""
        kernel, tiles = kernel_of(self.kernel, config)
        return Job(kernel, arch, self.problem, config=tiles)

    def step(self, arch: str, config: Config | None) -> Job:
        """Return the job of the same kernel in a step of a schedule, which needs more registers than other
        launches."""
        (kernel, tiles), problem = kernel_of(self.kernel, config), self.problem
        variant = "few" if kernel == "few" else "state"
        sizes = (problem.dim, problem.dtype, variant, tiles, problem.v_dim)
        return step_job(kernel, arch, *sizes, problem.score)

    @property
    def entry(self) -> dict[str, Any]:
        """Return the fields of an entry in a file of tiles: its key, and the measured shape."""
        problem = self.problem
        key = {"kernel": self.kernel, **problem.tile_key}
        key |= {"score": problem.score} if problem.score else {}
        key |= {"loads": 2} if _loads(problem.score)[0] == 2 else {}
        return {**key, "mask": MEASURED_KINDS[problem.mask], "shape": problem.shape}


def preset(name: str) -> str:
    """Return the shape of a preset, a model by name."""
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} is unknown; pass one of {', '.join(PRESETS)}")
    model, seq = PRESETS[name]
    return Problem("causal", seq, **MODELS[model]).shape


def targets(
    shapes: Sequence[str], masks: Sequence[str], ops: Sequence[str], dtype: str, score: str = ""
) -> list[Target]:
    """List the targets for shapes HEADSxKV_HEADS,HEAD_DIM[xV_HEAD_DIM],LENGTH. If calls look up the same
    tiles for several shapes, only the first is a target. Raises ValueError for an unknown name, or a shape in
    another format.

    >>> [target.name for target in targets(["32x8,128,4096"], ["full"], ["bwd"], "float16")]
    ['dq full 32x8 d128 4096 float16', 'dkdv full 32x8 d128 4096 float16']
    """
    targets_by_key: dict[tuple[Any, ...], Target] = {}
    for names, choices, what in ((masks, MEASURED_KINDS, "mask"), (ops, OPS, "op")):
        if unknown := [name for name in names if name not in choices]:
            raise ValueError(f"{what} {unknown[0]!r} is unknown; pass one of {', '.join(choices)}")
    for shape, mask, op in itertools.product(shapes, masks, ops):
        problem = replace(parse_shape(shape), mask=mask, dtype=dtype, score=score)
        if score:
            _check(score, problem.heads)
        if op == "few" and problem.heads // problem.kv_heads > FEW:
            raise ValueError(
                f"shape {shape!r} with --ops few: at most {FEW} query heads per KV head are supported"
            )
        if "fused" in OPS[op] and max(problem.dim, problem.v_dim) > FUSED_CHANNELS:
            raise ValueError(
                f"shape {shape!r} with --ops {op}: above {FUSED_CHANNELS} channels the backward pass is not "
                "fused; leave it out of --ops"
            )
        for kernel in OPS[op]:
            measured = replace(problem, mask="full", queries=1) if kernel == "few" else problem
            key = kernel, problem.dim, problem.v_dim, MEASURED_KINDS[measured.mask]
            targets_by_key.setdefault(key, Target(kernel, measured))
    return list(targets_by_key.values())


def without_faults(requested: Sequence[Target], arch: str) -> tuple[list[Target], str]:
    """Drop targets that this Triton version miscompiles for ``arch``. Returns (the others, reason or "").
    Raises ValueError if no target remains."""
    why = fused_fault(arch)
    right = [target for target in requested if target.kernel != "fused" or why is None]
    if len(right) == len(requested):
        return right, ""
    line = f"fused is left out: {why}, or leave it out of --ops; {UNSAFE_FUSED.name}=1 tunes it"
    if not right:
        raise ValueError(line)
    return right, line


def _check(score: str, heads: int) -> None:
    """Raise ValueError unless both kernels and torch (the reference) can run a score_mod."""
    fn = score_of(score, heads)
    if hand_written(fn):
        raise ValueError(
            f"--score-mod {score} is @triton.jit code, for which results cannot be checked: pass a Python "
            "function"
        )
    try:
        score_mod(fn)
    except Untranslatable as error:
        raise ValueError(str(error)) from error


def candidates(target: Target, arch: str, loops: Config | None = None) -> list[Config]:
    """List candidates: the default config, then tiles of half to twice its size, the nearest first; with and
    without descriptors, if the architecture has both. For "route": route "loops" with the tiles ``loops``
    (None: the default), then the architecture's other routes.

    >>> problem = Problem("causal", 16384)
    >>> configs = candidates(Target("forward", problem), "sm_90")
    >>> configs[0] == default("forward", "sm_90", 128, problem.torch_dtype), len(set(configs)) > 30
    (True, True)
    >>> {config.USE_TMA for config in configs}
    {False, True}
    >>> route = Target("route", problem)
    >>> [list(dict.fromkeys(c.ROUTE for c in candidates(route, arch))) for arch in ("sm_90", "sm_80")]
    [['loops', 'gluon'], ['loops']]
    """
    if target.kernel == "route":
        return list(_routes(target, arch, loops or _rule(replace(target, kernel="forward"), arch)))
    aligned, own = _aligned(target), _rule(target, arch)
    configs: set[Config] = set()
    for tma in (False, True) if aligned and copies(arch) else (own.USE_TMA,):
        rule = own if tma == own.USE_TMA else replace(_rule(target, arch, tma), USE_TMA=tma)
        near = [
            [n for n in (16, 32, 64, 128) if size // 2 <= n <= size * 2]
            for size in (rule.BLOCK_M, rule.BLOCK_N)
        ]
        near[0] = [rule.BLOCK_M] if target.kernel == "few" else near[0]  # determined by the number of rows
        plain = replace(rule, FLIP=False, maxnreg=None)
        sized = [replace(plain, BLOCK_M=m, BLOCK_N=n) for m, n in itertools.product(*near)]
        configs |= {
            rule,
            *(
                replace(config, num_warps=warps, num_stages=stages)
                for config, warps, stages in itertools.product(sized, (4, 8), (1, 2, 3, 4))
            ),
        }
        if not arch.startswith("gfx"):  # two CTAs fit on a multiprocessor
            configs |= {replace(config, num_warps=8, maxnreg=128) for config in sized}
        if target.kernel not in ("forward", "few"):
            flips = (c for c in sized if flips_right(arch, flipped_rows(target.kernel, c)))
            configs |= {replace(config, FLIP=True) for config in flips}
    values = asdict(own)

    def order(config: Config) -> tuple[Any, ...]:
        other = asdict(config)
        return sum(other[name] != values[name] for name in values), str(other)

    return [own, *sorted(configs - {own}, key=order)]


def _aligned(target: Target) -> bool:
    """Return whether strides allow tensor descriptors."""
    problem = target.problem
    return all(width * problem.torch_dtype.itemsize % 16 == 0 for width in (problem.dim, problem.v_dim))


def _rule(target: Target, arch: str, tma: bool = True) -> Config:
    problem = target.problem
    score = weight(target.kernel, *_loads(problem.score)) if problem.score else ""
    widest, tma = max(problem.dim, problem.v_dim), tma and _aligned(target)
    return default(target.kernel, arch, widest, problem.torch_dtype, tma, score)


@functools.lru_cache
def _loads(score: str) -> tuple[int, bool]:
    """Return (`Mod.loads` of a named score_mod, whether its captures require grad)."""
    mod = score_mod(score_of(score, 1)) if score else None
    return (mod.loads, bool(mod.wants)) if mod else (0, False)


def _routes(target: Target, arch: str, loops: Config) -> Iterator[Routed]:
    """Yield the routes that an architecture has. Other obstacles, such as a score_mod, raise at
    compilation."""
    yield Routed(**asdict(loops))
    widest, dtype = max(target.problem.dim, target.problem.v_dim), target.problem.torch_dtype
    for route in ROUTES[1:]:
        if widest > widest_route(arch, route) or dtype.itemsize > 2 or not _aligned(target):
            continue
        rule = asdict(default(route, arch, widest, dtype)) | {"ROUTE": route}
        sizes = [n for n in (64, 128) if rule["BLOCK_N"] // 2 <= n <= rule["BLOCK_N"] * 2]
        settings = [{}, *({"BLOCK_N": n, "num_stages": s} for n, s in itertools.product(sizes, (2, 3, 4)))]
        yield from dict.fromkeys(Routed(**rule | one) for one in settings)
