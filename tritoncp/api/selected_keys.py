"""`select_keys`, which chooses the keys of each query as indexers of sparse attention models do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritoncp.api.group_call import group_call
from tritoncp.api.plans import MaskLike
from tritoncp.api.reshard import unshard
from tritoncp.api.shards import placement_of
from tritoncp.call.check_arguments import check_mesh
from tritoncp.call.plan_cache import current_mask
from tritoncp.core.dynamo_boundary import graph_entry, host_only
from tritoncp.distributed.groups import Mesh, place_in_group
from tritoncp.masks.closed_forms import as_int
from tritoncp.masks.from_torch import from_block_mask
from tritoncp.masks.mask import Mask, create_block_mask, full_mask
from tritoncp.masks.mask_mod import MaskMod
from tritoncp.masks.traced_mask import plain_mask
from tritoncp.planning.plan import Plan
from tritoncp.selection.choice import ACTIVATIONS, POOLS, KeyChoice, choose
from tritoncp.selection.selection import Selection, check_sizes
from tritoncp.selection.visible import VisiblePairs


@graph_entry
@group_call
def select_keys(
    query: Tensor,
    key: Tensor,
    weights: Tensor | None = None,
    *,
    top: int,
    block_size: int = 1,
    block_mask: MaskLike | None = None,
    mesh: Mesh = None,
    activation: str = "relu",
    pool: str = "mean",
    own: bool | None = None,
    first: int = 0,
    last: int = 0,
) -> Selection:
    """Choose the keys, or blocks of keys, with the largest scores for each query, among those that the mask
    shows.

    >>> from tritoncp import causal, create_block_mask, flex_attention, select_keys
    >>> mask = create_block_mask(causal(), 1, 1, 256, 256)
    >>> index_query, index_key = torch.randn(1, 4, 256, 32), torch.randn(1, 1, 256, 32)
    >>> chosen = select_keys(index_query, index_key, torch.ones(1, 4, 256), top=64, block_mask=mask)
    >>> chosen.indices.shape
    torch.Size([1, 1, 256, 64])
    >>> q = k = v = torch.randn(1, 2, 256, 32)
    >>> flex_attention(q, k, v, mask, selected=chosen).shape
    torch.Size([1, 2, 256, 32])

    With ``weights`` the score of a key is sum_h weights[h] * activation(query[h] . key), as in the lightning
    indexer of DeepSeek-V3.2 (arXiv 2512.02556, equation 1). Without, each head chooses for itself; over means
    of blocks with ``activation="identity"`` and ``own=True`` that is MoBA (arXiv 2502.13189). Scores are
    compared as float32. Of equal scores the lower position is chosen, so that the choice is the same on any
    number of ranks. No matrix of all pairs is stored. The choice has no gradient.

    Args:
        query: [B, Hi, S_local, Di], this rank's shard of the queries of the indexer.
        key: [B, 1 or Hi, S_local, Di], this rank's shard of its keys. Under a mesh they are gathered once.
        weights: [B, Hi, S_local], or None.
        top: number of keys, or blocks, of a query. Where it sees fewer, the rest is -1.
        block_size: 1, or keys of a block, a multiple of 16.
        block_mask: the mask or Plan of the attention; None sees all keys.
        mesh: as of :func:`tritoncp.flex_attention`.
        activation: "relu", "sigmoid", "silu" or "identity", of the products.
        pool: how a block gets its score: "mean", of the mean of its keys; "max", the largest of its visible
            keys.
        own: whether the key, or block, at the position of the query is always chosen; None: for blocks.
        first: how many of the first visible keys or blocks are always chosen.
        last: how many of the last visible ones up to the query are always chosen.

    Returns:
        Selection with ascending int32 indices [B, Hs, S_local, top]; Hs is 1 with ``weights``, else Hi.

    Raises:
        TypeError: an argument is of another type.
        ValueError: shapes, mask and options do not fit each other, or more keys are always chosen than
            ``top``.
    """
    choice = _checked(top, block_size, activation, pool, own, first, last)
    _check_tensors(query, key, weights)
    return _select(query, key, weights, choice, plain_mask(block_mask), mesh)


@host_only
def _select(
    query: Tensor, key: Tensor, weights: Tensor | None, choice: KeyChoice, block_mask: Any, mesh: Any
) -> Selection:
    """Gather the keys, and choose."""
    place = place_in_group(mesh)
    check_mesh(mesh, block_mask)
    key, block_mask = key.detach(), current_mask(block_mask)
    if isinstance(block_mask, Plan):
        whole = unshard(key, block_mask, mesh, dim=2, side="kv")
        mask, first_row, at = block_mask.mask, block_mask.first_row, block_mask.positions
    else:
        whole = unshard(key, None if isinstance(block_mask, MaskMod) else block_mask, mesh, dim=2, side="kv")
        mask, first_row = _mask_of(block_mask, whole.shape[2]), 0
        placement, rank = placement_of(query, mask, place, 2, "q")
        at = placement.positions(rank)
    if at.shape[1] != query.shape[2]:
        raise ValueError(f"query has {query.shape[2]} rows; the shard has {at.shape[1]}")
    mod = mask.mask_mod
    pairs = VisiblePairs(mask, mod, first_row, query.device)
    with torch.no_grad():
        chosen = choose(query.detach(), whole, weights, choice, pairs, at.to(query.device))
    return Selection(chosen, choice.block_size)


def _mask_of(block_mask: Any, length: int) -> Mask:
    """Return a mask over a sequence of ``length`` tokens."""
    if block_mask is None:
        return full_mask(length, length)
    if isinstance(block_mask, MaskMod):
        return create_block_mask(block_mask, None, None, length, length)
    return block_mask if isinstance(block_mask, Mask) else from_block_mask(block_mask)


def _checked(
    top: Any, block_size: Any, activation: Any, pool: Any, own: Any, first: Any, last: Any
) -> KeyChoice:
    """Return what to choose, after checks."""
    check_sizes(block_size, 1)
    numbers = {"top": top, "first": first, "last": last}
    top, first, last = (as_int(f"select_keys: {name}", number) for name, number in numbers.items())
    for name, value, known in (("activation", activation, ACTIVATIONS), ("pool", pool, POOLS)):
        if value not in known:
            raise ValueError(f"select_keys: {name}={value!r}; pass one of {', '.join(map(repr, known))}")
    own = block_size > 1 if own is None else bool(own)
    if top < 1 or min(first, last) < 0 or first + last + own > top:
        raise ValueError(
            f"select_keys: top={top}, first={first}, last={last} and own={own}: top is at least 1, and at "
            "least as many as are always chosen"
        )
    return KeyChoice(top, block_size, activation, pool, own, first, last)


def _check_tensors(query: Tensor, key: Tensor, weights: Tensor | None) -> None:
    for name, x in (("query", query), ("key", key), ("weights", weights)):
        if x is None and name == "weights":
            continue
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"select_keys: {name} is {kind}; a tensor of floats is needed")
        if x.device != query.device:
            raise ValueError(f"select_keys: {name} is on {x.device}, query on {query.device}: move it there")
    if query.ndim != 4 or key.ndim != 4 or key.shape[0] != query.shape[0] or key.shape[3] != query.shape[3]:
        raise ValueError(
            f"select_keys: query is {list(query.shape)} and key {list(key.shape)}; query "
            "[B, Hi, S_local, Di] and key [B, 1 or Hi, S_local, Di] are needed"
        )
    if key.shape[1] not in (1, query.shape[1]):
        raise ValueError(f"select_keys: key has {key.shape[1]} heads; 1 or {query.shape[1]} are needed")
    if weights is not None and weights.shape != query.shape[:3]:
        raise ValueError(
            f"select_keys: weights are {list(weights.shape)}; {list(query.shape[:3])} is needed, one for "
            "each head and query"
        )
