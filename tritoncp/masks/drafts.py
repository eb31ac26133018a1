"""Masks of block diffusion and of draft models: a row sees a part of the text, and its block.

Block sizes and anchors are tensors, so that other values compile nothing new.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritoncp.core.dynamo_boundary import host_only
from tritoncp.core.host_copy import host
from tritoncp.core.pytrees import as_tree
from tritoncp.core.records import record
from tritoncp.masks.classification.interval_arithmetic import is_integer
from tritoncp.masks.mask_mod import MaskMod
from tritoncp.masks.prefix_tree import as_host_tensor
from tritoncp.masks.runs.block_runs import ramps


@as_tree
@record(repr=False)
class TextAndBlock(MaskMod):
    """Mask of queries that see an interval of the text and an interval of other keys.

    text_lo, text_hi, lo, hi: bounds of both intervals of each query, int32 [queries], or [B, queries]; lo =
        hi: none
    offset: query i belongs to key ``offset + i``; both are placed on the same rank
    name:   for messages
    """

    text_lo: Tensor
    text_hi: Tensor
    lo: Tensor
    hi: Tensor
    offset: int
    name: str

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row = (q_idx,) if self.text_lo.ndim == 1 else (b, q_idx)
        text = (kv_idx >= self.text_lo[row]) & (kv_idx < self.text_hi[row])
        return text | ((kv_idx >= self.lo[row]) & (kv_idx < self.hi[row]))

    @property
    def batch(self) -> int:
        return 1 if self.text_lo.ndim == 1 else len(self.text_lo)

    @property
    def query_offset(self) -> int:
        return self.offset

    def __repr__(self) -> str:
        return self.name


@host_only
def block_diffusion(length: int | Sequence[int] | Tensor, block: int) -> MaskMod:
    """Return the mask_mod of block diffusion: a text, followed by a corrupted copy of it.

    >>> index = torch.arange(8)
    >>> block_diffusion(4, 2)(None, None, index[:, None], index).int()
    tensor([[1, 1, 0, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0, 0, 0],
            [1, 1, 1, 1, 0, 0, 0, 0],
            [1, 1, 1, 1, 0, 0, 0, 0],
            [0, 0, 0, 0, 1, 1, 0, 0],
            [0, 0, 0, 0, 1, 1, 0, 0],
            [1, 1, 0, 0, 0, 0, 1, 1],
            [1, 1, 0, 0, 0, 0, 1, 1]], dtype=torch.int32)

    The sequence has twice the text's tokens: the text, then its copy in the same order. A corrupted token
    sees its block of the copy, before and after it, and the blocks of the text before its block. A token of
    the text sees its block of the text and the blocks before it. Blocks begin with a document, and no token
    sees another document.

    Args:
        length: number of tokens of the text, or of each packed document of the text, [n].
        block: number of tokens of a block; the last block of a document may be shorter.

    Returns:
        A mask_mod (b, h, q_idx, kv_idx) -> bool.

    Raises:
        ValueError: for numbers that are not integers >= 0, or a block below 1.
        TypeError: for a block that is not an int.
    """
    size = _positive("block_diffusion: block", block)
    with host():
        lengths = _integers("block_diffusion: length", [length] if isinstance(length, int) else length)
        within = ramps(torch.zeros_like(lengths), lengths)
        first = torch.arange(len(within)) - within  # of the token's document
        end = first + lengths.repeat_interleave(lengths)
        start = first + within // size * size  # of the token's block
        stop = torch.minimum(start + size, end)
        total = len(within)
        none = torch.zeros_like(start)
        text_lo, text_hi, lo, hi = (
            torch.cat(halves).int()
            for halves in ((first, first), (stop, start), (none, start + total), (none, stop + total))
        )
    return TextAndBlock(text_lo, text_hi, lo, hi, 0, f"block_diffusion({_describe(length)}, {size})")


@host_only
def draft_blocks(
    anchors: Sequence[int] | Tensor, block: int, *, context: int | Sequence[int] | Tensor
) -> MaskMod:
    """Return the mask_mod of a draft model, which predicts blocks of tokens at many places of a text at once.

    >>> mod = draft_blocks([1, 3], 2, context=3)        # two drafts of 2 tokens: after 1 and after 3 tokens
    >>> mod(None, None, torch.arange(4)[:, None], torch.arange(7)).int()
    tensor([[1, 0, 0, 1, 1, 0, 0],
            [1, 0, 0, 1, 1, 0, 0],
            [1, 1, 1, 0, 0, 1, 1],
            [1, 1, 1, 0, 0, 1, 1]], dtype=torch.int32)

    DFlash and JetSpec train draft models in this way. Keys are the text's tokens, then the drafts' tokens,
    ``block`` for each draft; queries are the drafts' tokens: Q_LEN = n * block and KV_LEN = context + n *
    block. A draft sees the text before its anchor, and itself. A plan has the keys of a draft on the rank of
    its queries, so that only keys of the text travel.

    Args:
        anchors: number of text tokens before each draft, integers [n], or [B, n] if batch rows have
            different ones; other anchors compile nothing new.
        block: number of tokens of a draft.
        context: number of tokens of the text, or of each packed document of the text: a draft sees the
            document of the token before its anchor.

    Returns:
        A mask_mod (b, h, q_idx, kv_idx) -> bool.

    Raises:
        ValueError: for an anchor outside of the text, and for numbers that are not integers >= 0.
        TypeError: for a block that is not an int.
    """
    size = _positive("draft_blocks: block", block)
    with host():
        lengths = _integers("draft_blocks: context", [context] if isinstance(context, int) else context)
        places = _integers("draft_blocks: anchors", anchors, of_rows=True)
        total = int(lengths.sum())
        if places.numel() and int(places.max()) > total:
            raise ValueError(
                f"draft_blocks: anchor {int(places.max())} is outside of a text of {total} tokens; pass the "
                "number of tokens before each draft"
            )
        ends = lengths.cumsum(0)
        document = torch.searchsorted(ends, places)  # of the token before the anchor
        first = torch.where(places > 0, (ends - lengths)[document.clamp(max=len(ends) - 1)], 0)
        start = total + (torch.arange(places.shape[-1]) * size).expand_as(places)
        text_lo, text_hi, lo, hi = (
            x.int().repeat_interleave(size, -1) for x in (first, places, start, start + size)
        )
    name = f"draft_blocks({list(places.shape)}, {size}, context={_describe(context)})"
    return TextAndBlock(text_lo, text_hi, lo, hi, total, name)


def _positive(name: str, number: Any) -> int:
    if not isinstance(number, int) or number < 1:
        raise ValueError(f"{name}={number!r}; a number of tokens is needed, an int of at least 1")
    return number


def _integers(name: str, numbers: Any, of_rows: bool = False) -> Tensor:
    """Return numbers of tokens, int64 [n] on the CPU. Raises ValueError for others. of_rows: whether they may
    be [B, n]"""
    x = as_host_tensor(name, numbers, "an int, or a list or tensor of integers [n]")
    fits = x.ndim == 1 or (of_rows and x.ndim == 2)
    if not fits or (x.numel() and (not is_integer(x.dtype) or int(x.min()) < 0)):
        shape = "[n] or [B, n]" if of_rows else "[n]"
        raise ValueError(
            f"{name} must be integers {shape} of at least 0, got {x.dtype} {list(x.shape)}: {numbers!r}"
        )
    return x.long()


def _describe(lengths: Any) -> str:
    return str(lengths) if isinstance(lengths, int) else f"[{len(lengths)}]"
