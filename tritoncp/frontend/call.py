"""One call of `flex_attention`: its arguments sorted, checked, its plan found, and its forward pass run."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from tritoncp.core.dynamo_boundary import host_only, untraced
from tritoncp.distributed import groups
from tritoncp.frontend import dynamo, plan_cache, validate
from tritoncp.frontend.group_call import group_name, stop_traced_call
from tritoncp.kernels.options import check_options
from tritoncp.kernels.tile_rules import architecture
from tritoncp.masks.mask import Mask
from tritoncp.masks.mask_mod import MaskMod
from tritoncp.masks.traced_mask import TracedMask, plain_mask
from tritoncp.ops import autograd, call_modes, call_mods
from tritoncp.ops.call import Call
from tritoncp.ops.graph.layouts import Uncapturable
from tritoncp.ops.sinks import with_sinks
from tritoncp.ops.transforms import refuse_transforms
from tritoncp.planning.plan import Plan

MASKS = (BlockMask, Mask, MaskMod, Plan, TracedMask)


class Options(NamedTuple):
    """The arguments of one call besides query, key, value, score_mod, mask and mesh, as they were passed."""

    scale: float | None
    enable_gqa: bool
    return_lse: bool
    kernel_options: dict[str, Any] | None
    return_aux: AuxRequest | None
    positions: Tensor | None
    sinks: Tensor | None
    batch_offset: int | None

    @property
    def returns(self) -> tuple[str, ...]:
        """All requested results besides out."""
        aux, sinks = self.return_aux, ("sinks",) * (self.sinks is not None)
        if aux is None:
            return ("lse", *sinks) if self.return_lse else sinks
        return ("lse",) * (self.return_lse or aux.lse) + ("max_scores",) * aux.max_scores + sinks

    def scale_for(self, query: Tensor) -> float:
        """Return the scale of scores; torch's if none is passed."""
        if self.scale is None:
            return 1 / math.sqrt(query.shape[3])
        validate.check_scale(self.scale)
        return float(self.scale)

    def check(self, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> None:
        """Check all that does not depend on the plan. mask: of the call, whose lengths may explain an
        error."""
        validate.check_aux(self.return_lse, self.return_aux)
        validate.check_tensors(query, key, value, self.enable_gqa, mask)
        validate.check_sinks(query, self.sinks)

    def check_key(self, query: Tensor, key: Tensor, value: Tensor, group: Any) -> Any:
        """Return the key of the checks: calls of equal keys under one plan pass or fail the same ones."""
        flags = bool(self.enable_gqa), bool(self.return_lse), type(self.return_aux)
        return validate.call_key(query, key, value, self.sinks, group, *flags, self.batch_offset)

    def results(self, outs: Sequence[Tensor]) -> Any:
        """Return the requested results, sinks included: out, (out, lse) or (out, AuxOutput)."""
        out, lse, *tops = outs
        if self.sinks is not None:
            out, lse = with_sinks(out, lse, self.sinks)
        if (aux := self.return_aux) is not None:
            return out, AuxOutput(lse=lse if aux.lse else None, max_scores=tops[0] if tops else None)
        return (out, lse) if self.return_lse else out


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


@untraced
def attend(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, mask: Any, mesh: Any, options: Options
) -> list[Tensor]:
    """Run one call, in the graph that Dynamo traces or on the host; return out, lse, max_scores."""
    if torch._C._is_any_autocast_enabled():
        query, key, value = call_modes.cast_for_autocast(query, key, value)
    refuse_transforms()
    if mesh is not None:
        validate.check_mesh(mask, groups.degree_of(mesh))
    if torch.compiler.is_dynamo_compiling():
        try:
            return dynamo.attend(query, key, value, score_mod, mask, mesh, options)
        except Uncapturable as error:
            reason = error.args[0]
            stop_traced_call(group_name(mesh), "a graph break")
        torch._dynamo.graph_break(msg=reason)
    return _attend_on_host(query, key, value, score_mod, mask, mesh, options)


@host_only
def _attend_on_host(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, mask: Any, mesh: Any, options: Options
) -> list[Tensor]:
    """Run a call outside of a graph that Dynamo traces."""
    if (substitute := _SUBSTITUTE.get()) is not None:
        with substitute_calls(None):
            return substitute(query, key, value, score_mod, mask, mesh, options)
    if call_modes.is_traced(query):
        check_options(options.kernel_options or {}, _local_architecture(query))
        with call_modes.fake_mode_of(query):
            return dynamo.attend(query, key, value, score_mod, mask, mesh, options)
    group, mask = groups.group_of(mesh), plain_mask(mask)
    plan = plan_cache.plan_of_rows(
        mask, query, key, group, options.check_key(query, key, value, group),
        lambda: options.check(query, key, value, mask), options.batch_offset,
    )  # fmt: skip
    validate.check_order(plan, options.positions)
    key, value = validate.shared_batch(query, key, value)
    return autograd.forward(make_call(query, plan, score_mod, group, options), query, key, value)


def make_call(query: Tensor, plan: Plan, score_mod: Any, group: Any, options: Options) -> Call:
    """Make the record of a call from its checked plan, its score_mod and its options, which are checked."""
    kernel_options: tuple[tuple[str, Any], ...] = ()
    if options.kernel_options:
        check_options(options.kernel_options, architecture(query.device))
        kernel_options = tuple(sorted(options.kernel_options.items()))
    score, scale = call_mods.score_of(score_mod, query), options.scale_for(query)
    return Call(plan.of_batch(query.shape[0]), score, scale, group, kernel_options, options.returns)


Attend = Callable[[Tensor, Tensor, Tensor, Any, Any, Any, Options], list[Tensor]]
_SUBSTITUTE: ContextVar[Attend | None] = ContextVar("substitute", default=None)


@contextmanager
def substitute_calls(call: Attend | None) -> Iterator[None]:
    """Have another function answer the calls of `flex_attention` in this context, with the arguments of
    :func:`attend`; None: none."""
    token = _SUBSTITUTE.set(call)
    try:
        yield
    finally:
        _SUBSTITUTE.reset(token)


def _local_architecture(x: Tensor) -> str | None:
    """Return the architecture of a tensor's device; None if this machine does not have it, as a fake or meta
    tensor's."""
    if x.device.type not in ("cpu", "cuda"):
        return None
    try:
        return architecture(x.device)
    except (AssertionError, RuntimeError):  # of torch without CUDA, or without a GPU
        return None
