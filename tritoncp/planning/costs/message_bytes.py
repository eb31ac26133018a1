"""Bytes that ranks send in a pass: counts of rows that a plan moves, times the size of a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tritoncp.core.records import replace
from tritoncp.planning.costs import traffic
from tritoncp.planning.costs.layer import Shape

if TYPE_CHECKING:
    from tritoncp.planning.plan import Plan

INDEX_BYTES = 4  # of a selected key


def trade_heads(plan: Plan, shape: Shape) -> tuple[Plan, list[range], list[range], bool]:
    """Return the plan between rows of ranks that exchange sequence for heads, the query heads of each rank of
    a row, the KV heads that these read, and whether dK and dV are sums over ranks, which are wide."""
    degree, between = plan.degree_for(shape.heads), plan.schedule.partition("+")[2] or "fetch"
    rows = replace(plan.rows(degree, shape.heads), schedule=between, handle=None)
    q_heads, kv_heads = traffic.trade(shape.heads, shape.kv_heads, degree)
    return rows, q_heads, kv_heads, not rows.is_local or traffic.share(kv_heads)


def bytes_sent(plan: Plan, shape: Shape) -> tuple[Tensor, Tensor]:
    """Count the bytes that each rank sends in a forward and in a backward pass of a layer: int64 [W] each."""
    if not plan.schedule.startswith("ulysses"):
        keys, grads = elements_sent(plan, plan.schedule, shape)
        return keys * shape.itemsize, keys * shape.itemsize + grads * max(4, shape.itemsize)
    rows, _, kv_heads, _ = trade_heads(plan, shape)
    of_a_head = bytes_sent(rows, replace(shape, heads=1, kv_heads=1))
    between = (torch.outer(nbytes, _count(kv_heads)).flatten() for nbytes in of_a_head)
    forward, backward = map(torch.add, bytes_exchanged(plan, shape), between)
    return forward, backward


def bytes_exchanged(plan: Plan, shape: Shape) -> tuple[Tensor, Tensor]:
    """Count the bytes that each rank sends forward and backward to exchange sequence for heads and back:
    int64 [W] each."""
    rows, q_heads, kv_heads, summed = trade_heads(plan, shape)

    def exchange(heads: Sequence[range], tokens: int, to_heads: int, back: int) -> Tensor:
        """Count the bytes for heads of which a token has these bytes on its way to heads, and back."""
        own = _count(heads)
        nbytes = (own.sum() - own) * to_heads + own * (len(heads) - 1) * back
        return (nbytes * tokens * shape.batch).repeat(rows.world_size)

    queries, keys = (q_heads, plan.q.s_max), (kv_heads, plan.kv.s_max)
    item, wide, d, e = shape.itemsize, max(4, shape.itemsize), shape.head_dim, shape.v_head_dim
    both, grad = (d + e) * item, (d + e) * (wide if summed else item)
    every = [range(1)] * len(q_heads)  # each rank of a row gets what the queries select
    keys_of_queries = exchange(every, plan.q.s_max, shape.selected * INDEX_BYTES, 0)
    forward = exchange(*queries, d * item, e * item + wide) + exchange(*keys, both, 0)  # back: out and lse
    forward = forward + keys_of_queries
    # To heads also dout, lse and delta.
    backward = exchange(*queries, both + 2 * wide, d * item) + exchange(*keys, both, grad)
    return forward, backward + keys_of_queries


def elements_sent(plan: Plan, schedule: str, shape: Shape) -> tuple[Tensor, Tensor]:
    """Count the elements of K and V that each rank sends in a pass of a schedule that exchanges no heads, and
    the elements of their gradients in a backward pass: int64 [W] each."""
    if schedule == "fetch":
        elements = elements_fetched(plan, shape)
        return elements.sum(0), elements.sum(1)
    buffer = plan.kv.s_max * shape.row
    if schedule == "allgather":
        peers = 0 if plan.derived.reads_only_own_keys else plan.world_size - 1
        sent = torch.full((plan.world_size,), peers * buffer)
        return sent, sent
    step, reach = plan.derived.ring_route
    ranks = torch.arange(plan.world_size)
    turn = (ranks[:, None] - ranks) * step % plan.world_size  # of each rank with each owner's keys
    sends, returns = turn < reach, (turn > 0) & (turn <= reach)
    return sends.sum(1) * buffer, returns.sum(1) * buffer


def elements_fetched(plan: Plan, shape: Shape) -> Tensor:
    """Count the elements of K and V of rank s that rank r fetches, at [r, s]: int64 [W, W]."""
    return plan.traffic.clone().fill_diagonal_(0) * (shape.row // (shape.batch if plan.batch > 1 else 1))


def _count(parts: Sequence[range]) -> Tensor:
    """Count the heads of each part: int64 [parts]."""
    return torch.tensor(list(map(len, parts)))
