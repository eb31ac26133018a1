"""Attention over packed documents [t, heads, head dim], and conversion from and to Megatron's order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

from tritoncp.api.attention import flex_attention
from tritoncp.api.group_call import group_call
from tritoncp.core.bounded_cache import TensorCache
from tritoncp.core.dynamo_boundary import graph_entry, host_only, untraced
from tritoncp.core.host_copy import to_host
from tritoncp.core.upload import DeviceCopy
from tritoncp.distributed import collectives, failures, groups
from tritoncp.masks.mask import Mask
from tritoncp.masks.varlen import Varlen, dual_chunk_rows, varlen
from tritoncp.planning.plan import Plan

EVERYTHING = (-1, -1)


@overload
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | Plan | Mask, cu_seqlens_kv: Tensor | None = ...,
    mesh: Any = ..., *, causal: bool | None = ..., window: tuple[int, int] = ...,
    cu_seqlens_q_padded: Tensor | None = ..., cu_seqlens_kv_padded: Tensor | None = ...,
    score_mod: Callable[..., Tensor] | None = ..., scale: float | None = ..., sinks: Tensor | None = ...,
    return_lse: Literal[False] = ..., return_aux: None = ..., kernel_options: dict[str, Any] | None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | Plan | Mask, cu_seqlens_kv: Tensor | None = ...,
    mesh: Any = ..., *, causal: bool | None = ..., window: tuple[int, int] = ...,
    cu_seqlens_q_padded: Tensor | None = ..., cu_seqlens_kv_padded: Tensor | None = ...,
    score_mod: Callable[..., Tensor] | None = ..., scale: float | None = ..., sinks: Tensor | None = ...,
    return_lse: Literal[True], return_aux: None = ..., kernel_options: dict[str, Any] | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | Plan | Mask, cu_seqlens_kv: Tensor | None = ...,
    mesh: Any = ..., *, causal: bool | None = ..., window: tuple[int, int] = ...,
    cu_seqlens_q_padded: Tensor | None = ..., cu_seqlens_kv_padded: Tensor | None = ...,
    score_mod: Callable[..., Tensor] | None = ..., scale: float | None = ..., sinks: Tensor | None = ...,
    return_lse: Literal[False] = ..., return_aux: AuxRequest, kernel_options: dict[str, Any] | None = ...,
) -> tuple[Tensor, AuxOutput]: ...  # fmt: skip
@overload
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | Plan | Mask, cu_seqlens_kv: Tensor | None = ...,
    mesh: Any = ..., *, causal: bool | None = ..., window: tuple[int, int] = ...,
    cu_seqlens_q_padded: Tensor | None = ..., cu_seqlens_kv_padded: Tensor | None = ...,
    score_mod: Callable[..., Tensor] | None = ..., scale: float | None = ..., sinks: Tensor | None = ...,
    return_lse: bool = ..., return_aux: AuxRequest | None = ..., kernel_options: dict[str, Any] | None = ...,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]: ...  # fmt: skip
@graph_entry
@group_call
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | Plan | Mask,
    cu_seqlens_kv: Tensor | None = None,
    mesh: Any = None,
    *,
    causal: bool | None = None,
    window: tuple[int, int] = EVERYTHING,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
    score_mod: Callable[..., Tensor] | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    return_aux: AuxRequest | None = None,
    kernel_options: dict[str, Any] | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Compute attention within documents that are packed end to end, sharded over ``mesh``.

    q: [t, Hq, D]; k: [t_kv, Hkv, D]; v: [t_kv, Hkv, E]: this rank's shard of the packed buffers; Hq a
    multiple of Hkv. The other arguments are those of the whole buffer, equal on every rank: see
    :func:`tritoncp.varlen_mask` for ``cu_seqlens_*``, ``causal`` and ``window``, and
    :func:`tritoncp.flex_attention` for the rest; score_mod sees positions in the buffer.
    Shards are pieces of the buffer in order, of any lengths: rank r holds the r-th. Documents may cross their
    edges. Or make a plan, ``make_plan(varlen_mask(...), mesh)``, which balances the work, shard with
    ``shard(x, plan, dim=0, batch_dim=None)``, and pass the plan (or the mask, for pieces in order) in place
    of ``cu_seqlens_q``; it contains ``causal`` and all other properties of documents.

    Returns out [t, Hq, E]; with ``return_lse`` or ``return_aux`` also lse and max_scores, float32 [t, Hq]
    (``max_scores.amax(0)`` is the max_logit of each head). Padding is never read, whatever its contents: its
    out and all its gradients are 0, its lse and max_scores -inf (lse the sink, if there are sinks). The same
    holds for queries of a document without keys.

    cu_seqlens on a device are copied to the host once, when the plan is made; a call with the same tensors,
    unedited, does not synchronise. Raises TypeError and ValueError as :func:`tritoncp.varlen_mask`, and where
    cu_seqlens do not account for every row of the buffer.

    >>> x = torch.randn(8, 2, 16)
    >>> out = varlen_attention(x, x, x, torch.tensor([0, 3, 8]), causal=True)
    >>> torch.allclose(out[3:], varlen_attention(x[3:], x[3:], x[3:], torch.tensor([0, 5]), causal=True))
    True
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.ndim != 3:
            text = list(x.shape) if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise ValueError(
                f"{name} is {text}; packed [t, heads, head dim] is needed: put the documents of a batch one "
                "after the other along t"
            )
    lengths = {
        "cu_seqlens_kv": cu_seqlens_kv,
        "cu_seqlens_q_padded": cu_seqlens_q_padded,
        "cu_seqlens_kv_padded": cu_seqlens_kv_padded,
    }
    mask = _mask(cu_seqlens_q, causal, window, lengths)
    query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
    options: dict[str, Any] = {"return_lse": return_lse, "return_aux": return_aux, "sinks": sinks}
    options |= {"scale": scale, "kernel_options": kernel_options, "mesh": mesh}
    result: Any = flex_attention(query, key, value, score_mod, mask, enable_gqa=True, **options)
    if return_aux is not None:
        out, aux = result
        return _rows(out), AuxOutput(*(x if x is None else _rows(x) for x in aux))
    return (_rows(result[0]), _rows(result[1])) if return_lse else _rows(result)


def _mask(
    cu_seqlens_q: Tensor | Plan | Mask,
    causal: bool | None,
    window: tuple[int, int],
    lengths: dict[str, Tensor | None],
) -> Plan | Mask | Varlen:
    if isinstance(cu_seqlens_q, Plan | Mask):
        extra = [name for name, value in lengths.items() if value is not None]
        extra += ["causal"] * (causal is not None) + ["window"] * (window != EVERYTHING)
        if extra:
            raise TypeError(
                f"{', '.join(extra)} beside a {type(cu_seqlens_q).__name__}, which says all that already: "
                "give them to varlen_mask(...) when you make it"
            )
        return cu_seqlens_q
    if causal is None:
        raise TypeError("causal=True or causal=False is needed: there is no usual value")
    return varlen(cu_seqlens_q, causal=causal, window=window, **lengths)


def _rows(x: Tensor) -> Tensor:
    """Convert [1, h, t, ...] to [t, h, ...]."""
    return x[0].transpose(0, 1).contiguous()


@host_only
@group_call
def dual_chunk_to_contiguous(
    x: Tensor, cu_seqlens: Tensor, mesh: Any = None, *, world_size: int | None = None, dim: int = 0
) -> Tensor:
    """Convert the load-balanced order of TransformerEngine and Megatron to pieces in order.

    In that order every document is cut into 2 W chunks of equal length, and rank r holds chunks r and
    2 W - 1 - r of each, documents one after the other. cu_seqlens: [n + 1], of the buffer's rows (the padded
    ones, where there is padding); x: any tensor with the shard's rows along ``dim``.
    With a mesh: this rank's shard in, its piece of the buffer out, in one all-to-all of exactly the rows that
    change ranks; every rank calls it. Without a mesh, x holds the shards of ``world_size`` ranks one after
    the other, and the result is the whole buffer in order. Differentiable: gradients take the inverse route.

    Raises ValueError for a document that 2 W does not divide.

    >>> shards = torch.tensor([0, 3, 4, 5, 10, 11, 1, 2, 6, 7, 8, 9])  # rank 0's, then rank 1's
    >>> dual_chunk_to_contiguous(shards, torch.tensor([0, 4, 12]), world_size=2)
    tensor([ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11])
    """
    return _reorder(x, cu_seqlens, mesh, world_size, dim, to_dual=False)


@host_only
@group_call
def contiguous_to_dual_chunk(
    x: Tensor, cu_seqlens: Tensor, mesh: Any = None, *, world_size: int | None = None, dim: int = 0
) -> Tensor:
    """Invert :func:`dual_chunk_to_contiguous`, with the same arguments.

    >>> contiguous_to_dual_chunk(torch.arange(12), torch.tensor([0, 4, 12]), world_size=2)
    tensor([ 0,  3,  4,  5, 10, 11,  1,  2,  6,  7,  8,  9])
    """
    return _reorder(x, cu_seqlens, mesh, world_size, dim, to_dual=True)


def _reorder(
    x: Tensor, cu_seqlens: Tensor, mesh: Any, world_size: int | None, dim: int, to_dual: bool
) -> Tensor:
    group = groups.group_of(mesh)
    if (group is None) == (world_size is None):
        raise ValueError(
            "give either mesh= (x is this rank's shard) or world_size= (x is all shards, one after the other)"
        )
    world = world_size or 1 if group is None else group.size()
    rank = None if group is None else group.rank()
    route_copy = _cached_route(cu_seqlens, (world, rank, to_dual, x.device))
    own = route_copy.on_current_stream()
    rows = len(own.order)
    if x.shape[dim] != rows:
        whose = "the shards of all ranks have" if group is None else "each rank's shard has"
        raise ValueError(
            f"x is {tuple(x.shape)}, {x.shape[dim]} rows along dimension {dim}; by cu_seqlens {whose} "
            f"{rows}: pass the cu_seqlens of the whole buffer's rows, padding included"
        )
    if group is None:
        return x.index_select(dim, own.order[own.arrange])
    return Move.apply(x.movedim(dim, 0), route_copy, group).movedim(0, dim)


_ROUTES = TensorCache(64)


def _cached_route(
    cu_seqlens: Tensor, route_key: tuple[int, int | None, bool, torch.device]
) -> DeviceCopy[Route]:
    """Return the cached route for this tensor object, if it was not edited; else compute one, which needs a
    copy to the host."""
    key = id(cu_seqlens), *route_key
    route_copy: DeviceCopy[Route] | None = _ROUTES.find(key, [cu_seqlens])
    if route_copy is None:
        route_copy = _compute_route(to_host([cu_seqlens])[0], *route_key)
        _ROUTES.keep(key, [cu_seqlens], route_copy)
    return route_copy


@torch.inference_mode(False)  # the result is cached, and autograd saves it
def _compute_route(
    cu_seqlens: Tensor, world: int, rank: int | None, to_dual: bool, device: torch.device
) -> DeviceCopy[Route]:
    """Compute one rank's messages between dual-chunk order and the buffer's. rank: None for one process that
    holds the shards of all ranks."""
    dual = dual_chunk_rows(cu_seqlens, world)
    dual = dual.view(1, -1) if rank is None else dual
    positions = torch.arange(dual.numel()).view_as(dual)
    source, target = (positions, dual) if to_dual else (dual, positions)
    host = route(source, target, rank or 0)
    return DeviceCopy(
        [host.order, host.arrange], device, lambda order, arrange: replace(host, order=order, arrange=arrange)
    )


@dataclass(frozen=True, eq=False)
class Route:
    """The messages that permute rows across ranks: ``x[order]`` has ``sends[r]`` rows for each rank r, from
    which ``receives[r]`` rows come; these, indexed by ``[arrange]``, are the result."""

    order: Tensor
    sends: list[int]
    receives: list[int]
    arrange: Tensor

    def back(self) -> Route:
        return Route(self.arrange.argsort(), self.receives, self.sends, self.order.argsort())


def route(source: Tensor, target: Tensor, rank: int) -> Route:
    """Compute one rank's messages from one order to another.

    source, target: int64 [W, n], rows of the whole buffer that each rank holds before and after.

    >>> route(torch.tensor([[0, 3], [1, 2]]), torch.tensor([[0, 1], [2, 3]]), 0)
    Route(order=tensor([0, 1]), sends=[1, 1], receives=[1, 1], arrange=tensor([0, 1]))
    """
    world, n = source.shape
    total = world * n

    def owners(rows: Tensor) -> Tensor:
        return torch.empty(total, dtype=torch.int64).scatter_(0, rows.flatten(), torch.arange(total) // n)

    to, came_from = owners(target)[source[rank]], owners(source)[target[rank]]
    order = (to * total + source[rank]).argsort()
    arrival = (came_from * total + target[rank]).argsort()
    sends, receives = (torch.bincount(peers, minlength=world).tolist() for peers in (to, came_from))
    return Route(order, sends, receives, arrival.argsort())


class Move(torch.autograd.Function):
    """Permutation of rows along dim 0 by a route; the backward pass uses the inverse route."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, route_copy: DeviceCopy[Route], group: Any) -> Tensor:
        ctx.route_copy, ctx.group = route_copy, group
        return collectives.run(_exchange_rows(x, route_copy.on_current_stream()), group)

    @staticmethod
    @untraced
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        with failures.closing(ctx.group):
            route_back = ctx.route_copy.on_current_stream().back()
            return collectives.run(_exchange_rows(dx, route_back), ctx.group), None, None


def _exchange_rows(x: Tensor, route_copy: Route) -> collectives.Schedule[Tensor]:
    flight = yield collectives.AllToAll(x[route_copy.order], route_copy.sends, route_copy.receives)
    return (yield collectives.Wait(flight))[route_copy.arrange]
