"""`roll`, which shifts the rows of shards within documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritoncp.api import shards
from tritoncp.api.group_call import group_call
from tritoncp.api.simulate import World
from tritoncp.call.check_arguments import check_mesh
from tritoncp.call.check_shards import check_place
from tritoncp.core.bounded_cache import TensorCache
from tritoncp.core.dynamo_boundary import graph_entry, host_only
from tritoncp.core.handles import handle_of, object_of
from tritoncp.core.host_copy import on_host
from tritoncp.distributed.groups import Mesh, place_in_group
from tritoncp.graph import dispatch
from tritoncp.graph.inputs import flatten_callable, rebuild
from tritoncp.graph.roll import Roll
from tritoncp.graph.row_moves import move_rows
from tritoncp.masks.closed_forms import as_int
from tritoncp.masks.mask_mod import MaskMod
from tritoncp.masks.prefix_tree import Tree
from tritoncp.mods.snapshot import captured_state
from tritoncp.planning.plan import Plan
from tritoncp.planning.shifts import Shift, shifted_documents, shifted_tree


@graph_entry
@group_call
def roll(
    x: Any,
    plan: Plan,
    shift: int,
    mesh: Mesh | World = None,
    *,
    dim: int,
    documents: Tensor | MaskMod | None = None,
    batch_dim: int | None = 0,
    pad: float | int | bool = 0,
) -> Any:
    """Shift the rows of a sharded tensor within documents, like ``torch.roll`` of the global tensor.

    >>> from tritoncp import causal, create_block_mask, document, roll, simulate
    >>> world = simulate(2)
    >>> plan = world.make_plan(create_block_mask(causal(), 1, 1, 8, 8, BLOCK_SIZE=2))
    >>> tokens = world.shard(torch.arange(8), plan, dim=0)
    >>> tokens
    [tensor([0, 1, 6, 7]), tensor([2, 3, 4, 5])]
    >>> roll(tokens, plan, -1, world, dim=0, pad=-100)              # labels of the next token
    [tensor([   1,    2,    7, -100]), tensor([3, 4, 5, 6])]
    >>> roll(tokens, plan, -1, world, dim=0, pad=-100, documents=document(lengths=[3, 5]))
    [tensor([   1,    2,    7, -100]), tensor([-100,    4,    5,    6])]

    The row of position p gets the row of position p - shift, if both are in one document; else ``pad``.
    Labels for tokens k further on, as in multi-token prediction, have the shift -1 - k.

    All ranks of the group call this. One all-to-all sends exactly the rows that cross ranks, none if all are
    local; their indices are computed once for a plan, documents and shift. The ranks compare these, shapes
    and dtypes as in :func:`reshard`. Differentiable: gradients are sent back to the rows that they belong to.
    In a compiled graph it is one op.

    Args:
        x: this rank's shard by ``plan``, any tensor with the shard's rows along ``dim``; in a simulated
            world, the list of all ranks' shards.
        plan: plan of the shards.
        shift: number of rows; positive: towards later positions.
        mesh: DeviceMesh or process group of the ranks; a simulated world; None: one process.
        dim: dimension of x that is sharded.
        documents: document index of each global token, or the ``document(...)`` mask, as in
            :func:`positions`; None: one document. With a ``tree(...)`` mask rows shift along paths: a token
            gets the row of the token ``shift`` before it. A negative shift needs a tree without branches at
            that distance.
        batch_dim: batch dimension of x, needed if the plan places batch rows differently, or their documents
            differ; None: x has none.
        pad: value of rows without a source, and of padding rows.

    Returns:
        A tensor like x; in a simulated world, the list of all ranks' tensors.

    Raises:
        ValueError: for a shard, plan and documents that do not fit together.
    """
    if isinstance(mesh, World):
        return _roll_in_world(x, plan, shift, mesh, dim, documents, batch_dim, pad)
    place = place_in_group(mesh)
    check_mesh(mesh, plan)
    _check_plan(plan, place[1], place[2] if place[0] else None)
    return _roll([x], place, plan, shift, dim, documents, batch_dim, pad)[0]


@host_only
def _roll_in_world(xs: Sequence[Tensor], plan: Any, shift: Any, world: World, *options: Any) -> list[Tensor]:
    """Shift the shards of all ranks of a simulated world."""
    size = world.world_size
    if len(xs) != size:
        raise ValueError(f"x is a list of {len(xs)} shards; {size} are needed, one for each rank")
    _check_plan(plan, size, None)
    return _roll(xs, ("", size, 0), plan, shift, *options)


def _check_plan(plan: Any, world_size: int, rank: int | None) -> None:
    if not isinstance(plan, Plan):
        raise TypeError(f"plan is a {type(plan).__name__}; a Plan is needed: make_plan(block_mask, mesh)")
    check_place(plan, world_size, rank)


def _roll(
    xs: Sequence[Tensor], place: tuple[str, int, int], plan: Plan, shift: Any, dim: int, documents: Any,
    batch_dim: int | None, pad: float,
) -> list[Tensor]:  # fmt: skip
    """Shift the shards ``xs`` of the ranks that begin with the rank of ``place``, after checks. place: see
    :func:`tritoncp.distributed.groups.place_in_group`"""
    world, _, first_rank = place
    shift = as_int("shift", shift)
    for rank, x in enumerate(xs, first_rank):
        shards.check_dim(x, dim)
        shards.check_batch_dim(x, batch_dim)
        shards.check_pad(x, pad)
        shards.check_rows_along(x, dim, plan.q.lengths[rank], f"rank {rank}'s shard by the plan")
    dim, batch_dim = dim % xs[0].ndim, None if batch_dim is None else batch_dim % xs[0].ndim
    if dispatch.is_traced(xs[0]):
        tensors: list[Tensor] = []
        ints: list[int] = []
        structure = flatten_callable(documents, tensors, ints)
        handle = dispatch.run_on_values(shift_op, tensors, ints, plan.pinned().handle, shift, structure)
    else:
        handle = handle_of(_find_shift(plan, documents, shift))
    return move_rows(Roll(handle, dim, batch_dim, pad, world), xs)


_SHIFTS = TensorCache(64)


def _find_shift(plan: Plan, documents: Any, shift: int) -> Shift:
    """Return the shift of a plan's rows within documents, from a cache."""
    slots = plan.q.slots[0]  # a tensor of the placement, never edited: the cache's key
    key: Any = id(slots), shift
    tensors = [slots]
    if isinstance(documents, Tensor):
        tensors.append(documents)
    elif documents is not None:
        state = captured_state(documents)
        key = None if state.key is None else (*key, state.key)
        tensors += state.tensors
    found: Shift | None = None if key is None else _SHIFTS.find((*key, len(tensors)), tensors)
    if found is None:
        found = _make_shift(plan, documents, shift)
        if key is not None:
            _SHIFTS.keep((*key, len(tensors)), tensors, found)
    return found


@on_host
@torch.inference_mode(False)
def _make_shift(plan: Plan, documents: Any, shift: int) -> Shift:
    length = plan.q.length
    within = torch.arange(length)[None] if documents is None else shards.positions_within(documents, length)
    batch = max(len(within), plan.q.batch)
    if min(len(within), plan.q.batch) not in (1, batch):
        raise shards.batch_error(len(within), plan.q.batch)
    shifted = shifted_tree if isinstance(documents, Tree) else shifted_documents
    return Shift(plan.q, shifted(within, shift))


def _shift(tensors: list[Tensor], ints: list[int], plan: Tensor, shift: int, structure: str) -> Tensor:
    """Return the handle of a shift within documents, flattened by :func:`flatten_callable`."""
    return handle_of(_find_shift(object_of(plan), rebuild(structure, tensors, ints), shift))


def _fake_handle(*args: Any) -> Tensor:
    """Return a handle without an object, for fake tensors."""
    return torch.full((), -1, dtype=torch.int64, device="cpu")


shift_op = dispatch.register_op("shift", _shift, _fake_handle, caller="roll")
