"""`shard`, from a global tensor to this rank's shard, and `positions`, the global positions of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from tritoncp.api.plans import MaskLike
from tritoncp.call.check_arguments import check_mesh
from tritoncp.call.check_shards import check_place
from tritoncp.core.dynamo_boundary import graph_entry
from tritoncp.core.host_copy import is_dtensor, refuse_dtensor
from tritoncp.distributed.groups import Mesh, place_in_group
from tritoncp.masks.closed_forms import Document, document
from tritoncp.masks.from_torch import has_no_lengths
from tritoncp.masks.mask import Mask
from tritoncp.masks.mask_mod import MaskMod
from tritoncp.masks.prefix_tree import Tree
from tritoncp.masks.traced_mask import plain_mask
from tritoncp.planning.placement import Placement, check_side, in_order, pieces, take
from tritoncp.planning.plan import Plan


@graph_entry
def shard(
    x: Tensor,
    plan_or_mask: MaskLike | None,
    mesh: Mesh = None,
    *,
    dim: int,
    side: str = "q",
    batch_dim: int | None = 0,
    pad: float | int | bool = 0,
) -> Tensor:
    """Return this rank's shard of a global tensor.

    >>> from tritoncp import causal, create_block_mask, make_plan
    >>> plan = make_plan(create_block_mask(causal(), 1, 1, 8, 8, BLOCK_SIZE=2), world_size=2, rank=1)
    >>> shard(torch.arange(8), plan, dim=0)
    tensor([2, 3, 4, 5])
    >>> tokens = torch.arange(16).view(2, 8)                        # [B, S]
    >>> shard(tokens, plan, dim=1).tolist()
    [[2, 3, 4, 5], [10, 11, 12, 13]]
    >>> short = make_plan(create_block_mask(causal(), 1, 1, 6, 6, BLOCK_SIZE=2), world_size=2, rank=0)
    >>> shard(torch.arange(6), short, dim=0, pad=-100)              # one block and padding
    tensor([   4,    5, -100, -100])

    Differentiable without communication: the gradient of x is zero outside of this rank's rows. A DTensor
    that is sharded over other dimensions, or replicated, gives a DTensor over the other dimensions of its
    mesh (pass ``mesh``, so that they are known); a DTensor sharded over ``dim`` has to be in the plan's
    order.

    Args:
        x: any tensor whose dimension ``dim`` is the global sequence.
        plan_or_mask: Plan, whose placement is used; or a mask or None, for even pieces in natural order.
        mesh: DeviceMesh or process group of the ranks, needed without a Plan; None: one process.
        dim: dimension of x that is sharded.
        side: "q", or "kv" if the plan places queries and keys differently.
        batch_dim: batch dimension of x, needed if the plan places batch rows differently; None: x has none.
        pad: value of the padding rows at the end of a plan's shard.

    Returns:
        The shard, with S_local rows along ``dim``.

    Raises:
        ValueError: for a tensor and a plan that do not fit together.
        TypeError: for a plan_or_mask of another type.
    """
    place, plan_or_mask = place_in_group(mesh), plain_mask(plan_or_mask)
    check_mesh(mesh, plan_or_mask)
    return cut(x, plan_or_mask, place, dim, side, batch_dim, pad, mesh)


def cut(
    x: Tensor, plan_or_mask: Any, place: tuple[str, int, int], dim: int, side: str = "q",
    batch_dim: int | None = 0, pad: float | int | bool = 0, mesh: Mesh | None = None,
) -> Tensor:  # fmt: skip
    """Return the shard of the rank of ``place`` after checks. place: result of :func:`place_in_group`; mesh:
    mesh for DTensors"""
    placement, rank = placement_of(x, plan_or_mask, place, dim, side)
    check_rows_along(x, dim, placement.length, "a global tensor")
    check_pad(x, pad)
    if is_dtensor(x):
        from tritoncp.api import dtensors  # late: torch.distributed.tensor takes a second to import

        return dtensors.shard_dtensor(x, plan_or_mask, placement, rank, mesh, dim, batch_dim, pad)
    return take(x, placement.positions(rank), dim, batch_dim, pad)


def placement_of(
    x: Tensor, plan_or_mask: Any, place: tuple[str, int, int], dim: int, side: str, length: int | None = None
) -> tuple[Placement, int]:
    """Check the arguments of `shard`; return (placement of tokens, this rank): the placement of a Plan, or
    natural order for a raw mask. place: result of :func:`place_in_group`. length: length of the sequence if
    the mask has none; None: the length of x"""
    world, world_size, rank = place
    check_dim(x, dim)
    if isinstance(plan_or_mask, Plan):
        if world:
            check_place(plan_or_mask, world_size, rank)
        return plan_or_mask.side(side), plan_or_mask.rank
    check_side(side)
    if has_lengths(plan_or_mask):
        length = plan_or_mask.seq_lengths[side == "kv"]
    return in_order(x.shape[dim] if length is None else length, world_size), rank


def has_lengths(plan_or_mask: Any) -> bool:
    """Return whether a plan or mask has the lengths of its sequence; a closed form and None do not. Raises
    TypeError for anything else."""
    if plan_or_mask is None or isinstance(plan_or_mask, MaskMod):
        return False
    if not isinstance(plan_or_mask, BlockMask | Mask | Plan):
        raise TypeError(
            f"plan_or_mask is a {type(plan_or_mask).__name__}; pass a Plan, make_plan(block_mask, mesh), or "
            "a mask, create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN), or None for natural order"
        )
    return not has_no_lengths(plan_or_mask)


@graph_entry
def positions(plan: Plan, documents: Tensor | MaskMod | None = None) -> Tensor:
    """Return the global position of each local token, -1 at padding.

    >>> from tritoncp import causal, create_block_mask, document, make_plan, tree
    >>> plan = make_plan(create_block_mask(causal(), 1, 1, 8, 8, BLOCK_SIZE=2), world_size=2, rank=1)
    >>> positions(plan).tolist()
    [[2, 3, 4, 5]]
    >>> positions(plan, document(lengths=[3, 5])).tolist()          # start again at 0 in every document
    [[2, 0, 1, 2]]
    >>> positions(plan, torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])).tolist()
    [[2, 0, 1, 2]]
    >>> positions(plan, tree([-1, 0, 0], [3, 2, 3])).tolist()       # tokens before it on its path
    [[2, 3, 4, 3]]

    Args:
        plan: this rank's plan.
        documents: document index of each global token, [N] or [B, N], or the ``document(...)`` mask:
            positions then start at 0 in every document, as rotary embeddings of packed sequences need them.
            With a ``tree(...)`` mask a position is the number of tokens before the token on its path. None:
            positions in the sequence.

    Returns:
        int64 [B or 1, S_local].

    Raises:
        ValueError: for documents or a tree with another number of tokens or batch rows than the plan.
        TypeError: for documents of another type.
    """
    at = plan.positions
    if documents is None:
        return at
    within = positions_within(documents, plan.q.length)  # [B or 1, N]
    batch = max(len(within), len(at))
    if min(len(within), len(at)) not in (1, batch):
        raise batch_error(len(within), len(at))
    local = within.expand(batch, -1).gather(1, at.clamp(min=0).expand(batch, -1))
    return local.masked_fill(at < 0, -1)


def batch_error(rows: int, placed: int) -> ValueError:
    """Return the error of documents of ``rows`` batch rows if the plan places ``placed`` rows."""
    return ValueError(
        f"documents has {rows} batch rows, and the plan places {placed}; pass the documents of the batch "
        "that the plan was made for"
    )


def positions_within(documents: Any, length: int) -> Tensor:
    """Return each token's position in its document, or its depth in a tree: int64 [B or 1, length]."""
    refuse_dtensor(documents, "documents", "pass documents.full_tensor()")
    mask = document(ids=documents) if isinstance(documents, Tensor) else documents
    if not isinstance(mask, Document | Tree):
        raise TypeError(
            f"documents is {mask!r}; pass a tensor of document indices, document(...) or tree(...)"
        )
    tokens = (mask.depth if isinstance(mask, Tree) else mask.ids).shape[-1]
    if tokens != length:
        raise ValueError(
            f"documents is of {tokens} tokens, and the plan of {length}: pass the documents or the tree of "
            "the whole sequence, padding included"
        )
    if isinstance(mask, Tree):
        return mask.positions(length)
    intervals = mask.intervals(length, length)
    if intervals is None:
        raise ValueError(
            "documents: a document is not contiguous; for positions within documents, give each contiguous "
            "piece a separate index"
        )
    return torch.arange(length) - intervals[0][:, 0]


# -- checks of the arguments -------------------------------------------------------------------------------


def check_dim(x: Tensor, dim: int) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a {type(x).__name__}; a tensor with a sequence dimension is needed")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(
            f"dim={dim}: the tensor {tuple(x.shape)} has no such dimension; pass that of its sequence"
        )


def check_batch_dim(x: Tensor, batch_dim: int | None) -> None:
    if batch_dim is not None and not -x.ndim <= batch_dim < x.ndim:
        raise ValueError(
            f"batch_dim={batch_dim}: the tensor {tuple(x.shape)} has no such dimension; pass that of its "
            "batch, or None"
        )


def check_pad(x: Tensor, pad: float) -> None:
    """Raise ValueError for a padding value that x's dtype cannot hold: -100 in uint8 is 156."""
    if not pad or x.is_floating_point() or x.is_complex():
        return
    limits = None if x.dtype == torch.bool else torch.iinfo(x.dtype)
    lowest, highest = (0, 1) if limits is None else (limits.min, limits.max)
    if not lowest <= pad <= highest or pad != int(pad):
        raise ValueError(
            f"pad={pad} is not a value of {x.dtype}, the dtype of x: convert x first, for example "
            f"shard(x.long(), plan, dim=..., pad=-100)"
        )


def check_rows_along(x: Tensor, dim: int, length: int, what: str) -> None:
    """Raise ValueError unless x has ``length`` rows along dim. what: words for the needed tensor"""
    if x.shape[dim] != length:
        raise ValueError(f"x is {tuple(x.shape)}; {what} is needed, {length} rows along dimension {dim}")


def sum_even(lengths: Sequence[int]) -> int:
    """Return the length of the sequence whose pieces, in order, have these lengths. Raises ValueError unless
    they are even."""
    even = pieces(sum(lengths), len(lengths))
    if list(lengths) != even:
        raise ValueError(
            f"x: the shards of all ranks have {list(lengths)} rows; without a plan, even pieces in order are "
            f"needed, here {even}: pass the plan by which they were sharded"
        )
    return sum(lengths)
