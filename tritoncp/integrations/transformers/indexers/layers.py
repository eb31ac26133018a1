"""Attention layers with an indexer, whose keys are chosen by tiles."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tritoncp.api.selected_keys import select_keys
from tritoncp.integrations.transformers.indexers.calls import LayerCall, read_call
from tritoncp.integrations.transformers.indexers.pools import DocumentBlocks, choose_blocks, choose_pools
from tritoncp.integrations.transformers.indexers.scores import read_scores
from tritoncp.integrations.transformers.masks import MaskWithKeys
from tritoncp.integrations.transformers.model_classes import attention_with_indexers
from tritoncp.selection import Selection
from tritoncp.selection.choice import KeyChoice

SELECTOR = "_tritoncp_key_selector"  # attribute of attention modules, and of models that are prepared


def select_by_tiles(model: nn.Module) -> None:
    """Let the attention layers of a model with indexers choose keys by tiles. A second call has no effect."""
    if SELECTOR in vars(model):
        return
    setattr(model, SELECTOR, True)
    attention: Any
    for attention in attention_with_indexers(model):
        if SELECTOR in vars(attention):  # of a part of the model that was prepared before
            continue
        selector = KeySelector(attention, attention.forward)
        setattr(attention, SELECTOR, selector)
        attention.forward = selector.attend
        if attention.indexer is not None:
            selector.own = attention.indexer.forward
            attention.indexer.forward = selector.choose
        if hasattr(attention, "build_attention_mask_from_topk"):
            attention.build_attention_mask_from_topk = selector.with_mask


@dataclass
class KeySelector:
    """Chooses the keys of an attention layer, in place of the code of its indexer.

    forward: of the attention layer
    own:     forward of its indexer; None: the layer gets the keys of another layer
    call:    the running call of the layer; None: the indexer's own code serves it
    """

    attention: Any
    forward: Callable[..., Any]
    own: Callable[..., Any] | None = None
    call: LayerCall | None = None

    @torch.compiler.disable
    def attend(self, *args: Any, **kwargs: Any) -> Any:
        """Run the attention layer, between compiled graphs."""
        self.call = read_call(self.attention, kwargs)
        try:
            return self.forward(*args, **kwargs)
        finally:
            self.call = None

    def choose(self, *args: Any, **kwargs: Any) -> Any:
        """Return the keys of each query, in place of the indexer."""
        assert self.own is not None
        if self.call is None:
            return self.own(*args, **kwargs)
        indexer = self.attention.indexer
        if hasattr(indexer, "compress_ratio"):
            return self._means(*args, **kwargs)
        if hasattr(indexer, "index_kpool"):
            return self._weighted_pools(*args, **kwargs)
        if hasattr(indexer, "topk_blocks"):
            return self._blocks(*args, **kwargs)
        return self._tokens(*args, **kwargs)

    def with_mask(self, topk_indices: Any, query_states: Tensor, kv_length: int) -> Any:
        """Return the mask of a layer that makes it from the keys of its indexer."""
        if isinstance(topk_indices, Selection):
            assert self.call is not None
            return MaskWithKeys(self.call.block_mask, topk_indices)
        own = type(self.attention).build_attention_mask_from_topk
        return own(self.attention, topk_indices, query_states, kv_length)

    def _tokens(self, *args: Any, **kwargs: Any) -> Selection:
        """Choose single keys by the weighted sum over heads: DeepSeek-V3.2 and its kin."""
        assert self.own is not None and self.call is not None
        scores = read_scores(self.own, *args, summed=True, **kwargs)
        assert scores.weights is not None
        return select_keys(
            scores.query.transpose(1, 2),
            scores.key.mT,
            scores.weights.transpose(1, 2),
            top=min(self.attention.indexer.index_topk, self.call.length),
            block_mask=self.call.block_mask,
            mesh=self.call.mesh,
        )

    def _blocks(self, *args: Any, **kwargs: Any) -> Selection:
        """Choose blocks by their best key, for each head: MiniMax M3."""
        assert self.own is not None and self.call is not None
        call, indexer = self.call, self.attention.indexer
        scores = read_scores(self.own, *args, summed=False, **kwargs)
        top, size = min(indexer.topk_blocks, -(-call.length // indexer.block_size)), indexer.block_size
        choice = KeyChoice(top, size, "identity", "max", last=min(indexer.local_blocks, top))
        if call.documents is not None:
            whole = call.gather(scores.key[:, 0].mT)
            return choose_blocks(scores.query, whole, choice, call)
        return select_keys(
            scores.query, scores.key.mT, top=top, block_size=size, block_mask=call.block_mask, mesh=call.mesh,
            activation="identity", pool="max", own=False, last=choice.last,
        )  # fmt: skip

    def _weighted_pools(self, *args: Any, **kwargs: Any) -> Selection:
        """Choose pools of keys, whose weights are learned, and the incomplete pool of the query: GLM-5.3."""
        assert self.own is not None and self.call is not None
        call, indexer = self.call, self.attention.indexer
        blocks = DocumentBlocks.of(call.segments(indexer.wk.weight.device), indexer.index_kpool)
        pools: list[Tensor] = []

        def pool(packed_states: Tensor) -> tuple[Tensor, Any, Any]:
            whole = call.gather(packed_states)
            whole[..., -1] = 1  # every token is valid; those without a place are not arranged
            pools.append(_all_pools(indexer, blocks.arrange(whole), blocks.size))
            return pools[0], None, None

        with _replaced(indexer, get_pooled_states=pool, get_visible_tokens=lambda **_: None):
            scores = read_scores(self.own, *args, summed=True, **kwargs)
        assert scores.weights is not None
        query, weights = scores.query.transpose(1, 2), scores.weights.transpose(1, 2)
        top = max(1, min(indexer.index_topk // blocks.size, pools[0].shape[1]))
        return choose_pools(
            query, pools[0], weights, top, call, blocks, indexer.index_kpool_always_select_tail
        )

    def _means(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any,
        cache: Any,
    ) -> Selection:
        """Choose means of blocks by the sum over heads, and the incomplete block of the query: Qwen4-Exp. Its
        indexer looks at one query at a time, so that its projections are repeated here."""
        assert self.call is not None
        call, indexer = self.call, self.attention.indexer
        rotate = sys.modules[type(indexer).__module__].apply_rotary_pos_emb
        cos, sin = (x.expand(len(hidden_states), -1, -1) for x in position_embeddings)
        width = indexer.index_head_dim
        with torch.no_grad():
            query, key = indexer.index_qk_proj(hidden_states).split(
                [indexer.index_n_heads * width, indexer.index_kv_heads * width], -1
            )
            query = indexer.q_layernorm(query.unflatten(-1, (-1, width)))
            query = rotate(query, cos=cos, sin=sin, unsqueeze_dim=2).transpose(1, 2)
            if cache is not None:
                key = cache.update_indexer(key, indexer.layer_idx)
            blocks = DocumentBlocks.of(call.segments(key.device), indexer.compress_ratio)
            keys, cos, sin = (
                blocks.arrange(call.gather(x)).unflatten(1, (-1, blocks.size)) for x in (key, cos, sin)
            )
            pools = indexer.k_layernorm(keys.float().mean(2).to(key.dtype))
            pools = rotate(pools[:, None], cos=cos[:, :, 0], sin=sin[:, :, 0])[:, 0]
            weights = query.new_full(query.shape[:3], 1 / math.sqrt(width), dtype=torch.float32)
            top = max(1, min(indexer.block_topk, pools.shape[1]))
            return choose_pools(query.float(), pools.float(), weights, top, call, blocks, tail=True)


def _all_pools(indexer: Any, states: Tensor, size: int) -> Tensor:
    """Return the pooled key of each block, by an indexer's own method, which leaves incomplete ones out: 0
    for these. states: [B, blocks * size, ...], in blocks"""
    keys, places, _ = type(indexer).get_pooled_states(indexer, states)
    pools = keys.new_zeros(len(keys), states.shape[1] // size, keys.shape[2])
    pools[:, places[..., -1].amax(0) // size] = keys
    return pools


@contextmanager
def _replaced(module: nn.Module, **methods: Callable[..., Any]) -> Iterator[None]:
    """Replace methods of a module meanwhile."""
    for name, method in methods.items():
        setattr(module, name, method)
    try:
        yield
    finally:
        for name in methods:
            delattr(module, name)
