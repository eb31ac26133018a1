"""The public calls: argument shapes and overloads, nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, overload

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from tritoncp.core.handles import refuse_inside_a_graph
from tritoncp.distributed import collectives
from tritoncp.frontend import dynamo, plan_cache, validate
from tritoncp.kernels.tile_rules import architecture, check_options
from tritoncp.masks.mask import Mask
from tritoncp.masks.mask_mod import MaskMod
from tritoncp.mods import Mod
from tritoncp.ops import call_mods, engine_factory, signatures
from tritoncp.ops.autograd import forward
from tritoncp.ops.sinks import with_sinks
from tritoncp.planning.balance import Balancer
from tritoncp.planning.placement import Placement, lengthen, take
from tritoncp.planning.plan import Plan

MaskLike = BlockMask | Mask | MaskMod | Plan


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | MaskLike | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    mesh: Any = None,
    positions: Tensor | None = None,
    sinks: Tensor | None = None,
    batch_offset: int | None = None,
) -> Any:
    """Flex attention over a sequence that is sharded over ``mesh``.

    query: [B, Hq, S_local, D]; key: [B, Hkv, S_local, D]; value: [B, Hkv, S_local, E]: this rank's shard, in
    natural order for a mask, in the plan's order for a Plan. bf16, fp16, fp32, or fp64 interpreted.
    Called as ``(q, k, v, block_mask, mesh)`` or with torch's own arguments plus ``mesh``, which have torch's
    meaning; masks and mods see global indices. Returns out [B, Hq, S_local, E]; with ``return_lse`` or
    ``return_aux`` also lse (natural log) and max_scores, float32 [B, Hq, S_local]. Out lies in memory as
    the query does, each gradient as its tensor: [B, S, H, D] seen through ``transpose(1, 2)`` comes back so.

    A tensor does not show the order of its rows. ``positions``: the global positions [S_local] or [B,
    S_local] that the caller assumes for its rows, compared with the plan's (this waits for the device).
    sinks: [Hq], learned logits that take probability and contribute no value (:mod:`tritoncp.ops.sinks`); lse
    then counts them, max_scores does not. There is no dropout. Raises TypeError and ValueError before any
    tensor data moves.
    batch_offset: row of the whole batch that the tensors' row 0 is, for micro-batches: mods see
    b + batch_offset, and a mask or plan of the whole batch is read from that row on. None: the mask's batch
    is the query's or 1.
    ``kernel_options={"deterministic": True}``, or ``torch.use_deterministic_algorithms``: gradients of
    captures of score_mod are bitwise equal in every run; all other results always are.
    Few rows (up to about a hundred) against many keys: query heads that share keys lie in one tile and
    several programs share a row's keys, in numbers that fill the device. ``kernel_options``: ``"PACK_GQA"``,
    True or False, and ``"SPLIT_KV"``, the number of programs; with ``{"PACK_GQA": False, "SPLIT_KV": 1}`` and
    tiles that are given too, rows cut off at a block boundary have the bits that they have in the whole.

    >>> q = k = v = torch.randn(1, 2, 256, 32)
    >>> from tritoncp import causal
    >>> flex_attention(q, k, v, causal()).shape
    torch.Size([1, 2, 256, 32])
    """
    score, mask, mesh = validate.arguments(score_mod, block_mask, mesh)
    validate.check_mesh(mask, collectives.degree_of(mesh))
    want_max = return_aux is not None and return_aux.max_scores
    want_lse = return_lse or (return_aux is not None and return_aux.lse)
    returns = ("lse",) * want_lse + ("max_scores",) * want_max + ("sinks",) * (sinks is not None)

    def check() -> None:
        validate.check_aux(return_lse, return_aux)
        validate.check_tensors(query, key, value, enable_gqa)
        validate.check_sinks(query, sinks)

    if torch.compiler.is_dynamo_compiling():
        check()
        key, value = validate.shared_batch(query, key), validate.shared_batch(query, value)
        scale = 1 / math.sqrt(query.shape[3]) if scale is None else float(scale)
        outs = dynamo.attend(
            query,
            key,
            value,
            score,
            mask,
            mesh,
            scale,
            kernel_options,
            want_max,
            positions,
            returns,
            batch_offset,
        )
    else:
        group = collectives.group_of(mesh)
        flags = bool(enable_gqa), bool(return_lse), return_aux is None
        call_key = validate.call_key(query, key, value, sinks, group, *flags, batch_offset)
        plan = plan_cache.plan_of_rows(mask, query, key, group, call_key, check, batch_offset)
        world = None if group is None else group.group_name
        key, value = validate.shared_batch(query, key), validate.shared_batch(query, value)
        try:
            validate.check_order(plan, positions)
            mod = call_mods.score_of(score, query)  # lives as long as the call that names it
            rest = _arguments(query, mod, plan.pinned(), world, scale, kernel_options, want_max, returns)
        except Exception as error:
            signatures.share_failure(group, plan, error)
            raise
        outs = forward([query], [key], [value], *rest)
    if sinks is not None:
        outs = [*with_sinks(outs[0], outs[1], sinks), *outs[2:]]
    if return_aux is not None:
        return outs[0], AuxOutput(
            lse=outs[1] if return_aux.lse else None, max_scores=outs[2] if return_aux.max_scores else None
        )
    return (outs[0], outs[1]) if return_lse else outs[0]


def attend(
    q: list[Tensor],
    k: list[Tensor],
    v: list[Tensor],
    score_mod: Any,
    plan: Plan,
    world: str | None,
    scale: float | None,
    options: dict[str, Any] | None,
    want_max: bool,
) -> list[Tensor]:
    """Run one layer for the ranks whose tensors are passed; return outs, lses, max_scores."""
    mod = call_mods.score_of(score_mod, q[0])  # lives as long as the call that names it
    return forward(q, k, v, *_arguments(q[0], mod, plan, world, scale, options, want_max, ()))


def _arguments(
    q: Tensor,
    score: Mod | None,
    plan: Plan,
    world: str | None,
    scale: float | None,
    options: dict[str, Any] | None,
    want_max: bool,
    returns: tuple[str, ...],
) -> tuple[Any, ...]:
    """Check score_mod, scale and options, and return the arguments of the forward op after q, k and v."""
    named_options: tuple[tuple[str, Any], ...] = ()
    if options:
        check_options(options, architecture(q.device))
        named_options = tuple(sorted(options.items()))
    numbers, captures, wants = (score.numbers, score.tensors, score.wants) if score else ((), (), ())
    ints = [n for n in numbers if isinstance(n, int)]
    floats = [n for n in numbers if not isinstance(n, int)]
    kinds = tuple(["i" if isinstance(n, int) else "f" for n in numbers])
    spec = engine_factory.Spec.encoded(
        score and score.digest, None, wants, kinds, want_max, world, named_options, returns
    )  # fmt: skip
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    assert plan.handle is not None
    return list(captures), ints, floats, scale, plan.handle, spec


@overload
def make_plan(
    block_mask: BlockMask | Mask,
    mesh: Any = ...,
    *,
    balancer: str | Balancer | None = ...,
    schedule: str = ...,
    world_size: int | None = ...,
    rank: int | None = ...,
) -> Plan: ...
@overload
def make_plan(
    block_mask: Mapping[str, BlockMask | Mask],
    mesh: Any = ...,
    *,
    balancer: str | Balancer | None = ...,
    schedule: str = ...,
    world_size: int | None = ...,
    rank: int | None = ...,
) -> dict[str, Plan]: ...
def make_plan(
    block_mask: Any,
    mesh: Any = None,
    *,
    balancer: str | Balancer | None = "ptrr",
    schedule: str = "auto",
    world_size: int | None = None,
    rank: int | None = None,
) -> Any:
    """Assign the blocks of the global mask to ranks.

    block_mask: a mask, or a dict of masks of one model's layers: their work is summed, so that one placement
    serves all, and a dict of plans comes back. mesh: 1-D DeviceMesh or ProcessGroup, whose ranks all call
    this (2-D for "ulysses" and "ulysses+ring": the second dimension trades heads); or ``world_size`` and
    ``rank`` without one. balancer: a name in ``tritoncp.balancers`` ("locality": few keys to fetch),
    a function of your own from a ``tritoncp.planning.balance.Work`` to each rank's blocks, or None for
    natural order.
    Raises TypeError for a closed form, which has no lengths; raises on every rank where one rank fails, or
    ranks differ in mask, options or versions.

    >>> from tritoncp import causal, create_block_mask, sliding_window
    >>> mask = create_block_mask(causal(), 1, 1, 1024, 1024)
    >>> plan = make_plan(mask, world_size=4, rank=1)
    >>> plan.owners.tolist(), plan.imbalance
    ([[0, 1, 2, 3, 3, 2, 1, 0]], 1.0)
    >>> near = create_block_mask(sliding_window(128), 1, 1, 1024, 1024)
    >>> plans = make_plan({"full": mask, "window": near}, world_size=4)
    >>> torch.equal(plans["full"].owners, plans["window"].owners)
    True
    """
    refuse_inside_a_graph("make_plan")
    group = collectives.group_of(mesh)
    if group is not None:
        world_size, rank = group.size(), group.rank()
    masks = block_mask if isinstance(block_mask, Mapping) else {"": block_mask}
    degree = collectives.degree_of(mesh)
    plans = plan_cache.make(masks, group, world_size or 1, rank or 0, balancer, schedule, degree)
    return plans if isinstance(block_mask, Mapping) else plans[""]


def shard(
    x: Tensor,
    plan_or_mask: MaskLike | None,
    mesh: Any = None,
    *,
    dim: int,
    side: str = "q",
    batch_dim: int | None = 0,
    pad: float | int | bool = 0,
) -> Tensor:
    """Return this rank's part of a global tensor: in a plan's order; for a raw mask its r-th piece.

    x: any tensor whose dimension ``dim`` is the global sequence. ``pad`` fills the padding at the end of a
    plan's shard. Differentiable: the backward pass puts own positions back and zeros elsewhere, without
    communication.

    >>> from tritoncp import causal, create_block_mask
    >>> plan = make_plan(create_block_mask(causal(), 1, 1, 8, 8, BLOCK_SIZE=2), world_size=2, rank=1)
    >>> shard(torch.arange(8), plan, dim=0)
    tensor([2, 3, 4, 5])
    """
    placement, rank = _placement(x, plan_or_mask, collectives.group_of(mesh), dim, side)
    validate.check_length(x, dim, placement.length, "a global tensor")
    return take(x, placement.positions(rank), dim, batch_dim, pad)


def unshard(
    x: Tensor,
    plan_or_mask: BlockMask | Mask | Plan,
    mesh: Any = None,
    *,
    dim: int,
    side: str = "q",
    batch_dim: int | None = 0,
    grad: str | None = None,
) -> Tensor:
    """Gather the shards of all ranks into the global tensor, without padding.

    ``grad``: how the backward pass combines gradients when x requires grad: "sum" (the loss is a sum over
    ranks: reduce-scatter) or "slice" (every rank computes the same loss: own part, no communication).
    """
    group = collectives.group_of(mesh)
    validate.check_gathered(plan_or_mask, 1 if group is None else group.size())
    placement, rank = _placement(x, plan_or_mask, group, dim, side)
    validate.check_length(x, dim, placement.lengths[rank], "this rank's shard")
    if x.requires_grad and grad not in ("sum", "slice"):
        raise ValueError(
            "x requires grad: say grad='sum' (the loss is summed over ranks) or grad='slice' (every rank "
            f"computes the same loss); got grad={grad!r}"
        )
    rows = lengthen(x, dim, placement.s_max).movedim(dim, 0).contiguous()
    whole = Gather.apply(rows, group, grad == "sum").movedim(0, dim)
    return take(whole, placement.inverse, dim, batch_dim, 0)


def _placement(x: Tensor, plan_or_mask: Any, group: Any, dim: int, side: str) -> tuple[Placement, int]:
    world_size, rank = (1, 0) if group is None else (group.size(), group.rank())
    validate.check_dim(x, dim)
    return validate.placement_of(plan_or_mask, world_size, rank, side, x.shape[dim])


class Gather(torch.autograd.Function):
    """All-gather along dim 0; the backward pass sums over ranks or takes the own slice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, add: bool) -> Tensor:
        ctx.group, ctx.add = group, add
        return _collect(collectives.AllGather(x), group)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        if ctx.group is None:
            return dx, None, None
        if ctx.add:
            return _collect(collectives.ReduceScatter(dx.contiguous()), ctx.group), None, None
        return dx.chunk(ctx.group.size())[ctx.group.rank()], None, None


def _collect(collective: collectives.Collective, group: Any) -> Tensor:
    def schedule() -> collectives.Schedule[Tensor]:
        return (yield collectives.Wait((yield collective)))

    return collectives.lockstep([schedule()])[0] if group is None else collectives.run(schedule(), group)


def positions(plan: Plan, documents: Tensor | MaskMod | None = None) -> Tensor:
    """Return the global position of each local token, -1 at padding: int64 [B or 1, S_local].

    documents: number of each global token's document, [N] or [B, N], or the ``document(...)`` mask: positions
    then start at 0 in every document, as rotary embeddings of packed sequences want them.

    >>> from tritoncp import causal, create_block_mask
    >>> plan = make_plan(create_block_mask(causal(), 1, 1, 8, 8, BLOCK_SIZE=2), world_size=2, rank=1)
    >>> positions(plan).tolist(), positions(plan, torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])).tolist()
    ([[2, 3, 4, 5]], [[2, 0, 1, 2]])
    """
    at = plan.positions
    if documents is None:
        return at
    first = validate.document_starts(documents, plan.q.length)  # [B or 1, N]
    batch = max(len(first), len(at))
    within = at - first.expand(batch, -1).gather(1, at.clamp(min=0).expand(batch, -1))
    return within.masked_fill(at < 0, -1)
