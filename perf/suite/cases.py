"""The table of benchmark cases, most important first.

A case is data. Its name never changes meaning, so that figures of different days can be compared: a new
shape or mask is a new case.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tritoncp.core.tracing import Mod
from tritoncp.masks.closed_forms import causal, document, prefix_lm, sliding_window
from tritoncp.masks.mask_mod import MaskMod, and_masks
from tritoncp.masks.named import alibi, softcap

TIERS = ("smoke", "core", "full")


@dataclass(frozen=True)
class Case:
    """One measurement: q [batch, heads, rows, dim], k [batch, kv_heads, seq, dim], v [.., seq, v_dim].

    mask:     a key of MASKS
    which:    "forward" or "backward"
    tier:     "smoke" (under half a minute), "core" (the figures to reach, eight minutes) or "full" (other
              models' shapes, sweeps, several ranks)
    world:    ranks that share the sequence; more than one: by ``schedule``, started by torchrun
    together: all ranks run in lockstep on one device, which measures the cost of splitting
    model:    the model with this shape; a label, not part of the name
    queries:  the number of query rows, 0 for as many as keys
    """

    mask: str
    which: str
    seq: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    v_dim: int = 128
    batch: int = 1
    dtype: str = "bfloat16"
    tier: str = "core"
    world: int = 1
    schedule: str = ""
    together: bool = False
    model: str = ""
    queries: int = 0

    @property
    def rows(self) -> int:
        return self.queries or self.seq

    @property
    def name(self) -> str:
        """The name: mask, differences from the default shape, length, pass.

        >>> Case("causal", "forward", 16384).name, Case("full", "backward", 300, heads=8, dim=64).name
        ('causal-16k-fwd', 'full-h8x8-d64x128-300-bwd')
        >>> Case("causal", "forward", 65536, world=8, schedule="ring").name
        'causal-w8-ring-64k-fwd'
        >>> Case("full", "forward", 32768, queries=1).name
        'full-q1-32k-fwd'
        """
        parts = [self.mask]
        parts += [f"b{self.batch}"] * (self.batch != 1)
        parts += [f"h{self.heads}x{self.kv_heads}"] * ((self.heads, self.kv_heads) != (32, 8))
        parts += [f"d{self.dim}x{self.v_dim}"] * ((self.dim, self.v_dim) != (128, 128))
        parts += [self.dtype] * (self.dtype != "bfloat16")
        parts += [f"q{self.queries}"] * bool(self.queries)
        parts += [f"{'s' if self.together else 'w'}{self.world}", self.schedule] * (self.world > 1)
        parts += [f"{self.seq // 1024}k" if self.seq % 1024 == 0 else str(self.seq)]
        return "-".join([*parts, {"forward": "fwd", "backward": "bwd"}[self.which]])

    @property
    def problem(self) -> Case:
        """The problem that both passes share; it is compiled and checked once."""
        return replace(self, which="forward", tier="core", model="")

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def shrunk(self) -> Case:
        """Return the same case, small enough for interpreted kernels."""
        heads, kv_heads = (4, 2) if self.world > 1 else (2, 1)
        small: dict[str, Any] = {
            "seq": 256,
            "heads": heads,
            "kv_heads": kv_heads,
            "dim": 16,
            "v_dim": 16,
            "batch": 1,
            "queries": min(self.queries, 16),
        }
        return replace(self, **small, dtype="float32")

    @property
    def tags(self) -> dict[str, str]:
        """Tags by which a reader of the history may filter cases.

        >>> Case("causal", "forward", 16384).tags["shape"]
        '1×16384, 32/8 heads of 128'
        """
        width = str(self.dim) if self.dim == self.v_dim else f"{self.dim}/{self.v_dim}"
        few = f" ({self.queries} queries)" if self.queries else ""
        shape = f"{self.batch}×{self.seq}{few}, {self.heads}/{self.kv_heads} heads of {width}"
        tags = {"mask": self.mask, "pass": self.which, "dtype": self.dtype, "shape": shape}
        ranks = f"{self.world} {'in one' if self.together else 'ranks'}, {self.schedule}"
        return (
            tags
            | ({"model": self.model} if self.model else {})
            | ({"ranks": ranks} if self.world > 1 else {})
        )


@dataclass(frozen=True)
class MaskCase:
    """A mask and its score_mod, for tritoncp and for PyTorch.

    closed: tritoncp's closed form for a length; None for the full mask
    plain:  the same mask as a mask_mod that PyTorch compiles, its tensors on a device
    score:  the score_mod for a number of heads
    dense:  the name of the mask for scaled_dot_product_attention, "full" or "causal"
    window, documents: arguments of varlen_attn for the mask, besides causal
    sinks:  whether every head has a learned logit that takes probability (gpt-oss)
    """

    closed: Callable[[int], MaskMod | None]
    plain: Callable[[int, torch.device], Mod | None]
    score: Callable[[int, torch.device], Mod | None] = lambda heads, device: None
    dense: str | None = None
    window: Callable[[int], int] | None = None
    documents: bool = False
    sinks: bool = False


def document_lengths(seq: int) -> list[int]:
    """Return fixed, uneven document lengths: from an eighth of a per cent to a quarter of the sequence.

    >>> document_lengths(16384)[:4], sum(document_lengths(16384)), len(document_lengths(16384))
    ([4096, 20, 2560, 655], 16384, 15)
    """
    parts = [250, 1.25, 156.25, 40, 10, 125, 5, 80, 20, 2.5, 60, 100, 15, 85]
    lengths = [int(seq * part / 1000) for part in parts]
    return [*lengths, seq - sum(lengths)]


def window_of(seq: int) -> int:
    """Return the number of earlier keys in a sliding window: 1023, or fewer for a short sequence."""
    return min(1024, seq // 4) - 1


def _plain_causal(seq: int, device: torch.device) -> Mod:
    return lambda b, h, q, kv: q >= kv


def _plain_documents(seq: int, device: torch.device) -> Mod:
    lengths = torch.tensor(document_lengths(seq), device=device)
    ids = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
    return lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv])


def _plain_window(seq: int, device: torch.device) -> Mod:
    return _plain_left(window_of(seq))


def _plain_left(left: int) -> Mod:
    return lambda b, h, q, kv: (q >= kv) & (q - kv <= left)


def _plain_prefix(seq: int, device: torch.device) -> Mod:
    prefix = seq // 4
    return lambda b, h, q, kv: (q >= kv) | (kv < prefix)


MASKS: dict[str, MaskCase] = {
    "causal": MaskCase(lambda seq: causal(), _plain_causal, dense="causal"),
    "full": MaskCase(lambda seq: None, lambda seq, device: None, dense="full"),
    "document": MaskCase(
        lambda seq: and_masks(causal(), document(lengths=document_lengths(seq))),
        _plain_documents,
        documents=True,
    ),
    "window": MaskCase(lambda seq: sliding_window(window_of(seq)), _plain_window, window=window_of),
    "prefix": MaskCase(lambda seq: prefix_lm(seq // 4), _plain_prefix),
    "softcap": MaskCase(lambda seq: causal(), _plain_causal, lambda heads, device: softcap()),
    "alibi": MaskCase(lambda seq: causal(), _plain_causal, alibi),
    # gpt-oss: sinks in every layer, a window of 128 in every other one
    "sinks": MaskCase(lambda seq: causal(), _plain_causal, sinks=True),
    "window128-sinks": MaskCase(
        lambda seq: sliding_window(127), lambda seq, device: _plain_left(127), sinks=True
    ),
}


def sink_logits(heads: int, device: torch.device) -> Tensor:
    """Return a sink logit for each head, float32, from -2 to 2."""
    return torch.linspace(-2, 2, heads, device=device)


def _both_passes(mask: str, seq: int, **shape: Any) -> list[Case]:
    return [Case(mask, direction, seq, **shape) for direction in ("forward", "backward")]


# Llama-3 8B, Qwen3 8B and Mistral 7B are the defaults of Case: 32 query and 8 key heads of 128.
MODELS: dict[str, dict[str, int]] = {
    "Llama-3 70B": {"heads": 64, "kv_heads": 8},
    "Qwen3 30B-A3B": {"heads": 32, "kv_heads": 4},
    "Qwen3 235B-A22B": {"heads": 64, "kv_heads": 4},
    "gpt-oss": {"heads": 64, "kv_heads": 8, "dim": 64, "v_dim": 64},
    "Gemma 2 9B": {"heads": 16, "kv_heads": 8, "dim": 256, "v_dim": 256},
    "DeepSeek-V3": {"heads": 128, "kv_heads": 128, "dim": 192, "v_dim": 128},
}
CONTEXT_PARALLEL = (("causal", "allgather"), ("causal", "ring"), ("document", "fetch"), ("causal", "ulysses"))

# Masks for which the kernel options of PyTorch are searched; other masks use the best of the causal mask.
SEARCHED = ("causal", "full", "document", "window")

# Goals: the least speedup over a baseline (its time over tritoncp's) worth shipping.
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

# Both passes of a problem are adjacent: they share one compilation. At the first size of a mask
# PyTorch's kernel options are searched; later sizes take the best of them.
CASES: tuple[Case, ...] = (
    *_both_passes("causal", 1024, tier="smoke"),
    *(case for mask in ("causal", "full", "document", "window") for case in _both_passes(mask, 16384)),
    *(case for mask in ("alibi", "softcap", "prefix") for case in _both_passes(mask, 16384)),
    *(case for mask in ("causal", "full", "document", "window") for case in _both_passes(mask, 8192)),
    *(case for mask in ("causal", "full", "document", "window") for case in _both_passes(mask, 32768)),
    *(
        case
        for mask in ("alibi", "softcap", "prefix")
        for seq in (8192, 32768)
        for case in _both_passes(mask, seq)
    ),
    # A step of decoding, and one that checks sixteen tokens or fills a little of a long context
    *(
        Case("full", "forward", 32768, queries=rows, tier="full", model="Llama-3 8B, decoding")
        for rows in (1, 16)
    ),
    # Cases measured before models had labels keep their place and name
    *_both_passes("causal", 16384, tier="full", model="gpt-oss, without sinks", **MODELS["gpt-oss"]),
    *_both_passes("window", 16384, tier="full", model="gpt-oss, wider window", **MODELS["gpt-oss"]),
    *_both_passes("causal", 8192, tier="full", **MODELS["Gemma 2 9B"], model="Gemma 2 9B, without softcap"),
    *_both_passes(
        "causal", 8192, tier="full", model="DeepSeek-V3, latent attention", **MODELS["DeepSeek-V3"]
    ),
    *_both_passes(
        "causal", 32768, heads=8, kv_heads=1, tier="full", model="Llama-3 70B, a rank of 8 by heads"
    ),
    *_both_passes("document", 8192, batch=4, tier="full"),
    *_both_passes("causal", 8192, dtype="float16", tier="full"),
    *_both_passes("sinks", 8192, tier="full", model="gpt-oss", **MODELS["gpt-oss"]),
    *_both_passes("window128-sinks", 8192, tier="full", model="gpt-oss", **MODELS["gpt-oss"]),
    *_both_passes("softcap", 8192, tier="full", model="Gemma 2 9B", **MODELS["Gemma 2 9B"]),
    *_both_passes("causal", 131072, tier="full", model="Llama-3 8B, 128K"),
    *_both_passes("document", 131072, tier="full", model="Llama-3 8B, 128K"),
    *(
        case
        for model in ("Llama-3 70B", "Qwen3 30B-A3B", "Qwen3 235B-A22B")
        for mask in ("causal", "document")
        for case in _both_passes(mask, 8192, tier="full", model=model, **MODELS[model])
    ),
    *(
        case
        for dim in (64, 96, 256)
        for mask in ("full", "document")
        for case in _both_passes(mask, 8192, dim=dim, v_dim=dim, tier="full")
    ),
    # Two ranks of a ring on one device: steps that load and store the softmax state
    *_both_passes("causal", 16384, tier="full", world=2, schedule="ring", together=True),
    *(
        case
        for together, world in ((True, 8), (False, 2), (False, 4), (False, 8))
        for mask, schedule in CONTEXT_PARALLEL
        for case in _both_passes(
            mask, 32768 if together else 65536, tier="full", world=world, schedule=schedule, together=together
        )
    ),
)


def position(name: str, patterns: str | Sequence[str]) -> int | None:
    """Return the position of the first pattern that a name matches; None if it matches none.

    >>> position("causal-8k-fwd", ["full-*", "*-8k-*"]), position("causal-8k-fwd", ["full-*"])
    (1, None)
    """
    sequence = [patterns] if isinstance(patterns, str) else patterns
    return next((i for i, pattern in enumerate(sequence) if fnmatch.fnmatchcase(name, pattern)), None)


def select(tier: str = "core", only: str | Sequence[str] = "*", world: int = 1) -> list[Case]:
    """Select the cases of a tier and the tiers before it, for a number of processes, whose names match a
    pattern; in the order of the patterns, then of the table.

    >>> [case.name for case in select(only=["causal-8k-*", "causal-*-fwd"])]
    ['causal-8k-fwd', 'causal-8k-bwd', 'causal-1k-fwd', 'causal-16k-fwd', 'causal-32k-fwd']
    """
    tiers = TIERS[: TIERS.index(tier) + 1]
    places = {
        case: position(case.name, only)
        for case in CASES
        if case.tier in tiers and world == (1 if case.together else case.world)
    }
    return sorted((case for case, at in places.items() if at is not None), key=lambda case: places[case] or 0)
