"""`flex_attention`: checks a call, finds its plan and runs the forward op."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

from tritoncp.api.plans import MaskLike
from tritoncp.core.dynamo_boundary import graph_entry, host_only
from tritoncp.distributed import groups
from tritoncp.frontend import dynamo, plan_cache, validate
from tritoncp.kernels.options import check_options
from tritoncp.kernels.tile_rules import architecture
from tritoncp.masks.traced_mask import plain_mask
from tritoncp.mods import Mod
from tritoncp.ops import call_modes, call_mods, engine_factory, signatures
from tritoncp.ops.autograd import forward
from tritoncp.ops.graph.layouts import Uncapturable
from tritoncp.ops.sinks import with_sinks
from tritoncp.ops.transforms import refuse_transforms
from tritoncp.planning.plan import Plan


@graph_entry
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
    Few rows (up to about a hundred) against many keys: query heads that share keys lie in one tile and
    several programs share a row's keys, in numbers that fill the device. ``kernel_options``: ``"PACK_GQA"``,
    True or False, and ``"SPLIT_KV"``, the number of programs; with ``{"PACK_GQA": False, "SPLIT_KV": 1}`` and
    tiles that are given too, rows cut off at a block boundary have the bits that they have in the whole.

    >>> q = k = v = torch.randn(1, 2, 256, 32)
    >>> from tritoncp import causal
    >>> flex_attention(q, k, v, causal()).shape
    torch.Size([1, 2, 256, 32])
    """
    arguments: Any = (
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux,
        mesh, positions, sinks, batch_offset,
    )  # fmt: skip
    if torch.compiler.is_dynamo_compiling():
        try:
            return _call_in_graph(*arguments)
        except Uncapturable as error:
            reason = error.args[0]
        torch._dynamo.graph_break(msg=reason)
    return _call(*arguments)


def _call_in_graph(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: Any, scale: float | None,
    enable_gqa: bool, return_lse: bool, kernel_options: dict[str, Any] | None, return_aux: AuxRequest | None,
    mesh: Any, positions: Tensor | None, sinks: Tensor | None, batch_offset: int | None,
) -> Any:  # fmt: skip
    """Run :func:`flex_attention` in a graph: traced, or on tensors without values.

    Raises Uncapturable for a mod or mask that the graph cannot carry.
    """
    if torch._C._is_any_autocast_enabled():
        query, key, value = call_modes.cast_for_autocast(query, key, value)
    refuse_transforms()
    score, mask, mesh = validate.arguments(score_mod, block_mask, mesh)
    validate.check_mesh(mask, groups.degree_of(mesh))
    want_max, returns = _results(return_lse, return_aux, sinks)
    validate.check_aux(return_lse, return_aux)
    validate.check_tensors(query, key, value, enable_gqa, mask)
    validate.check_sinks(query, sinks)
    key, value = validate.shared_batch(query, key), validate.shared_batch(query, value)
    scale = 1 / math.sqrt(query.shape[3]) if scale is None else float(scale)
    qkv = query, key, value
    outs = dynamo.attend(
        *qkv, score, mask, mesh, scale, kernel_options, want_max, positions, returns, batch_offset
    )
    if sinks is not None:
        outs = [*with_sinks(outs[0], outs[1], sinks), *outs[2:]]
    return _select_results(outs, return_lse, return_aux)


@host_only
def _call(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: Any, scale: float | None,
    enable_gqa: bool, return_lse: bool, kernel_options: dict[str, Any] | None, return_aux: AuxRequest | None,
    mesh: Any, positions: Tensor | None, sinks: Tensor | None, batch_offset: int | None,
) -> Any:  # fmt: skip
    """Run :func:`flex_attention` outside of a graph that Dynamo traces."""
    if (replacement := _replacement.get()) is not None:
        with replaced(None):
            return replacement(
                query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
                return_aux, mesh, positions, sinks, batch_offset,
            )  # fmt: skip
    if call_modes.is_traced(query):
        check_options(kernel_options or {}, _local_architecture(query))
        return _call_in_graph(
            query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
            return_aux, mesh, positions, sinks, batch_offset,
        )  # fmt: skip
    if torch._C._is_any_autocast_enabled():
        query, key, value = call_modes.cast_for_autocast(query, key, value)
    refuse_transforms()
    score, mask, mesh = validate.arguments(score_mod, block_mask, mesh)
    mask = plain_mask(mask)
    validate.check_mesh(mask, groups.degree_of(mesh))
    want_max, returns = _results(return_lse, return_aux, sinks)

    def check() -> None:
        validate.check_aux(return_lse, return_aux)
        validate.check_tensors(query, key, value, enable_gqa, mask)
        validate.check_sinks(query, sinks)

    group = groups.group_of(mesh)
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
    return _select_results(outs, return_lse, return_aux)


_replacement: ContextVar[Callable[..., Any] | None] = ContextVar("replacement", default=None)


@contextmanager
def replaced(call: Callable[..., Any] | None) -> Iterator[None]:
    """Have another function answer the calls of :func:`flex_attention` in this context, with its arguments in
    their order; None: flex_attention itself."""
    token = _replacement.set(call)
    try:
        yield
    finally:
        _replacement.reset(token)


def _local_architecture(x: Tensor) -> str | None:
    """Return the architecture of a tensor's device; None if this machine does not have it, as a fake or meta
    tensor's."""
    if x.device.type not in ("cpu", "cuda"):
        return None
    try:
        return architecture(x.device)
    except (AssertionError, RuntimeError):  # of torch without CUDA, or without a GPU
        return None


def _results(return_lse: bool, return_aux: AuxRequest | None, sinks: Any) -> tuple[bool, tuple[str, ...]]:
    """Return whether max_scores is requested, and all requested results besides out."""
    want_max = return_aux is not None and return_aux.max_scores
    want_lse = return_lse or (return_aux is not None and return_aux.lse)
    returns = ("lse",) * want_lse + ("max_scores",) * want_max + ("sinks",) * (sinks is not None)
    return want_max, returns


def _select_results(outs: Sequence[Tensor], return_lse: bool, return_aux: AuxRequest | None) -> Any:
    """Return the requested ones of out, lse and max_scores: out, (out, lse) or (out, AuxOutput)."""
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
    captures, *rest, handle, spec = _arguments(q[0], mod, plan, world, scale, options, want_max, ())
    (handle,), captures = call_modes.as_inputs([handle]), call_modes.as_inputs(captures)
    return forward(q, k, v, captures, *rest, handle, spec)


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
