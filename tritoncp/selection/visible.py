"""Which pairs of queries and selected keys a mask shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tritoncp.core.tracing import vmapped
from tritoncp.masks.block_runs import ABSENT, Kind
from tritoncp.masks.mask import Mask


@dataclass(frozen=True)
class VisiblePairs:
    """Looks up whether a mask shows single pairs of query and key.

    mask:      the mask of the whole sequence, whose block lists decide first
    mask_mod:  the mask_mod, with captures on the device of the pairs; None: the mask has none
    first_row: b of the mask_mod for the mask's batch row 0
    """

    mask: Mask
    mask_mod: Callable[..., Tensor] | None = None
    first_row: int = 0

    @cached_property
    def kinds(self) -> Tensor:
        """Kind of each block, uint8 [Bm, Hm, rows, columns], ABSENT for one that is not listed."""
        return self.mask.runs.to_kinds()

    @property
    def reads_heads(self) -> bool:
        """Whether the visible keys may differ between heads."""
        return self.mask.H > 1 or self.mask.reads[1]

    def __call__(self, b: int, heads: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return which pairs are visible: bool [n, 1 or H, height, width].

        b: batch row of the mask; heads: [H], of the layer; q_idx: [n, height], kv_idx: [n, width], positions
        in the sequence. Only the first head is looked up where heads see the same keys.
        """
        heads = heads if self.reads_heads else heads[:1]
        mask, rows = self.mask, q_idx[:, None, :, None]
        columns = kv_idx[:, None, None, :]
        kinds = self.kinds[b if mask.B > 1 else 0]  # [Hm, rows, columns]
        head = heads[:, None, None] if mask.H > 1 else torch.zeros_like(heads)[:, None, None]
        kind = kinds[head, rows // mask.q_block, columns // mask.kv_block]
        shown, masked = kind != ABSENT, kind == Kind.MASKED
        if mask.mask_mod is None or not bool(masked.any()):
            return shown
        return shown & (~masked | self._unmasked(b, heads, q_idx, kv_idx))

    def _unmasked(self, b: int, heads: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return what row intervals or the mask_mod show, in blocks that are masked."""
        interval = self.mask.interval_for(b + 1, int(heads[-1]) + 1)
        if interval is not None:
            row = b if len(interval[0]) > 1 else 0
            head = heads[:, None] if interval[0].shape[1] > 1 else torch.zeros_like(heads)[:, None]
            lo, hi = (bound[row][head, q_idx[:, None]][..., None] for bound in interval)
            keys = kv_idx[:, None, None, :]
            return (lo <= keys) & (keys < hi)
        assert self.mask_mod is not None
        levels = (None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (None, None, 0, 0)
        return vmapped(self.mask_mod, *levels)(torch.tensor(b + self.first_row), heads, q_idx, kv_idx)
