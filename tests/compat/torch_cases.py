"""The cases of torch's flex attention tests (test/inductor/test_flex_attention.py) as a table.

Sizes are small; what differs between cases is what differs between torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from tests.compat.torch_mods import BUILTIN, CAPTURING, LEARNED, Dims, Mod

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
# Largest error over the largest value: a few units of the dtype's precision.
TOLERANCE = {F16: 4e-3, BF16: 3e-2, F32: 2e-5, F64: 1e-11}


class Case(NamedTuple):
    """One call. ``block``, ``lists``: BLOCK_SIZE, and B and H, of the block mask; no mask: none is passed."""

    score: str | None = None
    mask: str | None = None
    dims: Dims = Dims()
    dtype: torch.dtype = F32
    block: int | tuple[int, int] = 32
    lists: tuple[int | None, int | None] = (1, 1)
    learned: bool = False  # captured tensors have the dtype of q
    passes: str = "training"  # or "inference"

    @property
    def name(self) -> str:
        """Everything that distinguishes this case from the others."""
        sizes = "x".join(str(n) for n in self.dims if n is not None)
        kind = str(self.dtype).removeprefix("torch.") + " learned" * self.learned
        return f"{self.score or 'no score'}-{self.mask or 'no mask'}-{sizes}-{kind}-{self.block}-{self.lists}"


TWO = Dims(batch=2)
TINY = Dims(2, 2, 11, 4)  # of gradcheck
BUILTIN_CALLS = [  # torch repeats its built-in score_mods over these
    *(Case(dims=TWO, dtype=dtype) for dtype in (F32, F16, BF16)),
    Case(dims=Dims(q=48)),  # shorter than the default block
    Case(mask="causal", dims=Dims(q=48), block=256),
    Case(dims=Dims(q=32, kv=64), dtype=F16),
    *(Case(mask="noop", block=block) for block in (16, (16, 32), (32, 16))),
    Case(mask="noop", dims=Dims(3, 4, kv_heads=2, kv_batch=1, q=32), lists=(3, 1)),
    Case(dims=Dims(heads=8, kv_heads=2, q=16, kv=64)),
    Case(dims=Dims(dim=32, v_dim=16)),
    Case(dims=Dims(dim=16, v_dim=32), dtype=F16),
    Case(dims=Dims(q=53), dtype=F16),
]
SPECIAL_CALLS = {  # score_mods that need other tensors than TWO
    "bool bias": Case(mask="causal", dims=TWO, lists=(2, None)),
    "rows of NaN beyond the batch": Case(mask="causal", dims=Dims(q=65)),
    "reciprocal": Case(mask="causal", dims=Dims(q=49), dtype=F64),
    "log where positive": Case(mask="causal", dims=Dims(q=49), dtype=F64),
    "head factor": Case(dims=TINY, dtype=F64),
    "query factor": Case(dims=Dims(q=67), dtype=BF16),
    "query and key bias": Case(mask="causal", dims=Dims(q=61), dtype=BF16),
}
MASKED_CALLS = [
    Case(None, "causal"),
    Case("causal", "causal", TWO),
    Case("squared", "causal", Dims(2, 2, 64, 4)),
    Case(None, "causal", Dims(2, q=63), lists=(2, 1)),
    Case(None, "causal", Dims(2, 4, kv_heads=1), lists=(2, 1)),
    *(Case(None, "causal", Dims(3, 4, kv_heads=n, kv_batch=1, q=32), lists=(3, 1)) for n in (1, 2)),
    Case(None, "blocks of 16", Dims(q=71), lists=(None, None)),
    Case(None, "causal and window"),
    Case(None, "causal beyond a window", Dims(2, q=49)),
    Case(None, "two documents", TWO, lists=(2, 1)),
    Case(None, "clamped documents", Dims(q=67), lists=(None, None)),
    Case("identity", "first half of the queries", TWO, lists=(2, 1)),
    Case(None, "start and end", lists=(None, None)),
    Case(None, "lengths", Dims(3, q=12), lists=(3, None)),
    Case(None, "hidden rows", TWO, lists=(2, None)),
    Case(None, "even batch rows", Dims(3, q=32), lists=(3, None)),
    Case(None, "offset by batch", Dims(4, 1), lists=(4, 1)),
    Case(None, "random bits", TWO, lists=(2, 2)),
    Case(None, "nothing"),
    Case(None, "noop", block=48),
    *(Case(None, "head of its own", Dims(1, 4), lists=(1, 4), block=block) for block in (16, 64)),
]
CASES = [
    *(call._replace(score=score) for score in BUILTIN for call in BUILTIN_CALLS),
    *(
        Case(score, dims=TWO, dtype=t)
        for score in CAPTURING
        for t in (F32, F16)
        if score not in SPECIAL_CALLS
    ),
    *(call._replace(score=score) for score, call in SPECIAL_CALLS.items()),
    *(call._replace(dtype=dtype) for call in MASKED_CALLS for dtype in (F32, F16)),
    *(Case(None, "causal", block=block) for block in (16, 64, 128, (16, 32), (32, 16))),
    # sizes at the limits
    *(Case("relative", dims=Dims(dim=d, v_dim=d), dtype=F16) for d in (17, 24, 94, 121)),
    *(Case(dims=Dims(heads=1, q=n)) for n in (1, 2, 17)),
    *(Case("causal", "noop", Dims(q=n)) for n in (31, 47, 48)),
    Case(dims=Dims(dim=8)),
    Case("identity", dims=Dims(q=32, dim=128, v_dim=128), dtype=F16),
    Case(dims=Dims(1, 4, kv_heads=2, v_dim=32), dtype=F16),
    Case(dims=Dims(33, 3, 4), passes="inference"),
    *(Case(score, dims=TINY, dtype=F64) for score in (None, "identity", "causal", "times two", "squared")),
    # captured tensors with gradients
    *(
        Case(score, dims=Dims(2, q=length), dtype=dtype, learned=True)
        for score in LEARNED
        for length, dtype in ((37, F32), (64, BF16), (69, F16))
    ),
]


def visible_pairs(mask_mod: Mod | None, x: Sequence[Tensor]) -> Tensor | None:
    """Evaluate a mask_mod at every pair of q and k as torch does."""
    return mask_mod and create_mask(mask_mod, *x[0].shape[:3], x[1].shape[2], device="cpu")


def first_of_each(cases: list[Case]) -> list[Case]:
    """The first case of each score_mod, mask_mod, dtype, block size and head layout."""
    seen: set[object] = set()
    first = []
    for case in cases:
        dims = case.dims
        heads = dims.heads // (dims.kv_heads or dims.heads), dims.v_dim, dims.kv_batch
        features = {(case.score, case.learned), case.mask, case.dtype, ("block", case.block), heads}
        if not features <= seen:
            first.append(case)
        seen |= features
    return first
