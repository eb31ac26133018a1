"""Closed forms: ready-made mask_mods with the interval of keys that each query row sees.

torch's flex_attention and create_block_mask take them as ordinary mask_mods. A Mask of a closed form is
computed by interval arithmetic: for a million tokens in a fraction of a second.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tritoncp.core.bounded_cache import TensorCache
from tritoncp.core.host_copy import host, refuse_dtensor
from tritoncp.core.pytrees import as_tree
from tritoncp.core.records import record
from tritoncp.masks.drafts import TextAndBlock
from tritoncp.masks.mask_mod import (
    UNBOUNDED,
    And,
    Intervals,
    MaskFn,
    MaskMod,
    Not,
    Or,
    batch_row,
    clip_intervals,
    dependence_of,
    name_of,
    num_batch_rows,
)
from tritoncp.masks.prefix_tree import Tree


@as_tree
@record(eq=True, repr=False)
class SlidingWindow(MaskMod):
    """Sliding window: -right <= q - kv <= left, inclusive on both sides; -1 = unbounded."""

    left: int
    right: int

    def __post_init__(self) -> None:
        if self.left < UNBOUNDED or self.right < UNBOUNDED:
            raise ValueError(
                f"left={self.left}, right={self.right} of sliding_window: numbers of tokens before and after "
                "the query are needed; pass 0 or more, or -1 for all tokens"
            )

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if self.left == UNBOUNDED and self.right == UNBOUNDED:
            return kv_idx >= 0
        if self.left == UNBOUNDED:
            return q_idx - kv_idx >= -self.right
        if self.right == UNBOUNDED:
            return q_idx - kv_idx <= self.left
        return (q_idx - kv_idx <= self.left) & (q_idx - kv_idx >= -self.right)

    def intervals(self, q_len: int, kv_len: int) -> Intervals:
        q = torch.arange(q_len)[None, None]
        lo = torch.zeros_like(q) if self.left == UNBOUNDED else q - self.left
        hi = torch.full_like(q, kv_len) if self.right == UNBOUNDED else q + self.right + 1
        return clip_intervals(lo, hi, kv_len)

    @property
    def window(self) -> tuple[int, int]:
        return self.left, self.right

    def __repr__(self) -> str:
        if (self.left, self.right) == (UNBOUNDED, 0):
            return "causal()"
        return f"sliding_window({self.left}, {self.right})"


@as_tree
@record(repr=False)
class Document(MaskMod):
    """Document mask: a query sees the keys with the same document id, before and after it."""

    ids: Tensor  # integers [N] or [B, N]

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row = batch_row(self.ids, b)
        return self.ids[(*row, q_idx)] == self.ids[(*row, kv_idx)]

    def intervals(self, q_len: int, kv_len: int) -> Intervals | None:
        n = max(q_len, kv_len)
        if self.ids.shape[-1] < n:
            raise ValueError(
                f"document ids cover {self.ids.shape[-1]} tokens, the mask needs {n} "
                f"(q_len={q_len}, kv_len={kv_len}): pass an id for every token"
            )
        ids = self.ids.detach().cpu().reshape(self.batch, -1)[:, :n]
        change = ids[:, 1:] != ids[:, :-1]
        if bool((ids[:, 1:] < ids[:, :-1]).any()):  # unsorted ids: a document may be in several pieces
            ordered = ids.sort(dim=1).values
            if not torch.equal(change.sum(1), (ordered[:, 1:] != ordered[:, :-1]).sum(1)):
                return None
        edge = torch.ones(len(ids), min(n, 1), dtype=torch.bool)
        position = torch.arange(n)
        lo = torch.where(torch.cat([edge, change], 1), position, 0).cummax(1).values
        hi = torch.where(torch.cat([change, edge], 1), position + 1, n).flip(1).cummin(1).values.flip(1)
        return clip_intervals(lo[:, None, :q_len], hi[:, None, :q_len], kv_len)

    @property
    def batch(self) -> int:
        return self.ids.shape[0] if self.ids.ndim == 2 else 1

    def __repr__(self) -> str:
        return f"document(ids={list(self.ids.shape)})"


class DocumentOfLengths(Document):
    """The result of `document(lengths=...)` inside torch.compile, where lengths have no values: its ids are
    computed when they are read."""

    lengths: Sequence[Any] | Tensor

    def __init__(self, lengths: Sequence[Any] | Tensor) -> None:
        object.__setattr__(self, "lengths", lengths)

    @property
    def ids(self) -> Tensor:
        return document_of(self.lengths).ids

    def as_call(self) -> tuple[Callable[..., MaskMod], tuple[Any, ...]]:
        return document_of, (self.lengths,)


def document_of(lengths: Sequence[Any] | Tensor) -> Document:
    """Return the document mask_mod of lengths. Equal numbers, and the same unedited tensor, give the same
    object, so that all layers of a graph share one mask."""
    key, tensors = (id(lengths), [lengths]) if isinstance(lengths, Tensor) else (repr(lengths), [])
    if (mask := _DOCUMENTS.find(key, tensors)) is None:
        with host():
            mask = Document(_ids_from_lengths(lengths))
        _DOCUMENTS.keep(key, tensors, mask)
    return mask


_DOCUMENTS = TensorCache(8)


@as_tree
@record(repr=False)
class PrefixLM(MaskMod):
    """Prefix LM mask: causal, and all queries see the prefix."""

    prefix: int | Tensor  # number of tokens; a tensor [B] for a number per batch row

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        prefix = self.prefix
        if isinstance(prefix, Tensor) and prefix.ndim == 1:
            prefix = prefix[b if len(prefix) > 1 else 0]
        return (kv_idx <= q_idx) | (kv_idx < prefix)

    def intervals(self, q_len: int, kv_len: int) -> Intervals:
        prefix = torch.as_tensor(self.prefix).detach().cpu().long().reshape(-1, 1, 1)
        hi = torch.maximum(torch.arange(1, q_len + 1), prefix)
        return clip_intervals(torch.zeros_like(hi), hi, kv_len)

    @property
    def batch(self) -> int:
        return len(self.prefix) if isinstance(self.prefix, Tensor) and self.prefix.ndim == 1 else 1

    def __repr__(self) -> str:
        prefix = list(self.prefix.shape) if isinstance(self.prefix, Tensor) else self.prefix
        return f"prefix_lm({prefix})"


@as_tree
@record(eq=True, repr=False)
class PartOfMask(MaskMod):
    """The mask_mod of a part of a mask: q_idx counts from query ``start``; b and h count the selected batch
    rows and heads.

    rows, heads: the selected b and h of ``part``; None: all. A single one serves every b or h.

    >>> PartOfMask(causal(), heads=(0, 2)), PartOfMask(causal(), start=8)
    (causal()[:, [0, 2]], causal() from query 8)
    """

    part: MaskFn
    rows: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    start: int = 0

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q_idx = q_idx + self.start if self.start else q_idx
        return self.part(_look_up(self.rows, b), _look_up(self.heads, h), q_idx, kv_idx)

    def intervals(self, q_len: int, kv_len: int) -> Intervals | None:
        part = self.part
        whole = part.intervals(self.start + q_len, kv_len) if isinstance(part, MaskMod) else None
        if whole is None:
            return None
        rows = slice(None) if self.rows is None or len(whole[0]) == 1 else list(self.rows)
        return whole[0][rows, :, self.start :], whole[1][rows, :, self.start :]

    @property
    def batch(self) -> int:
        batch = num_batch_rows(self.part)
        return batch if batch == 1 or self.rows is None else len(self.rows)

    @property
    def reads(self) -> tuple[bool, bool]:
        return dependence_of(self.part)

    def __repr__(self) -> str:
        places = [":" if part is None else str(list(part)) for part in (self.rows, self.heads)]
        index = "" if places == [":", ":"] else f"[{', '.join(places)}]"
        return f"{name_of(self.part)}{index}" + f" from query {self.start}" * bool(self.start)


def _look_up(numbers: tuple[int, ...] | None, index: Tensor) -> Tensor:
    """Return ``numbers[index]``, by arithmetic where the numbers are evenly spaced."""
    if numbers is None:
        return index
    step = 0 if len(numbers) == 1 else numbers[1] - numbers[0]
    if all(number == numbers[0] + step * i for i, number in enumerate(numbers)):
        return index * step + numbers[0]
    return torch.tensor(numbers, device=index.device)[index]


def causal() -> MaskMod:
    """Return the causal mask_mod, kv <= q. It is aligned top-left like torch's ``is_causal``.

    >>> index = torch.arange(3)
    >>> causal()(None, None, index[:, None], index).int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    >>> causal() & sliding_window(1024)             # masks are joined with & | ~
    and_masks(causal(), sliding_window(1024, 0))

    Returns:
        A mask_mod (b, h, q_idx, kv_idx) -> bool.
    """
    return SlidingWindow(UNBOUNDED, 0)


def sliding_window(left: int, right: int = 0) -> MaskMod:
    """Return the mask_mod of a sliding window, -right <= q - kv <= left.

    >>> index = torch.arange(4)
    >>> sliding_window(1)(None, None, index[:, None], index).int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    >>> sliding_window(1, 1)(None, None, index[:, None], index).int().tolist()      # both sides
    [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]

    Hugging Face's ``sliding_window=n`` counts the query itself, so it is ``left=n-1``:

    >>> n = 3
    >>> hf = lambda q, kv: (kv <= q) & (kv > q - n)     # transformers.masking_utils, causal and window
    >>> q, kv = torch.arange(8)[:, None], torch.arange(8)
    >>> torch.equal(hf(q, kv), sliding_window(n - 1)(None, None, q, kv))
    True

    Args:
        left: number of visible keys before the query, which itself is not counted, as in FlashAttention's
            ``window_size``; -1 = all.
        right: number of visible keys after the query; -1 = all.

    Returns:
        A mask_mod (b, h, q_idx, kv_idx) -> bool.

    Raises:
        ValueError: for a number below -1.
        TypeError: for a number that is not an int.
    """
    return SlidingWindow(_as_tokens("sliding_window: left", left), _as_tokens("sliding_window: right", right))


def as_int(name: str, number: Any, needed: str = "an int is needed") -> int:
    """Return a number as an int. Raises TypeError, with the text ``needed``, for a fraction or another
    object."""
    if isinstance(number, int):  # may be a symbol of a graph, which operator.index would turn into a constant
        return number
    try:
        return operator.index(number)
    except TypeError:
        raise TypeError(f"{name}={number!r}; {needed}") from None


def _as_tokens(name: str, number: Any) -> int:
    return as_int(name, number, "a number of tokens is needed, an int, as 4096")


def document(*, lengths: Sequence[int] | Tensor | None = None, ids: Tensor | None = None) -> MaskMod:
    """Return the document mask_mod: a token sees all tokens of its document, before and after it.

    >>> index = torch.arange(3)
    >>> document(lengths=[2, 1])(None, None, index[:, None], index).int().tolist()
    [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    >>> document(lengths=[2, 1]).ids.tolist()
    [0, 0, 1]
    >>> document(lengths=[[2, 1], [1, 2]]).ids.tolist()      # other documents in each batch row
    [[0, 0, 1], [0, 1, 1]]
    >>> causal() & document(ids=torch.tensor([0, 0, 1]))     # causal in each document
    and_masks(causal(), document(ids=[3]))

    Args:
        lengths: number of tokens of each document, [n], or [B, n] for each batch row; 0 = no document.
        ids: document number of each token, integers [N] or [B, N]; the tensor is captured, not copied.

    Returns:
        A mask_mod (b, h, q_idx, kv_idx) -> bool.

    Raises:
        ValueError: unless exactly one of ``lengths`` and ``ids`` is given, with this shape and type.
    """
    if (lengths is None) == (ids is None):
        raise ValueError(
            "document: lengths= (tokens of each document) and ids= (one per token): pass one of them"
        )
    if lengths is not None:
        if torch.compiler.is_dynamo_compiling():
            return DocumentOfLengths(lengths)
        ids = _ids_from_lengths(lengths)
    assert ids is not None
    if not isinstance(ids, Tensor) or ids.ndim not in (1, 2) or ids.is_floating_point():
        description = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"document: ids must be an integer tensor [N] or [B, N], got {description}")
    return Document(ids)


def prefix_lm(prefix: int | Tensor) -> MaskMod:
    """Return the prefix LM mask_mod: causal, and all queries see the first ``prefix`` keys.

    >>> index = torch.arange(4)
    >>> prefix_lm(2)(None, None, index[:, None], index).int().tolist()
    [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    >>> prefix_lm(torch.tensor([2, 3])).intervals(4, 4)[1].tolist()      # end of the keys that a query sees
    [[[2, 2, 3, 4]], [[3, 3, 3, 4]]]

    Args:
        prefix: number of tokens, an int; or an integer tensor [B], a number for each batch row.

    Returns:
        A mask_mod (b, h, q_idx, kv_idx) -> bool.

    Raises:
        ValueError: for a tensor of another shape or dtype.
        TypeError: for a number that is not an int.
    """
    if isinstance(prefix, Tensor) and (prefix.ndim > 1 or prefix.is_floating_point()):
        description = f"{prefix.dtype} {tuple(prefix.shape)}"
        raise ValueError(f"prefix_lm: prefix must be an int or an integer tensor [B], got {description}")
    return PrefixLM(prefix if isinstance(prefix, Tensor) else _as_tokens("prefix_lm: prefix", prefix))


def is_closed_form(mask: Any) -> bool:
    """Return whether a mask_mod consists of closed forms only: only the values of its tensors can change.

    >>> is_closed_form(causal() & document(lengths=[2, 6]))
    True
    >>> is_closed_form(causal() & (lambda b, h, q, kv: q != kv))
    False
    """
    if type(mask) in (SlidingWindow, Document, DocumentOfLengths, PrefixLM, TextAndBlock, Tree):
        return True
    combination = type(mask) in (And, Or, Not, PartOfMask)
    return combination and all(map(is_closed_form, getattr(mask, "parts", None) or (mask.part,)))


def _ids_from_lengths(lengths: Any) -> Tensor:
    """Return the document number of each token, int32 [N] or [B, N], from document lengths [n] or [B, n]."""
    if not isinstance(lengths, Tensor):
        lengths = torch.tensor(lengths, device="cpu")  # whatever the default device is
    refuse_dtensor(lengths, "lengths of document", "pass lengths.full_tensor()")
    if lengths.ndim not in (1, 2) or lengths.is_floating_point() or bool((lengths < 0).any()):
        raise ValueError(f"document: lengths must be integers >= 0, [n] or [B, n], got {lengths.tolist()}")
    rows = lengths.reshape(-1, lengths.shape[-1])
    totals = rows.sum(1)
    if bool((totals != totals[:1]).any()):
        sums = totals.tolist()
        raise ValueError(f"document: the lengths of every batch row must add up to the same, got {sums}")
    number = torch.arange(rows.shape[1], dtype=torch.int32, device=rows.device).repeat(len(rows))
    ids = number.repeat_interleave(rows.flatten()).view(len(rows), -1)
    return ids if lengths.ndim == 2 else ids[0]
