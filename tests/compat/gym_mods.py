"""The mask_mods and score_mods of attention-gym's kinds, each made from plain parameters and tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Mod = Callable[..., Tensor]


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def anything(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q == q


# -- masks over one sequence ----------------------------------------------------------------------------


def window(left: int) -> Mod:
    return lambda b, h, q, kv: (q >= kv) & (q - kv <= left)


def dilated_window(left: int, step: int) -> Mod:
    return lambda b, h, q, kv: (q >= kv) & (q - kv < left) & ((q - kv) % step == 0)


def first_keys_and_window(first: int, left: int) -> Mod:
    """Attention sinks: the first keys stay visible."""
    return lambda b, h, q, kv: (q >= kv) & ((kv < first) | (q - kv <= left))


def prefix_lm(length: int) -> Mod:
    return lambda b, h, q, kv: (kv < length) | (q >= kv)


def global_tokens(radius: int, marked: Tensor) -> Mod:
    return lambda b, h, q, kv: ((q - kv).abs() <= radius) | marked[q] | marked[kv]


def strided(step: int) -> Mod:
    return lambda b, h, q, kv: (q >= kv) & ((q - kv < step) | (kv % step == step - 1))


# -- packed sequences -----------------------------------------------------------------------------------


def offsets_of(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def document_of(offsets: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())


def in_documents(mod: Mod, offsets: Tensor) -> Mod:
    """``mod`` within each document, on positions counted from its start."""
    of = document_of(offsets)
    return lambda b, h, q, kv: (of[q] == of[kv]) & mod(b, h, q - offsets[of[q]], kv - offsets[of[kv]])


def packed_causal(offsets: Tensor) -> Mod:
    """Causal documents as one interval of keys for each query."""
    of = document_of(offsets)
    return lambda b, h, q, kv: (kv >= offsets[of[q]]) & (q >= kv)


def in_pieces(mod: Mod, size: int) -> Mod:
    """``mod`` within each run of ``size`` tokens."""
    return lambda b, h, q, kv: (q // size == kv // size) & mod(b, h, q % size, kv % size)


def shared_prefix(offsets: Tensor, prefix: Tensor) -> Mod:
    """Continuations see the whole of their prefix document, and themselves causally."""
    of = document_of(offsets)

    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        own = of[q]
        shared = prefix[own]
        before = (own != shared) & (kv >= offsets[shared]) & (kv < offsets[shared + 1])
        return before | ((kv >= offsets[own]) & (q >= kv))

    return mod


def last_image(image_of_text: Tensor, tokens: int) -> Mod:
    """Cross attention: each text token sees the image before it; none sees nothing."""
    return lambda b, h, q, kv: image_of_text[q] == kv // tokens + 1


def noised_and_clean(length: int, size: int) -> Mod:
    """Block diffusion over [noised tokens, clean tokens]."""

    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        q_noised, kv_noised = q < length, kv < length
        q_block, kv_block = q % length // size, kv % length // size
        same = (q_block == kv_block) & (q_noised == kv_noised)
        return same | (~kv_noised & torch.where(q_noised, q_block > kv_block, q_block >= kv_block))

    return mod


# -- trees ----------------------------------------------------------------------------------------------


def ancestors(parents: Sequence[int]) -> Tensor:
    table = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents[1:], start=1):
        table[node] |= table[parent]
    return table


def tree(prefix: int, table: Tensor) -> Mod:
    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        node = (kv - prefix).clamp(0, len(table) - 1)
        return (kv < prefix) | ((kv >= prefix) & (kv < prefix + len(table)) & table[q, node])

    return mod


def drafts(prefix: int, size: int) -> Mod:
    """Sampled blocks after a prefix of keys, each causal within itself."""

    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        own = kv - prefix
        return (kv < prefix) | ((kv >= prefix) & (q // size == own // size) & (own % size <= q % size))

    return mod


# -- images and videos ----------------------------------------------------------------------------------


def near(center: Tensor, at: Tensor, kernel: int, size: int) -> Tensor:
    """Whether ``at`` lies in the kernel around ``center``, which stays inside the canvas."""
    half = kernel // 2
    return (center.clamp(half, size - 1 - half) - at).abs() <= half


def neighbourhood(
    width: int, height: int, kernel: int, place: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> Mod:
    """NATTEN: ``place`` gives the (x, y) of an index."""

    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        (qx, qy), (kx, ky) = place(q), place(kv)
        return near(qx, kx, kernel, width) & near(qy, ky, kernel, height)

    return mod


def by_rows(width: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    return lambda i: (i % width, i // width)


def by_tiles(width: int, tile: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def place(i: Tensor) -> tuple[Tensor, Tensor]:
        number, inside = i // (tile * tile), i % (tile * tile)
        x, y = number % (width // tile), number // (width // tile)
        return x * tile + inside % tile, y * tile + inside // tile

    return place


def every_other_bit(code: Tensor) -> Tensor:
    code = code & 0x55555555
    for shift, bits in ((1, 0x33333333), (2, 0x0F0F0F0F), (4, 0x00FF00FF), (8, 0x0000FFFF)):
        code = (code | (code >> shift)) & bits
    return code


def by_morton_code(i: Tensor) -> tuple[Tensor, Tensor]:
    return every_other_bit(i), every_other_bit(i >> 1)


def tile_window(canvas: Sequence[int], kernel: Sequence[int], tile: Sequence[int], text: int = 0) -> Mod:
    """Sliding tiles in any number of dimensions, then text tokens that see everything and are seen."""
    tiles = [c // t for c, t in zip(canvas, tile)]
    kernels = [k // t for k, t in zip(kernel, tile)]
    size, vision = math.prod(tile), math.prod(canvas)

    def places(i: Tensor) -> list[Tensor]:
        number, result = i // size, []
        for count in reversed(tiles):
            result.append(number % count)
            number = number // count
        return result[::-1]

    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        seen = (q < vision) & (kv < vision)
        for at, key, count, width in zip(places(q), places(kv), tiles, kernels):
            left, right = width // 2, width // 2 + width % 2 - 1
            center = at.clamp(left, count - 1 - right)
            seen = seen & (key >= center - left) & (key <= center + right)
        to_text = (q < vision) & (kv >= vision) & (kv < vision + text)
        return seen | to_text | ((q >= vision) & (kv < vision + text))

    return mod


def spatial_head(prompt: int, frame: int, frames: int, sink: bool, multiple: int) -> Mod:
    reach = math.floor(frames * frame / multiple) * multiple
    first = prompt + frame * sink
    return lambda b, h, q, kv: (kv < first) | (q < prompt) | (torch.abs(q - kv) < reach)


def temporal_head(prompt: int, frame: int, frames: int, width: int) -> Mod:
    reach = width * frame // frames

    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        apart = (q - prompt) % frame - (kv - prompt) % frame
        return (kv < prompt) | (q < prompt) | (torch.abs(apart) < reach)

    return mod


def chosen_tiles(chosen: Tensor, tile: int, lengths: Tensor) -> Mod:
    """A table of tiles of keys for each tile of queries; a tile's tokens beyond its length are padding."""

    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return chosen[b, h, q // tile, kv // tile] & (kv % tile < lengths[kv // tile])

    return mod


def listed_tiles(listed: Tensor, tile: int) -> Mod:
    """Tiles of keys by number, a row of them for each tile of queries: compared one by one under vmap."""
    return lambda b, h, q, kv: (listed[b, h, q // tile] == (kv // tile).unsqueeze(-1)).any(-1)


# -- scores ---------------------------------------------------------------------------------------------


def alibi(heads: int) -> Mod:
    return lambda s, b, h, q, kv: s + (kv - q) * torch.exp2(-((h + 1) * 8.0 / heads))


def softcap(cap: float, tanh: Mod = torch.tanh) -> Mod:
    return lambda s, b, h, q, kv: cap * tanh(s / cap)


def logarithm_of(activation: Mod, offset: float) -> Mod:
    """Softmax of this is the activation, up to the row's sum and the offset."""
    return lambda s, b, h, q, kv: torch.log(activation(s) + offset)


def sandwich(heads: int, length: int, width: int = 16) -> Mod:
    rates = 10000 ** (-2 * torch.arange(width // 2) / width)
    table = torch.cos((torch.arange(2 * length - 1) - (length - 1)).abs()[:, None] * rates).sum(-1)
    share = heads / (8.0 * torch.arange(1, heads + 1))
    return lambda s, b, h, q, kv: s + table[q - kv + length - 1] * share[h]


def distances(edges: Tensor, most: int) -> Tensor:
    """int32 [B, N, N]: shortest paths in graphs, bool [B, N, N]; ``most + 1`` stands for longer ones."""
    count = edges.shape[1]
    far = torch.where(edges, 1, max(count, most + 1))
    far.diagonal(dim1=1, dim2=2).zero_()
    for k in range(count):
        far = torch.minimum(far, far[:, :, k : k + 1] + far[:, k : k + 1])
    return far.clamp(max=most + 1).to(torch.int32)


def bias_by_distance(table: Tensor, apart: Tensor) -> Mod:
    return lambda s, b, h, q, kv: s + table[h, apart[b, q, kv]]


def bias_of_path(tables: Sequence[Tensor], kinds: Tensor, lengths: Tensor) -> Mod:
    """The mean of a bias for each edge of a path: a loop over the places in the path, unrolled."""

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        length = lengths[b, q, kv]
        total = torch.zeros_like(s)
        for place, table in enumerate(tables):
            total = total + torch.where(length > place, table[h, kinds[b, q, kv, place]], 0.0)
        return s + total / torch.clamp(length, min=1)

    return mod


def of_visible(mask_mod: Mod, score_mod: Mod) -> Mod:
    """A mask inside a score_mod."""
    return lambda s, b, h, q, kv: torch.where(mask_mod(b, h, q, kv), score_mod(s, b, h, q, kv), -math.inf)
