"""Selection, the record of the keys that a model chose for each query at run time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritoncp.core.environment import CHECK
from tritoncp.planning.plan import Plan

MIN_BLOCK = 16  # keys; the smallest tile that tensor cores take
MAX_ENTRIES = 2**31 - 1  # of a table, whose entries kernels count in int32


class Selection(NamedTuple):
    """The keys that each query may see, chosen at run time: key positions, or blocks of keys.

    A pair of query and key is visible if the mask shows it and the key is selected.

    indices:     int32 or int64 [1 or B, Hs, rows, n], -1 for none, in any order; a repeated index counts
                 once. With ``block_size=1`` an index is the global position of a key, else the number of a
                 block: keys ``block_size * i`` to ``block_size * (i + 1) - 1``. Hs is 1, the number of KV
                 heads or the number of query heads. Rows are the local queries in the order of the shard.
    block_size:  1, or a multiple of 16
    query_block: number of adjacent local queries that share a row of ``indices``

    >>> chosen = Selection(torch.tensor([[[[0, 2, -1], [1, 1, 0]]]]))    # two queries
    >>> chosen.to_dense(4)[0, 0].int().tolist()
    [[1, 0, 1, 0], [1, 1, 0, 0]]
    """

    indices: Tensor
    block_size: int = 1
    query_block: int = 1

    @property
    def structure(self) -> tuple[int, int, int, int]:
        """Heads, indices of a row, block_size and query_block: equal on all ranks."""
        return self.indices.shape[1], self.indices.shape[3], self.block_size, self.query_block

    def unique(self) -> Selection:
        """Return the selection with ascending indices, and -1 first, in place of repeated ones too.

        >>> Selection(torch.tensor([[[[3, 1, 3, -1]]]])).unique().indices.tolist()
        [[[[-1, -1, 1, 3]]]]
        """
        ordered = self.indices.sort(-1).values
        repeated = torch.zeros_like(ordered, dtype=torch.bool)
        repeated[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
        return self._replace(indices=ordered.masked_fill_(repeated, -1).sort(-1).values)

    def to_dense(self, kv_len: int, rows: int | None = None) -> Tensor:
        """Return the selected pairs as a dense tensor, for tests and small sequences.

        Args:
            kv_len: number of keys
            rows: number of queries; None: ``query_block`` times the rows of ``indices``

        Returns:
            Whether each pair is selected, bool [1 or B, Hs, rows, kv_len].
        """
        blocks = -(-kv_len // self.block_size)
        index = torch.where(self.indices < 0, blocks, self.indices).long()  # none: one more block, cut off
        shown = index.new_zeros(*index.shape[:3], blocks + 1, dtype=torch.bool)
        shown.scatter_(3, index, torch.ones_like(index, dtype=torch.bool))
        shown = shown[..., :-1].repeat_interleave(self.block_size, 3)[..., :kv_len]
        return shown.repeat_interleave(self.query_block, 2)[:, :, :rows]


def check_selection(selection: Selection, query: Tensor, kv_heads: int) -> None:
    """Raise TypeError or ValueError for a selection that does not fit queries [B, Hq, S_local, D]."""
    if not isinstance(selection, Selection):
        raise TypeError(
            f"selected is a {type(selection).__name__}; pass tritoncp.Selection(indices, block_size=...)"
        )
    indices, block_size, query_block = selection
    if not isinstance(indices, Tensor) or indices.dtype not in (torch.int32, torch.int64):
        kind = indices.dtype if isinstance(indices, Tensor) else type(indices).__name__
        raise TypeError(f"selected: indices are {kind}; an int32 or int64 tensor is needed")
    check_sizes(block_size, query_block)
    batch, heads, rows, _ = query.shape
    needed = -(-rows // query_block)
    shape = tuple(indices.shape)
    if indices.ndim != 4 or shape[0] not in (1, batch) or shape[2] != needed:
        raise ValueError(
            f"selected: indices are {shape}; [1 or {batch}, heads, {needed}, n] is needed: a row for each "
            f"{'query' if query_block == 1 else f'{query_block} queries'} of {rows} local ones"
        )
    if shape[1] not in (1, kv_heads, heads):
        raise ValueError(
            f"selected: indices have {shape[1]} heads; 1, {kv_heads} (KV heads) or {heads} (query heads) are "
            "needed"
        )
    if indices.numel() > MAX_ENTRIES:
        raise ValueError(
            f"selected: {indices.numel()} indices, and kernels count up to {MAX_ENTRIES}: select fewer keys, "
            "or blocks of keys"
        )
    if indices.device != query.device:
        raise ValueError(
            f"selected: indices are on {indices.device}, the query on {query.device}: move them there"
        )


def check_sizes(block_size: int, query_block: int) -> None:
    if not isinstance(block_size, int) or block_size < 1 or (block_size > 1 and block_size % MIN_BLOCK):
        raise ValueError(f"selected: block_size={block_size!r}; 1 or a multiple of {MIN_BLOCK} is needed")
    if not isinstance(query_block, int) or query_block < 1:
        raise ValueError(f"selected: query_block={query_block!r}; a positive int is needed")


def check_plan(plan: Plan, options: Mapping[str, Any]) -> None:
    """Raise ValueError for a plan or kernel options that cannot have selected keys."""
    if plan.schedule.startswith("ulysses") and plan.world_size > 1:
        raise ValueError(
            f"selected= under the schedule {plan.schedule!r}, which exchanges heads, but not their selected "
            'keys: pass schedule="allgather", "ring" or "fetch" to make_plan'
        )
    if options.get("invariant"):
        raise ValueError("selected= with kernel option invariant=True, which it does not have: omit it")


def check_indices(selection: Selection, kv_len: int) -> None:
    """Raise ValueError for an index that is neither -1 nor a key, or block, of a sequence of ``kv_len`` keys.

    Indices on a GPU are looked at under ``TRITONCP_CHECK=1`` alone, since that waits for the device; kernels
    see no key for those past the end.
    """
    indices, block_size, _ = selection
    if not indices.numel() or indices.is_meta or (indices.device.type != "cpu" and not CHECK.read()):
        return
    count, what = -(-kv_len // block_size), "keys" if block_size == 1 else f"blocks of {block_size} keys"
    low, high = (int(x) for x in indices.aminmax())
    if low < -1 or high >= count:
        wrong = low if low < -1 else high
        raise ValueError(
            f"selected: index {wrong}; the sequence has {count} {what}, 0 to {count - 1}, and -1 stands for "
            "none"
        )
