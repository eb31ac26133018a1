"""Creation of masks on the host, and the device that evaluates a mask_mod."""

from __future__ import annotations

from typing import Any

import torch

from tritoncp.core.dynamo_boundary import host_only
from tritoncp.core.tracing import graph_of
from tritoncp.core.upload import upload
from tritoncp.masks.classification.classify import PairEvaluator
from tritoncp.masks.mask import Device, Mask, create_block_mask
from tritoncp.masks.mask_mod import MaskFn


@host_only
def create_on_device(
    mask_mod: MaskFn, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Device | None,
    BLOCK_SIZE: int | tuple[int, int],
) -> Mask:  # fmt: skip
    """Make a mask, evaluated on ``device`` (None: that of the captured tensors)."""
    _check_function(mask_mod)
    place = torch.device(device) if device is not None else _capture_device(mask_mod)
    on_gpu = None if place.type == "cpu" else _triton_evaluator(mask_mod, place)
    return create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, place, BLOCK_SIZE, evaluate=on_gpu)


def _check_function(mask_mod: Any) -> None:
    """Raise TypeError for a mask_mod that is no function."""
    if callable(mask_mod):
        return
    remedy = "pass a function, lambda b, h, q_idx, kv_idx: ..."
    if mask_mod is None:
        remedy = "tritoncp.full_mask(Q_LEN, KV_LEN) hides nothing, and neither does block_mask=None"
    elif isinstance(mask_mod, torch.Tensor):
        remedy = "capture the tensor, lambda b, h, q_idx, kv_idx: visible[q_idx, kv_idx]"
    raise TypeError(f"create_block_mask: mask_mod is a {type(mask_mod).__name__}, not a function; {remedy}")


def _capture_device(mask_mod: MaskFn) -> torch.device:
    """Return the accelerator of the tensors that the mask_mod captures; the CPU if there are none."""
    graph = graph_of(mask_mod) if torch.accelerator.is_available() else None
    nodes = graph.graph.nodes if graph is not None else ()
    devices = [getattr(graph, str(node.target)).device for node in nodes if node.op == "get_attr"]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def _triton_evaluator(mask_mod: MaskFn, device: torch.device) -> PairEvaluator | None:
    """Return the mask_mod as a Triton kernel; None if it cannot be translated."""
    from tritoncp import mods
    from tritoncp.kernels.mask_eval import make_evaluator

    try:
        mod = mods.mask_mod(mask_mod)
    except mods.Untranslatable:
        return None
    return make_evaluator(mod.fn, mod.caps(upload(mod.tensors, device)), device)
