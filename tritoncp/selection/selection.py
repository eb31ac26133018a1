"""Selection, the record of the keys that a model chose for each query at run time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from tritoncp.core.environment import CHECK
from tritoncp.core.host_copy import refuse_dtensor

MIN_BLOCK = 16  # keys; the smallest tile that tensor cores take
MAX_INDEX = 2**31 - 1
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
    def structure(self) -> tuple[int, int, int, int, int]:
        """Batch rows, heads, indices of a row, block_size and query_block: equal on all ranks."""
        batch, heads, _, count = self.indices.shape
        return batch, heads, count, self.block_size, self.query_block

    def unique(self) -> Selection:
        """Return the selection with ascending int32 indices, and -1 first, in place of repeated ones too.

        >>> Selection(torch.tensor([[[[3, 1, 3, -1]]]])).unique().indices.tolist()
        [[[[-1, -1, 1, 3]]]]
        """
        indices = self.indices
        if indices.dtype != torch.int32:
            indices = indices.clamp(-1, MAX_INDEX).to(torch.int32)  # those past the end stay past the end
        ordered = indices.sort(-1).values
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


def in_order(selection: Selection, values: Tensor) -> Tensor:
    """Return values of the entries of :meth:`Selection.unique`, [B, Hs, queries, n], in the order of the
    selection's indices. Of repeated indices the first gets the value.

    >>> chosen = Selection(torch.tensor([[[[3, 1, 3, -1]]]]))
    >>> in_order(chosen, torch.tensor([[[[0.0, 0.0, 0.5, 0.25]]]])).tolist()
    [[[[0.25, 0.5, 0.0, 0.0]]]]
    """
    indices = selection.indices.clamp(-1, MAX_INDEX)  # as in `unique`
    ordered, order = indices.sort(stable=True, dim=-1)
    repeated = torch.zeros_like(ordered, dtype=torch.bool)
    repeated[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
    again = ordered.masked_fill(repeated, -1).sort(stable=True, dim=-1).indices
    order = order.gather(-1, again).repeat_interleave(selection.query_block, 2)[:, :, : values.shape[2]]
    return torch.zeros_like(values).scatter(-1, order.expand_as(values), values)


class SelectionAuxRequest(NamedTuple):
    """What a call with ``selected=`` returns besides out, as ``return_aux``: torch's AuxRequest with one more
    field.

    lse:           log of the sum of exponentials of each row
    max_scores:    largest score of each row
    probabilities: probabilities of the selected keys, see :class:`SelectionAuxOutput`
    """

    lse: bool = False
    max_scores: bool = False
    probabilities: bool = False


class SelectionAuxOutput(NamedTuple):
    """What a call with :class:`SelectionAuxRequest` returns besides out; None where it was not requested.

    lse:           float32 [B, Hq, S_local], natural log, float64 for float64 tensors, as all fields
    max_scores:    [B, Hq, S_local], without gradient
    probabilities: [B, Hs, S_local, n], the probability of each entry of ``Selection.indices`` after sinks,
                   summed over the query heads that share it (all of them if Hs is 1) and over the keys of a
                   block. 0 for -1, for hidden keys, and for repetitions of an index. Without gradient: a
                   target for the scores of an indexer
    """

    lse: Tensor | None = None
    max_scores: Tensor | None = None
    probabilities: Tensor | None = None


def check_selection(selection: Selection, query: Tensor, kv_heads: int) -> None:
    """Raise TypeError or ValueError for a selection that does not fit queries [B, Hq, S_local, D]."""
    check_form(selection, query.device)
    check_shape(selection, query, kv_heads)


def check_form(selection: Selection, device: torch.device) -> None:
    """Raise TypeError or ValueError for a selection of another type, dtype, block size or device."""
    if not isinstance(selection, Selection):
        raise TypeError(
            f"selected is a {type(selection).__name__}; pass tritoncp.Selection(indices, block_size=...)"
        )
    indices, block_size, query_block = selection
    if not isinstance(indices, Tensor) or indices.dtype not in (torch.int32, torch.int64):
        kind = indices.dtype if isinstance(indices, Tensor) else type(indices).__name__
        raise TypeError(f"selected: indices are {kind}; an int32 or int64 tensor is needed")
    refuse_dtensor(indices, "selected", "pass DTensors as query, key and value too, or x.to_local()")
    check_sizes(block_size, query_block)
    if indices.device != device:
        raise ValueError(f"selected: indices are on {indices.device}, the query on {device}: move them there")


def check_shape(selection: Selection, query: Tensor, kv_heads: int) -> None:
    """Raise ValueError for indices whose shape does not fit queries [B, Hq, S_local, D]."""
    indices, _, query_block = selection
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


def check_sizes(block_size: int, query_block: int) -> None:
    if not isinstance(block_size, int) or block_size < 1 or (block_size > 1 and block_size % MIN_BLOCK):
        raise ValueError(f"selected: block_size={block_size!r}; 1 or a multiple of {MIN_BLOCK} is needed")
    if not isinstance(query_block, int) or query_block < 1:
        raise ValueError(f"selected: query_block={query_block!r}; a positive int is needed")


def check_indices(selection: Selection, kv_len: int) -> None:
    """Raise ValueError for an index that is neither -1 nor a key, or block, of a sequence of ``kv_len`` keys.

    Indices on a GPU are looked at under ``TRITONCP_CHECK=1`` alone, since that waits for the device; kernels
    see no key for those past the end.
    """
    indices, block_size, _ = selection
    if not indices.numel() or indices.is_meta or is_fake(indices):
        return
    if indices.device.type != "cpu" and not CHECK.read():
        return
    count, what = -(-kv_len // block_size), "keys" if block_size == 1 else f"blocks of {block_size} keys"
    low, high = (int(x) for x in indices.aminmax())
    if low < -1 or high >= count:
        wrong = low if low < -1 else high
        raise ValueError(
            f"selected: index {wrong}; the sequence has {count} {what}, 0 to {count - 1}, and -1 stands for "
            "none"
        )
