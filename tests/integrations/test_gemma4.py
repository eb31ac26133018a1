"""Gemma 4 with the head dims of its checkpoints, 256 in local layers and 512 in global ones, with layers that
share keys, and with images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import masking_utils as mu

from tests.integrations import families, image_families
from tests.multiprocess import ranks
from tritoncp.integrations.transformers import shard_batch
from tritoncp.integrations.transformers.masks import create_mask

pytestmark = pytest.mark.usefixtures("cpu_engine")


def build(family: str, attention: str) -> Any:
    """Build a small model in float64: two layers, and two that share their keys."""
    model = image_families.build(family, families.list_families()[family], attention, {})
    dims = [layer.self_attn.head_dim for layer in model.get_decoder().layers]
    assert dims == [256, 512, 256, 512]
    assert model.config.get_text_config().num_kv_shared_layers == 2
    return model


@pytest.mark.integrations
def test_layers_that_share_keys_train_with_images() -> None:
    """On one process, and on two and four ranks; one text a row, and packed documents."""
    eager, model = build("gemma4", "eager"), build("gemma4", "tritoncp")
    batch = image_families.make_batch(eager, *image_families.find_images(eager))
    expected = image_families.train(eager, batch)
    assert image_families.compare(image_families.train(model, batch), expected) == "yes"
    for size in (2, 4):
        rows = ranks.run(size, image_families.train_on_ranks, model, [batch, image_families.pack(batch)])[0]
        assert [image_families.compare(row, expected) for row in rows] == ["yes", "yes"]


@pytest.mark.integrations
def test_only_batches_with_images_need_types_of_tokens() -> None:
    """The larger models make masks of images for texts too."""
    head = families.list_families()["gemma4_unified"]
    eager, model = (
        image_families.build("gemma4_unified", head, attention, {}) for attention in ("eager", "tritoncp")
    )
    tokens = torch.randint(8, 90, (2, 40), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    local = shard_batch(batch, model, BLOCK_SIZE=16)
    found, expected = image_families.train(model, local), image_families.train(eager, batch)
    assert image_families.compare(found, expected) == "yes"
    types = torch.zeros_like(tokens)
    types[0, 3:9] = 1
    with pytest.raises(ValueError, match="sees images by a mask that shard_batch did not make"):
        model(**shard_batch(batch, model, BLOCK_SIZE=16), mm_token_type_ids=types)


@pytest.mark.integrations
def test_layers_that_share_keys_generate_the_tokens_of_eager_attention() -> None:
    """They run for the last query of the prompt alone."""
    prompt = torch.randint(8, 90, (2, 40), generator=torch.Generator().manual_seed(1))
    results = [
        build("gemma4", attention).eval().generate(prompt, max_new_tokens=3, do_sample=False)
        for attention in ("eager", "tritoncp")
    ]
    assert torch.equal(*results)


@pytest.mark.sample(12)
@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("first", [0, 5, -3, -1])
def test_the_mask_of_the_last_queries_has_their_rows(first: int, padded: bool, images: bool) -> None:
    """Gemma 4 slices masks before layers that share keys."""
    ids = torch.tensor([[-1, -1, 0, 0, 0, -1, 1, 1, -1, -1, 2, 2]]).expand(2, -1)
    function = mu.sliding_window_causal_mask_function(5)
    function = mu.or_masks(function, mu.blockwise_overlay(ids)) if images else function
    padding = torch.arange(12) >= torch.tensor([[0], [4]]) if padded else None
    mask = create_mask(2, 12, 12, mask_function=function, attention_mask=padding)
    part = mask[:, :, slice(first, None), :]
    rows = part if isinstance(part, torch.Tensor) else part.block_mask.to_dense(2, 1)  # of one query: dense
    assert torch.equal(rows.bool(), mask.block_mask.to_dense(2, 1)[:, :, first:].bool())


ALL = slice(None)


@pytest.mark.parametrize(
    "index", [0, (ALL, ALL, ALL), (ALL, ALL, slice(0, 3), ALL), (ALL, ALL, ALL, slice(5))]
)
def test_a_mask_has_no_other_slices(index: Any) -> None:
    mask = create_mask(1, 12, 12)
    with pytest.raises(ValueError, match="used as a tensor"):
        mask[index]
