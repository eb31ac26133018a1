"""Attention and masks inside torch.compile. A graph serves all masks of one structure: its constants are the
structure of mods and masks; tensors, numbers and the handles of plans and masks are its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from tritoncp.api import plan_cache, validate
from tritoncp.api.group_call import place_in_group
from tritoncp.core.bounded_cache import TensorCache
from tritoncp.core.dynamo_boundary import constant_result
from tritoncp.core.handles import handle_of, object_of
from tritoncp.distributed import failures, groups
from tritoncp.kernels.options import check_options
from tritoncp.masks.mask import create_block_mask
from tritoncp.masks.traced_mask import TracedMask
from tritoncp.mods.snapshot import captured_state
from tritoncp.ops import dispatch
from tritoncp.ops.autograd import forward_op
from tritoncp.ops.call import encode_spec
from tritoncp.ops.dispatch import register_op
from tritoncp.ops.graph.inputs import flatten_callable, is_symbol, rebuild
from tritoncp.ops.graph.layouts import Uncapturable


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
    """Encode the fields of a :class:`tritoncp.ops.call.CallConstants`."""
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


def _fake_handle(*args: Any) -> Tensor:
    """Return a handle without an object, for fake tensors."""
    return torch.full((), -1, dtype=torch.int64, device="cpu")


plan_op = register_op("plan", _plan, _fake_handle)


def _part(handle: Tensor, index: int, count: int, keys: int | None) -> Tensor:
    """Return the handle of :meth:`tritoncp.Plan.part`, a chunk of the queries, from the handle of a plan."""
    return handle_of(object_of(handle).part(index, count, keys=keys))


part_op = register_op("part", _part, _fake_handle)


def _batch_rows(handle: Tensor, first: int, count: int) -> Tensor:
    """Return the handle of :meth:`tritoncp.Plan.batch_rows` from the handle of a plan."""
    return handle_of(object_of(handle).batch_rows(first, count))


batch_rows_op = register_op("batch_rows", _batch_rows, _fake_handle)


def _view(handle: Tensor, first: int, heads: int, causal: int) -> Tensor:
    """Return the handle of a plan of ``heads`` query heads from ``first`` on (0: all heads), whose mask is
    that of scaled_dot_product_attention with ``is_causal=causal`` (-1: the plan's own mask)."""
    plan = object_of(handle)
    plan = plan.of_sdpa(bool(causal)) if causal >= 0 else plan
    return handle_of(plan.of_heads(first, heads) if heads else plan)


view_op = register_op("view", _view, _fake_handle)


def depends_on_inputs(mask_mod: Callable[..., Tensor], sizes: Sequence[Any]) -> bool:
    """Return whether a mask depends on inputs of the graph that is traced, by its sizes or captures."""
    tensors: list[Tensor] = []
    ints: list[int] = []
    with suppress(Uncapturable):
        flatten_callable(mask_mod, tensors, ints)
    return any(map(dispatch.is_traced_value, (*sizes, *tensors, *ints)))


def trace_block_mask(
    mask_mod: Callable[..., Tensor], sizes: Sequence[int | None], device: Any, block: int | tuple[int, int]
) -> TracedMask:
    """Make a mask in a graph that is traced, see :func:`tritoncp.create_block_mask`. sizes: B, H, Q_LEN and
    KV_LEN

    Raises Uncapturable for a mask_mod that cannot be part of a graph.
    """
    tensors: list[Tensor] = []
    ints: list[int] = []
    structure = flatten_callable(mask_mod, tensors, ints)
    blocks = [block, block] if isinstance(block, int) else [*block]
    numbers = [*(1 if size is None else size for size in sizes), *blocks]
    where = "" if device is None else str(device)
    return TracedMask(dispatch.run_on_values(block_mask_op, tensors, ints, numbers, structure, where))


def _block_mask(
    tensors: list[Tensor], ints: list[int], sizes: list[int], structure: str, device: str
) -> Tensor:
    """Return the handle of the mask of a mask_mod, flattened by :func:`flatten_callable`.

    sizes: B, H, Q_LEN, KV_LEN and the two block sizes. device: "" is the device of the captured tensors.
    """
    mask_mod = rebuild(structure, tensors, ints)
    state = captured_state(mask_mod)
    key = None if state.key is None else (state.key, tuple(sizes), device)
    mask = None if key is None else _MASKS.find(key, state.tensors)
    if mask is None:
        B, H, q_len, kv_len, *blocks = sizes
        mask = create_block_mask(mask_mod, B, H, q_len, kv_len, device or None, (blocks[0], blocks[1]))
        if key is not None:
            _MASKS.keep(key, state.tensors, mask)
    assert mask.handle is not None
    return mask.handle


_MASKS = TensorCache(8)  # each mask keeps the tensors that its mask_mod captures


block_mask_op = register_op("block_mask", _block_mask, _fake_handle)
