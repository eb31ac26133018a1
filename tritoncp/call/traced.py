"""Attention and masks inside torch.compile: a call is two ops in the graph, `plan` (below) and `forward`
(call/autograd.py), and a third one if probabilities of selected keys are requested. A graph serves all masks
of one structure: the structure of mods and masks is constant; tensors, numbers and the handles of plans and
masks are inputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tritoncp.call import check_arguments, check_shards, plan_cache
from tritoncp.call.autograd import forward_op
from tritoncp.call.read import Arguments, ShardSizes
from tritoncp.call.selected.probabilities import probabilities_in_graph
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
from tritoncp.selection.selection import check_form, check_shape


def attend_in_graph(call: Arguments) -> list[Tensor]:
    """Trace one attention call into the graph, or run it on fake tensors; return out and lse, and
    max_scores and probabilities if they are requested.

    Raises Uncapturable for a mod or mask that cannot be part of a graph.
    """
    check_arguments.check_mesh(call.mesh, call.block_mask)
    world = place_in_group(call.mesh)[0]
    call = check_arguments.shared_batch(check_arguments.check_arguments(call))
    captures: list[Tensor] = []
    numbers: list[int] = []
    score = None if call.score_mod is None else flatten_callable(call.score_mod, captures, numbers)
    expand, expansion, key_sizes = call.expand, None, None
    if expand is not None:
        expansion = flatten_callable(((expand.fn, *expand.arguments), expand.autocast), captures, numbers)
        key_sizes = expand.sizes
    scale, graph_scale = 1.0, None
    if is_symbol(call.scale):
        graph_scale = flatten_callable(call.scale, captures, numbers)
    else:
        scale = check_arguments.scale_of(call)
    options, graph_options = _split_options(call.kernel_options or {}, captures, numbers)
    sizes = ShardSizes.of(call.query, call.key, call.expand, call.selected)
    plan = find_in_graph(call.block_mask, sizes, world, call.positions, call.batch_offset)
    selected = call.selected
    if selected is not None:
        check_form(selected, call.query.device)
        if not any(map(is_symbol, (*selected.indices.shape, *call.query.shape))):
            check_shape(selected, call.query, call.key.shape[1] if expand is None else expand.sizes[0])
    wants = tuple([i for i, x in enumerate(captures) if x.requires_grad and x.is_floating_point()])
    inputs = graph_scale, graph_options, None if selected is None else tuple(selected[1:])
    if selected is not None:
        captures.append(selected.indices)
    spec = _spec(score, wants, world, options, call.returns, expansion, key_sizes, *inputs)
    arguments = dispatch.as_inputs(captures), numbers, scale, plan, spec
    results = forward_op(*call[:3], *arguments)
    if call.wants_probabilities:
        results = [*results, probabilities_in_graph(call, results[1], arguments)]
    return results


def find_in_graph(
    block_mask: Any, sizes: ShardSizes, world: str, positions: Tensor | None = None,
    batch_offset: int | None = None,
) -> Tensor:  # fmt: skip
    """Trace the op that finds the plan of a checked call; return its handle."""
    tensors: list[Tensor] = []
    ints: list[int] = []
    structure = flatten_callable(block_mask, tensors, ints)
    arguments = [*sizes], structure, world, positions, batch_offset
    return dispatch.run_on_values(plan_op, tensors, ints, *arguments)


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
    """Encode the fields of a :class:`tritoncp.graph.spec.CallConstants`."""
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

    shape: :class:`tritoncp.call.read.ShardSizes`
    """
    group = groups.group_by_name(world) if world else None
    with failures.closing(group):
        mask = plan_cache.current_mask(rebuild(structure, tensors, ints))
        call_key = *shape, group and (group.size(), group.rank()), batch_offset
        sizes = ShardSizes(*shape)
        plan = plan_cache.plan_for(mask, sizes, group, call_key, batch_offset=batch_offset)
        check_shards.check_order(plan, positions)
        return handle_of(plan)


plan_op = register_op("plan", _plan, fake_handle)
