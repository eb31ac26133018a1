"""`make_plan`: assignment of a mask's blocks to ranks, and the schedule of their communication."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, overload

from torch.nn.attention.flex_attention import BlockMask

from tritoncp.api.group_call import group_call
from tritoncp.call import plan_cache, prepare
from tritoncp.call.check_arguments import check_mesh
from tritoncp.call.mask_source import Sources, check_plannable
from tritoncp.core.dynamo_boundary import host_only
from tritoncp.core.host_copy import on_host
from tritoncp.core.records import replace
from tritoncp.distributed import consistency, groups
from tritoncp.distributed.consistency import fact
from tritoncp.distributed.groups import Mesh
from tritoncp.masks.mask import Mask
from tritoncp.masks.mask_mod import MaskMod
from tritoncp.masks.traced_mask import plain_mask
from tritoncp.planning import ScheduleName
from tritoncp.planning.balance import BalancerName, resolve_balancer
from tritoncp.planning.build import build_all
from tritoncp.planning.plan import Plan
from tritoncp.planning.work import Balancer

MaskLike = BlockMask | Mask | MaskMod | Plan


@overload
def make_plan(
    block_mask: BlockMask | Mask, mesh: Mesh = ..., *, balancer: BalancerName | Balancer | None = ...,
    schedule: ScheduleName = ..., world_size: int | None = ..., rank: int | None = ...,
    layer: Mapping[str, int] | None = ...,
) -> Plan: ...  # fmt: skip
@overload
def make_plan(
    block_mask: Mapping[str, BlockMask | Mask], mesh: Mesh = ..., *,
    balancer: BalancerName | Balancer | None = ..., schedule: ScheduleName = ...,
    world_size: int | None = ..., rank: int | None = ..., layer: Mapping[str, int] | None = ...,
) -> dict[str, Plan]: ...  # fmt: skip
@host_only
@group_call
def make_plan(
    block_mask: Any,
    mesh: Mesh = None,
    *,
    balancer: BalancerName | Balancer | None = "ptrr",
    schedule: ScheduleName = "auto",
    world_size: int | None = None,
    rank: int | None = None,
    layer: Mapping[str, int] | None = None,
) -> Plan | dict[str, Plan]:
    """Assign the blocks of the global mask to ranks, and choose a schedule of communication.

    >>> import torch
    >>> from tritoncp import causal, create_block_mask, sliding_window
    >>> mask = create_block_mask(causal(), 1, 1, 1024, 1024)
    >>> plan = make_plan(mask, world_size=4, rank=1)        # under torchrun: make_plan(mask, mesh)
    >>> plan.owners.tolist(), plan.imbalance
    ([[0, 1, 2, 3, 3, 2, 1, 0]], 1.0)
    >>> make_plan(mask, world_size=4, balancer="contiguous", schedule="ring").owners.tolist()
    [[0, 0, 1, 1, 2, 2, 3, 3]]
    >>> near = create_block_mask(sliding_window(128), 1, 1, 1024, 1024)
    >>> plans = make_plan({"full": mask, "window": near}, world_size=4)     # layers of two kinds
    >>> torch.equal(plans["full"].owners, plans["window"].owners)
    True

    All ranks of the mesh call this. An error on one rank is raised on all, and so is a difference in mask,
    options or versions.

    Args:
        block_mask: mask of the whole sequence, or a dict of the masks of a model's layers: their work is
            summed for one placement.
        mesh: 1-D DeviceMesh or ProcessGroup (2-D with schedule="ulysses" or "ulysses+ring": the second
            dimension exchanges heads); None: ``world_size`` and ``rank`` are used.
        balancer: a name in ``tritoncp.balancers`` ("locality": few keys to fetch; "ptrr_unweighted": torch's
            placement), a function from a ``tritoncp.planning.work.Work`` to the blocks of each rank, None for
            natural order, or "auto": the one of these names and natural order, each with its fastest
            schedule, that has the shortest predicted time for a layer of each mask; ``plan.reason`` has the
            times. "auto" makes all these placements, in 2 s for 1M tokens on 64 ranks; beyond twice that size
            it omits "locality".
        schedule: "allgather", "ring", "fetch", "ulysses" or "ulysses+ring"; "auto": the fastest for the
            placement.
        world_size: number of ranks, without a mesh; None: 1.
        rank: this rank, without a mesh; None: 0.
        layer: sizes of the layer for which "auto" predicts, as for :meth:`Plan.explain`, with ``latent`` for
            a layer that calls :func:`flex_attention` with ``expand``; None: 32 query heads, 8 KV heads, head
            dim 128. With ``selected``, the number of keys that a query selects at run time, balancers too
            count at most so many of its visible keys.

    Returns:
        This rank's :class:`Plan`; for a dict of masks, a dict of plans.

    Raises:
        TypeError: for a mask_mod, which has no lengths, and for options of another type.
        ValueError: for options that do not fit the mask or the world.
        Disagreement: on all ranks, if they differ.
    """
    group = groups.group_of(mesh)
    check_mesh(mesh, schedule=schedule)
    if group is not None:
        world_size, rank = group.size(), group.rank()
    for name, number in (("world_size", world_size), ("rank", rank)):
        if number is not None and not isinstance(number, Integral):
            raise TypeError(f"{name}={number!r} is a {type(number).__name__}; an int is needed")
    masks = block_mask if isinstance(block_mask, Mapping) else {"": block_mask}
    masks = {name: plain_mask(mask) for name, mask in masks.items()}
    world_size, rank = 1 if world_size is None else int(world_size), int(rank or 0)
    options = {"balancer": balancer, "schedule": schedule, "degree": groups.degree_of(mesh), "layer": layer}
    work = functools.partial(_make_plans, masks, group, world_size, rank, options)
    plans, _ = consistency.together(group, "make_plan", work)
    plan_cache.connect_new_plans(group, plans.values())
    return plans if isinstance(block_mask, Mapping) else plans[""]


@on_host
def _make_plans(
    masks: Mapping[str, Any], group: Any, world_size: int, rank: int, options: dict[str, Any]
) -> tuple[dict[str, Plan], consistency.Compared, Sequence[int]]:
    """Make one placement for all masks and a plan for each; return (plans, facts for the ranks to compare,
    numbers to exchange)."""
    if not masks:
        raise ValueError(
            "block_mask is an empty dict: pass a mask, or a dict of the masks of a model's layers"
        )
    for mask in masks.values():
        check_plannable(mask)
    sources = {name: Sources.of(mask) for name, mask in masks.items()}
    compact = [source.compact(1, 0, 0) for source in sources.values()]
    built = build_all(compact, world_size, rank, **options)
    for source, one in zip(sources.values(), built, strict=True):
        plan_cache.log_plan(source, one)
    # Also without a group: a data loader's worker may send the plan to a process that has one.
    digests = [source.digest() if world_size > 1 else b"" for source in sources.values()]
    plans = {
        name: replace(one, mask_digest=digest).pinned()
        for (name, source), one, digest in zip(sources.items(), built, digests, strict=True)
    }
    if not group:
        return plans, {}, ()
    balancer = options["balancer"]
    balancer = resolve_balancer(balancer)[0] if callable(balancer) else balancer
    rest = f"schedule={options['schedule']!r}, degree {options['degree']}, masks {list(masks)}"
    rest += f", layer={dict(options['layer'])}" if options["layer"] else ""
    facts = {
        "call": fact("make_plan"),
        "versions": consistency.versions(),
        "options": fact(f"balancer={balancer!r}, {rest}"),
        "mask": fact(lambda: "; ".join(map(prepare.mask_text, compact)), b"".join(digests)),
        "placement": fact(f"balancer={balancer!r}", b"".join(one.digest for one in built)),
    }
    return plans, facts, ()
