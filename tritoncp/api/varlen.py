"""Attention over packed documents [t, heads, head dim], and conversion from and to the load-balanced order
of Megatron and TransformerEngine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest
from torch.utils._pytree import tree_map_only

from tritoncp.api.attention import KeywordOptions, flex_attention
from tritoncp.api.group_call import group_call
from tritoncp.call.check_arguments import check_mesh
from tritoncp.core.bounded_cache import TensorCache
from tritoncp.core.dynamo_boundary import graph_entry, host_only
from tritoncp.core.handles import handle_of
from tritoncp.core.host_copy import host, to_host
from tritoncp.distributed import groups
from tritoncp.distributed.groups import Mesh
from tritoncp.graph.reshard import Reshard
from tritoncp.graph.row_moves import move_rows
from tritoncp.masks.mask import Mask
from tritoncp.masks.varlen import Documents, Varlen, varlen
from tritoncp.planning.placement import Placement
from tritoncp.planning.plan import Plan

EVERYTHING = (-1, -1)


@overload
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | Plan | Mask, cu_seqlens_kv: Tensor | None = ...,
    mesh: Mesh = ..., *, causal: bool | None = ..., window: tuple[int, int] = ...,
    cu_seqlens_q_padded: Tensor | None = ..., cu_seqlens_kv_padded: Tensor | None = ...,
    score_mod: Callable[..., Tensor] | None = ..., return_lse: Literal[True],
    **options: Unpack[KeywordOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | Plan | Mask, cu_seqlens_kv: Tensor | None = ...,
    mesh: Mesh = ..., *, causal: bool | None = ..., window: tuple[int, int] = ...,
    cu_seqlens_q_padded: Tensor | None = ..., cu_seqlens_kv_padded: Tensor | None = ...,
    score_mod: Callable[..., Tensor] | None = ..., return_aux: AuxRequest,
    **options: Unpack[KeywordOptions],
) -> tuple[Tensor, AuxOutput]: ...  # fmt: skip
@overload
def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | Plan | Mask, cu_seqlens_kv: Tensor | None = ...,
    mesh: Mesh = ..., *, causal: bool | None = ..., window: tuple[int, int] = ...,
    cu_seqlens_q_padded: Tensor | None = ..., cu_seqlens_kv_padded: Tensor | None = ...,
    score_mod: Callable[..., Tensor] | None = ..., return_lse: Literal[False] = ..., return_aux: None = ...,
    **options: Unpack[KeywordOptions],
) -> Tensor: ...  # fmt: skip
@graph_entry
@group_call
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | Plan | Mask,
    cu_seqlens_kv: Tensor | None = None,
    mesh: Mesh = None,
    *,
    causal: bool | None = None,
    window: tuple[int, int] = EVERYTHING,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
    score_mod: Callable[..., Tensor] | None = None,
    **options: Any,
) -> Any:
    """Compute attention within packed documents (variable length, THD layout), sharded over ``mesh``.

    >>> x = torch.randn(8, 2, 16)                           # documents of 3 and 5 tokens
    >>> out = varlen_attention(x, x, x, torch.tensor([0, 3, 8]), causal=True)
    >>> torch.allclose(out[3:], varlen_attention(x[3:], x[3:], x[3:], torch.tensor([0, 5]), causal=True))
    True
    >>> near = varlen_attention(x, x, x, torch.tensor([0, 3, 8]), causal=True, window=(1, 0))
    >>> out, lse = varlen_attention(x, x, x, torch.tensor([0, 3, 8]), causal=False, return_lse=True)
    >>> lse.shape
    torch.Size([8, 2])

    Rank r has the r-th piece of the buffer, of any length; a document may extend over several ranks. To
    balance the work, make a plan, ``make_plan(varlen_mask(...), mesh)``, shard with ``shard(x, plan, dim=0,
    batch_dim=None)``, and pass the plan as ``cu_seqlens_q``. Padding is never read: its out and gradients are
    0, its lse and max_scores -inf (lse is the sink, if there are sinks). The same holds for queries of a
    document without keys. A copy of cu_seqlens from a device to the host is made once, when the plan is made;
    a call with the same tensors, unedited, does not synchronise.

    Args:
        q: [t, Hq, D], this rank's shard of the packed queries; Hq is a multiple of Hkv.
        k: [t_kv, Hkv, D], this rank's shard of the packed keys.
        v: [t_kv, Hkv, E], this rank's shard of the packed values.
        cu_seqlens_q: number of tokens before each document of the whole buffer, [n + 1]; or a Plan, which
            contains ``causal`` and all other properties of the documents; or a mask, for pieces in order.
        cu_seqlens_kv: the same of keys; None: equal to ``cu_seqlens_q``.
        mesh: DeviceMesh or process group of the ranks that share the buffer; None: one device.
        causal: hide the keys after a query, see :func:`tritoncp.varlen_mask`. Needed without a plan or mask.
        window: (left, right), see :func:`tritoncp.varlen_mask`.
        cu_seqlens_q_padded: see :func:`tritoncp.varlen_mask`.
        cu_seqlens_kv_padded: see :func:`tritoncp.varlen_mask`.
        score_mod: function (score, b, h, q_idx, kv_idx) that gets positions in the buffer; None: none.
        options: scale, sinks, return_lse, return_aux and kernel_options of :func:`tritoncp.flex_attention`.

    Returns:
        out [t, Hq, E]; with ``return_lse`` or ``return_aux`` also lse and max_scores, float32 [t, Hq]
        (``max_scores.amax(0)`` is the max_logit of each head).

    Raises:
        TypeError, ValueError: the errors of :func:`tritoncp.varlen_mask`; for cu_seqlens that do not cover
            every row of the buffer; for arguments that a plan or mask already contains.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.ndim != 3:
            text = list(x.shape) if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise ValueError(
                f"{name} is {text}; packed [t, heads, head dim] is needed: concatenate the documents of a "
                "batch along t"
            )
    lengths = {
        "cu_seqlens_kv": cu_seqlens_kv,
        "cu_seqlens_q_padded": cu_seqlens_q_padded,
        "cu_seqlens_kv_padded": cu_seqlens_kv_padded,
    }
    mask = _mask(cu_seqlens_q, causal, window, lengths)
    query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
    result: Any = flex_attention(query, key, value, score_mod, mask, enable_gqa=True, mesh=mesh, **options)
    return tree_map_only(Tensor, _rows, result)


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
                f"{', '.join(extra)} beside a {type(cu_seqlens_q).__name__}, which contains them already: "
                "pass them to varlen_mask(...) that makes it"
            )
        return cu_seqlens_q
    if causal is None:
        raise TypeError("causal is missing and has no default: pass causal=True or causal=False")
    return varlen(cu_seqlens_q, causal=causal, window=window, **lengths)


def _rows(x: Tensor) -> Tensor:
    """Convert [1, h, t, ...] to [t, h, ...]."""
    return x[0].transpose(0, 1).contiguous()


@host_only
@group_call
def dual_chunk_to_contiguous(
    x: Tensor, cu_seqlens: Tensor, mesh: Mesh = None, *, world_size: int | None = None, dim: int = 0
) -> Tensor:
    """Convert shards from the load-balanced order of TransformerEngine and Megatron to contiguous pieces.

    >>> shards = torch.tensor([0, 3, 4, 5, 10, 11, 1, 2, 6, 7, 8, 9])  # rank 0's, then rank 1's
    >>> dual_chunk_to_contiguous(shards, torch.tensor([0, 4, 12]), world_size=2)
    tensor([ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11])

    In that order every document is cut into 2 W chunks of equal length, and rank r of W has chunks r and 2 W
    - 1 - r of each document. With a mesh all ranks call this, and one all-to-all sends exactly the rows that
    change ranks. Differentiable.

    Args:
        x: with a mesh, this rank's shard, any tensor with the shard's rows along ``dim``; without a mesh, the
            concatenation of the shards of ``world_size`` ranks.
        cu_seqlens: number of rows of the buffer before each document, [n + 1] (with padding, the padded
            ones).
        mesh: DeviceMesh or process group of the ranks.
        world_size: number of ranks, without a mesh.
        dim: dimension of x that is sharded.

    Returns:
        With a mesh, this rank's piece of the buffer; without, the whole buffer in order.

    Raises:
        ValueError: for a document whose length is not a multiple of 2 W, and unless exactly one of ``mesh``
            and ``world_size`` is given.
    """
    return _reorder(x, cu_seqlens, mesh, world_size, dim, to_dual=False)


@host_only
@group_call
def contiguous_to_dual_chunk(
    x: Tensor, cu_seqlens: Tensor, mesh: Mesh = None, *, world_size: int | None = None, dim: int = 0
) -> Tensor:
    """Invert :func:`dual_chunk_to_contiguous`, with the same arguments.

    >>> contiguous_to_dual_chunk(torch.arange(12), torch.tensor([0, 4, 12]), world_size=2)
    tensor([ 0,  3,  4,  5, 10, 11,  1,  2,  6,  7,  8,  9])

    Args:
        x: with a mesh, this rank's piece of the buffer; without a mesh, the whole buffer.
        cu_seqlens: number of rows of the buffer before each document, [n + 1] (with padding, the padded
            ones).
        mesh: DeviceMesh or process group of the ranks.
        world_size: number of ranks, without a mesh.
        dim: dimension of x that is sharded.

    Returns:
        With a mesh, this rank's shard in load-balanced order; without, the concatenation of all shards.

    Raises:
        ValueError: as :func:`dual_chunk_to_contiguous`.
    """
    return _reorder(x, cu_seqlens, mesh, world_size, dim, to_dual=True)


def _reorder(
    x: Tensor, cu_seqlens: Tensor, mesh: Mesh, world_size: int | None, dim: int, to_dual: bool
) -> Tensor:
    group = groups.group_of(mesh)
    check_mesh(mesh)
    if (group is None) == (world_size is None):
        raise ValueError(
            "mesh and world_size: pass either mesh= (x is this rank's shard) or world_size= (x is the "
            "concatenation of all shards)"
        )
    world = world_size or 1 if group is None else group.size()
    dual, handle = _cached_placement(cu_seqlens, world, group is None)
    if x.shape[dim] != dual.s_max:
        whose = "the shards of all ranks" if group is None else "each rank's shard"
        raise ValueError(
            f"x is {tuple(x.shape)}, {x.shape[dim]} rows along dimension {dim}; by cu_seqlens {dual.s_max} "
            f"are needed, the rows of {whose}: pass the cu_seqlens of the whole buffer, padding included"
        )
    source, target = (None, handle) if to_dual else (handle, None)
    name = "" if group is None else group.group_name
    return move_rows(Reshard(source, target, "q", dim % x.ndim, None, dual.s_max, 0, name), [x])[0]


_PLACEMENTS = TensorCache(64)


def _cached_placement(cu_seqlens: Tensor, world: int, is_merged: bool) -> tuple[Placement, Tensor]:
    """Return the placement of dual-chunk order and its handle, cached by tensor object and version; a miss
    copies cu_seqlens to the host. is_merged: one process has all ranks' shards."""
    key = id(cu_seqlens), world, is_merged
    cached: tuple[Placement, Tensor] | None = _PLACEMENTS.find(key, [cu_seqlens])
    if cached is None:
        with host():
            placement = dual_chunk_placement(to_host([cu_seqlens])[0], world)
            placement = placement.merged(world) if is_merged else placement
        cached = placement, handle_of(placement)
        _PLACEMENTS.keep(key, [cu_seqlens], cached)
    return cached


def dual_chunk_placement(cu_seqlens: Tensor, world: int) -> Placement:
    """Place the rows of a packed buffer in dual-chunk order: every document is cut into 2 W chunks; rank r
    has chunks r and 2 W - 1 - r.

    >>> placement = dual_chunk_placement(torch.tensor([0, 4, 12]), 2)
    >>> [placement.positions(rank).tolist() for rank in (0, 1)]
    [[[0, 3, 4, 5, 10, 11]], [[1, 2, 6, 7, 8, 9]]]
    """
    documents, chunks = Documents.of("cu_seqlens", cu_seqlens, cu_seqlens), 2 * world
    uneven = documents.rows % chunks != 0
    if bool(uneven.any()):
        i = int(uneven.nonzero()[0])
        raise ValueError(
            f"document {i} has {int(documents.rows[i])} rows, which {chunks} chunks of equal length cannot "
            f"share; dual-chunk order on {world} ranks pads every document to a multiple of {chunks}"
        )
    rank = torch.arange(world)[:, None]
    chunk = torch.stack([rank, chunks - 1 - rank], -1)  # [W, 1, 2]
    length = documents.rows[:, None] // chunks
    first = (documents.first[:, None] + chunk * length).flatten(1)  # [W, 2 n] for n documents
    rows = length.expand(world, -1, 2).flatten(1)
    slots = torch.stack([rows.cumsum(1) - rows, first, rows], -1).int()[:, None]
    local = rows.sum(1).tolist()
    return Placement(sum(local), max(1, sum(local)), tuple(slots), tuple(local))
