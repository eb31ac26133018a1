"""Masks of images in batches: those of transformers in one text, and apart in packed documents."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import masking_utils as mu

import tritoncp
from tritoncp.integrations.transformers import register, shard_batch
from tritoncp.integrations.transformers.mask_functions import read_pattern
from tritoncp.integrations.transformers.model_classes import own_mask_function

register()
pytestmark = pytest.mark.usefixtures("cpu_engine")
LENGTHS = (23, 17)
LENGTH = sum(LENGTHS)
# An image at the end of the first document, and one at the start of the second.
IS_IMAGE = torch.zeros(1, LENGTH, dtype=torch.int64)
IS_IMAGE[0, 4:9] = IS_IMAGE[0, 18:28] = IS_IMAGE[0, 33:36] = 1
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
KINDS = ["full_attention", "sliding_attention"]
TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma3": ("token_type_ids", {"sliding_window": 7, "layer_types": KINDS}),
    "PaliGemma": ("token_type_ids", {"model_type": "gemma"}),
    "PaliGemma 2": ("token_type_ids", {"model_type": "gemma2", "sliding_window": 7, "layer_types": KINDS}),
    "Molmo2": ("mm_token_type_ids", {}),
    "Gemma4": (
        "mm_token_type_ids",
        {"sliding_window": 7, "layer_types": KINDS, "use_bidirectional_attention": "vision"},
    ),
}


def config_of(name: str, attention: str) -> Any:
    cls = getattr(transformers, f"{name.split()[0]}Config")
    return cls(text_config=SMALL | TEXTS[name][1], attn_implementation=attention)


def transformers_masks(name: str, types: Tensor) -> dict[str, Tensor]:
    """Return the masks that transformers makes of one text, bool [S, S], by their name there."""
    config, (argument, _) = config_of(name, "sdpa"), TEXTS[name]
    create = own_mask_function(config, [argument])
    assert create is not None
    names = inspect.signature(create).parameters
    masks = create(
        **{
            "config": config,
            "inputs_embeds": torch.empty(*types.shape, 0),
            "attention_mask": None,
            "cache" if "cache" in names else "past_key_values": None,
            "position_ids": None,
            "is_first_iteration": True,
            argument: types,
        }
    )
    masks = masks if isinstance(masks, dict) else {"full_attention": masks}
    causal = torch.ones(types.shape[1], types.shape[1], dtype=torch.bool).tril()
    return {kind: causal if mask is None else mask[0, 0] for kind, mask in masks.items()}


def planned_masks(name: str, batch: dict[str, Tensor]) -> list[Tensor]:
    """Return the masks of the plans of a batch, bool [S, S]."""
    local = shard_batch(batch, config_of(name, "tritoncp"), BLOCK_SIZE=8)
    return [plan.mask.to_dense()[0, 0].bool() for plan in local["context_parallel"].plans.values()]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, others in ((found, expected), (expected, found)):
        assert all(any(torch.equal(x, y) for y in others) for x in one)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", TEXTS)
def test_masks_of_a_text_with_images_are_those_of_transformers(name: str) -> None:
    batch = {"input_ids": torch.ones(1, LENGTH, dtype=torch.int64), TEXTS[name][0]: IS_IMAGE}
    assert_same(planned_masks(name, batch), list(transformers_masks(name, IS_IMAGE).values()))


@pytest.mark.parametrize("name", TEXTS)
def test_images_of_packed_documents_see_no_other_document(name: str) -> None:
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    batch = {"input_ids": torch.ones_like(positions), "position_ids": positions, TEXTS[name][0]: IS_IMAGE}
    parts = [transformers_masks(name, types) for types in IS_IMAGE.split(LENGTHS, 1)]
    expected = [torch.block_diag(*(part[kind].int() for part in parts)).bool() for kind in parts[0]]
    assert_same(planned_masks(name, batch), expected)


def test_a_tree_with_images_that_see_both_ways_is_refused() -> None:
    packed = tritoncp.pack_trajectories([torch.arange(1, 30), torch.arange(1, 20)])
    row = {"input_ids": packed.tokens[None], "shift_labels": packed.tokens[None]}
    config, types = config_of("Gemma3", "tritoncp"), torch.zeros_like(row["input_ids"])
    shard_batch({**row, "token_type_ids": types}, config, BLOCK_SIZE=8, tree=packed)
    types[0, 4:9] = 1
    with pytest.raises(ValueError, match="tree: layers see images both ways"):
        shard_batch({**row, "token_type_ids": types}, config, BLOCK_SIZE=8, tree=packed)


def test_unions_and_intersections_that_are_no_pattern_of_images_are_not_read() -> None:
    images = mu.blockwise_overlay(IS_IMAGE)
    window = mu.sliding_window_causal_mask_function(7)
    bounded = mu.and_masks(mu.or_masks(mu.causal_mask_function, images), mu.sliding_window_overlay(7))
    assert read_pattern(bounded).kind == "window(6, 0) and images in the window"
    assert read_pattern(mu.or_masks(window, images)).kind == "window(6, 0) and images"
    for function in (
        images,
        mu.or_masks(images, window),
        mu.or_masks(window, mu.causal_mask_function),
        mu.or_masks(bounded, images),
        mu.and_masks(mu.or_masks(window, images), mu.sliding_window_overlay(5)),
        mu.and_masks(mu.or_masks(window, images), mu.causal_mask_function),
    ):
        assert read_pattern(function) is None
