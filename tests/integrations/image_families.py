"""`python -m tests.integrations.image_families --write`: the families of docs/models.md that take images.

Builds a small model of every family of transformers that embeds images, in float64, and compares loss and
gradients, those of the vision tower among them, with transformers' eager attention on one process: of batches
with images and of packed documents with images, on two and on four ranks.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from tests.integrations import families
from tests.multiprocess import ranks
from tritoncp.core.processes import Lost, WorkerPool
from tritoncp.integrations.transformers import shard_batch
from tritoncp.integrations.transformers.images.own_images import FEATURES, methods_of
from tritoncp.integrations.transformers.model_classes import counts_from_padding

BEGIN, END = "<!-- images: begin -->", "<!-- images: end -->"
SIZES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("image_sizes.toml").read_text())
IMAGE, IMAGES = 5, 5  # the token that stands for images, and their number, which no number of ranks divides
START = 4  # the token before each image
LIMIT, SECONDS = 1e-5, 300  # models compute norms and recurrent layers in float32 in any dtype
Batch = dict[str, Any]


def build(family: str, head: str, attention: str, variant: dict[str, Any]) -> Any:
    """Build the small model of a family in float64; token IMAGE stands for its images."""
    own = SIZES["options"].get(family, {})
    own = SIZES["options"][own] if isinstance(own, str) else own
    options = merge(families.options_of(family), own)
    dtype = torch.float32 if family in SIZES["float32"] else torch.float64
    model = families.build(family, head, attention, variant | SIZES["sizes"], options).to(dtype)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            for name in ("image_token_id", "image_token_index"):
                if isinstance(getattr(module.config, name, None), int):
                    setattr(module.config, name, IMAGE)
            module.config._experts_implementation = "eager"  # the others multiply no float64 matrices
            module.config.dtype = dtype
        if getattr(module, "scaling", None) == 1 and hasattr(module, "q_norm"):
            # For scores of unit size: Gemma 4's would be hundreds, which eager attention rounds to float32.
            module.q_norm.weight.data.mul_(module.head_dim**-0.5)
    return model


def merge(options: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Return options of a config with those of others in their place.

    >>> merge({"text_config": {"a": 1, "b": 2}}, {"text_config": {"b": 3}})
    {'text_config': {'a': 1, 'b': 3}}
    """
    both = {
        name: merge(options[name], x) if isinstance(x, dict) and isinstance(options.get(name), dict) else x
        for name, x in others.items()
    }
    return options | both


def image_method(model: Any) -> tuple[Any, Callable[..., Any]]:
    """Return the innermost module of a model that embeds images, and its method."""
    found = [(module, getattr(module, name)) for module, name, kind in methods_of(model) if kind == "image"]
    if not found:
        raise ValueError("the model has no method get_image_features, by which ranks share images")
    return found[-1]


def candidates(config: Any) -> Iterator[Batch]:
    """Yield images in the forms that families take, of several sizes where a form has sizes."""
    vision = getattr(config, "vision_config", None) or config
    side = getattr(vision, "image_size", None)
    side = side if isinstance(side, int) else 32
    patch = getattr(vision, "patch_size", None)
    patch = patch if isinstance(patch, int) else 16
    yield from _whole_images(side, patch)
    yield from _grids_of_patches(patch)
    yield from _padded_rows(side, patch)
    axis = torch.arange(6)
    places = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1).reshape(1, 36, 2)
    patches = {"pixel_values": _normal(IMAGES, 36, 3 * patch**2)}
    yield patches | {"image_position_ids": places.expand(IMAGES, -1, -1)}
    cells = torch.stack(torch.meshgrid(axis[:4], axis[:4], indexing="ij"), -1).reshape(1, 16, 2)
    rows = [cells.expand(IMAGES, -1, -1).double(), _normal(IMAGES, 16, 3 * patch**2)]
    yield {"flattened_patches": torch.cat(rows, -1)}


def _whole_images(side: int, patch: int) -> Iterator[Batch]:
    """Yield square images, whole or in tiles."""
    square = {"image_sizes": torch.full((IMAGES, 2), side)}
    plain = {"pixel_values": _normal(IMAGES, 3, side, side)}
    yield plain
    yield plain | square
    yield plain | {"pixel_mask": torch.ones(IMAGES, side, side, dtype=torch.bool)}
    yield plain | {"high_res_pixel_values": _normal(IMAGES, 3, side, side)}
    yield plain | {"qformer_input_ids": torch.arange(8).expand(IMAGES, -1)}
    for tiles in range(2, 6):
        yield {"pixel_values": _normal(IMAGES, tiles, 3, side, side)} | square
    count = (side // patch) ** 2
    patches = {"pixel_values": _normal(IMAGES, count, 3 * patch**2)}
    yield patches
    yield {"pixel_values": patches["pixel_values"].flatten(0, 1)}
    yield {"pixel_values": _normal(IMAGES, 2, patch, patch, 3)}
    yield patches | {
        "image_token_pooling": torch.arange(IMAGES * count).reshape(-1, 4),
        "image_grids": torch.tensor([[1, count // 4, 0, 0]] * IMAGES),
    }


def _grids_of_patches(patch: int) -> Iterator[Batch]:
    """Yield the patches of images of several sizes, in one list."""
    grid = torch.tensor([[1, 4, 4], [1, 4, 8], [1, 8, 4], [1, 4, 4], [1, 8, 8]])
    cells, merged = int(grid.prod(-1).sum()), 2 * patch
    for shape in ([3 * patch**2], [6 * patch**2], [3, patch, patch], [merged, merged, 3]):
        patches = {"pixel_values": _normal(cells, *shape)}
        yield patches | {"image_grid_thw": grid}
        yield patches | {"image_grid_thw": grid, "image_merge_sizes": torch.full((IMAGES,), 2)}
        yield patches | {"image_grid_hw": grid[:, 1:]}
    yield {"pixel_values": _normal(1, 3, patch, patch * cells), "target_sizes": grid[:, 1:]}


def _padded_rows(side: int, patch: int) -> Iterator[Batch]:
    """Yield images whose number fills up rows, or whose patches fill up images, by a mask."""
    rows = _normal(2, 3, 3, side, side)
    rows[0, 2] = 0  # fills up a row with two images
    yield {"pixel_values": rows, "pixel_attention_mask": torch.ones(2, 3, side, side, dtype=torch.int64)}
    yield {"pixel_values": rows, "pixel_attention_mask": torch.tensor([[True, True, False], [True] * 3])}
    yield {
        "pixel_values": _normal(IMAGES, 16, 3 * patch**2),
        "spatial_shapes": torch.full((IMAGES, 2), 4),
        "pixel_attention_mask": torch.ones(IMAGES, 16, dtype=torch.int64),
    }


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def find_images(model: Any) -> tuple[Batch, list[int]]:
    """Return images that a model takes, and the number of rows of each image. Raises ValueError, with the
    error of the first candidate, if it takes none."""
    module, method = image_method(model)
    arguments = inspect.signature(method).parameters
    needed = {name for name, x in arguments.items() if x.default is x.empty and x.kind != x.VAR_KEYWORD}
    errors = []
    for images in candidates(module.config):
        if needed <= images.keys() <= arguments.keys():
            found = families.attempt(lambda images=images: _rows_of_images(method(**images)))
            if not isinstance(found, str):
                return images, found
            errors.append(found)
    first = errors[0] if errors else f"it needs {', '.join(sorted(needed))}"
    raise ValueError(f"get_image_features takes no image of these tests: {first}")


def _rows_of_images(out: Any) -> list[int]:
    features = getattr(out, "pooler_output", out)
    if features is None:  # of Granite 4 Vision and Fuyu
        layers = getattr(out, "deepstack_features", None)
        features = layers[0][1] if layers else out.last_hidden_state
    parts = [features] if isinstance(features, Tensor) and features.ndim == 2 else list(features)
    rows = [x.numel() // x.shape[-1] for x in parts]
    return rows if len(rows) == IMAGES else [sum(rows) // IMAGES] * IMAGES


def make_batch(model: Any, images: Batch, rows: list[int]) -> Batch:
    """Return two rows of text, the first with two of the images and the second with three."""
    length = 12 * IMAGES + max(sum(rows[:2]), sum(rows[2:]))
    tokens = torch.randint(8, 90, (2, length), generator=torch.Generator().manual_seed(1))
    for row, own in zip(tokens, (rows[:2], rows[2:])):
        at = 3
        for size in own:
            row[at - 1], row[at : at + size] = START, IMAGE
            at += size + 9
    is_image = tokens == IMAGE
    labels = tokens.masked_fill(is_image, -100)
    labels[:, 0] = -100  # no document predicts the first token of the next one
    batch: Batch = {"input_ids": tokens, "labels": labels, **images}
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    names = {name for part in parts for name in inspect.signature(part.forward).parameters}
    if "mm_token_type_ids" in names:
        batch["mm_token_type_ids"] = is_image.int()
    if any(hasattr(part.config, "audio_start_token_id") for part in parts):
        batch["attention_mask"] = torch.ones_like(tokens)  # else Qwen's Omni counts no positions of images
    if counts_from_padding(model.config.get_text_config()):
        batch["position_ids"] = torch.arange(length).repeat(2, 1)  # as in packed documents
    if "image_embeds_position_mask" in names:
        batch["image_embeds_position_mask"] = is_image
    if "token_type_ids" in names:
        is_suffix = torch.arange(length) >= 3 + rows[0]  # of PaliGemma, whose prefix sees both ways
        has_prefix = "paligemma" in type(model).__name__.lower()
        batch["token_type_ids"] = (is_suffix.expand(2, -1) if has_prefix else is_image).int()
    return batch


def pack(batch: Batch) -> Batch:
    """Return the rows of a batch as documents of one row."""
    shape = batch["input_ids"].shape
    rest = {name: x for name, x in batch.items() if name != "attention_mask"}
    packed = {name: x.reshape(1, -1) if x.shape == shape else x for name, x in rest.items()}
    positions = torch.arange(shape[1]).repeat(shape[0])[None]
    return {**packed, "position_ids": positions}


def train(model: Any, batch: Batch) -> dict[str, Tensor]:
    """Return the loss of a model and its gradients."""
    model.zero_grad()
    return families.backward(model, model(**{"use_cache": False, **batch}).loss)


def train_on_ranks(group: Any, model: Any, batches: list[Batch]) -> list[Any]:
    """Return the sums over ranks of loss and gradients of each batch, or messages."""
    return [families.attempt(partial(_sum_over_ranks, group, model, batch)) for batch in batches]


def _sum_over_ranks(group: Any, model: Any, batch: Batch) -> dict[str, Tensor]:
    try:
        result = train(model, shard_batch(batch, model, group, BLOCK_SIZE=16))
    except ValueError as error:
        if "omit labels" not in str(error):
            raise
        result = train_by_logits(group, model, batch)
    for name, weight in model.named_parameters():
        dist.all_reduce(result.setdefault(name, torch.zeros_like(weight)))
    dist.all_reduce(result["loss"])
    return result


def train_by_logits(group: Any, model: Any, batch: Batch) -> dict[str, Tensor]:
    """Return the same for a model that computes a loss itself, from the logits of this rank."""
    model.zero_grad()
    rest = {name: x for name, x in batch.items() if name != "labels"}
    local = shard_batch({**rest, "targets": batch["labels"]}, model, group, BLOCK_SIZE=16)
    labels = local.pop("targets").masked_fill(~local["context_parallel"].plan.valid, -100)
    loss = families.loss_of(model(**local).logits, labels, (batch["labels"] != -100).sum())
    return families.backward(model, loss)


def compare(result: Any, expected: dict[str, Tensor]) -> str:
    """Return "yes", the largest difference, relative to the largest gradient, or a message."""
    if isinstance(result, str):
        return result
    expected = {name: x for name, x in expected.items() if x.numel()}
    largest = max(x.abs().max().item() for x in expected.values())
    worst = max((result[name] - x).abs().max().item() for name, x in expected.items()) / largest
    return "yes" if worst < LIMIT else f"differs by {worst:.1g}"


def find_variant(family: str, head: str) -> tuple[dict[str, Any], Any, Batch, dict[str, Tensor]]:
    """Return (sizes, model, batch, loss and gradients) of a model that trains with images and eager
    attention. Raises ValueError with the first error if none does."""
    errors = []

    def attempt(variant: dict[str, Any]) -> Any:
        model = build(family, head, "eager", variant)
        batch = make_batch(model, *find_images(model))
        try:
            with families.LowerPositionsFirst():
                return variant, model, batch, train(model, batch)
        except AttributeError as error:
            release = f"transformers {transformers.__version__}"
            raise ValueError(f"{release} fails on one process: {error}") from error

    for variant in families.VARIANTS:
        found = families.attempt(partial(attempt, variant))
        if not isinstance(found, str):
            return found
        errors.append(found)
    raise ValueError(errors[0].partition(": ")[2])


def refuse_tokens(family: str, head: str) -> None:
    """Raise the error of shard_batch for texts of a family on one process, if it refuses them."""
    build_one = partial(build, family, head, "tritoncp")
    built = (families.attempt(partial(build_one, variant)) for variant in families.VARIANTS)
    model = next((one for one in built if not isinstance(one, str)), None)
    if model is not None:
        shard_batch({"input_ids": torch.arange(8, 40)[None]}, model, BLOCK_SIZE=16)


def reads_images(model: Any, batch: Batch, expected: dict[str, Tensor]) -> bool:
    """Return whether gradients reach the vision tower, or else, of images that become tokens, whether others
    have another loss."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    text = {id(x) for part in (decoder, head) if part is not None for x in part.parameters()}
    tower = [name for name, x in model.named_parameters() if id(x) not in text and name in expected]
    if decoder is not None and any(bool(expected[name].any()) for name in tower):
        return True
    name = next(name for name in FEATURES if name in batch)
    return bool(train(model, {**batch, name: -batch[name]})["loss"] != expected["loss"])


def check(family: str, head: str) -> str:
    """Try a family, in this process: "yes", or why not."""
    refused = families.attempt(partial(refuse_tokens, family, head))
    if isinstance(refused, str):
        return refused
    variant, model, batch, expected = find_variant(family, head)
    if not reads_images(model, batch, expected):
        return "images change neither the loss nor gradients of a vision tower on one process"
    model = build(family, head, "tritoncp", variant)
    results = [
        compare(result, expected)
        for size in (2, 4)
        for result in ranks.run(size, train_on_ranks, model, [batch, pack(batch)], timeout=SECONDS)[0]
    ]
    return next((one for one in results if one != "yes"), "yes")


def check_families(cases: list[tuple[str, str]]) -> Iterator[str]:
    """Try families one after the other."""
    for family, head in cases:
        yield families.attempt(partial(check, family, head))


def check_in_child(family: str, head: str) -> str:
    """Try a family in a separate process, which may die or take too long."""
    with WorkerPool(check_families, 1, timeout=SECONDS, method="fork") as pool:
        ((_, result),) = pool.run([[(family, head)]])
    return result.why if isinstance(result, Lost) else str(result)


def list_families() -> dict[str, str]:
    """Return the class of each family whose models embed images, by model type; of several, the first."""
    own = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    heads = [(family, (head, own.get(family, head))) for family, head in families.list_families().items()]
    found = {family: next(filter(_embeds_images, names), "") for family, names in heads}
    return {family: head for family, head in found.items() if head}


def _embeds_images(head: str) -> bool:
    cls = getattr(transformers, head)
    return hasattr(cls, "get_image_features") or "pixel_values" in inspect.signature(cls.forward).parameters


def read_list() -> dict[str, str]:
    """Return "yes" or the reason of each family of the page."""
    found = {}
    for line in families.PAGE.read_text().partition(BEGIN)[2].partition(END)[0].splitlines():
        names, _, reason = line.removeprefix("- ").partition("`: ")
        if line.startswith("- "):
            found |= dict.fromkeys(re.findall(r"`([\w.-]+)", names), reason or "yes")
    return found


def write_list(rows: dict[str, str]) -> None:
    """Write all families into the page, in one item for equal reasons."""
    head, _, rest = families.PAGE.read_text().partition(BEGIN)
    _, _, rest = rest.partition(END)
    groups: dict[str, list[str]] = {}
    for family, reason in sorted(rows.items()):
        groups.setdefault(families.shorten(reason), []).append(f"`{family}`")
    lines = [
        f"- {', '.join(names)}" + f": {reason}" * (reason != "yes")
        for reason, names in sorted(groups.items(), key=lambda item: (item[0] != "yes", -len(item[1])))
    ]
    families.PAGE.write_text(f"{head}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{rest}")


@click.command()
@click.argument("names", nargs=-1)
@click.option("--write", is_flag=True, help="Write the list into docs/models.md.")
def main(names: tuple[str, ...], write: bool) -> None:
    """Try the families NAMES of transformers with images, all unless named."""
    families.prepare()
    ranks.load_compiler()
    heads, rows = list_families(), read_list()
    for family in names or heads:
        rows[family] = check_in_child(family, heads[family])
        click.echo(f"{family}\t{rows[family]}")
        if write:
            write_list(rows)


if __name__ == "__main__":
    main()
