"""Packed sequences: documents stand one after the other in a buffer, at the offsets cu_seqlens.

``cu_seqlens``, integers [n + 1], are cumulative lengths: the tokens before each of n documents, then the
total. If the buffer has padding at the end of documents, ``cu_seqlens_padded`` are its cumulative rows. There
is no loop over documents, and at most one copy from a device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tritoncp.core.pytrees import as_tree
from tritoncp.core.records import record
from tritoncp.masks.mask import Mask, create_block_mask
from tritoncp.masks.mask_mod import UNBOUNDED, Intervals, MaskMod, check_window


class Documents(NamedTuple):
    """Documents in a buffer, each int64 [n]: first row, tokens, and rows including padding."""

    first: Tensor
    tokens: Tensor
    rows: Tensor

    def of_rows(self) -> tuple[Tensor, Tensor]:
        """Return the document of each row of the buffer, and the row's position in it: int64 [t].

        >>> Documents.of("cu_seqlens", torch.tensor([0, 2, 2, 3]), torch.tensor([0, 3, 3, 4])).of_rows()
        (tensor([0, 0, 0, 2]), tensor([0, 1, 2, 0]))
        """
        number = torch.arange(len(self.rows)).repeat_interleave(self.rows)
        return number, torch.arange(len(number)) - self.first[number]

    def is_token(self) -> Tensor:
        """Return which rows of the buffer are tokens, not padding: bool [t]."""
        number, position = self.of_rows()
        return position < self.tokens[number]

    @classmethod
    def of(cls, name: str, cu_seqlens: Tensor, padded: Tensor, length: int | None = None) -> Documents:
        """Make Documents on the CPU from cumulative tokens and cumulative rows.

        name: of the argument, for messages. length: rows of the buffer; None: not checked. Raises ValueError
            for cumulative lengths that do not start at 0, decrease, or do not fit the buffer.
        """
        cu_seqlens, padded = (x.detach().cpu().long() for x in (cu_seqlens, padded))
        _check_cumulative(name, cu_seqlens)
        _check_cumulative(f"{name}_padded", padded)
        tokens, rows = cu_seqlens.diff(), padded.diff()
        if bool((tokens > rows).any()):
            i = int((tokens > rows).nonzero()[0])
            raise ValueError(
                f"document {i} has {int(tokens[i])} tokens by {name} and {int(rows[i])} rows by "
                f"{name}_padded; pass a {name}_padded that counts the tokens and the padding after them"
            )
        if length is not None and int(padded[-1]) != length:
            raise ValueError(
                f"{name} accounts for {int(padded[-1])} rows, the buffer has {length} on all ranks together; "
                "cu_seqlens describe the whole buffer, not a shard, and rows that hold no token are "
                f"padding of the document before them: pass {name}_padded, which ends at {length}"
            )
        return cls(padded[:-1], tokens, rows)


def _check_cumulative(name: str, x: Tensor) -> None:
    """Raise ValueError unless x, int64 [n + 1], starts at 0 and never decreases."""
    if int(x[0]) != 0:
        raise ValueError(
            f"{name} starts at {int(x[0])}; the number of tokens before the first document is 0: prepend a 0"
        )
    decreases = x.diff() < 0
    if bool(decreases.any()):
        i = int(decreases.nonzero()[0])
        raise ValueError(
            f"{name} falls from {int(x[i])} to {int(x[i + 1])} after document {i}; pass cumulative lengths: "
            "lengths.cumsum(0) with a 0 in front"
        )


@as_tree
@record(repr=False)
class Varlen(MaskMod):
    """The mask_mod of a packed buffer: a query sees only keys of its document.

    q, kv:               cumulative tokens [n + 1]; q_padded, kv_padded: cumulative rows of the buffer
    left, right:         with the last query of a document aligned to its last key, query i sees key j for
                         -right <= i - j <= left; -1 = unbounded
    """

    q: Tensor
    kv: Tensor
    q_padded: Tensor
    kv_padded: Tensor
    left: int
    right: int

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q, kv, q_padded, kv_padded = (
            x.to(q_idx.device) for x in (self.q, self.kv, self.q_padded, self.kv_padded)
        )
        q_number, kv_number = _document_of(q_padded, q_idx), _document_of(kv_padded, kv_idx)
        i, j = q_idx - q_padded[q_number], kv_idx - kv_padded[kv_number]
        queries, keys = q[q_number + 1] - q[q_number], kv[kv_number + 1] - kv[kv_number]
        distance = i - queries + keys - j
        visible = (q_number == kv_number) & (i < queries) & (j < keys)
        if self.left != UNBOUNDED:
            visible = visible & (distance <= self.left)
        return visible if self.right == UNBOUNDED else visible & (distance >= -self.right)

    def intervals(self, q_len: int, kv_len: int) -> Intervals:
        queries, keys = self._sides(q_len, kv_len)
        number, position = queries.of_rows()
        first, count = keys.first[number], keys.tokens[number]
        diagonal = position + (keys.tokens - queries.tokens)[number]
        lo = torch.zeros_like(diagonal) if self.left == UNBOUNDED else (diagonal - self.left).clamp(min=0)
        hi = count if self.right == UNBOUNDED else torch.minimum(count, diagonal + self.right + 1)
        nonempty = (position < queries.tokens[number]) & (hi > lo)
        lo, hi = (torch.where(nonempty, first + bound, 0) for bound in (lo, hi))
        return lo[None, None], hi[None, None]

    def tokens(self, q_len: int, kv_len: int) -> tuple[Tensor, Tensor] | None:
        queries, keys = (side.is_token() for side in self._sides(q_len, kv_len))
        return None if bool(queries.all() & keys.all()) else (queries, keys)

    def _sides(self, q_len: int, kv_len: int) -> tuple[Documents, Documents]:
        queries = Documents.of("cu_seqlens_q", self.q, self.q_padded, q_len)
        return queries, Documents.of("cu_seqlens_kv", self.kv, self.kv_padded, kv_len)

    def __repr__(self) -> str:
        return f"varlen(documents={len(self.q) - 1}, left={self.left}, right={self.right})"


def _document_of(padded: Tensor, row: Tensor) -> Tensor:
    """Return the index of the document that contains a row: the number of documents that end before it."""
    return (padded[1:] <= row[..., None]).sum(-1)


def varlen(
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor | None = None,
    *,
    causal: bool,
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED),
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
) -> Varlen:
    """Return the mask_mod of the arguments of :func:`varlen_mask`, without reading a device."""
    if cu_seqlens_kv is None:
        if cu_seqlens_kv_padded is not None:
            raise ValueError("cu_seqlens_kv_padded is given without cu_seqlens_kv: pass both, or neither")
        cu_seqlens_kv, cu_seqlens_kv_padded = cu_seqlens_q, cu_seqlens_q_padded
    q_padded = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
    kv_padded = cu_seqlens_kv if cu_seqlens_kv_padded is None else cu_seqlens_kv_padded
    sides = cu_seqlens_q, cu_seqlens_kv, q_padded, kv_padded
    _check_types(sides)
    left, right = check_window(window)
    return Varlen(*sides, left, 0 if causal else right)


def _check_types(sides: tuple[Tensor, ...]) -> None:
    """Raise unless all four cu_seqlens are integer tensors [documents + 1] for one number of documents."""
    names = "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"
    for name, x in zip(names, sides, strict=True):
        fits = isinstance(x, Tensor) and x.dtype in (torch.int32, torch.int64) and x.ndim == 1 and len(x)
        if not fits:
            description = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise TypeError(
                f"{name} is {description}; an int32 or int64 tensor [documents + 1] is needed: "
                "lengths.cumsum(0) with a 0 in front"
            )
    counts = [len(x) - 1 for x in sides]
    if len(set(counts)) > 1:
        listing = ", ".join(f"{name} {count}" for name, count in zip(names, counts, strict=True))
        raise ValueError(
            f"cu_seqlens of different numbers of documents: {listing}; pass length 0 where a document has no "
            "queries or no keys"
        )


def varlen_mask(
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor | None = None,
    *,
    causal: bool,
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED),
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
) -> Mask:
    """Return the mask of a packed buffer [t, heads, head dim]: a query sees only keys of its document.

    >>> mask = varlen_mask(torch.tensor([0, 2, 3]), causal=True)         # documents of 2 and 1 tokens
    >>> mask.to_dense()[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    >>> rows = torch.tensor([0, 3, 4])                                   # with padding: row 2
    >>> padded = varlen_mask(torch.tensor([0, 2, 3]), causal=True, cu_seqlens_q_padded=rows)
    >>> padded.to_dense()[0, 0].int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]]

    A plan of this mask leaves padding out: it is never read, and out and gradients are 0 there.
    The tensors are copied to the host in one copy.

    Args:
        cu_seqlens_q: number of query tokens before each of n documents, then the total: int32 or int64
            [n + 1]. Documents of length 0 are allowed.
        cu_seqlens_kv: the same of keys; None: equal to ``cu_seqlens_q``.
        causal: hide the keys after a query. The last query of a document is aligned to its last key
            (bottom-right alignment).
        window: (left, right), hide keys that are further away on either side, -1 = unbounded, as in
            FlashAttention. A pair is visible if neither ``causal`` nor ``window`` hides it.
        cu_seqlens_q_padded: cumulative rows of the buffer, if padding follows the tokens of documents; the
            last entry is the length of the buffer. None: no padding.
        cu_seqlens_kv_padded: the same of keys.
        BLOCK_SIZE: size of the blocks in tokens, an int or (queries, keys).

    Returns:
        A :class:`Mask`.

    Raises:
        TypeError, ValueError: for cu_seqlens of another type, that do not start at 0, that decrease, or that
            differ in their number of documents.
    """
    padded = {"cu_seqlens_q_padded": cu_seqlens_q_padded, "cu_seqlens_kv_padded": cu_seqlens_kv_padded}
    mod = varlen(cu_seqlens_q, cu_seqlens_kv, causal=causal, window=window, **padded)
    sides = (mod.q, mod.kv, mod.q_padded, mod.kv_padded)
    q, kv, q_padded, kv_padded = torch.stack([x.to(mod.q.device).long() for x in sides]).cpu()  # one copy
    mod = Varlen(q, kv, q_padded, kv_padded, mod.left, mod.right)
    return create_block_mask(mod, 1, 1, int(mod.q_padded[-1]), int(mod.kv_padded[-1]), BLOCK_SIZE=BLOCK_SIZE)
