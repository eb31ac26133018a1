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
from tritoncp.masks.mask_mod import UNBOUNDED, MaskFn, MaskMod


@dataclass(frozen=True, eq=False)
class Pattern:
    """Visible pairs of one kind of layer: an intersection of window, chunks and documents.

    window:       (left, right): -right <= q - kv <= left, -1 = unbounded
    chunk:        length of chunks, within which queries see keys; 0: no chunks
    left_padding: [B], padding before the first chunk of each row
    documents:    [B, S], index of each token's document, within which queries see keys
    positions:    [B, S], the position_ids from which the documents were read
    images:       [B, S], index of each token's image, -1 in text; tokens of one image see each other, within
                  a document, besides the keys that the window shows
    is_bounded:   whether the left side of the window holds within images too
    """

    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED)
    chunk: int = 0
    left_padding: Tensor | None = None
    documents: Tensor | None = None
    positions: Tensor | None = None
    images: Tensor | None = None
    is_bounded: bool = False

    @property
    def kind(self) -> str:
        """Window, chunks and images as text: equal for all layers of one kind, in all batches, on all
        ranks."""
        images = "" if self.images is None else " and images" + " in the window" * self.is_bounded
        return f"window{self.window}" + f" in chunks of {self.chunk}" * (self.chunk > 0) + images

    @property
    def without_images(self) -> Pattern:
        """The pattern of a text."""
        return replace(self, images=None, is_bounded=False)

    def mask_mod(self, length: int) -> MaskMod:
        """Return the mask_mod for ``length`` tokens, without padding; a closed form if there are no
        images."""
        window: MaskMod = SlidingWindow(*self.window)
        if self.images is not None:
            left, right = self.window
            image = _same_image(_shared(self.images))
            bound = SlidingWindow(left, UNBOUNDED)
            window = bound & (SlidingWindow(UNBOUNDED, right) | image) if self.is_bounded else window | image
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


def _same_image(images: Tensor) -> MaskFn:
    """Return the mask_mod of pairs in one image. images: [S] or [B, S], -1 in text"""
    if images.ndim == 1:
        return lambda b, h, q, kv: (images[q] == images[kv]) & (images[q] >= 0)
    return lambda b, h, q, kv: (images[b, q] == images[b, kv]) & (images[b, q] >= 0)


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
    if one.images is not None:
        one, other = other, one
    if other.images is not None and not _bounds_only(one):
        return None
    left, right = (
        min((bound for bound in bounds if bound != UNBOUNDED), default=UNBOUNDED)
        for bounds in zip(one.window, other.window, strict=True)
    )
    fields = {
        name: getattr(one if getattr(one, name) is not None else other, name)
        for name in ("left_padding", "documents", "positions", "images")
    }
    bounds_images = other.images is not None and one.window[0] != UNBOUNDED
    if bounds_images and other.window[0] != UNBOUNDED:  # two windows, of which one does not bound images
        return None
    return Pattern(
        (left, right), one.chunk or other.chunk, **fields, is_bounded=other.is_bounded or bounds_images
    )


def _bounds_only(pattern: Pattern) -> bool:
    """Return whether a pattern limits how far back queries see, or documents, and nothing else."""
    return pattern.images is None and pattern.window[1] == UNBOUNDED and not pattern.chunk


def _read_union(mask_functions: tuple[Callable[..., Any], ...]) -> Pattern | None:
    """Return the pattern of a mask function and images; None for any other union. Some models of transformers
    show images across documents; the pattern does not."""
    pattern = read_pattern(mask_functions[0])
    code = getattr(mask_functions[-1], "__code__", None)
    if len(mask_functions) != 2 or code is not _OF_IMAGES or pattern is None or pattern.images is not None:
        return None
    (cell,) = mask_functions[1].__closure__ or ()
    return replace(pattern, images=cell.cell_contents)


def _read_remapped(mask_function: Callable[..., Any], position_ids: Tensor) -> Pattern | None:
    """Return the pattern of a mask function that is applied to positions within documents. It is always
    intersected with the documents. Positions increase by one within a document, so that windows of positions
    are windows of rows."""
    pattern = read_pattern(mask_function)
    return pattern and replace(pattern, positions=position_ids)


_ANY = torch.zeros(1, dtype=torch.int64)
_OF_IMAGES = masking_utils.blockwise_overlay(_ANY).__code__
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
    masking_utils.or_masks().__code__: _read_union,
}
