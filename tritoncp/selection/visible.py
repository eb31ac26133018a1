"""Which pairs of queries and selected keys a mask shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tritoncp.core.upload import DeviceCopy
from tritoncp.masks.mask import Mask
from tritoncp.masks.runs.block_runs import ABSENT, Kind
from tritoncp.mods.tracing import vmapped

CPU = torch.device("cpu")


@dataclass(frozen=True)
class VisiblePairs:
    """Looks up whether a mask shows single pairs of query and key.

    mask:      the mask of the whole sequence, whose block lists decide first
    mask_mod:  the mask_mod, with captures on the device; None: the mask has none
    first_row: b of the mask_mod for the mask's batch row 0
    device:    of the pairs
    """

    mask: Mask
    mask_mod: Callable[..., Tensor] | None = None
    first_row: int = 0
    device: torch.device = CPU

    @property
    def kv_len(self) -> int:
        """Number of keys."""
        return self.mask.kv_len

    @property
    def kinds(self) -> Tensor:
        """Kind of each block, uint8 [Bm, Hm, rows, columns], ABSENT for one that is not listed."""
        return self._tables.on_current_stream()[0]

    @property
    def _interval(self) -> Sequence[Tensor]:
        """Begin and end of the keys of each query in masked blocks, int32 [Bm, Hm, q_len], or nothing."""
        return self._tables.on_current_stream()[1:]

    @cached_property
    def _tables(self) -> DeviceCopy[Sequence[Tensor]]:
        tables = [self.mask.runs.to_kinds(), *(self.mask.interval or ())]
        return DeviceCopy(tables, self.device, lambda *copies: copies)

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
        no_mod = self.mask_mod is None and not self._interval
        if no_mod or (self.device == CPU and not bool(masked.any())):
            return shown
        return shown & (~masked | self._shown_in_masked_blocks(b, heads, q_idx, kv_idx))

    def _shown_in_masked_blocks(self, b: int, heads: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return what the row intervals or the mask_mod show."""
        stale = (self.mask.reads[0] and b >= self.mask.B) or (self.mask.reads[1] and self.mask.H == 1)
        if self._interval and not stale:
            bounds = [bound[b if len(bound) > 1 else 0] for bound in self._interval]  # [Hm, q_len]
            head = heads[:, None] if len(bounds[0]) > 1 else torch.zeros_like(heads)[:, None]
            lo, hi = (bound[head, q_idx[:, None]][..., None] for bound in bounds)
            keys = kv_idx[:, None, None, :]
            return (lo <= keys) & (keys < hi)
        assert self.mask_mod is not None
        levels = (None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (None, None, 0, 0)
        row = torch.full((), b + self.first_row, device=self.device)
        return vmapped(self.mask_mod, *levels)(row, heads, q_idx, kv_idx)
