"""The public `flex_attention`, and the path of one call: read, check, find the plan, prepare, attend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict, overload

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest
from torch.overrides import handle_torch_function

from tritoncp.api.group_call import group_call, stop_traced_call
from tritoncp.api.plans import MaskLike
from tritoncp.call import traced
from tritoncp.call.autograd import attend
from tritoncp.call.check_arguments import check_call
from tritoncp.call.plan_cache import find_plan
from tritoncp.call.prepare import prepare
from tritoncp.call.read import Arguments, sort_arguments
from tritoncp.call.selected.probabilities import probabilities
from tritoncp.core.dynamo_boundary import graph_entry, host_only, untraced
from tritoncp.core.host_copy import is_dtensor
from tritoncp.distributed.groups import Mesh, place_in_group
from tritoncp.graph import dispatch
from tritoncp.graph.layouts import Uncapturable
from tritoncp.selection.selection import Selection, SelectionAuxOutput, SelectionAuxRequest

ScoreMod = Callable[..., Tensor] | MaskLike | None  # or a mask, as the fourth argument


class KeywordOptions(TypedDict, total=False):
    """Types of arguments by name that `varlen_attention` and `World.flex_attention` pass on."""

    scale: float | None
    sinks: Tensor | None
    kernel_options: dict[str, Any] | None


@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor | None, score_mod: ScoreMod = ...,
    block_mask: MaskLike | Mesh = ..., scale: float | None = ..., enable_gqa: bool = ...,
    return_lse: Literal[False] = ..., kernel_options: dict[str, Any] | None = ..., *, return_aux: None = ...,
    mesh: Mesh = ..., positions: Tensor | None = ..., sinks: Tensor | None = ...,
    batch_offset: int | None = ..., expand: Sequence[Any] | None = ...,
    selected: Selection | None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor | None, score_mod: ScoreMod = ...,
    block_mask: MaskLike | Mesh = ..., scale: float | None = ..., enable_gqa: bool = ..., *,
    return_lse: Literal[True], kernel_options: dict[str, Any] | None = ..., return_aux: None = ...,
    mesh: Mesh = ..., positions: Tensor | None = ..., sinks: Tensor | None = ...,
    batch_offset: int | None = ..., expand: Sequence[Any] | None = ...,
    selected: Selection | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor | None, score_mod: ScoreMod = ...,
    block_mask: MaskLike | Mesh = ..., scale: float | None = ..., enable_gqa: bool = ...,
    return_lse: Literal[False] = ..., kernel_options: dict[str, Any] | None = ..., *, return_aux: AuxRequest,
    mesh: Mesh = ..., positions: Tensor | None = ..., sinks: Tensor | None = ...,
    batch_offset: int | None = ..., expand: Sequence[Any] | None = ...,
    selected: Selection | None = ...,
) -> tuple[Tensor, AuxOutput]: ...  # fmt: skip
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor | None, score_mod: ScoreMod = ...,
    block_mask: MaskLike | Mesh = ..., scale: float | None = ..., enable_gqa: bool = ...,
    return_lse: Literal[False] = ..., kernel_options: dict[str, Any] | None = ..., *,
    return_aux: SelectionAuxRequest, mesh: Mesh = ..., positions: Tensor | None = ...,
    sinks: Tensor | None = ..., batch_offset: int | None = ..., expand: Sequence[Any] | None = ...,
    selected: Selection,
) -> tuple[Tensor, SelectionAuxOutput]: ...  # fmt: skip
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor | None, score_mod: ScoreMod = ...,
    block_mask: MaskLike | Mesh = ..., scale: float | None = ..., enable_gqa: bool = ...,
    return_lse: bool = ..., kernel_options: dict[str, Any] | None = ..., *,
    return_aux: AuxRequest | SelectionAuxRequest | None = ..., mesh: Mesh = ...,
    positions: Tensor | None = ..., sinks: Tensor | None = ..., batch_offset: int | None = ...,
    expand: Sequence[Any] | None = ..., selected: Selection | None = ...,
) -> (
    Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput] | tuple[Tensor, SelectionAuxOutput]
): ...  # fmt: skip
@graph_entry
@group_call
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    score_mod: ScoreMod = None,
    block_mask: MaskLike | Mesh = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | SelectionAuxRequest | None = None,
    mesh: Mesh = None,
    positions: Tensor | None = None,
    sinks: Tensor | None = None,
    batch_offset: int | None = None,
    expand: Sequence[Any] | None = None,
    selected: Selection | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput] | tuple[Tensor, SelectionAuxOutput]:
    """Flex attention over a sequence that is sharded over ``mesh``; on one device without a mesh.

    >>> import torch
    >>> from tritoncp import causal
    >>> q = k = v = torch.randn(1, 2, 256, 32)
    >>> flex_attention(q, k, v, causal()).shape
    torch.Size([1, 2, 256, 32])
    >>> def alibi(score, b, h, q_idx, kv_idx):
    ...     return score - 0.1 * (q_idx - kv_idx)
    >>> out, lse = flex_attention(q, k, v, alibi, causal(), return_lse=True)
    >>> lse.shape
    torch.Size([1, 2, 256])

    Arguments are torch's plus ``mesh`` and the last five, or ``(q, k, v, block_mask, mesh)``. Masks and
    mods see global indices. There is no dropout.

    Args:
        query: [B, Hq, S_local, D], this rank's shard, in natural order for a mask, in the plan's order for
            a Plan. bf16, fp16, fp32 or fp64. Under autocast query, key and value are cast to
            its dtype.
        key: [B, Hkv, S_local, D], or the latent of ``expand``.
        value: [B, Hkv, S_local, E]; None with ``expand``.
        score_mod: function (score, b, h, q_idx, kv_idx) that returns the changed score, or None.
        block_mask: mask_mod, mask, torch's BlockMask or Plan; None sees all keys.
        scale: factor of the scores; None: D ** -0.5.
        enable_gqa: whether Hq may be a multiple of Hkv.
        return_lse: whether lse is returned too.
        kernel_options: how kernels compute; the page "Kernel options" lists all. With ``{"deterministic":
            True}``, or ``torch.use_deterministic_algorithms``, gradients of captures of score_mod are
            bitwise equal in every run; all other results are so without it. With ``{"invariant": True}``
            out, lse, max_scores and dq of a row have the same bits on any number of ranks, for any
            placement, alone and packed with documents, if each starts at a multiple of the tile of keys
            (the mask's BLOCK_SIZE is one); under Ulysses dk and dv too, where ranks share no KV head:
            Triton kernels only, with the built-in default tiles, and the schedules allgather, fetch and
            Ulysses. For few query rows (up to about a hundred) and many keys, the query heads of a KV head
            form one tile, and the keys of a row are split over as many CTAs as fill the
            device: ``"PACK_GQA"``, True or False, and ``"SPLIT_KV"``, the number of CTAs, override this. With
            ``{"PACK_GQA": False, "SPLIT_KV": 1}`` and explicit tile sizes, a query cut at a block boundary
            gives the bits of the whole one.
        return_aux: torch's AuxRequest: lse, max_scores or both are returned too. With ``selected`` also a
            :class:`tritoncp.SelectionAuxRequest`: lse, max_scores and the probabilities of the selected keys.
        mesh: DeviceMesh of one dimension or process group of the ranks that share the sequence; None: one
            device.
        positions: global positions [S_local] or [B, S_local] of the rows, to check that the shards are in the
            plan's order, which no shape shows (the check waits for the device).
        sinks: [Hq], learned logits that take probability and contribute no value
            (:mod:`tritoncp.call.sinks`); lse then counts them, max_scores does not.
        batch_offset: index in the whole batch of the tensors' batch row 0, for micro-batches: mods get
            b + batch_offset, and a mask or plan of the whole batch is read from that row on. None: the mask's
            batch size is the query's or 1.
        expand: ``(fn, *parameters)`` for latent attention (MLA): ``key`` is a latent [B, heads, S_local, C]
            of any C, and ``fn(latent_rows, *parameters)`` returns key [B, Hkv, rows, D] and value [B, Hkv,
            rows, E] of these rows. Ranks send the latent; each step expands the rows that it reads, and the
            backward pass expands them again, as :func:`torch.utils.checkpoint.checkpoint` does. Parameters
            are tensors, lists and dicts of them, modules (``fn`` may be one), or constants; tensors get
            this rank's part of their gradients. ``fn`` maps each row by itself and gets no positions:
            rotary channels are part of the latent, rotated beforehand. Not under Ulysses.
        selected: :class:`tritoncp.Selection`, keys that the model chose for each query: a pair is visible if
            the mask shows it and the key is selected. Work and memory are proportional to the number of
            selected keys.

    Returns:
        out [B, Hq, S_local, E] in the dtype of the query; with ``return_lse`` or ``return_aux`` also lse
        (natural log) and max_scores, float32 [B, Hq, S_local]. Out has the query's stride order, each
        gradient its tensor's, the last dimension innermost: a query that is ``x.transpose(1, 2)`` of an x
        [B, S, H, D] gives such an out. Fake and meta tensors have shapes only.

    Raises:
        TypeError: An argument is of another type; before any tensor data moves, as ValueError is.
        ValueError: Shapes, dtypes, devices, options, masks or plans do not fit each other or other ranks'.
        RuntimeError: State that the mask_mod reads has changed since the mask was made, another rank
            failed, or a transform of ``torch.func`` is applied.

    query, key, value and sinks may be DTensors over one mesh, of equal placements: heads or batch rows
    sharded, or replicated; over ``mesh``, the sequence, for a mask or a plan in natural order. Results are
    DTensors placed as the query. Masks and mods get the indices of the whole tensors.

    >>> latent, weight = torch.randn(1, 1, 256, 12), torch.randn(12, 2 * 64)
    >>> def expand(latent, weight):
    ...     return (latent @ weight).unflatten(-1, (2, 64)).squeeze(1).transpose(1, 2).split(32, -1)
    >>> flex_attention(q, latent, None, causal(), expand=(expand, weight)).shape
    torch.Size([1, 2, 256, 32])
    """
    call = Arguments(
        query, key, value, *sort_arguments(score_mod, block_mask, mesh), scale, enable_gqa, return_lse,
        kernel_options, return_aux, positions, sinks, batch_offset, expand, selected,
    )  # fmt: skip
    results: Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput] | tuple[Tensor, SelectionAuxOutput]
    if is_dtensor(query) or is_dtensor(key) or is_dtensor(value) or is_dtensor(sinks):
        from tritoncp.api import dtensors  # late: torch.distributed.tensor takes a second to import

        local = dtensors.localize(call)
        results = dtensors.as_dtensors(local.results(run_call(local)), query, selected)
    else:
        results = call.results(run_call(call))
    return results


@untraced
def run_call(call: Arguments) -> list[Tensor]:
    """Run one call, in the graph that Dynamo traces or on the host. Returns out and lse, and
    max_scores and probabilities if they are requested."""
    if torch._C._is_any_autocast_enabled():
        query, key, value = dispatch.cast_for_autocast(*call[:3])
        call = call._replace(query=query, key=key, value=value)
    dispatch.refuse_transforms()
    if torch.compiler.is_dynamo_compiling():
        try:
            return traced.attend_in_graph(call)
        except Uncapturable as error:
            reason = error.args[0]
            stop_traced_call(place_in_group(call.mesh)[0], "a graph break")
        torch._dynamo.graph_break(msg=reason)
    return _run_on_host(call)


@host_only
def _run_on_host(call: Arguments) -> list[Tensor]:
    """Run a call outside of a graph that Dynamo traces. To a mode of torch functions it is one function."""
    if torch._C._is_torch_function_mode_enabled():
        results: list[Tensor] = handle_torch_function(run_call, (), call)
        return results
    if dispatch.is_traced(call.query):
        with dispatch.fake_mode_of(call.query):
            return traced.attend_in_graph(call)
    call = check_call(call)
    plan = find_plan(call)
    prepared = prepare(call, plan)
    results = attend([prepared], call[:3])  # compares the ranks first
    if call.wants_probabilities:
        results += probabilities([prepared], [call], [results[1]])
    return results
