"""One attention problem as data, and the registries of masks and model shapes.

Benchmarks, the autotuner, compilation for absent GPUs, tables in docs and the self-check use these masks. A
name in ``MASKS`` never changes its meaning, since histories are compared by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tritoncp.masks.closed_forms import causal, document, prefix_lm, sliding_window
from tritoncp.masks.expressions import mask_of, score_of
from tritoncp.masks.mask import Mask, create_block_mask, full_mask
from tritoncp.masks.mask_mod import MaskFn, and_masks
from tritoncp.masks.prefix_tree import tree
from tritoncp.mods.tracing import Mod


@dataclass(frozen=True)
class Problem:
    """One attention problem: q [batch, heads, rows, dim], k [batch, kv_heads, seq, dim], v [.., seq, v_dim].

    mask:     a key of MASKS, or an expression of tritoncp/masks/expressions.py
    queries:  number of query rows; 0 = number of keys
    score:    a score_mod as in tritoncp/masks/expressions.py; "" = the score_mod of the mask's name, if any
    world:    number of ranks that share the sequence, by ``schedule``
    together: run all ranks in lockstep on one device
    """

    mask: str
    seq: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    v_dim: int = 128
    batch: int = 1
    dtype: str = "bfloat16"
    queries: int = 0
    score: str = ""
    world: int = 1
    schedule: str = ""
    together: bool = False

    @property
    def name(self) -> str:
        """The name: mask, differences from the default shape, length.

        >>> Problem("causal", 16384).name, Problem("full", 300, heads=8, dim=64).name
        ('causal-16k', 'full-h8x8-d64x128-300')
        >>> Problem("causal", 65536, world=8, schedule="ring").name, Problem("full", 32768, queries=1).name
        ('causal-w8-ring-64k', 'full-q1-32k')
        """
        parts = [self.mask]
        parts += [f"b{self.batch}"] * (self.batch != 1)
        parts += [f"h{self.heads}x{self.kv_heads}"] * ((self.heads, self.kv_heads) != (32, 8))
        parts += [f"d{self.dim}x{self.v_dim}"] * ((self.dim, self.v_dim) != (128, 128))
        parts += [self.dtype] * (self.dtype != "bfloat16")
        parts += [f"q{self.queries}"] * bool(self.queries)
        parts += [f"{'s' if self.together else 'w'}{self.world}", self.schedule] * (self.world > 1)
        return "-".join([*parts, f"{self.seq // 1024}k" if self.seq % 1024 == 0 else str(self.seq)])

    @property
    def shape(self) -> str:
        """Heads, head dims and length, as `tritoncp autotune --shapes` takes them.

        >>> Problem("causal", 16384).shape, Problem("full", 4096, 8, 8, dim=192).shape
        ('32x8,128,16384', '8x8,192x128,4096')
        """
        return f"{self.heads}x{self.kv_heads},{self.width},{self.seq}"

    @property
    def width(self) -> str:
        """Head dims as text; one number if both are equal."""
        return "x".join(map(str, dict.fromkeys((self.dim, self.v_dim))))

    @property
    def tile_key(self) -> dict[str, Any]:
        """The dtype and head dims, as an entry of a file of tile shapes stores them.

        >>> Problem("causal", 16384).tile_key, Problem("causal", 16384, dim=192).tile_key["v_head_dim"]
        ({'dtype': 'bfloat16', 'head_dim': 128}, 128)
        """
        key = {"dtype": self.dtype, "head_dim": self.dim}
        return key | ({"v_head_dim": self.v_dim} if self.v_dim != self.dim else {})

    @property
    def rows(self) -> int:
        return self.queries or self.seq

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def closed_form(self, device: torch.device | str = "cpu") -> MaskFn | None:
        """Return the mask_mod, a closed form if there is one, with its tensors on a device; None for the full
        mask."""
        with torch.device(device):
            return MASKS[self.mask](self.seq) if self.mask in MASKS else mask_of(self.mask)

    def block_mask(self, device: str = "cpu", block: int = 128) -> Mask:
        """Return the Mask for the problem's query rows and keys, in blocks of this size, on the CPU."""
        closed = self.closed_form()
        if closed is None:
            return full_mask(self.rows, self.seq, block=block)
        return create_block_mask(closed, 1, 1, self.rows, self.seq, device, block)

    def score_mod(self, device: torch.device) -> Mod | None:
        name = self.score or (self.mask if self.mask in SCORES else "")
        return score_of(name, self.heads, device) if name else None

    def sinks(self, device: torch.device) -> Tensor | None:
        """Return a sink logit for each head, float32, from -2 to 2; None for a mask without sinks."""
        return torch.linspace(-2, 2, self.heads, device=device) if self.mask in SINKS else None


def document_lengths(seq: int) -> list[int]:
    """Return fixed, uneven document lengths: from an eighth of a per cent to a quarter of the sequence.

    >>> document_lengths(16384)[:4], sum(document_lengths(16384)), len(document_lengths(16384))
    ([4096, 20, 2560, 655], 16384, 15)
    """
    parts = [250, 1.25, 156.25, 40, 10, 125, 5, 80, 20, 2.5, 60, 100, 15, 85]
    lengths = [int(seq * part / 1000) for part in parts]
    return [*lengths, seq - sum(lengths)]


def corpus_lengths(seq: int) -> list[int]:
    """Draw the lengths of a packed corpus: log-normal, median 1400 tokens, one in a hundred above 18000, at
    most a quarter of the sequence.

    >>> len(corpus_lengths(65536)), max(corpus_lengths(65536)), sum(corpus_lengths(65536))
    (34, 12883, 65536)
    """
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(seq // 64 + 64, generator=generator, dtype=torch.float64, device="cpu")
    samples = 1400 * torch.exp(1.1 * normal)
    lengths = samples.long().clamp(1, max(1, seq // 4))
    complete = lengths[lengths.cumsum(0) < seq].tolist()
    return [*complete, seq - sum(complete)]


def window_of(seq: int) -> int:
    """Return the number of earlier keys in a sliding window: 1023, or fewer for a short sequence.

    >>> window_of(16384), window_of(1024)
    (1023, 255)
    """
    return min(1024, seq // 4) - 1


def _packed(lengths: Sequence[int], *masks: MaskFn) -> MaskFn:
    return and_masks(causal(), document(lengths=lengths), *masks)


def _few_documents(seq: int) -> MaskFn:
    """Build the causal mask of four documents, one of them of two tokens."""
    lengths = [seq // 3 + 1, 2, seq // 5]
    return _packed([*lengths, seq - sum(lengths)])


def _shared_question(seq: int) -> MaskFn:
    """Build the tree of several answers to one question, the first quarter of the sequence."""
    answers = document_lengths(seq - seq // 4)
    return tree([-1] + [0] * len(answers), [seq // 4, *answers])


def _dilated(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q - kv) % 3 == 0


# The mask_mod of each name for a length, a closed form if there is one; None for the full mask.
MASKS: dict[str, Callable[[int], MaskFn | None]] = {
    "causal": lambda seq: causal(),
    "full": lambda seq: None,
    "document": lambda seq: _packed(document_lengths(seq)),
    "window": lambda seq: sliding_window(window_of(seq)),
    "prefix": lambda seq: prefix_lm(seq // 4),
    "softcap": lambda seq: causal(),
    "alibi": lambda seq: causal(),
    # gpt-oss: sinks in every layer, a window of 128 in every second layer
    "sinks": lambda seq: causal(),
    "window128-sinks": lambda seq: sliding_window(127),
    # Plans
    "window4k": lambda seq: sliding_window(4095),
    "corpus": lambda seq: _packed(corpus_lengths(seq)),
    "corpus-window": lambda seq: _packed(corpus_lengths(seq), sliding_window(window_of(seq))),
    "corpus-window4k": lambda seq: _packed(corpus_lengths(seq), sliding_window(4095)),
    "shared-question": _shared_question,
    # Compilation and self-check
    "two-sided-window": lambda seq: sliding_window(200, 10),
    "third-window": lambda seq: sliding_window(seq // 3, 3),
    "neighbours": lambda seq: sliding_window(1, 1),
    "three-documents": lambda seq: _packed([300, 424, 300]),
    "few-documents": _few_documents,
    "dilated": lambda seq: _dilated,
}
SCORES = ("softcap", "alibi")  # masks that have a score_mod of the same name
SINKS = ("sinks", "window128-sinks")  # masks whose heads have a learned logit that takes probability

# Sizes of an attention layer, by model.
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3 8B": {},  # and Qwen3 8B, Mistral 7B: 32 query heads and 8 key heads of 128
    "Llama-3 70B": {"heads": 64, "kv_heads": 8},
    "Qwen2.5 7B": {"heads": 28, "kv_heads": 4},
    "Qwen3 30B-A3B": {"heads": 32, "kv_heads": 4},
    "Qwen3 235B-A22B": {"heads": 64, "kv_heads": 4},
    "gpt-oss": {"heads": 64, "kv_heads": 8, "dim": 64, "v_dim": 64},
    "Gemma 2 9B": {"heads": 16, "kv_heads": 8, "dim": 256, "v_dim": 256},
    "DeepSeek-V3": {"heads": 128, "kv_heads": 128, "dim": 192, "v_dim": 128},
    # Every sixth layer of Gemma 4; the others have a window and heads of 256
    "Gemma 4 31B": {"heads": 32, "kv_heads": 4, "dim": 512, "v_dim": 512},
    # The key is a token's latent and its rotary part, the value is the latent
    "DeepSeek-V3, absorbed": {"heads": 128, "kv_heads": 1, "dim": 576, "v_dim": 512},
}
