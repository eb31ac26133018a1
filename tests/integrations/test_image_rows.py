"""Tests of who embeds images, and of the ways of their rows between ranks."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from tests.multiprocess import ranks
from tritoncp.integrations.transformers.images.feature_rows import FeatureRows, RowExchange, send_features
from tritoncp.integrations.transformers.images.own_images import OwnFeatures, feature_tokens, place_features
from tritoncp.integrations.transformers.images.parts import own_part, share_images


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 5))
def test_consecutive_images_are_shared_evenly(sizes: list[int], world: int) -> None:
    """No rank has more than its share and the largest image."""
    parts = share_images(sizes, world)
    assert [i for first, end in parts for i in range(first, end)] == list(range(len(sizes)))
    assert all(sum(sizes[first:end]) <= sum(sizes) / world + max(sizes) for first, end in parts)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=6), st.integers(1, 4))
def test_patches_of_images_go_with_their_grids(grids: list[tuple[int, int]], world: int) -> None:
    grid = torch.tensor([[1, *pair] for pair in grids])
    image = torch.arange(len(grid)).repeat_interleave(grid.prod(-1))
    parts = [
        own_part({"pixel_values": image[:, None], "image_grid_thw": grid}, r, world) for r in range(world)
    ]
    owners = [part.arguments for part in parts if part.is_owner]
    assert torch.equal(torch.cat([own["pixel_values"] for own in owners])[:, 0], image)
    assert torch.equal(torch.cat([own["image_grid_thw"] for own in owners]), grid)
    for part in parts:
        assert part.is_split and len(part.arguments["image_grid_thw"]) >= 1
        assert len(part.arguments["pixel_values"]) == part.arguments["image_grid_thw"].prod(-1).sum()


def test_blank_images_that_fill_up_rows_are_left_out() -> None:
    images = torch.ones(2, 3, 1, 2, 2)
    images[0, 1:] = 0
    mask = torch.arange(6).view(2, 3, 1, 1).expand(2, 3, 2, 2)
    parts = [own_part({"pixel_values": images, "pixel_attention_mask": mask}, rank, 2) for rank in range(2)]
    kept = torch.cat([part.arguments["pixel_attention_mask"] for part in parts])
    assert kept[:, 0, 0, 0].tolist() == [0, 3, 4, 5]


def test_frames_of_an_image_go_to_one_rank() -> None:
    images = torch.arange(4.0).view(4, 1, 1, 1, 1).expand(4, 2, 8, 8, 3)
    part = own_part({"pixel_values": images}, 1, 2)
    assert torch.equal(part.arguments["pixel_values"], images[2:])


def test_arguments_that_are_not_of_single_images_leave_all_images_to_all_ranks() -> None:
    images = torch.ones(2, 3, 4, 4)
    for other in ({"batch_num_images": torch.ones(2)}, {"image_sizes": torch.ones(3, 2)}):
        part = own_part({"pixel_values": images, **other}, 1, 2)
        assert (part.arguments, part.is_owner, part.is_split) == ({}, True, False)


def test_rows_and_their_gradients_cross_ranks_exactly() -> None:
    """One rank owns no row: what it computes goes nowhere, and has gradient 0."""
    owned, readers = [3, 0, 4], torch.tensor([2, 0, 0, 1, 1, 1, 0])
    features = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def work(group: Any) -> Any:
        rank, rows = group.rank(), FeatureRows(readers)
        first = sum(owned[:rank])
        x = features[first : first + max(owned[rank], 1)].clone().requires_grad_()
        out = send_features(x, RowExchange(rows, owned, group))
        (out * (rows.wanted_by(rank)[:, None] + 1)).sum().backward()
        return out.detach(), x.grad

    for rank, (out, grad) in enumerate(ranks.run(3, work)):
        assert torch.equal(out, features[readers == rank])
        first = sum(owned[:rank])
        expected = torch.arange(first, first + owned[rank], dtype=torch.float64)[:, None].expand(-1, 5) + 1
        assert torch.equal(grad, expected if owned[rank] else torch.zeros(1, 5, dtype=torch.float64))


FORMS: dict[str, Any] = {  # a method's result of features [images, rows, E], and back
    "pooler_output": (
        lambda x: BaseModelOutputWithPooling(pooler_output=x),
        lambda out: [out.pooler_output],
    ),
    "last_hidden_state": (
        lambda x: BaseModelOutputWithPooling(last_hidden_state=x),
        lambda out: [out.last_hidden_state],
    ),
    "features of several layers": (
        lambda x: OutputOfLayers(deepstack_features=[(3, list(x)), (7, tuple(2 * x))]),
        lambda out: [torch.cat(list(x)) / scale for scale, (_, x) in zip((1, 2), out.deepstack_features)],
    ),
    "a tuple of tensors": (lambda x: tuple(x), lambda out: [torch.cat(out)]),
}


@dataclass
class OutputOfLayers(BaseModelOutputWithPooling):
    deepstack_features: Any = None


def of_rank(method: Any, readers: Tensor, group: Any) -> OwnFeatures:
    """Return a method that embeds a rank's images, for tokens on the ranks ``readers``."""
    plan = SimpleNamespace(several=True, features={"image": FeatureRows(readers)}, mesh=group)
    return OwnFeatures(method, "image", SimpleNamespace(of=lambda _: plan, without_plan=nullcontext))


@pytest.mark.sample(2)
@pytest.mark.parametrize("form", FORMS)
def test_features_in_each_form_of_a_result_come_to_the_rank_of_their_token(form: str) -> None:
    readers = torch.tensor([1, 0, 0, 1, 1, 1])
    images, (make, read) = torch.arange(36.0).view(3, 2, 6), FORMS[form]

    def embed(pixel_values: Tensor) -> Any:
        return make(pixel_values + 1)

    def work(group: Any) -> list[Tensor]:
        return read(of_rank(embed, readers, group)(images))

    for rank, found in enumerate(ranks.run(2, work)):
        for x in found:
            assert torch.equal(x.reshape(-1, 6), images.view(6, 6)[readers == rank] + 1)


class ModelOfImages(PreTrainedModel):
    config_class = LlamaConfig

    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        return pixel_values


def test_a_mask_has_the_places_of_images_that_no_token_stands_for() -> None:
    places = torch.zeros(2, 8, dtype=torch.int64)
    places[0, 1] = places[0, 6] = places[1, 5] = 1
    batch = {"input_ids": torch.ones(2, 8), "pixel_values": torch.ones(3, 4)}
    model = ModelOfImages(LlamaConfig())
    with pytest.raises(ValueError, match="no image_token_id"):
        feature_tokens(batch, model)
    batch["image_embeds_position_mask"] = places
    placement = SimpleNamespace(batch=2, inverse=torch.arange(8).expand(2, 8), s_max=4)  # on two ranks
    rows = place_features(batch, feature_tokens(batch, model), placement)
    assert rows["image"].readers.tolist() == [0, 1, 1]


class NormedImages(nn.Module):
    """Embeds images by batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, dtype=torch.float64)

    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        return self.norm(pixel_values.flatten(0, 1))


def test_images_that_batch_norm_mixes_are_not_split() -> None:
    readers = torch.tensor([1, 0, 0, 1, 1, 1])
    images = torch.arange(36, dtype=torch.float64).view(3, 2, 6).square()

    def work(group: Any) -> Tensor:
        return of_rank(NormedImages().get_image_features, readers, group)(images).detach()

    expected = NormedImages().get_image_features(images).detach()
    for rank, found in enumerate(ranks.run(2, work)):
        torch.testing.assert_close(found, expected[readers == rank])
