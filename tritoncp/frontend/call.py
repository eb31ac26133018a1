"""One call of `flex_attention`: finds the plan of a checked request, and runs the forward op."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from tritoncp.core.dynamo_boundary import host_only, untraced
from tritoncp.distributed import groups
from tritoncp.frontend import dynamo, plan_cache, validate
from tritoncp.frontend.group_call import group_name, stop_groups, stop_traced_call
from tritoncp.frontend.request import Request
from tritoncp.kernels.options import check_options
from tritoncp.kernels.tile_rules import architecture
from tritoncp.masks.traced_mask import TracedMask
from tritoncp.mods import Mod
from tritoncp.ops import call_modes, call_mods, engine_factory
from tritoncp.ops.autograd import forward
from tritoncp.ops.graph.layouts import Uncapturable
from tritoncp.ops.transforms import refuse_transforms
from tritoncp.planning.plan import Plan


@untraced
def attend(query: Tensor, key: Tensor, value: Tensor, request: Request) -> list[Tensor]:
    """Run one call, in the graph that Dynamo traces or on the host; return out, lse, max_scores."""
    if torch._C._is_any_autocast_enabled():
        query, key, value = call_modes.cast_for_autocast(query, key, value)
    refuse_transforms()
    validate.check_mesh(request.mask, groups.degree_of(request.mesh))
    if torch.compiler.is_dynamo_compiling():
        try:
            return dynamo.attend(query, key, value, request)
        except Uncapturable as error:
            reason = error.args[0]
            stop_traced_call(group_name(request.mesh), "a graph break")
        torch._dynamo.graph_break(msg=reason)
    return _attend_on_host(query, key, value, request)


@host_only
def _attend_on_host(query: Tensor, key: Tensor, value: Tensor, request: Request) -> list[Tensor]:
    """Run a call outside of a graph that Dynamo traces."""
    try:
        return _attend_now(query, key, value, request)
    except BaseException as error:  # also of a call whose caller could not be compiled
        stop_groups(error, (request.mesh, request.mask))
        raise


def _attend_now(query: Tensor, key: Tensor, value: Tensor, request: Request) -> list[Tensor]:
    if (substitute := _SUBSTITUTE.get()) is not None:
        with substitute_calls(None):
            return substitute(query, key, value, request)
    if call_modes.is_traced(query):
        check_options(request.options or {}, _local_architecture(query))
        with call_modes.fake_mode_of(query):
            return dynamo.attend(query, key, value, request)
    if isinstance(request.mask, TracedMask):
        request = request._replace(mask=request.mask.mask)
    group = groups.group_of(request.mesh)
    plan = plan_cache.plan_of_rows(
        request.mask, query, key, group, request.check_key(query, key, value, group),
        lambda: request.check(query, key, value), request.batch_offset,
    )  # fmt: skip
    world = None if group is None else group.group_name
    keys, values = validate.shared_batch(query, key), validate.shared_batch(query, value)
    validate.check_order(plan, request.positions)
    mod = call_mods.score_of(request.score_mod, query)  # lives as long as the call that names it
    rest = _op_arguments(query, mod, plan.pinned(), world, request)
    return forward([query], [keys], [values], *rest)


Call = Callable[[Tensor, Tensor, Tensor, Request], list[Tensor]]
_SUBSTITUTE: ContextVar[Call | None] = ContextVar("substitute", default=None)


@contextmanager
def substitute_calls(call: Call | None) -> Iterator[None]:
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


def attend_ranks(
    q: list[Tensor], k: list[Tensor], v: list[Tensor], plan: Plan, request: Request
) -> list[Tensor]:
    """Run one layer for the ranks whose tensors are passed; return outs, lses, max_scores."""
    mod = call_mods.score_of(request.score_mod, q[0])  # lives as long as the call that names it
    captures, *rest, handle, spec = _op_arguments(q[0], mod, plan, "", request)
    (handle,), captures = call_modes.as_inputs([handle]), call_modes.as_inputs(captures)
    return forward(q, k, v, captures, *rest, handle, spec)


def _op_arguments(
    q: Tensor, score: Mod | None, plan: Plan, world: str | None, request: Request
) -> tuple[Any, ...]:
    """Check score_mod, scale and options, and return the arguments of the forward op after q, k and v."""
    options: tuple[tuple[str, Any], ...] = ()
    if request.options:
        check_options(request.options, architecture(q.device))
        options = tuple(sorted(request.options.items()))
    numbers, captures, wants = (score.numbers, score.tensors, score.wants) if score else ((), (), ())
    ints = [n for n in numbers if isinstance(n, int)]
    floats = [n for n in numbers if not isinstance(n, int)]
    kinds = tuple(["i" if isinstance(n, int) else "f" for n in numbers])
    spec = engine_factory.Spec.encoded(
        score and score.digest, None, wants, kinds, request.want_max, world, options, request.returns
    )
    assert plan.handle is not None
    return list(captures), ints, floats, request.scale_for(q), plan.handle, spec
