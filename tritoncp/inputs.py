"""Every mistake a caller can make, caught before any tensor moves."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from tritoncp.closed_forms import MaskMod
from tritoncp.masks import Mask
from tritoncp.plan import Plan
from tritoncp.sharding import Placement

MASKS = (BlockMask, Mask, MaskMod, Plan)
MAX_HEAD_DIM = 256


def arguments(fourth: Any, fifth: Any, mesh: Any) -> tuple[Any, Any, Any]:
    """(score_mod, mask, mesh) from either call shape."""
    if isinstance(fourth, MASKS):
        if fifth is not None and mesh is not None:
            raise TypeError("two meshes: the fifth argument and mesh=; with a mask in fourth place give one of them")
        if isinstance(fifth, MASKS):
            raise TypeError("two masks: the fourth and the fifth argument; a score_mod goes in fourth place")
        return None, fourth, mesh if fifth is None else fifth
    if callable(fourth):
        _check_score_mod(fourth)
    elif fourth is not None:
        raise TypeError(f"the fourth argument is a score_mod, a mask or a Plan; got a {type(fourth).__name__}")
    if fifth is None or isinstance(fifth, MASKS):
        return fourth, fifth, mesh
    if fourth is not None:
        raise TypeError(f"after a score_mod comes a mask or a Plan; got a {type(fifth).__name__}; pass mesh= by name")
    return None, None, fifth


def _check_score_mod(fn: Any) -> None:
    try:
        count = len(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        return  # a jit function or a builtin: its own translation checks it
    if count == 4:
        raise TypeError(
            "this is a mask_mod (four arguments), and a callable in fourth place is a score_mod; make the mask "
            "with create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN) and pass that"
        )


def check_tensors(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> None:
    for name, x in (("query", q), ("key", k), ("value", v)):
        if x.is_nested:
            raise ValueError(f"{name} is a nested tensor; pack the documents into one sequence instead")
        if x.ndim != 4:
            raise ValueError(f"{name} is {tuple(x.shape)}; [batch, heads, sequence, head dim] is needed")
        if not x.is_floating_point():
            raise ValueError(f"{name} is {x.dtype}; attention takes floating point tensors")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"query is {q.dtype} on {q.device}, {name} is {x.dtype} on {x.device}; make them the same")
        if x.shape[3] > MAX_HEAD_DIM:
            raise ValueError(f"{name} has head dim {x.shape[3]}; at most {MAX_HEAD_DIM} is supported")
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError(f"query {tuple(q.shape)}, key {tuple(k.shape)} and value {tuple(v.shape)} do not fit together")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} key heads")
    if q.shape[1] != k.shape[1] and not enable_gqa:
        raise ValueError(f"{q.shape[1]} query heads and {k.shape[1]} key heads: pass enable_gqa=True if that is meant")


def check_plan(plan: Plan, q: Tensor, k: Tensor, group: Any) -> None:
    world = 1 if group is None else group.size()
    if plan.world_size != world:
        raise ValueError(f"the plan is for {plan.world_size} ranks, the mesh has {world}; make the plan with this mesh")
    if group is not None and plan.rank != group.rank():
        raise ValueError(f"the plan is rank {plan.rank}'s, this is rank {group.rank()}; use plan.for_rank(...)")
    check_shapes(plan, q, k)


def check_shapes(plan: Plan, q: Tensor, k: Tensor) -> None:
    for name, x, placement in (("query", q, plan.q), ("key", k, plan.kv)):
        if x.shape[2] != placement.lengths[plan.rank]:
            raise ValueError(
                f"{name} has {x.shape[2]} rows; rank {plan.rank}'s shard has {placement.lengths[plan.rank]} of the "
                f"mask's {placement.length}. Pass shard(x, plan, dim=2), and the global mask, not a local one"
            )
    shape = plan.mask.runs.shape
    if shape[0] not in (1, q.shape[0]) or shape[1] not in (1, q.shape[1]):
        raise ValueError(
            f"the mask is for batch {shape[0]} and {shape[1]} heads, the query has {q.shape[0]} and {q.shape[1]}; "
            "each must be 1 or equal"
        )
    placed = plan.q.slots[plan.rank].shape[0]
    if placed not in (1, q.shape[0]):
        raise ValueError(f"the plan places {placed} batch rows, the query has {q.shape[0]}")


def check_length(x: Tensor, dim: int, length: int, what: str) -> None:
    if x.shape[dim] != length:
        raise ValueError(f"{what} is needed: {length} rows along dimension {dim}; got {tuple(x.shape)}")


def side_of(plan: Plan, side: str) -> Placement:
    if side not in ("q", "kv"):
        raise ValueError(f'side is "q" or "kv"; got {side!r}')
    return plan.q if side == "q" else plan.kv
