"""Checks of a call's arguments, before any communication.

Each error message names the argument, the requirement and the remedy.
"""

from __future__ import annotations

import math
import weakref
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

from tritoncp.call.expand import Expansion
from tritoncp.call.read import Arguments, CallKind, count_selected
from tritoncp.core.bounded_cache import BoundedCache
from tritoncp.core.host_copy import refuse_dtensor
from tritoncp.distributed import groups
from tritoncp.kernels.tile_rules import MAX_HEAD_DIM, MAX_V_HEAD_DIM, head_dim_fault
from tritoncp.planning.plan import Plan
from tritoncp.selection.selection import SelectionAuxRequest

MAX_CHECKED_CALLS = 1024
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
DEVICES = ("cuda", "cpu", "meta")  # meta tensors have only shapes

# Kinds of calls whose arguments passed the checks, by :func:`call_key`.
_CHECKED_CALLS: BoundedCache[Any, CallKind] = BoundedCache(MAX_CHECKED_CALLS)


def check_call(call: Arguments) -> Arguments:
    """Refuse wrong arguments before ranks exchange their lengths to make a plan. Returns the call with its
    kind, and with keys and values of the queries' batch size. A call with the :func:`call_key` of an earlier
    call is not checked again."""
    check_mesh(call.mesh, call.block_mask)
    group, kind = groups.group_of(call.mesh), None
    key = None if call.expand is not None else call_key(call, group)  # parameters are read at each call
    if key is not None:
        kind = _CHECKED_CALLS.get(key)
    if kind is None:
        call = check_arguments(call)
        kind = CallKind(call, group, key is not None)
        if key is not None:
            _CHECKED_CALLS.put(key, kind)
    if kind.shares_batch:
        call = shared_batch(call)
    return tuple.__new__(Arguments, (*call[:-1], kind))  # as call._replace(kind=kind), in half the time


def check_arguments(call: Arguments) -> Arguments:
    """Refuse wrong arguments of a call that can be checked without a plan, except scale, kernel options and
    score_mod (:func:`tritoncp.call.prepare.prepare`). Returns the call with the checked record of ``expand``,
    and for a latent a value with zero channels."""
    if call.expand is not None:
        expansion = expansion_of(*call[:3], call.expand, call.enable_gqa)
        call = call._replace(expand=expansion, value=call.key.detach()[..., :0])
    check_aux(call.return_lse, call.return_aux, call.selected)
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
    wants = call.return_aux is not None and call.wants_probabilities
    flags = (
        bool(call.enable_gqa),
        bool(call.return_lse),
        type(call.return_aux),
        wants and call.selected is None,
        call.selected is not None and count_selected(call.selected),
    )
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


def _check_tensor(name: str, x: Tensor, q: Tensor) -> None:
    """Check one shard: type, layout, dtype, device and head dim."""
    _check_shard(name, x, q)
    if fault := head_dim_fault(x.shape[3], name == "value"):
        raise ValueError(f"{name} has head dim {x.shape[3]}; {fault}{_head_dim_remedy(name, x.shape[3])}")


def _head_dim_remedy(name: str, dim: int) -> str:
    """Return what to do about a head dim that is not supported, after the fault and the nearest one."""
    if dim > (MAX_V_HEAD_DIM if name == "value" else MAX_HEAD_DIM):
        return (
            ": cut value along its head dim, call once for each part, and concatenate the outputs"
            if name == "value"
            else ": torch.nn.attention.flex_attention takes others, for a whole sequence on one device"
        )
    if dim == 0:
        return ""
    return (
        f", and cut out to {dim} channels"
        if name == "value"
        else f", query and key alike, and pass scale={dim}**-0.5"
    )


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


def check_aux(return_lse: bool, return_aux: Any, selected: Any = None) -> None:
    """Raise for a return_aux that is not an AuxRequest, or that is passed with return_lse, and for one of
    selected keys without any."""
    if isinstance(return_aux, SelectionAuxRequest):
        if return_aux.probabilities and selected is None:
            raise ValueError(
                "return_aux=SelectionAuxRequest(probabilities=True) without selected=, whose keys the "
                "probabilities are of: pass selected=Selection(indices)"
            )
    elif return_aux is not None and not isinstance(return_aux, AuxRequest):
        raise TypeError(
            f"return_aux is a {type(return_aux).__name__}; pass torch.nn.attention.flex_attention's "
            "AuxRequest, for example return_aux=AuxRequest(lse=True)"
        )
    if return_lse and return_aux is not None:
        raise ValueError("return_lse and return_aux in one call: pass return_aux=AuxRequest(lse=True) alone")


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
