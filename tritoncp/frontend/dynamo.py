"""Attention and masks inside torch.compile. A graph serves all masks of one structure: its constants are the
structure of mods and masks; tensors, numbers and the handles of plans and masks are its inputs.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritoncp.core.dynamo_boundary import constant_result
from tritoncp.core.handles import handle_of, object_of
from tritoncp.distributed import groups
from tritoncp.frontend import mask_source, plan_cache, validate
from tritoncp.masks.create import create_block_mask
from tritoncp.masks.mask import Mask
from tritoncp.masks.traced_mask import TracedMask
from tritoncp.ops import call_modes, engine_factory
from tritoncp.ops.autograd import forward_op
from tritoncp.ops.dispatch import register_op
from tritoncp.ops.graph.inputs import flatten_callable, rebuild


@call_modes.in_fake_mode
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Tensor] | None,
    mask: Any,
    mesh: Any,
    scale: float,
    options: dict[str, Any] | None,
    want_max: bool,
    positions: Tensor | None,
    returns: tuple[str, ...],
    batch_offset: int | None = None,
) -> list[Tensor]:
    """Run one layer for this rank, traced by Dynamo; return out, lse, max_scores.

    Raises Uncapturable for a mod or mask that a graph cannot carry.
    """
    world = _world(mesh)
    captures: list[Tensor] = []
    numbers: list[int] = []
    score = None if score_mod is None else flatten_callable(score_mod, captures, numbers)
    tensors: list[Tensor] = []
    ints: list[int] = []
    structure = flatten_callable(mask, tensors, ints)
    shape = [*q.shape, k.shape[1], k.shape[2]]
    options_of_plan = shape, structure, world, positions, batch_offset
    plan = call_modes.run_on_values(plan_op, tensors, ints, *options_of_plan)
    wants = tuple([i for i, x in enumerate(captures) if x.requires_grad and x.is_floating_point()])
    spec = _spec(score, wants, want_max, world, options or {}, returns)
    captures = call_modes.as_inputs(captures)
    return forward_op([q], [k], [v], captures, numbers, [], scale, plan, spec)


@constant_result
def _world(mesh: Any) -> str:
    group = groups.group_of(mesh)
    return "" if group is None else group.group_name


@constant_result
def _spec(
    score: str | None, wants: tuple[int, ...], want_max: bool, world: str, options: dict[str, Any],
    returns: tuple[str, ...],
) -> str:  # fmt: skip
    return engine_factory.Spec(
        score=None,
        graph_score=score,
        wants=wants,
        numbers=(),
        want_max=want_max,
        world=world or None,
        options=tuple(sorted(options.items())),
        returns=returns,
    ).encode()


def _plan(
    tensors: list[Tensor],
    ints: list[int],
    shape: list[int],
    structure: str,
    world: str,
    positions: Tensor | None,
    batch_offset: int | None = None,
) -> Tensor:
    """A handle of the plan for a Plan or mask that :func:`flatten_callable` took apart, checked against the
    shards.

    shape: batch, query heads, rows of the query's shard, head dim, key heads, rows of the key's shard.
    """
    group = groups.group_by_name(world) if world else None
    mask = rebuild(structure, tensors, ints)
    batch, heads, rows, dim, kv_heads, kv_rows = shape
    q = torch.empty(batch, heads, rows, dim, device="meta")
    k = torch.empty(batch, kv_heads, kv_rows, dim, device="meta")
    call_key = validate.call_key(q, k, k, None, group, batch_offset)
    plan = plan_cache.plan_of_rows(mask, q, k, group, call_key, batch_offset=batch_offset)
    validate.check_order(plan, positions)
    return handle_of(plan)


def _plan_fake(
    tensors: list[Tensor],
    ints: list[int],
    shape: list[int],
    structure: str,
    world: str,
    positions: Tensor | None,
    batch_offset: int | None = None,
) -> Tensor:
    return torch.full((), -1, dtype=torch.int64, device="cpu")  # names no plan


plan_op = register_op("plan", _plan, _plan_fake)


def _part(handle: Tensor, index: int, count: int, dim: str, keys: int | None) -> Tensor:
    """A handle of the plan of one chunk, see :meth:`tritoncp.Plan.part`, for the handle of the whole plan."""
    return handle_of(object_of(handle).part(index, count, dim=dim, keys=keys))


def _part_fake(handle: Tensor, index: int, count: int, dim: str, keys: int | None) -> Tensor:
    return torch.full((), -1, dtype=torch.int64, device="cpu")  # names no plan


part_op = register_op("part", _part, _part_fake)


def trace_block_mask(
    mask_mod: Callable[..., Tensor],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any,
    BLOCK_SIZE: int | tuple[int, int],
) -> TracedMask:
    """Make a mask in a graph that Dynamo traces, see :func:`tritoncp.create_block_mask`.

    Raises Uncapturable for a mask_mod that a graph cannot carry.
    """
    tensors: list[Tensor] = []
    ints: list[int] = []
    structure = flatten_callable(mask_mod, tensors, ints)
    blocks = [BLOCK_SIZE, BLOCK_SIZE] if isinstance(BLOCK_SIZE, int) else [*BLOCK_SIZE]
    sizes = [1 if B is None else B, 1 if H is None else H, Q_LEN, KV_LEN, *blocks]
    return TracedMask(block_mask_op(tensors, ints, sizes, structure, "" if device is None else str(device)))


def _block_mask(
    tensors: list[Tensor], ints: list[int], sizes: list[int], structure: str, device: str
) -> Tensor:
    """A handle of the mask for a mask_mod that :func:`flatten_callable` took apart.

    sizes: B, H, Q_LEN, KV_LEN and the two block sizes. device: "" for that of the captured tensors.
    """
    mask_mod = rebuild(structure, tensors, ints)
    state = mask_source.captured_state(mask_mod)
    key = None if state.key is None else (state.key, tuple(sizes), device)
    if any(tensor.is_inference() for tensor in state.tensors):
        key = None
    with _MASKS_LOCK:
        entry = _MASKS.pop(key, None)
    if entry is None or not entry.serves(state.tensors):
        B, H, q_len, kv_len, *blocks = sizes
        mask = create_block_mask(mask_mod, B, H, q_len, kv_len, device or None, (blocks[0], blocks[1]))
        versions = [(weakref.ref(tensor), tensor._version) for tensor in state.tensors] if key else []
        entry = MaskEntry(mask, versions)
    with _MASKS_LOCK:
        if key is not None:
            _MASKS[key] = entry
        while len(_MASKS) > MAX_MASKS:
            _MASKS.popitem(last=False)
    return entry.mask.handle


class MaskEntry(NamedTuple):
    """A mask that an op made, and the tensors that it was made from, with their versions."""

    mask: Mask
    tensors: list[tuple[weakref.ref[Tensor], int]]

    def serves(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether the mask was made from these tensor objects, unedited since."""
        pairs = zip(self.tensors, tensors, strict=True)
        return all(ref() is tensor and version == tensor._version for (ref, version), tensor in pairs)


MAX_MASKS = 8  # each keeps the tensors that its mask_mod captures
_MASKS: OrderedDict[Any, MaskEntry] = OrderedDict()  # in order of their last use
_MASKS_LOCK = threading.Lock()


def _block_mask_fake(
    tensors: list[Tensor], ints: list[int], sizes: list[int], structure: str, device: str
) -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


block_mask_op = register_op("block_mask", _block_mask, _block_mask_fake)
