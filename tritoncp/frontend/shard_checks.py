"""Checks of the arguments of ``shard`` and ``unshard``, and the placement of a plan or a mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from tritoncp.masks.from_torch import has_no_lengths
from tritoncp.masks.mask import Mask
from tritoncp.masks.mask_mod import MaskMod
from tritoncp.planning.placement import Placement, in_order
from tritoncp.planning.plan import Plan


def check_dim(x: Tensor, dim: int) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"a tensor with a dimension of the sequence is needed; got a {type(x).__name__}")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"the tensor {tuple(x.shape)} has no dimension {dim}; dim= is that of its sequence")


def check_pad(x: Tensor, pad: float) -> None:
    """Refuse a padding value that x's dtype would change: -100 in uint8 is 156."""
    if not pad or x.is_floating_point() or x.is_complex():
        return
    limits = None if x.dtype == torch.bool else torch.iinfo(x.dtype)
    lowest, highest = (0, 1) if limits is None else (limits.min, limits.max)
    if not lowest <= pad <= highest or pad != int(pad):
        raise ValueError(
            f"pad={pad} is no value of {x.dtype}, the dtype of x; convert x before it is cut, as "
            f"shard(x.long(), plan, dim=..., pad=-100)"
        )


def check_length(x: Tensor, dim: int, length: int, what: str) -> None:
    if x.shape[dim] != length:
        raise ValueError(f"{what} is needed: {length} rows along dimension {dim}; got {tuple(x.shape)}")


def placement_of(
    plan_or_mask: Any, world_size: int, rank: int, side: str, length: int
) -> tuple[Placement, int]:
    """Return the placement of tokens and this rank: a Plan's own, or natural order for a raw mask.

    length: of the global sequence, for closed forms, which have no length.
    """
    if isinstance(plan_or_mask, Plan):
        return side_of(plan_or_mask, side), plan_or_mask.rank
    _check_side(side)
    if isinstance(plan_or_mask, BlockMask) and not has_no_lengths(plan_or_mask):
        length = plan_or_mask.seq_lengths[side == "kv"]
    elif isinstance(plan_or_mask, Mask):
        length = plan_or_mask.q_len if side == "q" else plan_or_mask.kv_len
    elif plan_or_mask is not None and not isinstance(plan_or_mask, BlockMask | MaskMod):
        raise TypeError(
            f"a Plan or a mask is needed; got a {type(plan_or_mask).__name__}. make_plan(block_mask, mesh) "
            "makes a plan, create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN) a mask"
        )
    return in_order(length, world_size), rank


def check_gathered(plan_or_mask: Any, world_size: int) -> None:
    """Check the plan or mask argument of unshard."""
    if isinstance(plan_or_mask, MaskMod) or plan_or_mask is None or has_no_lengths(plan_or_mask):
        raise TypeError(
            f"{plan_or_mask!r} does not say how long the whole sequence is; pass the Plan or "
            "create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)"
        )
    if isinstance(plan_or_mask, Plan) and plan_or_mask.world_size != world_size:
        raise ValueError(
            f"the plan is for {plan_or_mask.world_size} ranks, the mesh has {world_size}; pass the mesh it "
            "was made with, unshard(x, plan, mesh, dim=...)"
        )


def side_of(plan: Plan, side: str) -> Placement:
    _check_side(side)
    return plan.q if side == "q" else plan.kv


def _check_side(side: str) -> None:
    if side not in ("q", "kv"):
        raise ValueError(f'side={side!r} is not known; it is "q" for queries or "kv" for keys and values')
