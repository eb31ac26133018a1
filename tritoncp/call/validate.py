"""Checks of a call's arguments, before any communication.

Each error message names the argument, the requirement and the remedy.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

from tritoncp.call.executable import MAX_CHECKED_CALLS
from tritoncp.call.expand import Expansion
from tritoncp.call.read import Arguments
from tritoncp.core.bounded_cache import BoundedCache
from tritoncp.core.caller import warn_caller
from tritoncp.core.host_copy import refuse_dtensor
from tritoncp.distributed import groups
from tritoncp.masks.closed_forms import is_closed_form
from tritoncp.masks.from_torch import has_no_lengths
from tritoncp.masks.mask import Mask
from tritoncp.masks.mask_mod import MaskMod, name_of
from tritoncp.planning.plan import Plan

MAX_HEAD_DIM = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
DEVICES = ("cuda", "cpu", "meta")  # meta tensors have only shapes


class ShardSizes(NamedTuple):
    """Sizes of a rank's query [batch, heads, rows, dim] and key [.., kv_heads, kv_rows, dim]. latent:
    channels per token of the latent from which ``expand=`` computes keys and values, 0 without it."""

    batch: int
    heads: int
    rows: int
    dim: int
    kv_heads: int
    kv_rows: int
    latent: int = 0

    @classmethod
    def of(cls, query: Tensor, key: Tensor, expand: Expansion | None = None) -> ShardSizes:
        batch, heads, rows, dim = query.shape
        if expand is None:
            return cls(batch, heads, rows, dim, key.shape[1], key.shape[2])
        return cls(batch, heads, rows, dim, expand.sizes[0], key.shape[2], key.shape[1] * key.shape[3])

    @property
    def layer(self) -> dict[str, int] | None:
        """Sizes of a latent layer, for the choice of a schedule; None for plain keys: a standard layer."""
        names = "heads", "kv_heads", "head_dim", "latent"
        sizes = self.heads, self.kv_heads, self.dim, self.latent
        return dict(zip(names, sizes, strict=True)) if self.latent else None


class CallKind:
    """Properties of calls that one check covers. Kinds are compared by identity.

    sizes:        sizes of the shards
    shares_batch: whether keys or values of batch size 1 serve several batch rows of queries
    ranks:        weak reference to their process group; None: all ranks are in this process
    is_kept:      whether later calls have this kind too, so that results for it are worth caching
    """

    __slots__ = "is_kept", "ranks", "shares_batch", "sizes"

    def __init__(self, call: Arguments, group: Any, is_kept: bool) -> None:
        q, k, v = call[:3]
        self.sizes = ShardSizes.of(q, k, call.expand)
        self.shares_batch = not q.shape[0] == k.shape[0] == v.shape[0]
        self.ranks, self.is_kept = group and weakref.ref(group), is_kept


# Kinds of calls whose arguments passed the checks, by :func:`call_key`.
_CHECKED_CALLS: BoundedCache[Any, CallKind] = BoundedCache(MAX_CHECKED_CALLS)


def check_call(call: Arguments) -> tuple[Arguments, CallKind]:
    """Refuse wrong arguments before ranks exchange their lengths to make a plan. Returns the call, with keys
    and values of the queries' batch size, and its kind. A call with the :func:`call_key` of an earlier call
    is not checked again."""
    group, kind = groups.group_of(call.mesh), None
    key = None if call.expand is not None else call_key(call, group)  # parameters are read at each call
    if key is not None:
        kind = _CHECKED_CALLS.get(key)
    if kind is None:
        call = check_arguments(call)
        kind = CallKind(call, group, key is not None)
        if key is not None:
            _CHECKED_CALLS.put(key, kind)
    return (shared_batch(call) if kind.shares_batch else call), kind


def check_arguments(call: Arguments) -> Arguments:
    """Refuse wrong arguments of a call that can be checked without a plan, except scale, kernel options and
    score_mod (:func:`tritoncp.call.prepare.prepare`). Returns the call with the checked record of ``expand``,
    and for a latent a value with zero channels."""
    if call.expand is not None:
        expansion = expansion_of(*call[:3], call.expand, call.enable_gqa)
        call = call._replace(expand=expansion, value=call.key.detach()[..., :0])
    check_aux(call.return_lse, call.return_aux)
    if call.expand is None:
        check_tensors(*call[:3], call.enable_gqa)
    check_sinks(call.query, call.sinks)
    return call


_facts = attrgetter("shape", "dtype", "device", "layout")


def call_key(call: Arguments, group: Any) -> Any:
    """Return a hashable key of all properties of a call that checks read: calls with equal keys need one
    check per plan. None if sizes may be symbols."""
    q, k, v = shards = call[:3]
    for x in shards:
        if type(x) is not Tensor or x.is_nested:
            return None
    logits, sinks = None, call.sinks
    if sinks is not None:
        if not isinstance(sinks, Tensor):
            return None
        logits = sinks.shape, sinks.dtype, sinks.device
    flags = bool(call.enable_gqa), bool(call.return_lse), type(call.return_aux)
    ranks = group and weakref.ref(group)
    return _facts(q), _facts(k), _facts(v), logits, ranks, flags, call.batch_offset


def check_tensors(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> None:
    """Check dtypes, devices and shapes of one rank's shards."""
    for name, x in (("query", q), ("key", k), ("value", v)):
        _check_tensor(name, x, q)
    # Compare symbols first: `== 1` of an unbacked size raises.
    other = any(x.shape[0] != q.shape[0] and x.shape[0] != 1 for x in (k, v))
    if other or k.shape[1:3] != v.shape[1:3] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"query {tuple(q.shape)}, key {tuple(k.shape)} and value {tuple(v.shape)} do not fit together: "
            "[B, Hq, Sq, D], [B or 1, Hkv, Skv, D] and [B or 1, Hkv, Skv, E] are needed"
        )
    if q.shape[1] == k.shape[1]:
        return
    heads = f"{q.shape[1]} query heads and {k.shape[1]} key heads"
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{heads}; query heads must be a multiple of key heads, in tensors [batch, heads, sequence, head "
            "dim]: repeat or drop some of them, or transpose(1, 2)"
        )
    if not enable_gqa:
        raise ValueError(f"{heads} without enable_gqa: pass enable_gqa=True if groups of heads share a key")


def expansion_of(q: Any, k: Any, v: Any, expand: Any, enable_gqa: bool) -> Expansion:
    """Check a latent and the function that expands it, by a call with two rows of ones; return the function's
    record."""
    if not isinstance(expand, tuple | list) or not expand or not callable(expand[0]):
        raise TypeError(
            f"expand is a {type(expand).__name__}; a tuple of a function and its parameters is needed: "
            "expand=(fn, *parameters)"
        )
    if v is not None:
        raise ValueError(
            "value is a tensor beside expand=, whose fn(latent, *parameters) returns key and value: pass the "
            "latent as key, and value=None"
        )
    _check_shard("query", q, q)
    _check_shard("key", k, q)
    if k.shape[0] not in (1, q.shape[0]):
        raise ValueError(
            f"query {tuple(q.shape)} and the latent {tuple(k.shape)} do not fit together: [B, Hq, Sq, D] and "
            "[B or 1, heads, Skv, channels] are needed"
        )
    device = q.device.type
    is_cast = device != "meta" and torch.is_autocast_enabled(device)
    autocast = str(torch.get_autocast_dtype(device)).removeprefix("torch.") if is_cast else ""
    expansion = Expansion.of(expand[0], expand[1:], (), autocast)
    for x in expansion.tensors:
        refuse_dtensor(x, "a parameter of expand=", "pass its local part, x.to_local()")
    with torch.enable_grad():
        rows = k.detach().new_ones(1, k.shape[1], 2, k.shape[3])
        key, value = expansion.with_tensors([x.detach() for x in expansion.tensors])(rows)
    if key.requires_grad or value.requires_grad:
        raise ValueError(
            "expand: fn reads a tensor that requires grad and is none of its parameters, so that no gradient "
            "would reach it; pass it, or the module that has it: expand=(fn, *parameters)"
        )
    try:
        check_tensors(q[:1], key, value, enable_gqa)
    except ValueError as error:
        raise ValueError(f"expand: wrong key or value returned by fn: {error}") from None
    return expansion._replace(sizes=(key.shape[1], key.shape[3], value.shape[3]))


def _exchanged(name: str, rows: int, heads: int) -> str:
    """Format the error of a tensor whose heads and sequence dimensions look exchanged."""
    return (
        f"{name} has {heads} heads and {rows} rows, and the mask is for {heads} rows: [batch, heads, "
        "sequence, head dim] is needed, and this looks like [batch, sequence, heads, head dim]; pass "
        f"{name}.transpose(1, 2)"
    )


def _check_tensor(name: str, x: Tensor, q: Tensor) -> None:
    """Check one shard: type, layout, dtype, device and head dim."""
    _check_shard(name, x, q)
    if not 0 < x.shape[3] <= MAX_HEAD_DIM:
        remedy = (
            "cut value along its head dim, call once for each part, and concatenate the outputs"
            if name == "value"
            else "torch.nn.attention.flex_attention takes other head dims, for a whole sequence on one device"
        )
        raise ValueError(f"{name} has head dim {x.shape[3]}; 1 to {MAX_HEAD_DIM} is supported: {remedy}")


def _check_shard(name: str, x: Tensor, q: Tensor) -> None:
    """Check one shard: type, layout, dtype and device."""
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{name} is a {type(x).__name__}; a tensor [batch, heads, sequence, head dim] is needed"
        )
    refuse_dtensor(x, name, "pass its local part, x.to_local()")
    if x.is_nested:
        raise ValueError(
            f"{name} is a nested tensor; dense [batch, heads, sequence, head dim] is needed: pack the "
            "documents into one sequence and mask with document(lengths=...)"
        )
    if x.layout != torch.strided:
        raise ValueError(
            f"{name} is a {x.layout} tensor; a dense one is needed: {name}.to_dense(). The mask "
            "selects the pairs that are computed, not the layout"
        )
    if x.ndim != 4:
        raise ValueError(
            f"{name} is {tuple(x.shape)}; [batch, heads, sequence, head dim] is needed: unsqueeze or "
            "reshape it"
        )
    if x.dtype not in DTYPES:
        raise ValueError(
            f"{name} is {x.dtype}; bfloat16, float16, float32 or float64 is needed: convert it, "
            f"{name}.to(...)"
        )
    if x.dtype != q.dtype or x.device != q.device:
        raise ValueError(
            f"query is {q.dtype} on {q.device}, {name} is {x.dtype} on {x.device}; one dtype and one device "
            f"are needed: {name}.to(query)"
        )
    if x.device.type not in DEVICES:
        raise ValueError(
            f"{name} is on {x.device}; the kernels run on CUDA and ROCm GPUs, and interpreted or as plain "
            "torch on the CPU: move it to one of these"
        )
    if x.shape[1] == 0:
        raise ValueError(
            f"{name} has no heads: {tuple(x.shape)}; [batch, heads, sequence, head dim] is needed"
        )


def shared_batch(call: Arguments) -> Arguments:
    """Expand keys and values of batch 1 to the queries' batch, as torch does."""
    k, v, batch = call.key, call.value, call.query.shape[0]
    if k.shape[0] == batch == v.shape[0]:
        return call
    return call._replace(key=k.expand(batch, -1, -1, -1), value=v.expand(batch, -1, -1, -1))


def scale_of(call: Arguments) -> float:
    """Return the scale of scores: the argument, checked, or 1/sqrt(head dim) as in torch."""
    if call.scale is None:
        return 1 / math.sqrt(call.query.shape[3])
    check_scale(call.scale)
    return float(call.scale)


def check_scale(scale: Any) -> None:
    """Raise for a scale that is not a number, or that requires grad."""
    if isinstance(scale, str):
        raise TypeError(
            f"scale={scale!r} is a str; pass a number, for example 0.125, or None for 1/sqrt(head dim)"
        )
    if isinstance(scale, Tensor) and scale.requires_grad:
        raise ValueError(
            "scale is a tensor that requires grad, but is read as a number, without a gradient: pass query * "
            "scale as the query and scale=1.0, or multiply the score in a score_mod"
        )
    if isinstance(scale, Tensor) and torch.compiler.is_dynamo_compiling():
        raise TypeError(
            "scale is a tensor, whose value torch.compile cannot read: pass a number, or query * scale as "
            "the query and scale=1.0"
        )


def check_aux(return_lse: bool, return_aux: Any) -> None:
    """Raise for a return_aux that is not an AuxRequest, or that is passed with return_lse."""
    if return_aux is not None and not isinstance(return_aux, AuxRequest):
        raise TypeError(
            f"return_aux is a {type(return_aux).__name__}; pass torch.nn.attention.flex_attention's "
            "AuxRequest, for example return_aux=AuxRequest(lse=True)"
        )
    if return_lse and return_aux is not None:
        raise ValueError("return_lse and return_aux in one call: pass return_aux=AuxRequest(lse=True) alone")


def check_mesh(mesh: Any, *plans: Any, schedule: str = "") -> None:
    """Raise ValueError for a mesh of two dimensions, since all its ranks would share one sequence, unless the
    schedule, or the schedule of a plan, exchanges heads between the ranks of the second dimension."""
    if mesh is None or not groups.degree_of(mesh):
        return
    names = [schedule, *[plan.schedule for plan in plans if isinstance(plan, Plan)]]
    if not any(name.startswith("ulysses") for name in names):
        raise ValueError(
            f"mesh has two dimensions, {mesh.mesh_dim_names}, and all its {mesh.size()} ranks would share "
            "one sequence: pass mesh['cp'], the dimension of context parallelism, by its name. For a second "
            "dimension that exchanges heads, pass the plan of make_plan(mask, mesh, "
            "schedule='ulysses+ring'), or of 'ulysses'"
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


def check_sinks(q: Tensor, sinks: Tensor | None) -> None:
    """Raise unless sinks has one floating-point logit for each query head, on the query's device."""
    if sinks is None:
        return
    if not isinstance(sinks, Tensor):
        raise TypeError(f"sinks is a {type(sinks).__name__}; a tensor with a logit for each head is needed")
    if sinks.shape != q.shape[1:2] or not sinks.is_floating_point() or sinks.device != q.device:
        raise ValueError(
            f"sinks is {sinks.dtype} {tuple(sinks.shape)} on {sinks.device}; one floating point logit for "
            f"each of the query's {q.shape[1]} heads is needed, on {q.device}"
        )


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


def check_mask_captures(tensors: Sequence[Tensor]) -> None:
    """Raise if the mask_mod captures a tensor that requires grad: a mask has no gradient."""
    for tensor in tensors:
        if tensor.requires_grad:
            raise ValueError(
                f"the mask_mod captures a tensor {tuple(tensor.shape)} that requires grad, and a mask has no "
                "gradient; capture tensor.detach(), or learn it in a score_mod"
            )


def check_plannable(mask: Any) -> None:
    """Raise TypeError for a mask without lengths: None, a mask_mod, or a BlockMask of torch without sizes."""
    if mask is None or has_no_lengths(mask):
        raise TypeError(
            "None has no lengths, and a plan needs them: make_plan(full_mask(Q_LEN, KV_LEN), mesh)"
        )
    is_plain = callable(mask) and not isinstance(mask, BlockMask | Mask | Plan)
    if isinstance(mask, MaskMod) or is_plain:
        name = name_of(mask) if name_of(mask) != "<lambda>" else "mask_mod"
        raise TypeError(
            f"{name} has no lengths, and a plan needs Q_LEN and KV_LEN, the global lengths of queries "
            f"and keys: make_plan(create_block_mask({name}, None, None, Q_LEN, KV_LEN), mesh)"
        )
