"""The public `flex_attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

from tritoncp.api.plans import MaskLike
from tritoncp.core.dynamo_boundary import graph_entry
from tritoncp.frontend.call import Options, attend, sort_arguments
from tritoncp.frontend.group_call import group_call


@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Tensor] | MaskLike | None = ...,
    block_mask: Any = ..., scale: float | None = ..., enable_gqa: bool = ...,
    return_lse: Literal[False] = ..., kernel_options: dict[str, Any] | None = ..., *, return_aux: None = ...,
    mesh: Any = ..., positions: Tensor | None = ..., sinks: Tensor | None = ...,
    batch_offset: int | None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Tensor] | MaskLike | None = ...,
    block_mask: Any = ..., scale: float | None = ..., enable_gqa: bool = ..., *, return_lse: Literal[True],
    kernel_options: dict[str, Any] | None = ..., return_aux: None = ..., mesh: Any = ...,
    positions: Tensor | None = ..., sinks: Tensor | None = ..., batch_offset: int | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Tensor] | MaskLike | None = ...,
    block_mask: Any = ..., scale: float | None = ..., enable_gqa: bool = ...,
    return_lse: Literal[False] = ..., kernel_options: dict[str, Any] | None = ..., *, return_aux: AuxRequest,
    mesh: Any = ..., positions: Tensor | None = ..., sinks: Tensor | None = ...,
    batch_offset: int | None = ...,
) -> tuple[Tensor, AuxOutput]: ...  # fmt: skip
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Tensor] | MaskLike | None = ...,
    block_mask: Any = ..., scale: float | None = ..., enable_gqa: bool = ..., return_lse: bool = ...,
    kernel_options: dict[str, Any] | None = ..., *, return_aux: AuxRequest | None = ..., mesh: Any = ...,
    positions: Tensor | None = ..., sinks: Tensor | None = ..., batch_offset: int | None = ...,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]: ...  # fmt: skip
@graph_entry
@group_call
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
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Flex attention over a sequence that is sharded over ``mesh``.

    query: [B, Hq, S_local, D]; key: [B, Hkv, S_local, D]; value: [B, Hkv, S_local, E]: this rank's shard, in
    natural order for a mask, in the plan's order for a Plan. bf16, fp16, fp32, or fp64 interpreted.

    Called as ``(q, k, v, block_mask, mesh)`` or with torch's own arguments plus ``mesh``, which have torch's
    meaning; masks and mods see global indices. Returns out [B, Hq, S_local, E]; with ``return_lse`` or
    ``return_aux`` also lse (natural log) and max_scores, float32 [B, Hq, S_local]. Out has the query's
    stride order, each gradient its tensor's, the last dimension innermost: [B, S, H, D] seen through
    ``transpose(1, 2)`` comes back so. Under autocast q, k, v are cast to its dtype first, and out has it.
    Fake and meta tensors: shapes only. ``torch.func``'s transforms raise RuntimeError.

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

    Few rows (up to about a hundred) against many keys: query heads that share keys form one tile and
    several CTAs share a row's keys, in numbers that fill the device. ``kernel_options``: ``"PACK_GQA"``,
    True or False, and ``"SPLIT_KV"``, the number of CTAs; with ``{"PACK_GQA": False, "SPLIT_KV": 1}`` and
    tiles that are given too, rows cut off at a block boundary have the bits that they have in the whole.

    >>> import torch
    >>> from tritoncp import causal
    >>> q = k = v = torch.randn(1, 2, 256, 32)
    >>> flex_attention(q, k, v, causal()).shape
    torch.Size([1, 2, 256, 32])
    """
    score, mask, mesh = sort_arguments(score_mod, block_mask, mesh)
    options = Options(
        scale, enable_gqa, return_lse, kernel_options, return_aux, positions, sinks, batch_offset
    )
    results: Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]
    results = options.results(attend(query, key, value, score, mask, mesh, options))
    return results
