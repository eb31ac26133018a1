"""The public `flex_attention`: sorts and checks arguments, finds the plan, runs the forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType
from typing import Any, Literal, NamedTuple, TypedDict, overload

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from tritoncp.api.group_call import group_call, stop_traced_call
from tritoncp.api.plans import MaskLike
from tritoncp.call import autograd, call_mods, plan_cache, traced, validate
from tritoncp.call.executable import MAX_CHECKED_CALLS
from tritoncp.call.facts import with_facts
from tritoncp.call.record import Call
from tritoncp.call.sinks import with_sinks
from tritoncp.core.bounded_cache import BoundedCache
from tritoncp.core.dynamo_boundary import graph_entry, host_only, untraced
from tritoncp.core.host_copy import is_dtensor
from tritoncp.distributed import groups
from tritoncp.distributed.groups import Mesh, place_in_group
from tritoncp.graph import dispatch
from tritoncp.graph.layouts import Uncapturable
from tritoncp.kernels.options import check_options
from tritoncp.kernels.tile_rules import architecture
from tritoncp.masks.mask import Mask
from tritoncp.masks.mask_mod import MaskMod
from tritoncp.masks.traced_mask import TracedMask, plain_mask
from tritoncp.planning.plan import Plan

ScoreMod = Callable[..., Tensor] | MaskLike | None  # a mask may be in its place
MASKS = (BlockMask, Mask, MaskMod, Plan, TracedMask)


class KeywordOptions(TypedDict, total=False):
    """Types of arguments by name that `varlen_attention` and `World.flex_attention` pass on."""

    scale: float | None
    sinks: Tensor | None
    kernel_options: dict[str, Any] | None


class Options(NamedTuple):
    """The arguments of one call besides query, key, value, score_mod, mask and mesh, as they were passed."""

    scale: float | None = None
    enable_gqa: bool = False
    return_lse: bool = False
    kernel_options: dict[str, Any] | None = None
    return_aux: AuxRequest | None = None
    positions: Tensor | None = None
    sinks: Tensor | None = None
    batch_offset: int | None = None
    expand: Any = None

    @property
    def returns(self) -> tuple[str, ...]:
        """Names of the requested results besides out."""
        aux, sinks = self.return_aux, ("sinks",) * (self.sinks is not None)
        if aux is None:
            return ("lse", *sinks) if self.return_lse else sinks
        return ("lse",) * (self.return_lse or aux.lse) + ("max_scores",) * aux.max_scores + sinks

    def scale_for(self, query: Tensor) -> float:
        """Return the scale of scores: the argument, or 1/sqrt(head dim) as in torch."""
        if self.scale is None:
            return 1 / math.sqrt(query.shape[3])
        validate.check_scale(self.scale)
        return float(self.scale)

    def with_expansion(self, query: Tensor, key: Tensor, value: Any) -> tuple[Options, Tensor]:
        """Return (options with the checked record of ``expand``, value); without ``expand``, both unchanged.
        The value of a latent has zero channels."""
        if self.expand is None:
            return self, value
        expansion = validate.expansion_of(query, key, value, self.expand, self.enable_gqa)
        return self._replace(expand=expansion), key.detach()[..., :0]

    def check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Check the arguments that can be checked without a plan."""
        validate.check_aux(self.return_lse, self.return_aux)
        if self.expand is None:
            validate.check_tensors(query, key, value, self.enable_gqa)
        validate.check_sinks(query, self.sinks)

    def results(self, outs: Sequence[Tensor]) -> Any:
        """Return the requested results, sinks included: out, (out, lse) or (out, AuxOutput)."""
        out, lse, *tops = outs
        if self.sinks is not None:
            out, lse = with_sinks(out, lse, self.sinks, bool((self.kernel_options or {}).get("invariant")))
        if (aux := self.return_aux) is not None:
            return out, AuxOutput(lse=lse if aux.lse else None, max_scores=tops[0] if tops else None)
        return (out, lse) if self.return_lse else out


@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor | None, score_mod: ScoreMod = ...,
    block_mask: MaskLike | Mesh = ..., scale: float | None = ..., enable_gqa: bool = ...,
    return_lse: Literal[False] = ..., kernel_options: dict[str, Any] | None = ..., *, return_aux: None = ...,
    mesh: Mesh = ..., positions: Tensor | None = ..., sinks: Tensor | None = ...,
    batch_offset: int | None = ..., expand: Sequence[Any] | None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor | None, score_mod: ScoreMod = ...,
    block_mask: MaskLike | Mesh = ..., scale: float | None = ..., enable_gqa: bool = ..., *,
    return_lse: Literal[True], kernel_options: dict[str, Any] | None = ..., return_aux: None = ...,
    mesh: Mesh = ..., positions: Tensor | None = ..., sinks: Tensor | None = ...,
    batch_offset: int | None = ..., expand: Sequence[Any] | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor | None, score_mod: ScoreMod = ...,
    block_mask: MaskLike | Mesh = ..., scale: float | None = ..., enable_gqa: bool = ...,
    return_lse: Literal[False] = ..., kernel_options: dict[str, Any] | None = ..., *, return_aux: AuxRequest,
    mesh: Mesh = ..., positions: Tensor | None = ..., sinks: Tensor | None = ...,
    batch_offset: int | None = ..., expand: Sequence[Any] | None = ...,
) -> tuple[Tensor, AuxOutput]: ...  # fmt: skip
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor | None, score_mod: ScoreMod = ...,
    block_mask: MaskLike | Mesh = ..., scale: float | None = ..., enable_gqa: bool = ...,
    return_lse: bool = ..., kernel_options: dict[str, Any] | None = ..., *,
    return_aux: AuxRequest | None = ..., mesh: Mesh = ..., positions: Tensor | None = ...,
    sinks: Tensor | None = ..., batch_offset: int | None = ..., expand: Sequence[Any] | None = ...,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]: ...  # fmt: skip
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
    return_aux: AuxRequest | None = None,
    mesh: Mesh = None,
    positions: Tensor | None = None,
    sinks: Tensor | None = None,
    batch_offset: int | None = None,
    expand: Sequence[Any] | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
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

    Arguments are torch's plus ``mesh`` and the last four, or ``(q, k, v, block_mask, mesh)``. Masks and
    mods see global indices. There is no dropout.

    Args:
        query: [B, Hq, S_local, D], this rank's shard, in natural order for a mask, in the plan's order for
            a Plan. bf16, fp16, fp32, or fp64 interpreted. Under autocast query, key and value are cast to
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
        return_aux: torch's AuxRequest: lse, max_scores or both are returned too.
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

    Returns:
        out [B, Hq, S_local, E] in the dtype of the query; with ``return_lse`` or ``return_aux`` also lse
        (natural log) and max_scores, float32 [B, Hq, S_local]. Out has the query's stride order, each
        gradient its tensor's, the last dimension innermost: a query that is ``x.transpose(1, 2)`` of an x
        [B, S, H, D] gives such an out. Fake and meta tensors have shapes only.

    Raises:
        TypeError: An argument is of another type; before any tensor data moves, as ValueError is.
        ValueError: Shapes, dtypes, devices, options, masks or plans do not fit each other or those of other
            ranks.
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
    score_mod, block_mask, mesh = sort_arguments(score_mod, block_mask, mesh)
    options = Options(
        scale, enable_gqa, return_lse, kernel_options, return_aux, positions, sinks, batch_offset, expand
    )
    results: Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]
    if is_dtensor(query) or is_dtensor(key) or is_dtensor(value) or is_dtensor(sinks):
        from tritoncp.api import dtensors  # late: torch.distributed.tensor takes a second to import

        call = dtensors.localize(query, key, value, score_mod, block_mask, mesh, options)
        results = call.as_dtensors(call.arguments[-1].results(run_call(*call.arguments)))
        return results
    results = options.results(run_call(query, key, value, score_mod, block_mask, mesh, options))
    return results


def sort_arguments(score_mod: Any, block_mask: Any, mesh: Any) -> tuple[Any, Any, Any]:
    """Return (score_mod, block_mask, mesh) from the fourth and fifth argument and mesh=: calls are
    ``(q, k, v, block_mask, mesh)`` or torch's ``(q, k, v, score_mod, block_mask, mesh=mesh)``."""
    if type(score_mod) is not FunctionType and isinstance(score_mod, MASKS):
        if block_mask is None:
            return None, score_mod, mesh
        if isinstance(block_mask, MASKS):
            raise TypeError(
                "block_mask: the fourth and the fifth argument are both masks; pass one of them (a score_mod "
                "is the fourth argument)"
            )
        if mesh is not None:
            raise TypeError("mesh is both the fifth argument and mesh=: pass one of them")
        return None, score_mod, block_mask
    if callable(score_mod):
        if not torch.compiler.is_dynamo_compiling():  # would recompile for every function
            call_mods.check_score_mod(score_mod)
    elif score_mod is not None:
        raise TypeError(
            f"score_mod, the fourth argument, is a {type(score_mod).__name__}; a score_mod, a mask or a Plan "
            f"is needed{_hint(score_mod)}"
        )
    if block_mask is None or isinstance(block_mask, MASKS):
        return score_mod, block_mask, mesh
    if callable(block_mask):
        raise TypeError(
            "block_mask is a function; a mask is needed: make it with create_block_mask(mask_mod, B, H, "
            "Q_LEN, KV_LEN)"
        )
    if isinstance(block_mask, Tensor):
        raise TypeError(f"block_mask is a Tensor; a mask or a Plan is needed{_hint(block_mask)}")
    if score_mod is not None:
        raise TypeError(
            f"block_mask, after a score_mod, is a {type(block_mask).__name__}; a mask or a Plan is needed: "
            "pass a mesh by name, mesh=..."
        )
    if not groups.is_mesh(block_mask):
        raise TypeError(
            f"block_mask, the fifth argument, is a {type(block_mask).__name__}; a mask, a Plan or a mesh is "
            f"needed{_hint(block_mask)}"
        )
    return None, None, block_mask


def _hint(argument: Any) -> str:
    """Return the end of an error about an argument that is no mask: how to get one."""
    if isinstance(argument, Mapping):
        return f": pass the value of this layer, of {', '.join(map(repr, argument))}"
    if isinstance(argument, Tensor):
        return "; a dense mask becomes one by create_block_mask(lambda b, h, q, kv: mask[q, kv], ...)"
    return ""


@untraced
def run_call(
    query: Tensor, key: Tensor, value: Any, score_mod: Any, block_mask: Any, mesh: Any, options: Options
) -> list[Tensor]:
    """Run one call, in the graph that Dynamo traces or on the host; return out, lse, max_scores."""
    if torch._C._is_any_autocast_enabled():
        query, key, value = dispatch.cast_for_autocast(query, key, value)
    dispatch.refuse_transforms()
    validate.check_mesh(mesh, block_mask)
    if torch.compiler.is_dynamo_compiling():
        try:
            return traced.attend_in_graph(query, key, value, score_mod, block_mask, mesh, options)
        except Uncapturable as error:
            reason = error.args[0]
            stop_traced_call(place_in_group(mesh)[0], "a graph break")
        torch._dynamo.graph_break(msg=reason)
    return _run_on_host(query, key, value, score_mod, block_mask, mesh, options)


# Kinds of calls whose tensors passed the checks, by `validate.call_key`.
_CHECKED_CALLS: BoundedCache[Any, validate.CallKind] = BoundedCache(MAX_CHECKED_CALLS)


@host_only
def _run_on_host(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: Any, mesh: Any, options: Options
) -> list[Tensor]:
    """Run a call outside of a graph that Dynamo traces."""
    if (substitute := _SUBSTITUTE.get()) is not None:
        with substitute_calls(None):
            return substitute(query, key, value, score_mod, block_mask, mesh, options)
    if dispatch.is_traced(query):
        with dispatch.fake_mode_of(query):
            return traced.attend_in_graph(query, key, value, score_mod, block_mask, mesh, options)
    group, call_key, kind = groups.group_of(mesh), None, None
    if options.expand is not None:  # its parameters are read at each call
        options, value = options.with_expansion(query, key, value)
    elif (call_key := validate.call_key(query, key, value, group, options)) is not None:
        kind = _CHECKED_CALLS.get(call_key)
    if kind is None:
        options.check(query, key, value)  # before a plan is made, for which ranks exchange their lengths
        if call_key is not None:
            kind = _CHECKED_CALLS.put(call_key, validate.CallKind(query, key, value))
    sizes = validate.ShardSizes.of(query, key, options.expand) if kind is None else kind.sizes
    plan = plan_cache.plan_for(plain_mask(block_mask), sizes, group, kind, options.batch_offset)
    validate.check_order(plan, options.positions)
    if kind is None or kind.shares_batch:
        key, value = validate.shared_batch(query, key, value)
    call = make_call(query, plan, score_mod, group, options)
    if kind is not None:
        call = with_facts(call, kind, query, key, value)
    return autograd.forward([call], (query, key, value))


def make_call(query: Tensor, plan: Plan, score_mod: Any, group: Any, options: Options) -> Call:
    """Check the options of a call and make its record."""
    kernel_options: tuple[tuple[str, Any], ...] = ()
    if options.kernel_options:
        check_options(options.kernel_options, architecture(query.device))
        kernel_options = tuple(sorted(options.kernel_options.items()))
    dtype, device = query.dtype, query.device
    score, tensors = (None, ()) if score_mod is None else call_mods.translate_score(score_mod, dtype, device)
    scale = options.scale_for(query)
    return Call(plan, score, scale, group, kernel_options, options.returns, options.expand, tensors)


Substitute = Callable[[Tensor, Tensor, Tensor, Any, Any, Any, Options], list[Tensor]]
_SUBSTITUTE: ContextVar[Substitute | None] = ContextVar("substitute", default=None)


@contextmanager
def substitute_calls(call: Substitute | None) -> Iterator[None]:
    """Replace `flex_attention` inside this context: ``call`` gets the arguments of :func:`run_call`. None:
    no replacement."""
    token = _SUBSTITUTE.set(call)
    try:
        yield
    finally:
        _SUBSTITUTE.reset(token)
