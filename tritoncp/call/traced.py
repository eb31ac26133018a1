"""Attention and masks inside torch.compile. A graph serves all masks of one structure: its constants are the
structure of mods and masks; tensors, numbers and the handles of plans and masks are its inputs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tritoncp.call import plan_cache, validate
from tritoncp.call.autograd import forward_op
from tritoncp.core.dynamo_boundary import constant_result
from tritoncp.core.handles import handle_of
from tritoncp.distributed import failures, groups
from tritoncp.distributed.groups import place_in_group
from tritoncp.graph import dispatch
from tritoncp.graph.dispatch import register_op
from tritoncp.graph.handle_ops import fake_handle
from tritoncp.graph.inputs import flatten_callable, is_symbol, rebuild
from tritoncp.graph.spec import encode_spec
from tritoncp.kernels.options import check_options


def attend_in_graph(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: Any, mesh: Any, options: Any
) -> list[Tensor]:
    """Trace one attention call into the graph, or run it on fake tensors; return out, lse, max_scores.

    options: :class:`tritoncp.api.attention.Options`. Raises Uncapturable for a mod or mask that cannot be
    part of a graph.
    """
    world = place_in_group(mesh)[0]
    options, value = options.with_expansion(query, key, value)
    options.check(query, key, value)
    key, value = validate.shared_batch(query, key, value)
    captures: list[Tensor] = []
    numbers: list[int] = []
    score = None if score_mod is None else flatten_callable(score_mod, captures, numbers)
    tensors: list[Tensor] = []
    ints: list[int] = []
    expand, expansion = options.expand, None
    if expand is not None:
        expansion = flatten_callable(((expand.fn, *expand.arguments), expand.autocast), captures, numbers)
    scale, graph_scale = options.scale, None
    if is_symbol(scale):
        scale, graph_scale = 1.0, flatten_callable(scale, captures, numbers)
    else:
        scale = options.scale_for(query)
    kernel_options, graph_options = _split_options(options.kernel_options or {}, captures, numbers)
    structure = flatten_callable(block_mask, tensors, ints)
    sizes = [*validate.ShardSizes.of(query, key, expand)]
    options_of_plan = sizes, structure, world, options.positions, options.batch_offset
    plan = dispatch.run_on_values(plan_op, tensors, ints, *options_of_plan)
    wants = tuple([i for i, x in enumerate(captures) if x.requires_grad and x.is_floating_point()])
    key_sizes = None if expand is None else expand.sizes
    inputs = graph_scale, graph_options
    spec = _spec(score, wants, world, kernel_options, options.returns, expansion, key_sizes, *inputs)
    captures = dispatch.as_inputs(captures)
    return forward_op(query, key, value, captures, numbers, scale, plan, spec)


def _split_options(
    options: dict[str, Any], captures: list[Tensor], numbers: list[int]
) -> tuple[dict[str, Any], tuple[tuple[str, str], ...]]:
    """Split kernel options into constants of the graph, which are checked, and (name, structure) of symbols,
    which become inputs and are checked when the graph runs."""
    constants, symbols = {}, []
    for name, value in options.items():
        if is_symbol(value):
            symbols.append((name, flatten_callable(value, captures, numbers)))
        else:
            constants[name] = value
    check_options(constants)
    return constants, tuple(symbols)


@constant_result
def _spec(score: str | None, wants: tuple[int, ...], world: str, options: dict[str, Any], *rest: Any) -> str:
    """Encode the fields of a :class:`tritoncp.call.record.CallConstants`."""
    return encode_spec(score, wants, world, tuple(sorted(options.items())), *rest)


def _plan(
    tensors: list[Tensor],
    ints: list[int],
    shape: list[int],
    structure: str,
    world: str,
    positions: Tensor | None,
    batch_offset: int | None = None,
) -> Tensor:
    """Return the handle of the plan of a Plan or mask, flattened by :func:`flatten_callable`, after a check
    against the shards.

    shape: :class:`validate.ShardSizes`
    """
    group = groups.group_by_name(world) if world else None
    with failures.closing(group):
        mask = rebuild(structure, tensors, ints)
        call_key = *shape, group and (group.size(), group.rank()), batch_offset
        sizes = validate.ShardSizes(*shape)
        plan = plan_cache.plan_for(mask, sizes, group, call_key, batch_offset=batch_offset)
        validate.check_order(plan, positions)
        return handle_of(plan)


plan_op = register_op("plan", _plan, fake_handle)
