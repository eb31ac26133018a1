"""`select_keys`, which chooses the keys of each query as indexers of sparse attention models do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from tritoncp.api.group_call import group_call, stop_traced_call
from tritoncp.api.plans import MaskLike
from tritoncp.call import plan_cache, traced
from tritoncp.call.check_arguments import check_mesh
from tritoncp.call.read import ShardSizes
from tritoncp.call.selected.engines import pairs_of
from tritoncp.core.dynamo_boundary import graph_entry, host_only
from tritoncp.core.handles import handle_of, object_of
from tritoncp.core.host_copy import refuse_dtensor
from tritoncp.distributed import failures, groups
from tritoncp.distributed.groups import Mesh, place_in_group
from tritoncp.graph import dispatch
from tritoncp.graph.dispatch import call_op, register_op
from tritoncp.graph.layouts import Uncapturable
from tritoncp.graph.reshard import Reshard
from tritoncp.graph.row_moves import move_rows
from tritoncp.masks.closed_forms import as_int
from tritoncp.mods.tracing import fresh_dispatch
from tritoncp.planning.plan import Plan
from tritoncp.selection.choice import ACTIVATIONS, POOLS, KeyChoice, choose
from tritoncp.selection.selection import Selection, check_sizes


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
        block_mask: the mask or Plan of the attention; None sees all keys. With ``weights`` it is the same
            for all heads.
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
    choice = checked_choice(top, block_size, activation, pool, own, first, last)
    check_index_tensors(query, key, weights)
    world = place_in_group(mesh)[0]
    check_mesh(mesh, block_mask)
    query, key = query.detach(), key.detach()
    arguments = query, key, None if weights is None else weights.detach(), block_mask, choice, world
    if torch.compiler.is_dynamo_compiling():
        try:
            return Selection(_choose_in_graph(*arguments), block_size)
        except Uncapturable as error:
            reason = error.args[0]
            stop_traced_call(world, "a graph break")
        torch._dynamo.graph_break(msg=reason)
    return Selection(choose_on_host(*arguments), block_size)


@host_only
def choose_on_host(
    query: Tensor, key: Tensor, weights: Tensor | None, block_mask: Any, choice: KeyChoice, world: str
) -> Tensor:
    """Choose outside of a graph that Dynamo traces. To a mode of torch functions it is one function."""
    if torch._C._is_torch_function_mode_enabled():
        arguments = query, key, weights, block_mask, choice, world
        chosen: Tensor = handle_torch_function(choose_on_host, (), *arguments)
        return chosen
    if dispatch.is_traced(query):
        with dispatch.fake_mode_of(query):
            return _choose_in_graph(query, key, weights, block_mask, choice, world)
    group = groups.group_by_name(world) if world else None
    sizes = _sizes_of(query, key, choice)
    mask = plan_cache.current_mask(block_mask)
    plan = plan_cache.plan_for(mask, sizes, group, ("select_keys", sizes, world))
    if dispatch.needs_dispatcher([query, key]):
        chosen = call_op(select_keys_op, query, key, weights, handle_of(plan), *choice, world)
        return chosen
    return _gather_and_choose(query, key, weights, plan, choice, world)


def _sizes_of(query: Tensor, key: Tensor, choice: KeyChoice) -> ShardSizes:
    """Return the sizes by which a raw mask gets its plan, the one of the attention to the chosen keys."""
    return ShardSizes.of(query, key)._replace(selected=choice.top * choice.block_size)


def _choose_in_graph(
    query: Tensor, key: Tensor, weights: Tensor | None, block_mask: Any, choice: KeyChoice, world: str
) -> Tensor:
    """Trace the choice into the graph. Raises Uncapturable for a mask that cannot be part of a graph."""
    plan = traced.find_in_graph(block_mask, _sizes_of(query, key, choice), world)
    (weights,) = dispatch.as_inputs([weights])
    chosen: Tensor = select_keys_op(query, key, weights, plan, *choice, world)
    return chosen


def _gather_and_choose(
    query: Tensor, key: Tensor, weights: Tensor | None, plan: Plan, choice: KeyChoice, world: str
) -> Tensor:
    """Gather the keys of all ranks, and choose for this rank's queries."""
    whole, handle = key, plan.pinned().handle
    call = Reshard(handle, None, "kv", 2, 0, plan.kv.length, 0, world, "target", "slice")
    (whole,) = move_rows(call, [key])
    return choose_for_rank(query, whole, weights, choice, plan)


def choose_for_rank(
    query: Tensor, whole: Tensor, weights: Tensor | None, choice: KeyChoice, plan: Plan
) -> Tensor:
    """Return the chosen keys of the queries of a plan's rank: int32 [B, Hs, S_local, top]. whole: the keys of
    the sequence"""
    with fresh_dispatch():  # also without autocast, so that ranks compute equal scores
        pairs = pairs_of(plan, query)
        if weights is not None and pairs.reads_heads and query.shape[1] > 1:
            raise ValueError(
                f"select_keys: block_mask shows other keys to each of {query.shape[1]} heads, and weights "
                "sum the heads to one choice: pass a mask without heads, or weights=None"
            )
        return choose(query, whole, weights, choice, pairs, plan.positions_on(query.device))


def _op_body(
    query: Tensor, key: Tensor, weights: Tensor | None, plan: Tensor, *choice_and_world: Any
) -> Tensor:
    *choice, world = choice_and_world
    with failures.closing(groups.group_by_name(world) if world else None):
        found = object_of(plan)
        found.check_sources()
        return _gather_and_choose(query, key, weights, found, KeyChoice(*choice), world)


def _op_fake(
    query: Tensor, key: Tensor, weights: Tensor | None, plan: Tensor, top: int, *rest: Any
) -> Tensor:
    batch, heads, rows, _ = query.shape
    return query.new_empty(batch, heads if weights is None else 1, rows, top, dtype=torch.int32)


SCHEMA = (
    "(Tensor query, Tensor key, Tensor? weights, Tensor plan, SymInt top, int block_size, str activation, "
    "str pool, bool own, int first, int last, str world) -> Tensor"
)
select_keys_op = register_op("select_keys", _op_body, _op_fake, schema=SCHEMA, caller="select_keys")


def checked_choice(
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


def check_index_tensors(query: Tensor, key: Tensor, weights: Tensor | None) -> None:
    for name, x in (("query", query), ("key", key), ("weights", weights)):
        if x is None and name == "weights":
            continue
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"select_keys: {name} is {kind}; a tensor of floats is needed")
        refuse_dtensor(x, f"select_keys: {name}", "pass its local part, x.to_local()")
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
