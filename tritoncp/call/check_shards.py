"""Checks of a call's shards against its plan: ranks, lengths, batch, heads, and the order of rows.

Each error message names the argument, the requirement and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritoncp.call.read import ShardSizes
from tritoncp.core.caller import warn_caller
from tritoncp.core.host_copy import refuse_dtensor
from tritoncp.masks.closed_forms import is_closed_form
from tritoncp.masks.mask_mod import MaskMod
from tritoncp.planning.plan import Plan


def check_ranks(plan: Plan, group: Any) -> None:
    """Check that a plan is for the size of this group, and for this rank."""
    check_place(plan, *((1, None) if group is None else (group.size(), group.rank())))


def check_place(plan: Plan, world_size: int, rank: int | None) -> None:
    """Check that a plan is for this world size and rank. rank: None without a group."""
    if plan.world_size != world_size:
        missing = "; pass the mesh it was made with" if rank is None else "; make the plan with this mesh"
        raise ValueError(f"the plan is for {plan.world_size} ranks, the mesh has {world_size}{missing}")
    if rank is not None and plan.rank != rank:
        raise ValueError(f"the plan is rank {plan.rank}'s, this is rank {rank}; use plan.for_rank({rank})")


def check_sizes(plan: Plan, sizes: ShardSizes) -> None:
    """Check the sizes of a call's shards against the plan: their lengths, batch and heads."""
    query, key = (sizes.rows, sizes.heads), (sizes.kv_rows, sizes.kv_heads)
    for name, (rows, num_heads), side in (("query", query, "q"), ("key", key, "kv")):
        placement = plan.side(side)
        own = placement.lengths[plan.rank]
        if rows != own:
            if num_heads == own and rows != placement.length:
                raise ValueError(_exchanged(name, rows, num_heads))
            whole = " (that is all of them: it was not sharded)" if rows == placement.length else ""
            raise ValueError(
                f"{name} has {rows} rows{whole}; rank {plan.rank}'s shard has {own} of the mask's "
                f"{placement.length}: pass shard({name}, plan, dim=2, side={side!r}), and make the plan from "
                "the global mask, not a local one"
            )
    batch, heads = plan.mask.runs.shape[:2]
    if batch not in (1, sizes.batch) or heads not in (1, sizes.heads):
        raise ValueError(
            f"the mask is for batch {batch} and {heads} heads, the query has {sizes.batch} and "
            f"{sizes.heads}; each must be 1 or equal: make the mask with B and H of the query, or None"
        )
    if plan.q.batch not in (1, sizes.batch):
        raise ValueError(
            f"the plan places {plan.q.batch} batch rows, the query has {sizes.batch}; make the plan from "
            "this batch's mask"
        )


def check_shard_lengths(
    lengths: Sequence[int],
    kv_lengths: Sequence[int],
    q_len: int,
    kv_len: int,
    heads: tuple[int, int] = (0, 0),
) -> None:
    """Check that the shards of all ranks, in natural order, add up to a raw mask's lengths.

    heads: of this rank's query and key, to recognise tensors with sequence and heads exchanged
    """
    sides = (("query", lengths, q_len, heads[0]), ("key", kv_lengths, kv_len, heads[1]))
    for what, rows, whole, num_heads in sides:
        total = sum(rows)
        if total == whole:
            continue
        if num_heads * len(rows) == whole and set(rows) != {whole}:
            raise ValueError(_exchanged(what, rows[0], num_heads))
        if len(rows) == 1:
            raise ValueError(
                f"{what} has {total} rows, the mask is for {whole}; make the mask for {total}, or pass mesh= "
                "if the sequence is sharded"
            )
        hint = ""
        if set(rows) == {whole}:
            hint = " Either this is one rank's local mask, or every rank holds the whole sequence."
        raise ValueError(
            f"{what}: the shards of all ranks are {_abbreviate(rows)} rows long, {total} together, the mask "
            f"is for {whole}.{hint} Make the mask for the global sequence, and pass rank r the r-th piece of "
            f"it: shard({what}, mask, mesh, dim=2)"
        )


def _exchanged(name: str, rows: int, heads: int) -> str:
    """Format the error of a tensor whose heads and sequence dimensions look exchanged."""
    return (
        f"{name} has {heads} heads and {rows} rows, and the mask is for {heads} rows: [batch, heads, "
        "sequence, head dim] is needed, and this looks like [batch, sequence, heads, head dim]; pass "
        f"{name}.transpose(1, 2)"
    )


def _abbreviate(numbers: Sequence[int]) -> str:
    text = ", ".join(map(str, numbers[:8]))
    return f"[{text}, ...]" if len(numbers) > 8 else f"[{text}]"


def check_positions(plan: Plan, positions: Tensor) -> None:
    """Compare the caller's positions with the plan's: a tensor does not show the order of its rows."""
    if not isinstance(positions, Tensor):
        raise TypeError(f"positions is a {type(positions).__name__}; a tensor is needed: positions(plan)")
    refuse_dtensor(positions, "positions", "pass positions(plan)")
    claimed = positions.detach().cpu().long()  # synchronises: the check is a debugging aid
    expected = plan.positions
    claimed = claimed[None] if claimed.ndim == 1 else claimed
    if (
        claimed.ndim != 2
        or claimed.shape[1] != expected.shape[1]
        or claimed.shape[0] not in (1, expected.shape[0])
    ):
        raise ValueError(
            f"positions is {tuple(positions.shape)}; [S_local] or [B, S_local] is needed, here "
            f"{list(expected.shape)}: pass positions(plan)"
        )
    wrong = (claimed != expected) & (expected >= 0)
    if bool(wrong.any()):
        batch, row = (int(i) for i in wrong.nonzero()[0])
        position = int(claimed.expand(len(wrong), -1)[batch, row])
        raise ValueError(
            f"row {row} holds position {position} by positions=, but rank {plan.rank} of a {plan.balancer} "
            f"placement holds {int(expected[batch, row])} there; shard every tensor with this plan, shard(x, "
            "plan, dim=...), and pass the plan, not the mask, to the call"
        )


def check_order(plan: Plan, positions: Tensor | None = None) -> None:
    """Check that shards are in the plan's order: compare ``positions``. Without positions, warn once per plan
    that reorders blocks if neither `shard` nor `positions` was ever called with it.

    An unpickled plan causes no warning: another process, such as a data loader's worker, may have called
    them.
    """
    if positions is not None:
        check_positions(plan, positions)
        return
    if plan.balancer == "natural" or plan.q.order_is_read:
        return
    plan.q.mark_order_read()  # so that it warns once per plan
    warn_caller(
        f"this plan places blocks in {plan.balancer} order, and neither shard(x, plan, dim=...) nor "
        "positions(plan) was called for it: shards in natural order give wrong answers without an error. "
        "Shard every tensor with the plan, and pass positions=positions(plan) to have the order checked; or "
        "pass the mask in place of the plan, if rank r holds the r-th piece"
    )


def whole_batch(mask: Any, rows: int, batch_offset: int) -> int:
    """Return the batch size of the plan for a call with ``rows`` batch rows from ``batch_offset`` on: the
    mask's batch size; if it is 1, ``rows``, or ``batch_offset + rows`` for a mask_mod without block lists."""
    if isinstance(batch_offset, bool) or not isinstance(batch_offset, int | torch.SymInt):
        raise TypeError(f"batch_offset is a {type(batch_offset).__name__}; an int is needed")
    batch = mask.batch if isinstance(mask, Plan | MaskMod) else 1 if mask is None else mask.shape[0]
    if batch_offset < 0 or (batch > 1 and batch_offset + rows > batch):
        raise ValueError(
            f"batch_offset={batch_offset} and a query of batch size {rows}: rows {batch_offset} to "
            f"{batch_offset + rows - 1} of a mask of batch size {batch}; pass the batch index in the mask of "
            "the query's row 0"
        )
    without_lists = isinstance(mask, MaskMod) and not is_closed_form(mask)
    return batch if batch > 1 else batch_offset + rows if without_lists else rows
