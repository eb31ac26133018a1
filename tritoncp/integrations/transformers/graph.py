"""Masks and plans in compiled layers: a graph gets their handles as inputs, and finds the mask of a layer
when it runs, because it then reads padding and positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritoncp.core.handles import handle_of, object_of
from tritoncp.graph.dispatch import register_op
from tritoncp.integrations.transformers.masks import ModelMask
from tritoncp.integrations.transformers.plans import ContextParallelPlan
from tritoncp.masks.traced_mask import TracedMask


def mask_mod_in_graph(mask: ModelMask) -> Any:
    """Return the node that represents the mask_mod of a mask in the traced graph."""
    return TracedMask(_mask_mod_op(mask.handle))


def plan_in_graph(batch: ContextParallelPlan, mask: Any, position_ids: Tensor | None) -> Any:
    """Return the node that represents :func:`checked_plan` in the traced graph. mask: a mask with a handle"""
    return TracedMask(_plan_op(batch.handle, mask.handle, position_ids))


def has_handle(mask: Any) -> bool:
    """Return whether a graph refers to a mask by its handle, and does not contain it."""
    return isinstance(mask, ModelMask) and mask.handle is not None


def checked_plan(batch: ContextParallelPlan, mask: Any, position_ids: Tensor | None) -> Any:
    """Return the plan of a layer, after a check of its positions."""
    batch.check_positions(position_ids)
    return batch.layer_plan(mask)


def _mask_mod(handle: Tensor) -> Tensor:
    """Return the handle of the mask_mod of a ModelMask."""
    return handle_of(object_of(handle).mask_mod)


def _plan(batch: Tensor, mask: Tensor, position_ids: Tensor | None) -> Tensor:
    """Return the handle of the plan of a layer."""
    return handle_of(checked_plan(object_of(batch), object_of(mask), position_ids))


def _fake_handle(*args: Any) -> Tensor:
    return torch.full((), -1, dtype=torch.int64, device="cpu")


_mask_mod_op = register_op("transformers_mask", _mask_mod, _fake_handle)
_plan_op = register_op("transformers_plan", _plan, _fake_handle)
