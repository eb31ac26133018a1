"""The selected keys of the queries of an engine, in the form that schedules move with the queries."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True, eq=False)
class SelectedRows:
    """The keys that the queries of an engine's tensors select.

    indices:     int32 [1 or B, heads, rows, n], unique, ascending, -1 for none: keys of the whole sequence,
                 or numbers of blocks of them
    block_size:  keys of a block
    query_block: adjacent queries that share a row of ``indices``
    positions:   global positions of the queries, int64 [1 or B, S], -1 for padding, on their device
    num_heads:   query heads of the layer
    group:       query heads of the layer that share a KV head
    shares:      heads of the selection of the layer: 1, the number of KV heads or of query heads
    first_share: head of the selection at which ``indices`` begin
    """

    indices: Tensor
    block_size: int
    query_block: int
    positions: Tensor
    num_heads: int
    group: int
    shares: int
    first_share: int = 0

    def shares_of(self, heads: range) -> range:
        """Return the heads of the selection for query heads of the layer.

        >>> import torch
        >>> rows = SelectedRows(torch.zeros(1, 2, 3, 4).int(), 1, 1, torch.arange(3)[None], 8, 4, 2)
        >>> rows.shares_of(range(3, 5)), rows.shares_of(range(5, 8))
        (range(0, 2), range(1, 2))
        """
        return range(self.share_of(heads.start), self.share_of(heads.stop - 1) + 1)

    def share_of(self, head: int) -> int:
        """Return the head of the selection for a query head of the layer."""
        return head * self.shares // self.num_heads

    def cut(self, query_block: int) -> SelectedRows:
        """Return the same selection with a row for each ``query_block`` queries, a divisor of the present
        number."""
        if query_block == self.query_block:
            return self
        rows = -(-self.positions.shape[1] // query_block)
        indices = self.indices.repeat_interleave(self.query_block // query_block, 2)[:, :, :rows]
        return replace(self, indices=indices, query_block=query_block)

    def for_queries(
        self, indices: Tensor, positions: Tensor, query_block: int, first_share: int | None = None
    ) -> SelectedRows:
        """Return the selection of other queries. Arguments are as the fields; first_share None: unchanged"""
        first = self.first_share if first_share is None else first_share
        return replace(self, indices=indices, positions=positions, query_block=query_block, first_share=first)
