"""Conversion of transformers' mask functions to closed forms, from their code objects and closures.

`transformers.masking_utils` builds the mask function of a layer from a few factories: causal, window, chunks,
packed documents, and their intersection. The code object identifies the factory, and the closure has its
numbers. Nothing is traced, and masks of two calls compare as equal if they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from tritoncp.masks.closed_forms import SlidingWindow, document
from tritoncp.masks.mask_mod import UNBOUNDED, MaskMod


@dataclass(frozen=True, eq=False)
class Pattern:
    """Visible pairs of one kind of layer: an intersection of window, chunks and documents.

    window:       (left, right): -right <= q - kv <= left, -1 = unbounded
    chunk:        length of chunks, within which queries see keys; 0: no chunks
    left_padding: [B], padding before the first chunk of each row
    documents:    [B, S], index of each token's document, within which queries see keys
    positions:    [B, S], the position_ids from which the documents were read
    """

    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED)
    chunk: int = 0
    left_padding: Tensor | None = None
    documents: Tensor | None = None
    positions: Tensor | None = None

    @property
    def kind(self) -> str:
        """Window and chunks as text: equal for all layers of one kind, in all batches, on all ranks."""
        return f"window{self.window}" + f" in chunks of {self.chunk}" * (self.chunk > 0)

    def mask_mod(self, length: int) -> MaskMod:
        """Return the closed form for ``length`` tokens, without padding."""
        window = SlidingWindow(*self.window)
        segments = self._segments(length)
        return window if segments is None else window & document(ids=segments)

    def _segments(self, length: int) -> Tensor | None:
        """Return the index of each token's segment (a chunk within a document), [S] or [B, S]; None: one
        segment."""
        if not self.chunk:
            return None if self.documents is None else _shared(self.documents)
        padding = self.left_padding
        if padding is not None and not bool(padding.any()):
            padding = None
        if padding is None and self.documents is None:
            return _chunk_ids(self.chunk, length)
        at = _chunk_ids(1, length)[None] if self.positions is None else self.positions
        at = at if padding is None else at.to(padding.device) - padding[:, None]
        ids = at.div(self.chunk, rounding_mode="floor")
        if self.documents is None:
            return _shared(ids)
        starts = (ids.diff(dim=1) != 0) | (self.documents.diff(dim=1) != 0)
        return _shared(torch.nn.functional.pad(starts, (1, 0)).cumsum(1))


def _shared(ids: Tensor) -> Tensor:
    """Return ids [1, S] as [S]; ids [B, S] unchanged."""
    return ids[0] if len(ids) == 1 else ids


@lru_cache(64)
def _chunk_ids(chunk: int, length: int) -> Tensor:
    """Return the chunk index of each token: int64 [length]. It is cached, since plans are found again by the
    identity of tensors."""
    return torch.arange(length) // chunk


def read_pattern(function: Callable[..., Any]) -> Pattern | None:
    """Return the pattern of a mask function of transformers.masking_utils; None for any other function.

    >>> read_pattern(masking_utils.sliding_window_causal_mask_function(4)).window
    (3, 0)
    >>> read_pattern(lambda b, h, q, kv: q >= kv) is None
    True
    """
    code = getattr(function, "__code__", None)
    reader = _READERS.get(code)
    if code is None or reader is None:
        return None
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    return reader(**dict(zip(code.co_freevars, cells, strict=True)))


def _read_intersection(mask_functions: tuple[Callable[..., Any], ...]) -> Pattern | None:
    patterns = [read_pattern(function) for function in mask_functions]
    return reduce(_intersect, patterns)


def _intersect(one: Pattern | None, other: Pattern | None) -> Pattern | None:
    """Return the intersection of two patterns; None if both have chunks, or both have documents."""
    if one is None or other is None:
        return None
    if (one.chunk and other.chunk) or (one.documents is not None and other.documents is not None):
        return None
    left, right = (
        min((bound for bound in bounds if bound != UNBOUNDED), default=UNBOUNDED)
        for bounds in zip(one.window, other.window, strict=True)
    )
    fields = {
        name: getattr(one if getattr(one, name) is not None else other, name)
        for name in ("left_padding", "documents", "positions")
    }
    return Pattern((left, right), one.chunk or other.chunk, **fields)


def _read_remapped(mask_function: Callable[..., Any], position_ids: Tensor) -> Pattern | None:
    """Return the pattern of a mask function that is applied to positions within documents. It is always
    intersected with the documents. Positions increase by one within a document, so that windows of positions
    are windows of rows."""
    pattern = read_pattern(mask_function)
    return pattern and replace(pattern, positions=position_ids)


_ANY = torch.zeros(1, dtype=torch.int64)
_READERS: dict[Any, Callable[..., Pattern | None]] = {
    masking_utils.causal_mask_function.__code__: lambda: Pattern((UNBOUNDED, 0)),
    masking_utils.bidirectional_mask_function.__code__: Pattern,
    masking_utils.sliding_window_overlay(1).__code__: lambda sliding_window: Pattern(
        (sliding_window - 1, UNBOUNDED)  # transformers' window includes the query itself
    ),
    masking_utils.sliding_window_bidirectional_overlay(1).__code__: lambda sliding_window: Pattern(
        (sliding_window, sliding_window)
    ),
    masking_utils.chunked_overlay(1, _ANY).__code__: lambda chunk_size, left_padding: Pattern(
        chunk=chunk_size, left_padding=left_padding
    ),
    masking_utils.packed_sequence_mask_function(_ANY).__code__: lambda packed_sequence_mask: Pattern(
        documents=packed_sequence_mask
    ),
    masking_utils.remap_positions_for_packed_sequence(max, _ANY).__code__: _read_remapped,
    masking_utils.and_masks().__code__: _read_intersection,
}
