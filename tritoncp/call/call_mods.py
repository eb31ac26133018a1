"""Translated mask_mods and score_mods of a call, with their captured tensors on the queries' device; bitmaps
for mask_mods that cannot be translated."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tritoncp import mods
from tritoncp.core.bounded_cache import BoundedCache
from tritoncp.core.upload import DeviceCopy
from tritoncp.distributed.schedules.buffers import stats_dtype
from tritoncp.masks.classification.classify import masked_blocks
from tritoncp.masks.runs.block_runs import Kind
from tritoncp.mods import Mod, Untranslatable
from tritoncp.mods.mod import translate
from tritoncp.planning.derived import PlanCache
from tritoncp.planning.plan import Plan

MAX_MASK_MODS = 64  # max copies of a plan's mask_mod
# Copies of a plan's mask_mod by ranks, batch rows, heads and device; (None,) if no masked block needs it.
_MASK_MODS: PlanCache[BoundedCache[Any, tuple[DeviceCopy[Mod] | None]]] = PlanCache(
    lambda: BoundedCache(MAX_MASK_MODS)
)


def translate_score(
    score_mod: Callable[..., Any], dtype: torch.dtype, device: torch.device
) -> tuple[Mod, Sequence[Tensor]]:
    """Translate a score_mod for queries of ``dtype``; if it cannot be translated to Triton, only for the CPU
    engine. Returns it without its captured tensors, then the tensors. They have to be on the queries'
    ``device``: they may be edited between calls and may require gradients, so that a cached copy would be
    wrong."""
    try:
        score, tensors = translate(score_mod, 5, stats_dtype(dtype))
    except TypeError:
        check_score_mod(score_mod)  # in a graph it was not checked
        raise
    for tensor in tensors:
        if tensor.ndim and tensor.device != device:
            raise ValueError(
                f"score_mod captures a tensor {tuple(tensor.shape)} on {tensor.device}, the query is on "
                f"{device}; move it there once, before the call: tensor.to({str(device)!r})"
            )
    return score, tensors


def check_score_mod(fn: Any) -> None:
    """Raise TypeError for a mask_mod in place of a score_mod."""
    plain = type(fn) is types.FunctionType and not fn.__dict__  # a __dict__ may have a wrapped function
    if plain and fn.__code__.co_argcount - len(fn.__defaults__ or ()) != 4:
        return  # inspect.signature takes longer than a kernel launch
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return  # a jit function or a builtin, which is checked when it is translated
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.kind in places and p.default is inspect.Parameter.empty]
    if len(needed) == 4 and not any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        raise TypeError(
            "score_mod, the fourth argument, is a mask_mod (it takes four arguments): pass the mask that "
            "create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN) makes of it"
        )


def translate_mask(plan: Plan, q: Tensor) -> DeviceCopy[Mod] | None:
    """Return the translated mask_mod of a call, None if no masked block needs it. The plan caches it with
    copies of captured CPU tensors on the query's device; it checks that captures were not edited."""
    by_rows = plan.schedule.startswith("ulysses")  # after the exchange, ranks have the rows of all ranks
    ranks = tuple(range(plan.world_size)) if by_rows else (plan.rank,)
    batch, heads, device = q.shape[0], q.shape[1], q.device
    if plan.mask.interval_for(batch, heads) is not None:
        return None  # kernels compare positions with the interval of their row
    reads, copies = plan.mask.reads, _MASK_MODS.of(plan.derived)
    key = ranks, batch if reads[0] else 1, heads if reads[1] else 1, device
    if (cached := copies.get(key)) is None:
        needed = any(_has_masked(plan.for_rank(rank)) for rank in ranks)
        copy = _copy_to(_translate_or_tabulate(plan, ranks, batch, heads), device) if needed else None
        cached = copies.put(key, (copy,))
    return cached[0]


def _has_masked(plan: Plan) -> bool:
    """Return whether any block of this rank's queries is masked (partly visible)."""
    _, runs = plan.listed()
    return runs.has_kind(Kind.MASKED)


def _translate_or_tabulate(plan: Plan, ranks: Sequence[int], batch: int, heads: int) -> Mod:
    """Translate a plan's mask_mod to Triton; if it cannot be translated, translate a bitmap of its values."""
    fn = plan.mask.mask_mod
    assert fn is not None
    with contextlib.suppress(Untranslatable):
        return mods.mask_mod(fn)
    return mods.mask_mod(tabulate(plan, ranks, batch, heads))


def _copy_to(mod: Mod, device: torch.device) -> DeviceCopy[Mod]:
    """Copy a mod's captured CPU tensors to a device. Raises ValueError for captures on other devices."""
    for tensor in mod.tensors:
        if tensor.device.type != "cpu" and tensor.device != device:
            raise ValueError(
                f"mask_mod captures a tensor {tuple(tensor.shape)} on {tensor.device}, the query is on "
                f"{device}; make the mask from tensors on {device} or on the CPU"
            )
    return DeviceCopy(mod.tensors, device, lambda *copies: mod.with_captures(copies, mod.numbers))


# -- bitmaps for a mask_mod that cannot be translated --------------------------------------------------------
#
# torch evaluates the mask_mod once in the masked blocks of some ranks; a mask_mod that only indexes tensors
# takes its place.


def tabulate(plan: Plan, ranks: Sequence[int], batch: int, heads: int) -> Callable[..., Tensor]:
    """Evaluate a mask_mod in the masked blocks of a plan's ``ranks``, for ``batch`` rows and ``heads`` query
    heads. Returns a mask_mod that looks these values up; its values in other blocks are arbitrary."""
    mask, first_row, q_block, kv_block = plan.mask, plan.first_row, plan.mask.q_block, plan.mask.kv_block
    B = max(mask.B, batch if mask.reads[0] else 1)
    H = max(mask.H, heads if mask.reads[1] else 1)
    blocks = masked_blocks(mask.runs.expand(B, H))  # [n, 4]: b, h, row, col
    owned = _owned_blocks(plan, ranks)  # [Bp, rows]
    owned = owned if len(owned) == B else owned.any(0, keepdim=True)
    blocks = blocks[owned[blocks[:, 0] % len(owned), blocks[:, 2]]]
    needed = torch.zeros(owned.shape[1], dtype=torch.bool)
    needed[blocks[:, 2]] = True
    rows = (needed.cumsum(0) - 1).int()  # row in ``ids`` of each query block
    ids = torch.full((B, H, max(1, int(needed.sum())), mask.runs.shape[3]), -1, dtype=torch.int32)
    ids[blocks[:, 0], blocks[:, 1], rows[blocks[:, 2]], blocks[:, 3]] = torch.arange(len(blocks)).int()
    chunks = mask.evaluate(blocks + torch.tensor([first_row, 0, 0, 0]))
    parts = [_pack_bits(visible) for _, visible in chunks]
    no_blocks = torch.zeros(1, q_block, -(-kv_block // 8), dtype=torch.uint8)
    bits = torch.cat(parts) if parts else no_blocks  # by ``ids``: [blocks, q_block, ceil(kv_block / 8)]
    each_batch, each_head = B > 1, H > 1

    def look_up(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        batch, head = b - first_row if each_batch else 0, h if each_head else 0
        block = ids[batch, head, rows[q_idx // q_block], kv_idx // kv_block]
        column = kv_idx % kv_block
        byte = bits[block, q_idx % q_block, column // 8].to(torch.int32)
        return (byte >> (column % 8)) & 1 != 0

    return look_up


def _owned_blocks(plan: Plan, ranks: Sequence[int]) -> Tensor:
    """Return which query blocks have a token on one of these ranks: bool [Bp, q blocks]."""
    mask = plan.mask
    owned = torch.zeros(plan.q.slots[0].shape[0], mask.runs.shape[2] + 1, dtype=torch.bool)
    for rank in ranks:
        slots = plan.q.slots[rank]
        row = torch.where(slots[..., 2] > 0, slots[..., 1] // mask.q_block, mask.runs.shape[2])
        owned.scatter_(1, row.long(), torch.ones_like(row, dtype=torch.bool))
    return owned[:, :-1]


def _pack_bits(visible: Tensor) -> Tensor:
    """Pack bool [n, q_block, kv_block] into uint8 [n, q_block, ceil(kv_block / 8)], lowest bit first."""
    visible = torch.nn.functional.pad(visible, (0, -visible.shape[2] % 8)).unflatten(2, (-1, 8))
    return (visible * (1 << torch.arange(8, dtype=torch.uint8))).sum(3, dtype=torch.uint8)


def check_torch_form(mod: Mod | None) -> Mod | None:
    """Return the mod; raise ValueError if it is a hand-written Triton function, which torch cannot call."""
    if mod is not None and mod.graph is None:
        raise ValueError(
            "mask_mod or score_mod is a hand-written @triton.jit function, which the CPU engine cannot call: "
            "run on a GPU, or with TRITON_INTERPRET=1"
        )
    return mod
