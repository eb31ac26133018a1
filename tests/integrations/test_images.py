"""Images and their embeddings on ranks, with positions of one or three axes, have the gradients of one
process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
)

from tests.integrations import transformers_models as models
from tests.multiprocess import ranks
from tritoncp.integrations.transformers import shard_batch
from tritoncp.integrations.transformers.images.image_positions import find_image_positions
from tritoncp.integrations.transformers.images.own_images import names_of_features
from tritoncp.integrations.transformers.whole_sequences import CURRENT, hook_layers

pytestmark = pytest.mark.usefixtures("cpu_engine")
IMAGE, VIDEO, PIECES = 5, 4, 4  # the ids of tokens of images and videos, and the number of an image
TOKENS = models.text_batch()["input_ids"].clamp(min=6)
TOKENS[0, 90 : 90 + PIECES] = TOKENS[1, 3 : 3 + PIECES] = IMAGE
LABELS = TOKENS.masked_fill(TOKENS == IMAGE, -100)


def build(name: str, attention: str) -> tuple[Any, dict[str, Any]]:
    """Return a small model, and the inputs of an image in each row."""
    generator = torch.Generator().manual_seed(2)
    torch.manual_seed(0)
    if name == "Llava":
        vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "patch_size": 16}
        text = LlamaConfig(**models.COMMON)
        config: Any = LlavaConfig(
            vision_config=vision | {"image_size": 32}, text_config=text, image_token_id=IMAGE,
            vision_feature_layer=-1, attn_implementation=attention,
        )  # fmt: skip
        images = {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}
        return LlavaForConditionalGeneration(config).train(), images
    vision = {
        "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32,
        "patch_size": 4, "spatial_merge_size": 2, "window_size": 16, "fullatt_block_indexes": [0],
        "temporal_patch_size": 1,
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = Qwen2_5_VLConfig(
        vision_config=vision, text_config=models.COMMON | {"rope_parameters": rope}, image_token_id=IMAGE,
        video_token_id=VIDEO, vision_start_token_id=3, attn_implementation=attention,
    )  # fmt: skip
    grid = torch.tensor([[1, 4, 4]] * 2)
    images = {"pixel_values": torch.randn(32, 48, generator=generator), "image_grid_thw": grid}
    return Qwen2_5_VLForConditionalGeneration(config).train(), images


def embed(model: Any, images: dict[str, Any]) -> dict[str, Tensor]:
    """Return the batch with embeddings in place of tokens and images, and positions of three axes."""
    features = torch.cat(list(model.get_image_features(**images).pooler_output))
    embeddings = model.get_input_embeddings()(TOKENS)
    batch = {"inputs_embeds": embeddings.masked_scatter((TOKENS == IMAGE)[..., None], features)}
    if "image_grid_thw" in images:
        grid = {"image_grid_thw": images["image_grid_thw"], "mm_token_type_ids": (TOKENS == IMAGE).int()}
        batch["position_ids"] = model.model.get_rope_index(TOKENS, **grid)[0]
    return {**batch, "labels": LABELS}


def train(model: Any, batch: dict[str, Any]) -> Any:
    """Return the loss and the gradients of the text model and of the patches."""
    tower = model.model.vision_tower.embeddings if hasattr(model.model, "vision_tower") else None
    patches = model.model.visual.patch_embed if tower is None else tower.patch_embedding
    parts = {"text": model.model.language_model, "patches": patches}
    weights = {f"{name}.{key}": x for name, part in parts.items() for key, x in part.named_parameters()}
    loss = model(**{"use_cache": False, **batch}).loss
    return loss.item(), dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))


def with_images(images: dict[str, Any]) -> dict[str, Any]:
    """Return the batch of tokens and images, as a processor makes it."""
    batch = {"input_ids": TOKENS, "labels": LABELS, **images}
    return batch | ({"mm_token_type_ids": (TOKENS == IMAGE).int()} if "image_grid_thw" in images else {})


@pytest.mark.long
@pytest.mark.parametrize("name", ["Llava", "Qwen2.5-VL"])
def test_images_and_their_embeddings_train_on_ranks(name: str) -> None:
    def work(group: Any) -> Any:
        model, images = build(name, "tritoncp")
        results = []
        for batch in (with_images(images), embed(model, images)):
            local = shard_batch(batch, model, group, BLOCK_SIZE=16)
            results.append(models.sum_over_ranks(*train(model, local)))
        return results

    model, images = build(name, "eager")
    expected = train(model, with_images(images))
    for result in ranks.run(2, work)[0]:
        models.assert_equal(result, expected)


@pytest.mark.long
def test_videos_beside_images_train_on_ranks() -> None:
    tokens, generator = TOKENS.clone(), torch.Generator().manual_seed(3)
    tokens[0, 90 : 90 + 2 * PIECES] = tokens[1, 30 : 30 + PIECES] = VIDEO
    batch = {
        "input_ids": tokens,
        "labels": tokens.masked_fill(tokens < 6, -100),
        "pixel_values": torch.randn(16, 48, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "pixel_values_videos": torch.randn(48, 48, generator=generator),
        "video_grid_thw": torch.tensor([[2, 4, 4], [1, 4, 4]]),
        "mm_token_type_ids": (tokens == IMAGE) + 2 * (tokens == VIDEO).int(),
    }

    def work(group: Any) -> Any:
        model, _ = build("Qwen2.5-VL", "tritoncp")
        return models.sum_over_ranks(*train(model, shard_batch(batch, model, group, BLOCK_SIZE=16)))

    models.assert_equal(ranks.run(2, work)[0], train(build("Qwen2.5-VL", "eager")[0], batch))


@pytest.mark.long
def test_each_rank_embeds_its_images_and_those_of_one_rank_are_embedded_once() -> None:
    """A rank without images embeds one, so that all ranks run the tower."""

    def work(group: Any) -> list[int]:
        model, images = build("Llava", "tritoncp")
        seen: list[int] = []
        model.model.vision_tower.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(len(kwargs.get("pixel_values", args[0:1] and args[0]))),
            with_kwargs=True,
        )
        local = shard_batch(with_images(images), model, group, BLOCK_SIZE=16)
        model(**local)
        assert local["pixel_values"] is images["pixel_values"]
        return seen

    assert ranks.run(2, work) == [[1], [1]]
    assert ranks.run(3, work) == [[1], [1], [1]]


@pytest.mark.long
@pytest.mark.parametrize("part_first", [True, False])
def test_a_model_and_its_part_are_prepared_one_after_the_other(part_first: bool) -> None:
    """Each image is embedded once, whichever of the two is called."""

    def work(group: Any) -> list[float]:
        model, images = build("Llava", "tritoncp")
        batch, losses = with_images(images), []
        for one in (model.model, model) if part_first else (model, model.model):
            shard_batch(batch, one, group, BLOCK_SIZE=16)
        for one in (model.model, model):
            local = shard_batch(batch, one, group, BLOCK_SIZE=16)
            out = one(**local) if one is model else model.lm_head(one(**local).last_hidden_state)
            loss = out.loss if one is model else model.loss_function(logits=out, **of_loss(local))
            dist.all_reduce(loss := loss.detach())
            losses.append(loss.item())
        return losses

    def of_loss(local: dict[str, Any]) -> dict[str, Any]:
        names = ("labels", "shift_labels", "num_items_in_batch")
        return {name: local[name] for name in names} | {"vocab_size": models.VOCABULARY}

    model, images = build("Llava", "eager")
    expected = model(**with_images(images)).loss.item()
    for losses in ranks.run(2, work):
        assert losses == pytest.approx([expected] * 2, rel=1e-5)


def test_the_tower_runs_without_the_plan_of_the_text() -> None:
    """Else its convolutions would take images for tokens of the batch."""
    model, images = build("Llava", "tritoncp")
    local = shard_batch(with_images(images), model, BLOCK_SIZE=16)
    seen = []
    for part in (model.model.vision_tower, model.model.language_model):
        part.register_forward_pre_hook(lambda *_: seen.append(vars(model)[CURRENT].of({})))
    model(**local)
    assert seen == [None, local["context_parallel"]]


def test_a_prepared_model_has_the_names_of_its_features() -> None:
    model, _ = build("Llava", "tritoncp")
    names = names_of_features(model)
    hook_layers(model)
    assert "image_sizes" in names and "input_ids" not in names
    assert names_of_features(model) == names


def test_a_prepared_model_generates_from_images() -> None:
    model, images = build("Llava", "tritoncp")
    prompt = {"input_ids": TOKENS[:1, 80:100], "pixel_values": images["pixel_values"][:1]}
    expected = model.eval().generate(**prompt, max_new_tokens=3, do_sample=False)
    hook_layers(model)
    assert torch.equal(model.generate(**prompt, max_new_tokens=3, do_sample=False), expected)


def test_images_of_a_config_are_refused_on_one_process_too() -> None:
    model, images = build("Llava", "tritoncp")
    with pytest.raises(ValueError, match="pixel_values, which the model embeds: pass the model"):
        shard_batch(with_images(images), model.config)


def test_images_that_a_rank_cannot_place_are_refused() -> None:
    def work(group: Any) -> None:
        model, images = build("Llava", "tritoncp")
        batch = with_images(images)
        with pytest.raises(ValueError, match="pixel_values, which the model embeds: pass the model"):
            shard_batch(batch, model.config, group)
        embeddings = {**batch, "inputs_embeds": torch.ones(*TOKENS.shape, 32)}
        del embeddings["input_ids"]
        with pytest.raises(ValueError, match=r"pixel_values, and no input_ids \[B, S\] in which tokens"):
            shard_batch(embeddings, model, group)
        with pytest.raises(ValueError, match="no method get_audio_features, or no audio_token_id"):
            shard_batch({**batch, "input_features": torch.ones(1, 8, 8)}, model, group)
        fewer = {**batch, "pixel_values": images["pixel_values"][:1]}
        with pytest.raises(ValueError, match="images of the batch have 4 rows of features, and 8 tokens"):
            model(**shard_batch(fewer, model, group, BLOCK_SIZE=16))

    ranks.run(2, work)


@pytest.mark.long
def test_documents_with_positions_of_several_axes_have_the_text_axis_first() -> None:
    texts = models.packed_batch()["position_ids"]

    def pack(model: Any, images: dict[str, Any]) -> dict[str, Tensor]:
        batch = embed(model, images)
        return {**batch, "position_ids": torch.cat([texts[None], batch["position_ids"]])}

    def work(group: Any) -> Any:
        model, images = build("Qwen2.5-VL", "tritoncp")
        local = shard_batch(pack(model, images), model, group, BLOCK_SIZE=16)
        return models.sum_over_ranks(*train(model, local))

    model, images = build("Qwen2.5-VL", "eager")
    models.assert_equal(ranks.run(2, work)[0], train(model, pack(model, images)))


class Counting(PreTrainedModel):
    """Counts positions of some axes as in a text."""

    config_class, axes = LlamaConfig, 3

    def compute_3d_position_ids(self, input_ids: Tensor) -> Tensor:
        return torch.arange(input_ids.shape[1]).expand(self.axes, *input_ids.shape)


@pytest.mark.parametrize("axes", [3, 4])
def test_packed_positions_have_the_text_axis_first_only_for_models_that_read_it(axes: int) -> None:
    """Hunyuan-VL, whose positions have four axes, refuses a fifth."""
    model, texts = Counting(LlamaConfig()), models.packed_batch()["position_ids"]
    model.axes = axes
    batch = {"input_ids": torch.ones_like(texts), "pixel_values": torch.ones(1)}
    found = find_image_positions(batch, model, texts, torch.arange(texts.shape[1]).expand(texts.shape))
    assert torch.equal(found, texts.expand(4, *texts.shape))


def test_embeddings_that_lack_positions_or_features_of_images_are_refused_on_ranks() -> None:
    def work(group: Any) -> None:
        model, _ = build("Qwen2.5-VL", "tritoncp")
        batch = {"inputs_embeds": torch.ones(2, 32, 32), "labels": torch.ones(2, 32, dtype=torch.int64)}
        with pytest.raises(ValueError, match=r"pass position_ids \[3, B, S\], model.get_rope_index"):
            shard_batch(batch, model.config, group)
        with pytest.raises(
            ValueError, match=r"position_ids is \[2, 2, 32\]; .* or \[3, B or 1, S\] is needed"
        ):
            shard_batch({**batch, "position_ids": torch.arange(32).expand(2, 2, 32)}, model.config, group)
        shard_batch({**batch, "position_ids": torch.arange(32)[None]}, model.config, group)
        config = Qwen3VLConfig(attn_implementation="tritoncp")
        with pytest.raises(ValueError, match=r"to the hidden states of several layers \(deepstack\)"):
            shard_batch(batch, config, group)
        shard_batch({"input_ids": TOKENS}, config, group)
        shard_batch(batch, config.get_text_config(), group)

    ranks.run(2, work)
