"""`reshard`, from shards of one plan to shards of another, and `unshard`, from shards to the global
tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritoncp.api import shards
from tritoncp.api.group_call import group_call
from tritoncp.api.plans import MaskLike
from tritoncp.api.simulate import World
from tritoncp.call.check_arguments import check_mesh
from tritoncp.call.check_shards import check_place
from tritoncp.core.dynamo_boundary import graph_entry, host_only
from tritoncp.distributed import groups
from tritoncp.distributed.consistency import Compared, fact, together
from tritoncp.distributed.groups import Mesh, place_in_group
from tritoncp.graph.dispatch import is_traced
from tritoncp.graph.reshard import Reshard
from tritoncp.graph.row_moves import compare_move, move_rows
from tritoncp.masks.traced_mask import plain_mask
from tritoncp.planning.placement import check_side, pieces
from tritoncp.planning.plan import Plan


@graph_entry
@group_call
def reshard(
    x: Any,
    source: Plan | None,
    target: Plan | None,
    mesh: Mesh | World = None,
    *,
    dim: int,
    side: str = "q",
    batch_dim: int | None = 0,
    pad: float | int | bool = 0,
) -> Any:
    """Redistribute a sharded tensor from the placement of one plan to the placement of another.

    >>> import torch
    >>> from tritoncp import causal, create_block_mask, reshard, simulate
    >>> world = simulate(2)
    >>> plan = world.make_plan(create_block_mask(causal(), 1, 1, 8, 8, BLOCK_SIZE=2))
    >>> balanced = world.shard(torch.arange(8), plan, dim=0)
    >>> balanced
    [tensor([0, 1, 6, 7]), tensor([2, 3, 4, 5])]
    >>> reshard(balanced, plan, None, world, dim=0)                 # to natural order
    [tensor([0, 1, 2, 3]), tensor([4, 5, 6, 7])]
    >>> reshard(world.shard(torch.arange(8), None, dim=0), None, plan, world, dim=0)       # and back
    [tensor([0, 1, 6, 7]), tensor([2, 3, 4, 5])]

    All ranks of the group call this. One all-to-all sends exactly the rows that change ranks; their indices
    are computed once for each pair of plans. At the first call with a pair of plans, a shape or a dtype, and
    at every call under ``TRITONCP_CHECK=1``, the ranks compare them, and all raise Disagreement if they
    differ. Differentiable: gradients are sent back, and are 0 for padding. In a compiled graph it is one op.

    Args:
        x: this rank's shard by ``source``, any tensor with the shard's rows along ``dim``; in a simulated
            world, the list of all ranks' shards.
        source: plan whose placement x has; None: even pieces in natural order, as in :func:`shard`.
        target: plan whose placement the result has, for the same ranks and a sequence of the same length;
            None: even pieces in natural order.
        mesh: DeviceMesh or process group of the ranks; a simulated world; None: one process.
        dim: dimension of x that is sharded.
        side: "q", or "kv" if a plan places queries and keys differently.
        batch_dim: batch dimension of x, needed if a plan places batch rows differently; None: x has none.
        pad: value of the padding rows of the result.

    Returns:
        This rank's shard by ``target``; in a simulated world, the list of all ranks' shards.

    Raises:
        ValueError: for shards and plans that do not fit together.
    """
    if isinstance(mesh, World):
        return _reshard_in_world(x, source, target, mesh, dim, side, batch_dim, pad)
    place = place_in_group(mesh)
    check_mesh(mesh, source, target)
    world, world_size, rank = place
    for plan in (source, target):
        _check_plan(plan, world_size, rank if world else None)
    return _move([x], place, source, target, dim, side, batch_dim, pad)[0]


@host_only
def _reshard_in_world(
    xs: Sequence[Tensor], source: Any, target: Any, world: World, *options: Any
) -> list[Tensor]:
    """Move the shards of all ranks of a simulated world."""
    size = world.world_size
    if len(xs) != size:
        raise ValueError(f"x is a list of {len(xs)} shards; {size} are needed, one for each rank")
    for plan in (source, target):
        _check_plan(plan, size, None)
    return _move(xs, ("", size, 0), source, target, *options)


def _move(
    xs: Sequence[Tensor], place: tuple[str, int, int], source: Any, target: Any, dim: int, side: str,
    batch_dim: int | None, pad: float,
) -> list[Tensor]:  # fmt: skip
    """Move the shards ``xs`` of the ranks that begin with the rank of ``place``, after checks. place: see
    :func:`tritoncp.distributed.groups.place_in_group`"""
    world, world_size, first_rank = place
    check_side(side)
    for x in xs:
        shards.check_dim(x, dim)
        shards.check_batch_dim(x, batch_dim)
        shards.check_pad(x, pad)
    dim, batch_dim = dim % xs[0].ndim, None if batch_dim is None else batch_dim % xs[0].ndim
    if source is None and target is None:
        if world and not is_traced(xs[0]):  # eager
            call = Reshard(None, None, side, dim, batch_dim, xs[0].shape[dim], pad, world)
            compare_move(call, groups.group_by_name(world), xs[0])
        return list(xs)
    before, after = (_lengths(*pair, side, world_size) for pair in ((source, target), (target, source)))
    for rank, x in enumerate(xs, first_rank):
        shards.check_rows_along(x, dim, before[rank], f"rank {rank}'s shard by source")
    handles = [None if plan is None else plan.pinned().handle for plan in (source, target)]
    call = Reshard(handles[0], handles[1], side, dim, batch_dim, after[first_rank], pad, world)
    return move_rows(call, xs)


def _check_plan(plan: Any, world_size: int, rank: int | None) -> None:
    if isinstance(plan, Plan):
        check_place(plan, world_size, rank)
    elif plan is not None:
        raise TypeError(f"source or target is {plan!r}; pass a Plan, or None for natural order")


def _lengths(plan: Any, other: Any, side: str, world_size: int) -> Sequence[int]:
    """Return the length of each rank's shard: by ``plan``; if it is None, in natural order for the sequence
    of the ``other`` plan."""
    length = (other if plan is None else plan).side(side).length
    if other is not None and other.side(side).length != length:
        raise ValueError(
            f"source and target are plans of {length} and {other.side(side).length} tokens: pass plans of "
            "one sequence"
        )
    return pieces(length, world_size) if plan is None else plan.side(side).lengths


@graph_entry
@group_call
def unshard(
    x: Tensor,
    plan_or_mask: MaskLike | None,
    mesh: Mesh = None,
    *,
    dim: int,
    side: str = "q",
    batch_dim: int | None = 0,
    grad: str | None = None,
) -> Tensor:
    """Gather the shards of all ranks into the global tensor, without padding: the inverse of :func:`shard`.

    >>> import torch
    >>> from tritoncp import causal, create_block_mask, make_plan, shard, simulate, unshard
    >>> plan = make_plan(create_block_mask(causal(), 1, 1, 8, 8, BLOCK_SIZE=2), world_size=1, rank=0)
    >>> unshard(shard(torch.arange(8), plan, dim=0), plan, dim=0)  # alone; under torchrun pass a mesh
    tensor([0, 1, 2, 3, 4, 5, 6, 7])
    >>> world = simulate(2)                                         # two ranks in this process
    >>> plan = world.make_plan(create_block_mask(causal(), 1, 1, 8, 8, BLOCK_SIZE=2))
    >>> world.unshard([torch.tensor([0, 1, 6, 7]), torch.tensor([2, 3, 4, 5])], plan, dim=0)
    tensor([0, 1, 2, 3, 4, 5, 6, 7])

    All ranks of the group call this. In a compiled graph it is one op.

    Args:
        x: this rank's shard, any tensor with the shard's rows along ``dim``.
        plan_or_mask: as in :func:`shard`. If it has no lengths, like None, the ranks exchange the lengths of
            their even pieces at every call; a graph needs a plan or mask with lengths.
        mesh: DeviceMesh or process group of the ranks; None: one process.
        dim: dimension of x that is sharded.
        side: "q", or "kv" if the plan places queries and keys differently.
        batch_dim: batch dimension of x, needed if the plan places batch rows differently; None: x has none.
        grad: backward pass, needed if x requires grad: "sum" if the loss is a sum over ranks
            (reduce-scatter), "slice" if every rank computes the same loss (each rank keeps its rows, without
            communication).

    Returns:
        The global tensor, on every rank.

    Raises:
        ValueError: for a shard and a plan that do not fit together.
    """
    place, plan_or_mask = place_in_group(mesh), plain_mask(plan_or_mask)
    check_mesh(mesh, plan_or_mask)
    if isinstance(plan_or_mask, Plan):
        check_place(plan_or_mask, place[1], None)
    shards.check_dim(x, dim)
    shards.check_batch_dim(x, batch_dim)
    _check_grad(x, grad)
    check_side(side)
    length = None if shards.has_lengths(plan_or_mask) else _length_in_order(x, dim, place)
    placement, rank = shards.placement_of(x, plan_or_mask, place, dim, side, length)
    shards.check_rows_along(x, dim, placement.lengths[rank], "this rank's shard")
    handle = plan_or_mask.pinned().handle if isinstance(plan_or_mask, Plan) else None
    dim, batch_dim = dim % x.ndim, None if batch_dim is None else batch_dim % x.ndim
    call = Reshard(
        handle, None, side, dim, batch_dim, placement.length, 0, place[0], "target", grad or "slice"
    )
    return move_rows(call, [x])[0]


def _check_grad(x: Tensor, grad: str | None) -> None:
    if x.requires_grad and grad not in ("sum", "slice"):
        raise ValueError(
            f"grad={grad!r} and x requires grad: pass grad='sum' (the loss is summed over ranks) or "
            "grad='slice' (every rank computes the same loss)"
        )


def _length_in_order(x: Tensor, dim: int, place: tuple[str, int, int]) -> int:
    """Return the length of the sequence, if the shards are even pieces of it in order (collective). Raises
    ValueError on all ranks for other pieces."""
    world, rows = place[0], x.shape[dim]
    if not world:
        return rows
    if torch.compiler.is_dynamo_compiling() or is_traced(x):
        raise TypeError(
            "plan_or_mask has no lengths, which a graph cannot exchange: pass the plan, or "
            "full_mask(Q_LEN, KV_LEN) for natural order"
        )
    purpose = "unshard of shards in natural order"

    def work() -> tuple[None, Compared, Sequence[int]]:
        return None, {"call": fact(purpose)}, (rows,)

    _, lengths = together(groups.group_by_name(world), purpose, work)
    return shards.sum_even([length for (length,) in lengths])
