"""One call of `flex_attention`: sorts and checks its arguments, finds its plan, and runs the forward op."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from tritoncp.core.dynamo_boundary import host_only, untraced
from tritoncp.distributed import groups
from tritoncp.frontend import dynamo, plan_cache, validate
from tritoncp.kernels.options import check_options
from tritoncp.kernels.tile_rules import architecture
from tritoncp.masks.mask import Mask
from tritoncp.masks.mask_mod import MaskMod
from tritoncp.masks.traced_mask import TracedMask
from tritoncp.mods import Mod
from tritoncp.ops import call_modes, call_mods, engine_factory, signatures
from tritoncp.ops.autograd import forward
from tritoncp.ops.graph.layouts import Uncapturable
from tritoncp.ops.sinks import with_sinks
from tritoncp.ops.transforms import refuse_transforms
from tritoncp.planning.plan import Plan

MASKS = (BlockMask, Mask, MaskMod, Plan, TracedMask)


class Request(NamedTuple):
    """The arguments of one call besides query, key and value, sorted from either call shape."""

    score_mod: Any
    mask: Any
    mesh: Any
    scale: float | None
    enable_gqa: bool
    return_lse: bool
    options: dict[str, Any] | None
    return_aux: AuxRequest | None
    positions: Tensor | None
    sinks: Tensor | None
    batch_offset: int | None

    @property
    def want_max(self) -> bool:
        """Whether max_scores is requested."""
        return self.return_aux is not None and self.return_aux.max_scores

    @property
    def returns(self) -> tuple[str, ...]:
        """All requested results besides out."""
        want_lse = self.return_lse or (self.return_aux is not None and self.return_aux.lse)
        sinks = self.sinks is not None
        return ("lse",) * want_lse + ("max_scores",) * self.want_max + ("sinks",) * sinks

    def check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Check all that does not depend on the plan."""
        validate.check_aux(self.return_lse, self.return_aux)
        validate.check_tensors(query, key, value, self.enable_gqa, self.mask)
        validate.check_sinks(query, self.sinks)

    def check_key(self, query: Tensor, key: Tensor, value: Tensor, group: Any) -> Any:
        """Return the key of the checks: calls of equal keys under one plan pass or fail the same ones."""
        flags = bool(self.enable_gqa), bool(self.return_lse), self.return_aux is None
        return validate.call_key(query, key, value, self.sinks, group, *flags, self.batch_offset)

    def results(self, outs: Sequence[Tensor]) -> Any:
        """Return what was requested of out, lse and max_scores, sinks included: out, (out, lse) or (out,
        AuxOutput)."""
        out, lse, *tops = outs
        if self.sinks is not None:
            out, lse = with_sinks(out, lse, self.sinks)
        if (aux := self.return_aux) is not None:
            return out, AuxOutput(lse=lse if aux.lse else None, max_scores=tops[0] if tops else None)
        return (out, lse) if self.return_lse else out


@untraced
def attend(query: Tensor, key: Tensor, value: Tensor, request: Request) -> list[Tensor]:
    """Run one call, in the graph that Dynamo traces or on the host; return out, lse, max_scores."""
    if torch._C._is_any_autocast_enabled():
        query, key, value = call_modes.cast_for_autocast(query, key, value)
    refuse_transforms()
    validate.check_mesh(request.mask, groups.degree_of(request.mesh))
    if torch.compiler.is_dynamo_compiling():
        try:
            return _attend_in_graph(query, key, value, request)
        except Uncapturable as error:
            reason = error.args[0]
        torch._dynamo.graph_break(msg=reason)
    return _attend_on_host(query, key, value, request)


def _attend_in_graph(query: Tensor, key: Tensor, value: Tensor, request: Request) -> list[Tensor]:
    """Run a call in a graph: traced, or on tensors without values.

    Raises Uncapturable for a mod or mask that the graph cannot carry.
    """
    request.check(query, key, value)
    key, value = validate.shared_batch(query, key), validate.shared_batch(query, value)
    return dynamo.attend(
        query, key, value, request.score_mod, request.mask, request.mesh, _scale(request.scale, query),
        request.options, request.want_max, request.positions, request.returns, request.batch_offset,
    )  # fmt: skip


@host_only
def _attend_on_host(query: Tensor, key: Tensor, value: Tensor, request: Request) -> list[Tensor]:
    """Run a call outside of a graph that Dynamo traces."""
    if call_modes.is_traced(query):
        check_options(request.options or {}, _local_architecture(query))
        return _attend_in_graph(query, key, value, request)
    if isinstance(request.mask, TracedMask):
        request = request._replace(mask=request.mask.mask)
    group = groups.group_of(request.mesh)
    plan = plan_cache.plan_of_rows(
        request.mask, query, key, group, request.check_key(query, key, value, group),
        lambda: request.check(query, key, value), request.batch_offset,
    )  # fmt: skip
    world = None if group is None else group.group_name
    keys, values = validate.shared_batch(query, key), validate.shared_batch(query, value)
    try:
        validate.check_order(plan, request.positions)
        mod = call_mods.score_of(request.score_mod, query)  # lives as long as the call that names it
        rest = _op_arguments(
            query, mod, plan.pinned(), world, request.scale, request.options, request.want_max,
            request.returns,
        )  # fmt: skip
    except Exception as error:
        signatures.share_failure(group, plan, error)
        raise
    return forward([query], [keys], [values], *rest)


def _local_architecture(x: Tensor) -> str | None:
    """Return the architecture of a tensor's device; None if this machine does not have it, as a fake or meta
    tensor's."""
    if x.device.type not in ("cpu", "cuda"):
        return None
    try:
        return architecture(x.device)
    except (AssertionError, RuntimeError):  # of torch without CUDA, or without a GPU
        return None


def attend_ranks(
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
    captures, *rest, handle, spec = _op_arguments(q[0], mod, plan, world, scale, options, want_max, ())
    (handle,), captures = call_modes.as_inputs([handle]), call_modes.as_inputs(captures)
    return forward(q, k, v, captures, *rest, handle, spec)


def _op_arguments(
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
    assert plan.handle is not None
    return list(captures), ints, floats, _scale(scale, q), plan.handle, spec


def _scale(scale: float | None, query: Tensor) -> float:
    return 1 / math.sqrt(query.shape[3]) if scale is None else float(scale)


def sort_arguments(fourth: Any, fifth: Any, mesh: Any) -> tuple[Any, Any, Any]:
    """Return (score_mod, mask, mesh) from either call shape."""
    if type(fourth) is not FunctionType and isinstance(fourth, MASKS):
        if fifth is not None and mesh is not None:
            raise TypeError(
                "two meshes: the fifth argument and mesh=; with a mask in fourth place give one of them"
            )
        if isinstance(fifth, MASKS):
            raise TypeError("two masks: the fourth and the fifth argument; a score_mod goes in fourth place")
        return None, fourth, mesh if fifth is None else fifth
    if callable(fourth):
        _check_score_mod(fourth)
    elif fourth is not None:
        raise TypeError(
            "the fourth argument is a score_mod, a mask or a Plan; got a "
            f"{type(fourth).__name__}{_dense_mask_hint(fourth)}"
        )
    if fifth is None or isinstance(fifth, MASKS):
        return fourth, fifth, mesh
    if callable(fifth):
        raise TypeError(
            "block_mask is a mask, not a function; make it with create_block_mask(mask_mod, B, H, Q_LEN, "
            "KV_LEN)"
        )
    if isinstance(fifth, Tensor):
        raise TypeError(f"block_mask is a mask or a Plan; got a Tensor{_dense_mask_hint(fifth)}")
    if fourth is not None:
        raise TypeError(
            f"after a score_mod comes a mask or a Plan; got a {type(fifth).__name__}; pass mesh= by name"
        )
    return None, None, fifth


def _dense_mask_hint(argument: Any) -> str:
    if not isinstance(argument, Tensor):
        return ""
    return "; a dense mask becomes one by create_block_mask(lambda b, h, q, kv: mask[q, kv], ...)"


def _check_score_mod(fn: Any) -> None:
    if torch.compiler.is_dynamo_compiling():
        return  # inspecting the signature would recompile for every function; translation checks it too
    plain = type(fn) is FunctionType and not fn.__dict__  # else it may wrap another function
    if plain and fn.__code__.co_argcount - len(fn.__defaults__ or ()) != 4:
        return  # inspect.signature takes longer than a kernel launch
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return  # a jit function or a builtin: its own translation checks it
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.kind in places and p.default is inspect.Parameter.empty]
    if len(needed) == 4 and not any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        raise TypeError(
            "this is a mask_mod (four arguments), and a callable in fourth place is a score_mod; make the "
            "mask with create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN) and pass that"
        )
