"""Masks for the layers of a transformers model, computed at their first use and shared by all layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import masking_utils

from tritoncp.core.handles import handle_of, stand_for
from tritoncp.core.records import fields_of, record, replace
from tritoncp.integrations.transformers.mask_functions import Pattern, read_pattern
from tritoncp.integrations.transformers.model_classes import (
    computes_attention_itself,
    has_compressed_keys,
    has_indexers,
)
from tritoncp.masks.block_mask_interface import BlockMaskInterface
from tritoncp.masks.closed_forms import PartOfMask, SlidingWindow, document
from tritoncp.masks.mask import Mask, create_block_mask
from tritoncp.masks.mask_mod import UNBOUNDED, MaskMod, and_masks
from tritoncp.masks.varlen import varlen
from tritoncp.planning.plan import Plan
from tritoncp.selection import Selection


@record()
class ModelMask(BlockMaskInterface):
    """The mask of one kind of layer in one call of a model. It is evaluated at its first use, or never if the
    call has a plan.

    function:  transformers' mask function, (b, h, q_idx, kv_idx) -> bool, of positions including the offsets
    pattern:   its closed form, or None
    q_offset, kv_offset: position of the first query and of the first key, ints or 0-d tensors
    attention_mask:      bool [B, tokens], False at padding, or None
    """

    function: Callable[..., Tensor]
    pattern: Pattern | None
    batch: int
    q_len: int
    kv_len: int
    q_offset: int | Tensor
    kv_offset: int | Tensor
    attention_mask: Tensor | None
    handle: Tensor | None = field(default=None, init=False, repr=False)  # None for a mask made in a graph

    def pinned(self) -> ModelMask:
        """Return the mask with a handle, by which graphs of single layers find it."""
        object.__setattr__(self, "handle", handle_of(replace(self)))  # of a copy: no cycle
        stand_for(self, self.handle)
        return self

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise ValueError if a model uses the mask as a tensor."""
        raise ValueError(
            "attention_mask is used as a tensor by the model's own attention code, in "
            f'{getattr(function, "__name__", function)}: load it with attn_implementation="eager", on one '
            "process"
        )

    def __getitem__(self, index: Any) -> Any:
        """Return the mask of the last queries: Gemma 4 has fewer queries in layers that share keys, and
        slices masks even if it keeps all. Raises ValueError for any other index."""
        match index:
            case (slice() as b, slice() as h, slice(stop=None, step=None) as q, slice() as kv) if (
                b == h == kv == slice(None)
            ):
                first, _, _ = q.indices(self.q_len)
                return self._of_queries_from(first) if first else self
        return self.__torch_function__(self.__getitem__, ())

    def _of_queries_from(self, first: int) -> Any:
        """Return the mask of the queries from the ``first`` on, as :func:`create_mask` does."""
        return create_mask(
            self.batch, self.q_len - first, self.kv_len, self.q_offset + first, self.kv_offset, self.function,
            self.attention_mask, allow_is_causal_skip=False,
        )  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields, without the function if it has a closed form, since it cannot be pickled."""
        state = {name: getattr(self, name) for name in fields_of(self)}
        return state if self.pattern is None else state | {"function": None}

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, 1, self.q_len, self.kv_len

    @property
    def BLOCK_SIZE(self) -> tuple[int, int]:
        return 128, 128

    @property
    def kind(self) -> str | None:
        """The kind of layers that have this mask; None for a custom mask function."""
        return None if self.pattern is None else self.pattern.kind

    @cached_property
    def padding(self) -> Tensor | None:
        """Which keys are tokens rather than padding, bool [B, kv_len]; None if all are. Synchronises."""
        if self.attention_mask is None:
            return None
        tokens = self.attention_mask.bool()
        if bool(tokens.all()) and tokens.shape[1] >= self._offsets[1] + self.kv_len:
            return None
        # Keys of a static cache that are not written yet count as padding.
        padded = masking_utils.prepare_padding_mask(tokens, self.kv_len, self._offsets[1])
        keys = padded[:, self._offsets[1] : self._offsets[1] + self.kv_len]
        causal = self.pattern is not None and self.pattern.window[1] == 0
        written = self._offsets[0] + self.q_len - self._offsets[1]
        return None if causal and bool(keys[:, :written].all()) else keys

    @cached_property
    def mask_mod(self) -> MaskMod:
        """The mask_mod of this call's queries and keys, both counted from 0."""
        offset = self._offsets[0] - self._offsets[1]
        if self.pattern is None or offset < 0:
            return self._custom_mask_mod()
        mod = self.pattern.mask_mod(max(self.kv_len, self.q_len + offset))
        if self.padding is not None:
            # Tokens see tokens only; padding sees padding, so that no row is empty.
            ids = torch.nn.functional.pad(self.padding.int(), (0, max(0, self.q_len + offset - self.kv_len)))
            mod = mod & document(ids=ids)
        return PartOfMask(mod, start=offset) if offset else mod

    @cached_property
    def block_mask(self) -> Mask:
        """The mask of the whole sequence, on one process."""
        mod = self.mask_mod
        rows = self.batch if mod.reads[0] else None
        return create_block_mask(mod, rows, None, self.q_len, self.kv_len)

    @cached_property
    def _offsets(self) -> tuple[int, int]:
        """Offsets of queries and keys as ints; tensors, as with a static cache, are read once."""
        return int(self.q_offset), int(self.kv_offset)

    def _custom_mask_mod(self) -> MaskMod:
        function = self.function
        if self.padding is not None:
            padded = torch.nn.functional.pad(self.padding, (self._offsets[1], 0))
            function = masking_utils.and_masks(function, masking_utils.padding_mask_function(padded))
        if any(self._offsets):
            function = masking_utils.add_offsets_to_mask_function(function, *self._offsets)
        return and_masks(function)


class IndexedMask(ModelMask):
    """The mask of layers with an indexer, as many keys as queries. Code of these layers narrows it for the
    indexer, and joins it with the selected keys."""

    dtype = torch.bool

    def __getitem__(self, index: Any) -> IndexedMask:
        return self

    def __and__(self, keys: Selection) -> MaskWithKeys:
        return MaskWithKeys(self, keys)


class MaskWithKeys(NamedTuple):
    """A mask of a layer, and the keys that its indexer selected."""

    mask: ModelMask | Mask | Plan
    keys: Selection


def create_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Any = None,
    **options: Any,
) -> Any:
    """Create a layer's mask, with the signature of transformers' mask interface, which calls it once for each
    kind of layer.

    attention_mask: bool [B, tokens], False at padding, or a complete mask, which is returned. Returns a
    :class:`ModelMask`; for a single query bool [B, 1, 1, kv_length], or None if it sees all keys; for models
    that compute attention themselves or add keys, and for steps of generation of models with an indexer,
    transformers' dense mask.
    """
    config = options.get("config")
    indexed = config is not None and has_indexers(config)
    if config is not None and (
        computes_attention_itself(config)
        or has_compressed_keys(config)
        or (indexed and not 1 < q_length == kv_length)
    ):
        return masking_utils.eager_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **options
        )
    if isinstance(attention_mask, ModelMask | Mask | Plan | MaskMod | BlockMask):
        return attention_mask
    if q_length == 1:  # decoding: one row of the mask, evaluated by torch
        return masking_utils.sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **options
        )
    pattern = read_pattern(mask_function)
    mask = (IndexedMask if indexed else ModelMask)(
        mask_function, pattern, batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask
    )
    return mask if torch.compiler.is_compiling() else mask.pinned()


def default_mask(is_causal: bool, window: int | None) -> SlidingWindow:
    """Return the mask of a module for calls without one. window: as in transformers, including the query"""
    left = UNBOUNDED if window is None else window - 1
    return SlidingWindow(left, 0 if is_causal else left)


def mask_of_call(
    attention_mask: Any, default: SlidingWindow, cu_seq_lens_q: Tensor | None, cu_seq_lens_k: Tensor | None
) -> Any:
    """Return the mask of a call without a plan. attention_mask: what the layer got; default: without one"""
    if cu_seq_lens_q is not None:
        return _packed_mask(attention_mask, default, cu_seq_lens_q, cu_seq_lens_k)
    if isinstance(attention_mask, IndexedMask):
        return attention_mask.block_mask
    if isinstance(attention_mask, ModelMask):
        return attention_mask.mask_mod
    if attention_mask is None:
        return default
    if isinstance(attention_mask, Mask | MaskMod | BlockMask | Plan):
        return attention_mask
    check_dense(attention_mask)
    dense = attention_mask
    rows, heads = dense.shape[:2]

    def visible(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return dense[b if rows > 1 else 0, h if heads > 1 else 0, q_idx, kv_idx]

    return and_masks(visible)


def _packed_mask(mask: Any, default: SlidingWindow, cu_q: Tensor, cu_k: Tensor | None) -> MaskMod:
    """Return the mask of packed documents from flash attention's ``cu_seq_lens`` arguments."""
    left, right = default.window
    if isinstance(mask, ModelMask):
        if mask.pattern is None or mask.pattern.chunk or mask.padding is not None or mask.batch != 1:
            raise ValueError(
                "cu_seq_lens_q needs one row of packed documents without padding, chunks or a custom mask "
                "function: pass position_ids that restart at each document instead"
            )
        left, right = mask.pattern.window
    elif mask is not None:
        raise ValueError("cu_seq_lens_q and attention_mask in one call: pass one of them")
    return varlen(cu_q, cu_k, causal=False, window=(left, right))


def check_dense(mask: Any) -> None:
    """Raise ValueError unless a mask is a dense bool mask."""
    if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.dtype != torch.bool:
        kind = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask is {kind}; a padding mask [batch, tokens], a bool or float mask [batch, 1, "
            "queries, keys], or a mask of tritoncp is needed"
        )
