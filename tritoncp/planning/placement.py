"""Placements of tokens on ranks, and gathers of rows of tensors from global order to shards and back.

A placement is a list of slots per rank: ``(first row in the rank's buffer, global position of that row,
tokens)``, sorted by position.  Permutation, inverse and validity follow from the slots.
"""

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tritoncp.core.bounded_cache import computed_once
from tritoncp.core.dynamo_boundary import constant_result
from tritoncp.core.host_copy import on_host
from tritoncp.core.upload import upload
from tritoncp.masks.runs.block_runs import content, ramps


@dataclass(frozen=True, eq=False)
class Placement:
    """Placement of the tokens of a sequence on ranks.

    slots:   one int32 [Bp, n, 3] tensor per rank; Bp is 1, or B if batch rows are placed differently. A slot
             lies inside one mask block of ``block`` tokens; 0 tokens = an empty slot.
    lengths: rows of each rank's buffer. Tokens come first, padding last.
    order_is_read: whether a tensor was sharded in this order, or its positions were read

    >>> p = by_blocks(10, 4, [[[0, 2], [1]]])
    >>> p.slots[0].tolist(), p.lengths
    ([[[0, 0, 4], [4, 8, 2]]], (6, 6))
    >>> p.positions(1).tolist()
    [[4, 5, 6, 7, -1, -1]]
    """

    length: int
    block: int
    slots: tuple[Tensor, ...] = field(repr=False)
    lengths: tuple[int, ...]
    order_is_read: bool = field(default=False, init=False, repr=False)

    @property
    def world_size(self) -> int:
        return len(self.slots)

    @property
    def batch(self) -> int:
        """Number of batch rows if they are placed differently, else 1."""
        return self.slots[0].shape[0]

    @property
    def s_max(self) -> int:
        """Max number of rows of a buffer, which is the size of every rank's message in a collective."""
        return max(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of the slots, and of the positions and the inverse if they are computed."""
        return sum(slots.nbytes for slots in self.slots) + 3 * 8 * self.length * self.slots[0].shape[0]

    @on_host
    def positions(self, rank: int) -> Tensor:
        """Return the global position of each row of a rank's buffer, -1 at padding: int64 [Bp,
        lengths[rank]]."""
        self.mark_order_read()
        return self._row_positions(rank)

    def mark_order_read(self) -> None:
        """Set ``order_is_read``."""
        object.__setattr__(self, "order_is_read", True)

    @computed_once
    def _row_positions(self, rank: int) -> Tensor:
        return row_positions(self.slots[rank], self.lengths[rank])

    @cached_property
    def digest(self) -> bytes:
        """Digest of the places of all tokens: equal for equal placements, on every rank."""
        sizes = self.length, self.lengths, [tuple(part.shape) for part in self.slots]
        return hashlib.sha256(repr(sizes).encode() + b"".join(map(content, self.slots))).digest()

    @computed_once
    def is_filled(self, rank: int) -> bool:
        """Return whether a rank's buffer has no padding, so that a write of all tokens initialises every
        row."""
        return bool((self.slots[rank][..., 2].sum(1) == self.lengths[rank]).all())

    @cached_property
    @on_host
    def inverse(self) -> Tensor:
        """Row of each global position in the gathered buffer [W * s_max]: int64 [Bp, length]."""
        row, position, tokens = self.gathered().unbind(-1)
        return row_positions(torch.stack([position, row, tokens], -1), self.length)

    @cached_property
    @on_host
    def gathered_positions(self) -> Tensor:
        """Global position of each row of the gathered buffer, -1 at padding: int64 [Bp, W * s_max]."""
        return row_positions(self.gathered(), self.world_size * self.s_max)

    def gathered(self, ranks: Sequence[int] | None = None) -> Tensor:
        """Return the slots of the buffer that holds the shards of ``ranks`` one after the other, ``s_max``
        rows each, sorted by global position (empty slots last): int32 [Bp, n, 3]."""
        parts = []
        for index, rank in enumerate(range(self.world_size) if ranks is None else ranks):
            parts.append(self.slots[rank] + torch.tensor([index * self.s_max, 0, 0], dtype=torch.int32))
        return sort_by_position(torch.cat(parts, 1))

    def all_slots(self) -> tuple[Tensor, Tensor]:
        """Return the slots of all ranks, one rank after the other, int32 [Bp, n, 3], and their ranks [n]."""
        counts = torch.tensor([part.shape[1] for part in self.slots])
        return torch.cat(self.slots, 1), torch.repeat_interleave(counts)

    def owners(self) -> Tensor:
        """Return the rank of the first token of each block, -1 if all is padding: int64 [Bp, blocks]."""
        slots, owner = self.all_slots()
        _, position, tokens = slots.long().unbind(-1)
        unowned = torch.iinfo(torch.int64).max
        first = torch.full((self.batch, -(-self.length // self.block)), unowned)
        code = torch.where(tokens > 0, position * self.world_size + owner, unowned)
        first.scatter_reduce_(1, position // self.block, code, "amin")
        return torch.where(first == unowned, -1, first % self.world_size)

    @cached_property
    @on_host
    def _joined(self) -> Tensor:
        return torch.cat(self.slots, 1)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle all slots as one tensor, since torch passes each tensor to another process through a
        separate file. The placement keeps that tensor, since a spawned process opens the file later."""
        counts = [part.shape[1] for part in self.slots]
        parts = self.length, self.block, self._joined, counts, self.lengths
        return _unpickle, parts, {"order_is_read": True}  # another process may have read the order

    def batch_rows(self, first: int, count: int) -> "Placement":
        """Return the placement of ``count`` batch rows from ``first`` on; the placement itself if they all
        share it."""
        if self.batch == 1:
            return self
        return self.part(tuple(part[first : first + count].contiguous() for part in self.slots), self.lengths)

    def part(self, slots: tuple[Tensor, ...], lengths: tuple[int, ...]) -> "Placement":
        """Return the placement of a part of the tokens, in the order of this one."""
        part = Placement(self.length, self.block, slots, lengths)
        object.__setattr__(part, "order_is_read", self.order_is_read)
        return part

    def merged(self, degree: int) -> "Placement":
        """Merge ``degree`` neighbouring ranks into one rank with their buffers one after the other."""
        firsts = range(0, self.world_size, degree)
        slots = tuple(self.gathered(range(first, first + degree)) for first in firsts)
        return Placement(self.length, self.block, slots, (degree * self.s_max,) * len(slots))


def _unpickle(
    length: int, block: int, slots: Tensor, counts: Sequence[int], lengths: tuple[int, ...]
) -> Placement:
    return Placement(length, block, tuple(part.contiguous() for part in slots.split(counts, 1)), lengths)


def by_blocks(length: int, block: int, owners: Sequence[Sequence[Sequence[int]]]) -> Placement:
    """Place whole blocks: ``owners[batch row][rank]`` lists the rank's blocks, ascending.

    Every buffer has the max number of tokens of a rank as its rows; the rest is padding.
    """
    world_size = len(owners[0])
    slots = []
    for rank in range(world_size):
        tables = []
        for row in owners:
            first = torch.tensor(row[rank], dtype=torch.int64) * block
            place = torch.arange(len(first)) * block
            tables.append(torch.stack([place, first, (length - first).clamp(max=block)], 1).int())
        slots.append(pad_sequence(tables, batch_first=True))
    rows = max(int(table[..., 2].sum(1).max()) if table.numel() else 0 for table in slots)
    return Placement(length, block, tuple(slots), (rows,) * world_size)


def natural(lengths: Sequence[int], block: int) -> Placement:
    """Place contiguous pieces of any lengths in natural order, piece r on rank r. Slots are cut at mask
    blocks.

    >>> natural([3, 5], 4).slots[1].tolist()
    [[[0, 3, 1], [1, 4, 4]]]
    """
    ends = list(itertools.accumulate(lengths))
    slots = tuple(torch.tensor([[[0, end - rows, rows]]]) for end, rows in zip(ends, lengths))
    return recut(Placement(ends[-1], block, slots, tuple(lengths)), block)


def joined(one: Placement, other: Placement, block: int) -> Placement:
    """Place two sequences as one, the second after the first: each rank has its part of the first, then its
    part of the second. block: block size of the whole sequence

    >>> joined(natural([1, 2], 3), natural([2, 0], 2), 4).positions(0).tolist()
    [[0, 3, 4]]
    """
    held = [int(slots[..., 2].sum(1).max()) for slots in one.slots]  # equal for all batch rows
    rows = torch.tensor(held)
    slots = []
    for rank, pair in enumerate(zip(one.slots, other.slots)):
        batch = max(map(len, pair))
        first, second = (part.expand(batch, -1, -1) for part in pair)
        slots.append(torch.cat([first, second + torch.tensor([held[rank], one.length, 0]).int()], 1))
    most = max(int(rows[rank]) + other.lengths[rank] for rank in range(one.world_size))
    whole = Placement(one.length + other.length, block, tuple(slots), (most,) * one.world_size)
    return recut(whole, block)


def pieces(total: int, world_size: int) -> list[int]:
    """Return the lengths of natural-order pieces that differ by at most one token.

    >>> pieces(10, 4)
    [3, 3, 2, 2]
    """
    return [total // world_size + (rank < total % world_size) for rank in range(world_size)]


@lru_cache(maxsize=64)
@on_host
def in_order(length: int, world_size: int) -> Placement:
    """Place even pieces in order; the sequence is one mask block.

    >>> in_order(5, 2).positions(1).tolist()
    [[3, 4]]
    """
    return natural(pieces(length, world_size), max(1, length))


def without_padding(placement: Placement, tokens: Tensor, close_up: bool) -> Placement:
    """Cut the slots so that none covers a position where ``tokens`` [length] is False: its row becomes
    padding of the shard and is never read. close_up: move the remaining rows together, padding last.

    >>> p = natural([4, 4], 4)
    >>> some = torch.tensor([1, 0, 1, 1, 1, 1, 1, 0]).bool()
    >>> [without_padding(p, some, False).positions(rank).tolist() for rank in (0, 1)]
    [[[0, -1, 2, 3]], [[4, 5, 6, -1]]]
    >>> without_padding(p, some, True).positions(0).tolist()
    [[0, 2, 3]]
    """
    edge = torch.nn.functional.pad(tokens.int(), (1, 1)).diff()
    first, last = ((edge == step).nonzero()[:, 0] for step in (1, -1))
    tables = _cut_slots(placement, first, last, close_up)
    most = max(int(table[..., 2].sum(1).max()) for table in tables)
    lengths = (most,) * placement.world_size if close_up else placement.lengths
    return Placement(placement.length, placement.block, tables, lengths)


def recut(placement: Placement, block: int) -> Placement:
    """Cut the slots of a placement so that none crosses a multiple of ``block``.

    >>> tokens = torch.tensor([1, 0, 1, 1, 1, 1]).bool()
    >>> recut(without_padding(natural([6], 6), tokens, False), 4).slots[0].tolist()
    [[[0, 0, 1], [2, 2, 2], [4, 4, 2]]]
    """
    first = torch.arange(0, placement.length, block)
    slots = _cut_slots(placement, first, first + block, close_up=False)
    return Placement(placement.length, block, slots, placement.lengths)


def _cut_slots(placement: Placement, first: Tensor, last: Tensor, close_up: bool) -> tuple[Tensor, ...]:
    """Cut the slots of every rank to the ranges [first, last) of positions. close_up: move the rows
    together."""
    tables = ([_pieces(table, first, last, close_up) for table in slots] for slots in placement.slots)
    return tuple(pad_sequence(rows, batch_first=True).int() for rows in tables)


def _pieces(slots: Tensor, first: Tensor, last: Tensor, close_up: bool) -> Tensor:
    """Cut ``slots`` [n, 3] to the ranges [first, last): int64 [m, 3]."""
    row, position, tokens = slots.T.long().contiguous()
    begin = torch.searchsorted(last, position, right=True)
    count = (torch.searchsorted(first, position + tokens) - begin).clamp(min=0) * (tokens > 0)
    slot = torch.arange(len(slots)).repeat_interleave(count)
    part = ramps(begin, count)
    start = torch.maximum(first[part], position[slot])
    counts = torch.minimum(last[part], (position + tokens)[slot]) - start
    at = counts.cumsum(0) - counts if close_up else row[slot] + start - position[slot]
    return torch.stack([at, start, counts], 1)


def sort_by_position(slots: Tensor) -> Tensor:
    """Sort the slots [Bp, n, 3 or more columns] of each batch row by global position. Empty slots are
    dropped, or come last if batch rows have different numbers of slots."""
    key = torch.where(slots[..., 2] > 0, slots[..., 1].to(torch.int64), torch.iinfo(torch.int64).max)
    order = key.argsort(dim=1, stable=True)
    keep = int((slots[..., 2] > 0).sum(1).max())
    return slots.gather(1, order[..., None].expand_as(slots))[:, :keep].contiguous()


def row_positions(slots: Tensor, rows: int) -> Tensor:
    """Return the global position of each row, -1 if no slot covers it: int64 [Bp, rows]."""
    out = torch.full((slots.shape[0], rows), -1, dtype=torch.int64)
    for batch, table in enumerate(slots.to(torch.int64)):
        row, position, tokens = table.unbind(1)
        out[batch, ramps(row, tokens)] = ramps(position, tokens)
    return out


def take(x: Tensor, index: Tensor, dim: int, batch_dim: int | None, pad: float | int | bool) -> Tensor:
    """Gather rows ``index`` [Bp, n] of ``x`` along ``dim``; ``pad`` where the index is negative.
    Differentiable: the backward pass scatters the gradient of each row to its place, with zeros elsewhere.

    If Bp > 1, ``batch_dim`` is the dimension of ``x`` that goes with the rows of the index; a tensor without
    one (``batch_dim=None``) gets a new leading batch dimension.
    """
    if x.dtype not in MOVABLE:
        return take(as_movable(x), index, dim, batch_dim, as_word(pad, x.dtype)).view(x.dtype)
    dim = dim % x.ndim
    (index,) = upload([index], x.device)
    if index.shape[0] > 1 and batch_dim is None:
        x, dim, batch_dim = x.expand(index.shape[0], *x.shape), dim + 1, 0
    shape = [1] * x.ndim
    if index.shape[0] > 1:
        batch_dim = batch_dim % x.ndim  # type: ignore[operator]
        if x.shape[batch_dim] != index.shape[0]:
            raise ValueError(
                f"the plan places {index.shape[0]} batch rows differently, but dimension {batch_dim} of the "
                f"tensor has {x.shape[batch_dim]}; pass batch_dim= the batch dimension, or None for none"
            )
        shape[batch_dim], shape[dim] = index.shape
        if batch_dim > dim:
            index = index.T
        full = list(x.shape)
        full[dim] = shape[dim]
        rows = x.gather(dim, index.clamp(min=0).reshape(shape).expand(full))
    else:
        shape[dim] = index.shape[1]
        rows = x.index_select(dim, index[0].clamp(min=0))
    padding = (index < 0).reshape(shape)
    return rows.masked_fill(padding, pad)


WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # dtypes by size in bytes
MOVABLE = frozenset(  # dtypes for which torch has all operations that move rows
    {
        *WORDS.values(), torch.int8, torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64,
        torch.complex64, torch.complex128,
    }
)  # fmt: skip


def as_movable(x: Tensor) -> Tensor:
    """View a tensor of a dtype that torch cannot gather, such as float8 and uint16, as integers of the same
    size, without a gradient; return any other tensor as it is.

    >>> as_movable(torch.ones(2, dtype=torch.float8_e5m2))
    tensor([60, 60], dtype=torch.uint8)
    """
    if x.dtype in MOVABLE:
        return x
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"a tensor of {x.dtype} that requires grad: its rows are moved as bytes, without a gradient; "
            "convert it, x.to(torch.bfloat16), or pass x.detach()"
        )
    return x.view(WORDS[x.dtype.itemsize])


@constant_result
def as_word(value: float | int | bool, dtype: torch.dtype) -> float | int | bool:
    """Return the integer as which :func:`as_movable` views a value of this dtype."""
    if dtype in MOVABLE or not value:
        return value
    word: int = torch.full((), value, dtype=dtype, device="cpu").view(WORDS[dtype.itemsize]).item()  # type: ignore[assignment]
    return word


def lengthen(x: Tensor, dim: int, rows: int) -> Tensor:
    """Append zeros to ``x`` along ``dim``, up to ``rows``.

    >>> lengthen(torch.ones(2), 0, 3)
    tensor([1., 1., 0.])
    """
    missing = list(x.shape)
    missing[dim] = rows - x.shape[dim]
    return torch.cat([x, x.new_zeros(missing)], dim) if missing[dim] else x


def check_side(side: str) -> None:
    """Raise ValueError for a side other than "q" and "kv"."""
    if side not in ("q", "kv"):
        raise ValueError(f'side={side!r} is unknown; pass "q" for queries or "kv" for keys and values')
