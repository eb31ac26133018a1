"""The images of a batch that a rank embeds: consecutive ones, about equal in size over the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from torch import Tensor

# Arguments with one element for each image, besides the images themselves.
PER_IMAGE = frozenset(
    (
        "high_res_pixel_values", "image_grid_hw", "image_grid_thw", "image_merge_sizes", "image_position_ids",
        "image_sizes", "pixel_attention_mask", "pixel_mask", "spatial_shapes", "target_sizes",
        "target_sizes_videos", "tile_fine_mask", "video_grid_thw", "video_merge_sizes",
    )
)  # fmt: skip
GRIDS = ("image_grid_thw", "video_grid_thw", "image_grid_hw")  # the patches of each image, in one list


class Part(NamedTuple):
    """The images that a rank embeds.

    arguments: the arguments of the method for these images
    is_owner:  whether other ranks get their rows from this rank; False: an image of another rank, so that
               every rank embeds one
    is_split:  whether ranks have different images; False: all have all, since their arguments name no images
    """

    arguments: dict[str, Any]
    is_owner: bool
    is_split: bool


ALL_IMAGES = Part({}, is_owner=True, is_split=False)  # of every rank


def share_images(sizes: Sequence[int], world_size: int) -> list[tuple[int, int]]:
    """Return (first, end) of the images of each rank. sizes: the work of each image

    >>> share_images([1, 1, 1, 3], 2), share_images([5], 2)
    ([(0, 3), (3, 4)], [(0, 0), (0, 1)])
    """
    ends, total = list(accumulate(sizes)), sum(sizes)
    middles = [(end - size / 2) * world_size / total for end, size in zip(ends, sizes)]
    owners = [min(int(middle), world_size - 1) for middle in middles]
    counts = [sum(owner < rank for owner in owners) for rank in range(world_size + 1)]
    return list(pairwise(counts))


def own_part(arguments: Mapping[str, Any], rank: int, world_size: int) -> Part:
    """Return the part of a rank of the arguments of a method that embeds images, the images first."""
    given = {name: x for name, x in arguments.items() if _is_of_images(x)}
    first = next(iter(arguments))
    if first not in given or not set(given) <= PER_IMAGE | {first}:
        return ALL_IMAGES
    given = _without_padding(given, first)
    grid = next((given[name] for name in GRIDS if name in given), None)
    sizes = [1] * len(given[first]) if grid is None else grid.prod(-1).tolist()
    if not sizes or any(len(x) not in (len(sizes), sum(sizes)) for x in given.values()):
        return ALL_IMAGES
    start, end = share_images(sizes, world_size)[rank]
    is_owner = start < end
    start, end = (start, end) if is_owner else (0, 1)
    ends = [0, *accumulate(sizes)]
    patches = slice(ends[start], ends[end])
    return Part(
        {name: x[slice(start, end) if len(x) == len(sizes) else patches] for name, x in given.items()},
        is_owner,
        True,
    )


def _is_of_images(x: Any) -> bool:
    return isinstance(x, Tensor) or (isinstance(x, list | tuple) and any(isinstance(y, Tensor) for y in x))


def _without_padding(given: dict[str, Any], first: str) -> dict[str, Any]:
    """Return images [n, 1, C, H, W] of rows of images [B, m, C, H, W] in which blank images fill up the rows
    (Idefics); other arguments unchanged."""
    images = given[first]
    has_tiles = "image_sizes" in given  # of LLaVA-NeXT
    if first != "pixel_values" or has_tiles or not isinstance(images, Tensor) or images.ndim != 5:
        return given
    if images.shape[-1] == 3:  # frames [n, T, H, W, C] of Inkling
        return given
    is_image = (images != 0).flatten(2).any(-1)
    if not bool(is_image.any()):
        return given
    return {
        name: x[is_image][:, None] if isinstance(x, Tensor) and x.shape[:2] == is_image.shape else x
        for name, x in given.items()
    }
