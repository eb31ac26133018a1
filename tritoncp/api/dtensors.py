"""DTensors as arguments of `flex_attention` and `shard`: a call runs on local parts, and its results are
DTensors.

Tensor parallelism shards heads or the batch, or replicates tensors, and attention needs no data of other
heads and batch rows. Masks and mods see the indices of the whole tensors. A mesh dimension that shards the
sequence has to be the call's mesh, and its pieces have to be in natural order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import tree_map_only

from tritoncp.call.read import Arguments
from tritoncp.core.dynamo_boundary import constant_result
from tritoncp.core.host_copy import is_dtensor
from tritoncp.distributed import groups
from tritoncp.graph import handle_ops
from tritoncp.masks.mask import Mask
from tritoncp.masks.mask_mod import MaskMod
from tritoncp.masks.traced_mask import TracedMask
from tritoncp.planning.placement import Placement, take
from tritoncp.planning.plan import Plan
from tritoncp.selection.selection import Selection

BATCH, HEADS, SEQUENCE = 0, 1, 2  # dimensions of the query
Part = tuple[int, int]  # (index of this rank's part of a dimension, number of parts)


def as_dtensors(results: Any, like: Any, selected: Selection | None = None) -> Any:
    """Return results, in any container, as DTensors with the mesh and placements of ``like``. Probabilities
    of ``selected`` keys that all heads share are sums over heads, partial where heads are sharded."""
    summed = None
    if selected is not None and selected.indices.shape[HEADS] == 1 and isinstance(results, tuple):
        summed = getattr(results[1], "probabilities", None)
    return tree_map_only(Tensor, lambda x: _as_dtensor(like, x, x is summed), results)


def _as_dtensor(like: Any, x: Tensor, is_summed: bool = False) -> Tensor:
    places = [Partial() if is_summed and place == Shard(HEADS) else place for place in like.placements]
    return DTensor.from_local(x, like.device_mesh, places, run_check=False)


def localize(call: Arguments) -> Arguments:
    """Return the call on the local parts of DTensors.

    Raises TypeError for plain tensors beside DTensors, ValueError for placements whose parts need each other.
    """
    query, key, value, score_mod, block_mask, mesh = call[:6]
    if call.expand is not None or not all(map(is_dtensor, (query, key, value))):
        raise TypeError(
            "query, key, value or sinks are DTensors, others plain tensors or None: pass DTensors over one "
            "mesh, or the local part of each, x.to_local() (with expand= too)"
        )
    meshes, placements = zip(*((x.device_mesh, x.placements) for x in (query, key, value)))
    rows, heads, pieces = _parts_of_rank(meshes, placements, mesh)
    if pieces[1] > 1 and isinstance(block_mask, Plan) and block_mask.balancer != "natural":
        raise ValueError(
            f"query is a DTensor sharded over the sequence, in natural order, and the plan's order is "
            f"{block_mask.balancer}: pass make_plan(mask, mesh, balancer=None), or shard(x.full_tensor(), "
            "plan, dim=2) of query, key and value"
        )
    local = [x.to_local() for x in (query, key, value)]
    for name, x, part in zip(("query", "key", "value"), (query, key, value), local):
        _check_even(name, x, part, (rows[1], heads[1], pieces[1]))
    if heads[1] > 1:
        count = local[0].shape[HEADS]
        block_mask = mask_of_heads(block_mask, heads[0] * count, count)
        if score_mod is not None:
            score_mod = functools.partial(score_of_head, score_mod, heads[0] * count)
    if rows[1] > 1:
        first = rows[0] * local[0].shape[BATCH]
        call = call._replace(batch_offset=first + (call.batch_offset or 0))
    if call.sinks is not None:
        call = call._replace(sinks=_local_sinks(call.sinks, query, heads[1] > 1))
    if call.selected is not None:
        call = call._replace(selected=_local_selection(call.selected, query))
    q, k, v = local
    return call._replace(query=q, key=k, value=v, score_mod=score_mod, block_mask=block_mask)


@constant_result
def _parts_of_rank(
    meshes: Sequence[DeviceMesh], placements: Sequence[Sequence[Any]], mesh: Any
) -> tuple[Part, Part, Part]:
    """Return this rank's part of the batch, the heads and the sequence of query, key and value, by their
    meshes and placements. mesh: mesh of the call"""
    own, of_call = meshes[0], dims_of_call(meshes[0], mesh)
    for name, other, placed in zip(("query", "key", "value"), meshes, placements):
        for dim in range(own.ndim):
            if own.size(dim) == 1 and other == own:
                continue
            places = (Shard(SEQUENCE),) if dim in of_call else (Shard(BATCH), Shard(HEADS), Replicate())
            if other != own or placed[dim] not in places or placed[dim] != placements[0][dim]:
                raise ValueError(
                    f"{name} is a DTensor placed {placed} over {other}; the query's mesh and placements are "
                    "needed, Shard(0) (batch), Shard(1) (heads) or Replicate(), and Shard(2) (the sequence) "
                    f"over the mesh of the call alone, which is {mesh}: pass mesh=, "
                    f"{name}.redistribute(placements=...), or plain tensors, x.to_local()"
                )
    rows, heads, pieces = (part_of_rank(own, placements[0], dim) for dim in (BATCH, HEADS, SEQUENCE))
    if of_call and pieces != place_in(mesh):
        raise ValueError(
            f"query is a DTensor over {own}, which has other ranks along the sequence than the call's mesh "
            f"{mesh}, or in another order: pass the mesh over which the sequence is sharded"
        )
    return rows, heads, pieces


def dims_of_call(own: DeviceMesh, mesh: Any) -> list[int]:
    """Return the dimensions of a DTensor's mesh that have only ranks of the call's mesh."""
    group = groups.group_of(mesh)
    ranks = [] if group is None else dist.get_process_group_ranks(group)
    return [
        dim
        for dim in range(own.ndim)
        if own.size(dim) > 1 and {*dist.get_process_group_ranks(own.get_group(dim))} <= {*ranks}
    ]


def place_in(mesh: Any) -> Part:
    """Return (this rank's index, number of ranks) of a mesh."""
    group = groups.group_of(mesh)
    return (0, 1) if group is None else (group.rank(), group.size())


def part_of_rank(mesh: DeviceMesh, placements: Sequence[Any], dim: int) -> Part:
    """Return this rank's part of dimension ``dim`` of a DTensor."""
    index, count = 0, 1
    for axis, placement in enumerate(placements):
        if placement == Shard(dim):
            index = index * mesh.size(axis) + mesh.get_local_rank(axis)
            count *= mesh.size(axis)
    return index, count


def _check_even(name: str, x: Tensor, part: Tensor, counts: Sequence[int]) -> None:
    """Raise ValueError unless the parts of a DTensor are equally long. counts: number of parts, by
    dimension"""
    for dim, count in enumerate(counts):
        if part.shape[dim] * count != x.shape[dim]:
            raise ValueError(
                f"{name} is a DTensor {tuple(x.shape)}, whose dimension {dim} is shared by {count} ranks and "
                f"not a multiple of {count}: use a mesh that divides it, or redistribute to Replicate()"
            )


def _local_sinks(sinks: Any, query: Any, by_heads: bool) -> Tensor:
    """Return the sinks of the local heads of a query. by_heads: whether heads are sharded"""
    if not is_dtensor(sinks) and not by_heads:
        return sinks
    if not is_dtensor(sinks) or sinks.device_mesh != query.device_mesh:
        raise TypeError(
            f"sinks is a {type(sinks).__name__}, query a DTensor over {query.device_mesh}: pass one over "
            "this mesh, distribute_tensor(sinks, mesh, placements), or plain tensors alone"
        )
    places, of_gradient = [], []
    for placement in query.placements:
        by_head = placement == Shard(HEADS)
        places.append(Shard(0) if by_head else Replicate())
        # Each rank computes the terms of its batch rows and queries.
        of_gradient.append(Shard(0) if by_head else Replicate() if placement == Replicate() else Partial())
    local: Tensor = sinks.redistribute(placements=places).to_local(grad_placements=of_gradient)
    return local


def _local_selection(selected: Selection, query: Any) -> Selection:
    """Return the selection of the local part of a query: its indices are placed as the query, and replicated
    where they have a single batch row or head."""
    if not isinstance(selected, Selection):
        return selected  # which the call refuses
    indices: Any = selected.indices
    needed = [
        Replicate() if place in (Shard(BATCH), Shard(HEADS)) and indices.shape[place.dim] == 1 else place
        for place in query.placements
    ]
    if not is_dtensor(indices) or indices.device_mesh != query.device_mesh or [*indices.placements] != needed:
        placed = f"placed {indices.placements}" if is_dtensor(indices) else "a plain tensor"
        raise TypeError(
            f"selected: indices are {placed}, and query, key and value DTensors over {query.device_mesh}, "
            f"for which {needed} is needed: pass Selection(distribute_tensor(indices, mesh, placements))"
        )
    local = indices.to_local()
    counts = [part_of_rank(query.device_mesh, needed, dim)[1] for dim in (BATCH, HEADS, SEQUENCE)]
    _check_even("selected.indices", indices, local, counts)
    return selected._replace(indices=local)


def mask_of_heads(mask: Any, first: int, count: int) -> Any:
    """Return the mask or plan of ``count`` query heads from ``first`` on."""
    if isinstance(mask, Plan):
        if not mask.mask.reads[1] and mask.mask.H == 1:
            return mask
        if torch.compiler.is_dynamo_compiling():
            return TracedMask(handle_ops.view_op(mask.handle, first, count, -1))
        return mask.of_heads(first, count)
    by_head = isinstance(mask, BlockMask | Mask) and mask.shape[1] > 1
    if by_head or (isinstance(mask, Mask | MaskMod) and mask.reads[1]):
        raise ValueError(
            "block_mask differs between heads, and heads are sharded: pass the plan of the mask of all "
            "heads, make_plan(block_mask, mesh), from which the heads of a call are selected"
        )
    return mask


def score_of_head(
    score_mod: Callable[..., Tensor], first: int, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor,
    kv_idx: Tensor,
) -> Tensor:  # fmt: skip
    """Call score_mod with the head index h + first."""
    return score_mod(score, b, h + first, q_idx, kv_idx)


# -- shards --------------------------------------------------------------------------------------------------


def shard_dtensor(
    x: Any, plan_or_mask: Any, placement: Placement, rank: int, mesh: Any, dim: int, batch_dim: int | None,
    pad: float,
) -> Tensor:  # fmt: skip
    """Return this rank's shard of a DTensor, see :func:`tritoncp.shard`: a DTensor over the dimensions of its
    mesh along which the shards do not differ, or a plain tensor if there are none."""
    dim, batch_dim = dim % x.ndim, None if batch_dim is None else batch_dim % x.ndim
    place = rank, placement.world_size
    (piece, rows), kept = _parts_of_shard(x.device_mesh, x.placements, mesh, dim, batch_dim, place)
    grads = [p if axis in kept or p == Shard(dim) else Partial() for axis, p in enumerate(x.placements)]
    local = x.to_local(grad_placements=grads)
    _check_even("x", x, local, [part_of_rank(x.device_mesh, x.placements, d)[1] for d in range(x.ndim)])
    positions = placement.positions(rank)
    if piece[1] > 1:
        natural = not isinstance(plan_or_mask, Plan) or plan_or_mask.balancer == "natural"
        if not natural or any(length != local.shape[dim] for length in placement.lengths):
            raise ValueError(
                f"x is a DTensor sharded over dimension {dim} in natural order, in pieces of "
                f"{local.shape[dim]}, and the plan's are others: pass x.full_tensor(), or a plan of "
                "make_plan(mask, mesh, balancer=None)"
            )
        positions = torch.where(positions < 0, -1, positions - piece[0] * local.shape[dim])
    if len(positions) > 1:
        count = len(positions) // rows[1]
        positions = positions[rows[0] * count : (rows[0] + 1) * count]
    out = take(local, positions, dim, batch_dim, pad)
    if not kept:
        return out
    own = x.device_mesh if len(kept) == x.device_mesh.ndim else _sub_mesh(x.device_mesh, kept)
    return DTensor.from_local(out, own, [x.placements[axis] for axis in kept], run_check=False)


@constant_result
def _parts_of_shard(
    own: DeviceMesh, placements: Sequence[Any], mesh: Any, dim: int, batch_dim: int | None, place: Part
) -> tuple[tuple[Part, Part], tuple[int, ...]]:
    """Return (this rank's part of dimension ``dim`` of a DTensor, and of its batch), and the dimensions of
    its mesh along which the result is placed like the DTensor. place: this rank's part of the sequence"""
    of_call = dims_of_call(own, mesh)
    along = [axis for axis in range(own.ndim) if placements[axis] == Shard(dim) and own.size(axis) > 1]
    piece = part_of_rank(own, placements, dim)
    fits = all(isinstance(p, Shard) or p == Replicate() for p in placements)
    fits &= not along or (piece == place and {*of_call} <= {*along})
    fits &= all(placements[axis] in (Shard(dim), Replicate()) for axis in of_call)
    # Without the mesh, the plan's ranks cannot be told from ranks over which tensor parallelism replicates.
    unclear = mesh is None and not along and place[1] > 1
    if unclear and any(p == Replicate() and own.size(axis) == place[1] for axis, p in enumerate(placements)):
        fits = False
    if not fits:
        raise ValueError(
            f"x is a DTensor placed {placements} over {own}; Replicate() or Shard are needed, and over the "
            f"plan's ranks Replicate() or Shard({dim}) (the sequence): pass mesh=, the plan's, or "
            "x.redistribute(placements=...), or a plain tensor, x.full_tensor()"
        )
    rows = (0, 1) if batch_dim is None else part_of_rank(own, placements, batch_dim)
    return (piece, rows), tuple([axis for axis in range(own.ndim) if axis not in (along or of_call)])


def _sub_mesh(mesh: DeviceMesh, dims: Sequence[int]) -> DeviceMesh:
    """Return the mesh of some dimensions of a mesh."""
    if mesh.mesh_dim_names is None:
        raise ValueError(
            f"x is a DTensor over {mesh}, whose dimensions have no names: pass init_device_mesh(..., "
            "mesh_dim_names=...), or a plain tensor, x.full_tensor()"
        )
    return mesh[tuple([mesh.mesh_dim_names[dim] for dim in dims])]
