"""Positions of several axes, as Qwen2-VL counts them for images, of a whole batch and of packed documents."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tritoncp.integrations.transformers.images.own_images import FEATURES

TEXT_FIRST = 3  # axes of models that read positions of the text before these; Hunyuan-VL, with 4, does not
COUNT = "compute_3d_position_ids"  # the method of models that counts positions of images


def find_image_positions(
    batch: Mapping[str, Any], model: nn.Module, restarting: Tensor | None, default: Tensor
) -> Tensor:
    """Return the positions of a batch with images as its model counts them, [axes, B, S]; of packed
    documents, as in each document alone, [1 + axes, B, S], those of the text first, if the model reads these.

    restarting: positions within documents, [B or 1, S], or None
    default:    what is returned if the model counts no positions of images, or the batch has none
    """
    counts = [one for one in model.modules() if isinstance(one, PreTrainedModel) and hasattr(one, COUNT)]
    given = batch.get("position_ids") is not None and restarting is None
    has_features = any(batch.get(name) is not None for name in FEATURES)
    if not (counts and has_features) or given or batch.get("input_ids") is None:
        return default
    if restarting is None:
        found = _count(counts[0], batch)
        return default if found is None else found
    texts = restarting.expand(default.shape)
    starts = torch.nn.functional.pad(texts.diff(dim=1) != 1, (1, 0), value=True)
    document = starts.flatten().cumsum(0) - 1
    first = starts.flatten().nonzero()[:, 0]
    place = torch.arange(document.numel(), device=document.device) - first[document]
    rows = {"attention_mask": torch.ones_like(batch["input_ids"])}
    rows |= {name: x for name, x in batch.items() if isinstance(x, Tensor) and x.shape == texts.shape}
    shape = len(first), int(place.max()) + 1
    padded = {
        name: x.new_zeros(shape).index_put((document, place), x.flatten())
        for name, x in rows.items()
        if name != "position_ids"
    }
    found = _count(counts[0], {**batch, **padded})
    if found is None:
        return default
    packed = found[:, document, place].unflatten(1, texts.shape)
    return torch.cat([texts[None], packed]) if len(packed) == TEXT_FIRST else packed


def _count(model: PreTrainedModel, batch: Mapping[str, Any]) -> Tensor | None:
    """Return the positions of rows of images and text, [axes, B, S], by the method of the model; None for
    texts. The model keeps the offsets of its last call, which are restored."""
    method = getattr(model, COUNT)
    names = inspect.signature(method).parameters
    kept = getattr(model, "rope_deltas", None)
    arguments = {name: batch.get(name) for name, one in names.items() if one.default is one.empty}
    arguments |= {name: batch[name] for name in names if batch.get(name) is not None}
    if "inputs_embeds" in names:
        arguments["inputs_embeds"] = torch.empty(*batch["input_ids"].shape, 0)
    try:
        model.rope_deltas = None
        found: Tensor | None = method(**arguments)
    finally:
        model.rope_deltas = kept
    return found
