"""The table of benchmark cases, in order of importance.

The meaning of a case's name never changes, so that times of different days can be compared: a new shape or
mask is a new case.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tritoncp.perf.problem import MODELS, Problem

TIERS = ("smoke", "core", "full")
PASS_SUFFIXES = {"forward": "fwd", "backward": "bwd"}


@dataclass(frozen=True)
class Case:
    """One measurement of a problem.

    which: "forward" or "backward"
    tier:  "smoke" (under half a minute), "core" (the figures to reach, eight minutes) or "full" (other
           models' shapes, sweeps, several ranks)
    model: the model with this shape; a label, not part of the name
    alias: a short name of the problem, by which both passes are selected; no history has it
    """

    problem: Problem
    which: str
    tier: str = "core"
    model: str = ""
    alias: str = ""

    @property
    def name(self) -> str:
        """The name: that of the problem, and the pass.

        >>> Case(Problem("causal", 16384), "forward").name
        'causal-16k-fwd'
        """
        return f"{self.problem.name}-{PASS_SUFFIXES[self.which]}"

    def shrunk(self) -> Case:
        """Return the case with sizes small enough for interpreted kernels."""
        heads, kv_heads = (4, 2) if self.problem.world > 1 else (2, 1)
        problem = replace(
            self.problem, seq=256, heads=heads, kv_heads=kv_heads, dim=16, v_dim=16, batch=1,
            queries=min(self.problem.queries, 16), dtype="float32",
        )  # fmt: skip
        return replace(self, problem=problem)

    @property
    def tags(self) -> dict[str, str]:
        """Tags for filters of the history's readers.

        >>> Case(Problem("causal", 16384), "forward").tags["shape"]
        '1×16384, 32/8 heads of 128'
        """
        problem = self.problem
        width = problem.width.replace("x", "/")
        few = f" ({problem.queries} queries)" if problem.queries else ""
        shape = f"{problem.batch}×{problem.seq}{few}, {problem.heads}/{problem.kv_heads} heads of {width}"
        tags = {"mask": problem.mask, "pass": self.which, "dtype": problem.dtype, "shape": shape}
        ranks = f"{problem.world} {'in one' if problem.together else 'ranks'}, {problem.schedule}"
        return (
            tags
            | ({"model": self.model} if self.model else {})
            | ({"ranks": ranks} if problem.world > 1 else {})
        )


def _both_passes(
    masks: str,
    lengths: int | tuple[int, ...],
    tier: str = "core",
    model: str = "",
    alias: str = "",
    **shape: Any,
) -> list[Case]:
    """List both passes of problems with each of the masks, separated by blanks, and each length."""
    seqs = (lengths,) if isinstance(lengths, int) else lengths
    problems = [Problem(mask, seq, **shape) for mask in masks.split() for seq in seqs]
    return [Case(problem, which, tier, model, alias) for problem in problems for which in PASS_SUFFIXES]


CONTEXT_PARALLEL = (("causal", "allgather"), ("causal", "ring"), ("document", "fetch"), ("causal", "ulysses"))

# Masks for which flex variants that compile slowly are measured too, at the first size
SEARCHED = ("causal", "full", "document", "window")

# Goals: the min speedup over a baseline (its time over tritoncp's) worth shipping.
GOALS: dict[tuple[str, str], dict[str, float]] = {
    ("full", "forward"): {"flex": 1.2, "flash": 1.3, "cudnn": 0.8},
    ("full", "backward"): {"flex": 1.3, "flash": 1.1, "cudnn": 0.72},
    ("causal", "forward"): {"flex": 1.2, "flash": 1.3, "cudnn": 0.8},
    ("causal", "backward"): {"flex": 1.3, "flash": 1.1, "cudnn": 0.72},
    ("document", "forward"): {"flex": 1.5, "flash": 1.25},
    ("document", "backward"): {"flex": 1.6, "flash": 1.15},
    ("window", "forward"): {"flex": 1.25, "flash": 1.5},
    ("window", "backward"): {"flex": 1.3, "flash": 1.05},
    **{(mask, "forward"): {"flex": 1.2} for mask in ("prefix", "softcap", "alibi")},
    **{(mask, "backward"): {"flex": 1.3} for mask in ("prefix", "softcap", "alibi")},
}

# Both passes of a problem are adjacent: they share one compilation.
CASES: tuple[Case, ...] = (
    *_both_passes("causal", 1024, tier="smoke"),
    *_both_passes("causal full document window alibi softcap prefix", 16384),
    *_both_passes("causal full document window", 8192),
    *_both_passes("causal full document window", 32768),
    *_both_passes("alibi softcap prefix", (8192, 32768)),
    # A step of decoding, and a step that checks sixteen tokens or extends a long context a little
    *(
        Case(Problem("full", 32768, queries=rows), "forward", "full", "Llama-3 8B, decoding")
        for rows in (1, 16)
    ),
    # Cases measured before models had labels keep their place and name
    *_both_passes("causal", 16384, "full", "gpt-oss, without sinks", **MODELS["gpt-oss"]),
    *_both_passes("window", 16384, "full", "gpt-oss, wider window", **MODELS["gpt-oss"]),
    *_both_passes("causal", 8192, "full", "Gemma 2 9B, without softcap", **MODELS["Gemma 2 9B"]),
    *_both_passes("causal", 8192, "full", "DeepSeek-V3, latent attention", **MODELS["DeepSeek-V3"]),
    *_both_passes("causal", 32768, "full", "Llama-3 70B, a rank of 8 by heads", heads=8, kv_heads=1),
    *_both_passes("document", 8192, "full", batch=4),
    *_both_passes("causal", 8192, "full", dtype="float16"),
    *_both_passes("sinks window128-sinks", 8192, "full", "gpt-oss", **MODELS["gpt-oss"]),
    *_both_passes("softcap", 8192, "full", "Gemma 2 9B", **MODELS["Gemma 2 9B"]),
    *_both_passes("causal document", 131072, "full", "Llama-3 8B, 128K"),
    *_both_passes("causal document", 8192, "full", "Llama-3 70B", **MODELS["Llama-3 70B"]),
    *_both_passes("causal document", 8192, "full", "Qwen3 30B-A3B", **MODELS["Qwen3 30B-A3B"]),
    *_both_passes("causal document", 8192, "full", "Qwen3 235B-A22B", **MODELS["Qwen3 235B-A22B"]),
    *_both_passes("full document", 8192, "full", dim=64, v_dim=64),
    *_both_passes("full document", 8192, "full", dim=96, v_dim=96),
    *_both_passes("full document", 8192, "full", dim=256, v_dim=256),
    *_both_passes(
        "causal", 8192, "full", "Gemma 4 31B, global layers", "gemma4-global", **MODELS["Gemma 4 31B"]
    ),
    *_both_passes(
        "causal", 8192, "full", "DeepSeek-V3, absorbed", "mla-absorbed", **MODELS["DeepSeek-V3, absorbed"]
    ),
    # Two ranks of a ring on one device: steps that load and store the softmax state
    *_both_passes("causal", 16384, "full", world=2, schedule="ring", together=True),
    *(
        case
        for together, world, seq in (
            (True, 8, 32768),
            (False, 2, 65536),
            (False, 4, 65536),
            (False, 8, 65536),
        )
        for mask, schedule in CONTEXT_PARALLEL
        for case in _both_passes(mask, seq, "full", world=world, schedule=schedule, together=together)
    ),
)


def position(name: str, patterns: str | Sequence[str]) -> int | None:
    """Return the position of the first pattern that a name matches; None if it matches none.

    >>> position("causal-8k-fwd", ["full-*", "*-8k-*"]), position("causal-8k-fwd", ["full-*"])
    (1, None)
    """
    sequence = [patterns] if isinstance(patterns, str) else patterns
    return next((i for i, pattern in enumerate(sequence) if fnmatch.fnmatchcase(name, pattern)), None)


def select(
    tier: str = "core",
    only: str | Sequence[str] = "*",
    world: int | None = 1,
    table: Sequence[Case] = CASES,
) -> list[Any]:
    """Select the cases of a tier and the tiers before it, for a number of processes (None: any), whose names
    or aliases match a pattern; in the order of the patterns, then of the table.

    >>> [case.name for case in select(only=["causal-8k-*", "causal-*-fwd"])]
    ['causal-8k-fwd', 'causal-8k-bwd', 'causal-1k-fwd', 'causal-16k-fwd', 'causal-32k-fwd']
    >>> [case.name for case in select("full", "mla-absorbed")]
    ['causal-h128x1-d576x512-8k-fwd', 'causal-h128x1-d576x512-8k-bwd']
    """
    tiers = TIERS[: TIERS.index(tier) + 1]
    places = {}
    for case in table:
        if case.tier in tiers and world in (None, 1 if case.problem.together else case.problem.world):
            matches = position(case.name, only), position(case.alias, only) if case.alias else None
            places[case] = min((at for at in matches if at is not None), default=None)
    return sorted((case for case, at in places.items() if at is not None), key=lambda case: places[case] or 0)
