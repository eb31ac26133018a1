"""One call of `flex_attention`: checks its arguments, finds its plan, and runs its forward pass."""

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
from tritoncp.frontend.arguments import Options
from tritoncp.frontend.group_call import group_name, stop_traced_call
from tritoncp.kernels.options import check_options
from tritoncp.kernels.tile_rules import architecture
from tritoncp.masks.traced_mask import plain_mask
from tritoncp.ops import autograd, call_modes, call_mods
from tritoncp.ops.call import Call
from tritoncp.ops.graph.layouts import Uncapturable
from tritoncp.ops.transforms import refuse_transforms
from tritoncp.planning.plan import Plan


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
