"""Ops whose results are handles: masks made in a graph; chunks, batch rows and heads of a plan.

A handle (:mod:`tritoncp.core.handles`) is an input of a graph, so that the graph serves all masks of one
structure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from tritoncp.core.bounded_cache import TensorCache
from tritoncp.core.handles import handle_of, object_of
from tritoncp.graph import dispatch
from tritoncp.graph.dispatch import register_op
from tritoncp.graph.inputs import flatten_callable, rebuild
from tritoncp.graph.layouts import Uncapturable
from tritoncp.masks.mask import create_block_mask
from tritoncp.masks.traced_mask import TracedMask
from tritoncp.mods.snapshot import captured_state


def fake_handle(*args: Any) -> Tensor:
    """Return a handle without an object, for fake tensors."""
    return torch.full((), -1, dtype=torch.int64, device="cpu")


def _part(handle: Tensor, index: int, count: int, keys: int | None) -> Tensor:
    """Return the handle of :meth:`tritoncp.Plan.part`, a chunk of the queries, from the handle of a plan."""
    return handle_of(object_of(handle).part(index, count, keys=keys))


part_op = register_op("part", _part, fake_handle)


def _batch_rows(handle: Tensor, first: int, count: int) -> Tensor:
    """Return the handle of :meth:`tritoncp.Plan.batch_rows` from the handle of a plan."""
    return handle_of(object_of(handle).batch_rows(first, count))


batch_rows_op = register_op("batch_rows", _batch_rows, fake_handle)


def _view(handle: Tensor, first: int, heads: int, causal: int) -> Tensor:
    """Return the handle of a plan of ``heads`` query heads from ``first`` on (0: all heads), with
    scaled_dot_product_attention's mask for ``is_causal=causal`` (-1: the plan's mask)."""
    plan = object_of(handle)
    plan = plan.of_sdpa(bool(causal)) if causal >= 0 else plan
    return handle_of(plan.of_heads(first, heads) if heads else plan)


view_op = register_op("view", _view, fake_handle)


def depends_on_inputs(mask_mod: Callable[..., Tensor], sizes: Sequence[Any]) -> bool:
    """Return whether a mask depends on inputs of the traced graph, by its sizes or captures."""
    tensors: list[Tensor] = []
    ints: list[int] = []
    with suppress(Uncapturable):
        flatten_callable(mask_mod, tensors, ints)
    return any(map(dispatch.is_traced_value, (*sizes, *tensors, *ints)))


def trace_block_mask(
    mask_mod: Callable[..., Tensor], sizes: Sequence[int | None], device: Any, block: int | tuple[int, int]
) -> TracedMask:
    """Make a mask in the traced graph, see :func:`tritoncp.create_block_mask`. sizes: B, H, Q_LEN and KV_LEN

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


block_mask_op = register_op("block_mask", _block_mask, fake_handle)
