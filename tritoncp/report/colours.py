"""The colour of each rank, in pictures and on a terminal."""

from __future__ import annotations

import colorsys

# Matplotlib's "tab10", without Matplotlib: ten colours that are easy to tell apart
PALETTE = (
    (31, 119, 180), (255, 127, 14), (44, 160, 44), (214, 39, 40), (148, 103, 189),
    (140, 86, 75), (227, 119, 194), (127, 127, 127), (188, 189, 34), (23, 190, 207),
)  # fmt: skip


def rank_colours(world_size: int) -> list[tuple[int, int, int]]:
    """Return red, green and blue of each rank, from 0 to 255. Up to ten ranks have a distinct palette; more
    have a rainbow in the order of the ranks, from blue over green and red to purple, in which neighbours
    differ in lightness.

    >>> rank_colours(2), len(set(rank_colours(64)))
    ([(31, 119, 180), (255, 127, 14)], 64)
    """
    if world_size <= len(PALETTE):
        return list(PALETTE[:world_size])
    colours = []
    for rank in range(world_size):
        rgb = colorsys.hls_to_rgb((0.62 - 0.8 * rank / world_size) % 1, (0.40, 0.56)[rank % 2], 0.62)
        colours.append((round(255 * rgb[0]), round(255 * rgb[1]), round(255 * rgb[2])))
    return colours
