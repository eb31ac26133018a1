"""Masks as people write them: torch's idiom over tables of tokens, for packed documents of all lengths."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor

from tritoncp.masks.mask_mod import MaskFn


class Everyday(NamedTuple):
    """A mask_mod and the sizes that it is made for."""

    mod: MaskFn
    length: int
    B: int | None = None
    H: int | None = None
    most: int = 8  # intervals of a row; 0: too many for a list, or known only by evaluating pairs


def draw_lengths(total: int, seed: int, median: float = 1800, sigma: float = 1.4) -> list[int]:
    """Draw log-normal lengths of documents that add up to ``total``."""
    draw = random.Random(seed)
    out: list[int] = []
    while sum(out) < total:
        length = int(draw.lognormvariate(torch.tensor(median).log().item(), sigma)) + 1
        out.append(min(length, max(1, total // 4), total - sum(out)))
    return out


def of_tokens(values: object, counts: list[int]) -> Tensor:
    """Repeat a value for the tokens of each document: int32."""
    return torch.repeat_interleave(torch.as_tensor(values, dtype=torch.int32), torch.as_tensor(counts))


def draw_images(length: int) -> Tensor:
    """Number the tokens of images from 1, and text 0: int32 [length]."""
    image, place, draw, number = torch.zeros(length, dtype=torch.int32), 0, random.Random(2), 0
    while place < length - 600:
        place += draw.randint(300, 2500)
        number += 1
        image[place : place + draw.choice([64, 256, 576])] = number
    return image


def everyday_masks(length: int) -> dict[str, Everyday]:
    """Return masks by name, of ``length`` tokens each, batches in all."""
    sizes = draw_lengths(length, 11)
    document, image = of_tokens(range(len(sizes)), sizes), draw_images(length)
    edges = torch.tensor([0, *sizes]).cumsum(0)
    start, end = edges[document.long()], edges[document.long() + 1]
    position = torch.arange(length) - start
    draw = random.Random(3)
    prefix = torch.tensor([draw.randint(0, size) for size in sizes])
    pad = torch.tensor([draw.randint(0, min(60, size - 1)) for size in sizes])
    is_token = torch.arange(length) < end - pad[document.long()]
    keep = torch.rand(length, generator=torch.Generator().manual_seed(0)) < 0.9
    lengths = draw_lengths(length, 5, median=150, sigma=1.0)
    turn, role = (
        of_tokens(range(len(lengths)), lengths),
        of_tokens([i % 2 for i in range(len(lengths))], lengths),
    )
    frame, window = (
        (torch.arange(length) // 256).int(),
        torch.tensor([64, 128, 256, 512, 1024, 2048, 4096, length]),
    )
    enter, leave = draw_tree(length)
    packed, short = (
        torch.stack([of_tokens(range(len(s)), s) for s in (draw_lengths(length // n, i) for i in range(n))])
        for n in (8, 32)
    )
    half = length // 2

    def block_diffusion(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """Noisy blocks of 64 before their clean copies, which are causal by block."""
        clean, clean_key = q >= half, kv >= half
        block, block_key = (torch.where(x >= half, (x - half) // 64, x // 64) for x in (q, kv))
        own = (block == block_key) & (clean == clean_key)
        return own | ((block > block_key) & clean_key & ~clean) | ((block >= block_key) & clean_key & clean)

    whole = {
        "documents": (lambda b, h, q, kv: (q >= kv) & (document[q] == document[kv]), 1),
        "window": (lambda b, h, q, kv: (q >= kv) & (q - kv < 4096), 1),
        "images both ways": (lambda b, h, q, kv: (q >= kv) | ((image[q] == image[kv]) & (image[q] > 0)), 1),
        "images and a window": (
            lambda b, h, q, kv: ((q >= kv) & (q - kv < 1024)) | ((image[q] == image[kv]) & (image[q] > 0)), 1,
        ),
        "documents and images": (
            lambda b, h, q, kv: (
                (document[q] == document[kv]) & ((q >= kv) | ((image[q] == image[kv]) & (image[q] > 0)))
            ), 2,
        ),
        "prefix-LM documents": (
            lambda b, h, q, kv: (
                (document[q] == document[kv]) & ((q >= kv) | (position[kv] < prefix[document[q]]))
            ), 1,
        ),
        "documents by position": (
            lambda b, h, q, kv: (document[q] == document[kv]) & (position[q] >= position[kv]), 1,
        ),
        "documents with padding": (
            lambda b, h, q, kv: (q >= kv) & (document[q] == document[kv]) & is_token[kv] & is_token[q], 1,
        ),
        "window and sinks": (lambda b, h, q, kv: (q >= kv) & ((q - kv < 2048) | (kv < 64)), 2),
        "chunks": (lambda b, h, q, kv: (q >= kv) & (q // 8192 == kv // 8192), 1),
        "causal by block": (lambda b, h, q, kv: q // 512 >= kv // 512, 1),
        "frames": (lambda b, h, q, kv: (frame[q] - frame[kv] < 6) & (frame[q] >= frame[kv]), 1),
        "window of both sides": (lambda b, h, q, kv: (q - kv).abs() <= 1000, 1),
        "ends from tables": (lambda b, h, q, kv: (kv >= start[q]) & (kv < torch.minimum(end[q], q + 100)), 1),
        "shared first document": (
            lambda b, h, q, kv: (q >= kv) & ((document[kv] == 0) | (document[q] == document[kv])), 2,
        ),
        "not later, not elsewhere": (lambda b, h, q, kv: ~((q < kv) | (document[q] != document[kv])), 1),
        "block diffusion": (block_diffusion, 2),
        "dilated window": (lambda b, h, q, kv: (q >= kv) & (q - kv < 8192) & ((q - kv) % 4 == 0), 0),
        "dilated": (lambda b, h, q, kv: (q >= kv) & ((q - kv) % 4 == 0), 0),
        "documents with random padding": (
            lambda b, h, q, kv: (q >= kv) & (document[q] == document[kv]) & keep[kv], 0,
        ),
        "random padding": (lambda b, h, q, kv: (q >= kv) & keep[kv], 0),
        "roles": (lambda b, h, q, kv: (q >= kv) & ((role[kv] == 0) | (turn[q] == turn[kv])), 0),
        "tree": (lambda b, h, q, kv: (q >= kv) & (enter[kv] <= enter[q]) & (enter[q] < leave[kv]), 0),
        "neighbours of a grid": (
            lambda b, h, q, kv: ((q // 256 - kv // 256).abs() <= 2) & ((q % 256 - kv % 256).abs() <= 2), 0,
        ),
    }  # fmt: skip
    return {
        **{name: Everyday(mod, length, most=most) for name, (mod, most) in whole.items()},
        "window of each head": Everyday(
            lambda b, h, q, kv: (q >= kv) & (q - kv < window[h]), length, H=8, most=1
        ),
        "8 packed rows": Everyday(
            lambda b, h, q, kv: (q >= kv) & (packed[b, q] == packed[b, kv]), length // 8, B=8, most=1
        ),
        "32 packed rows": Everyday(
            lambda b, h, q, kv: (q >= kv) & (short[b, q] == short[b, kv]), length // 32, B=32, most=1
        ),
    }


def draw_tree(length: int) -> tuple[Tensor, Tensor]:
    """Draw a tree of segments in depth-first order: for each token its segment, and the segment after the
    last descendant of its segment, int32 [length] each."""
    sizes, draw = draw_lengths(length, 9, median=650, sigma=1.0), random.Random(4)
    path: list[int] = []
    leave = [len(sizes)] * len(sizes)
    for segment in range(len(sizes)):
        for _ in range(min(draw.choice([0, 0, 1, 2, 3]), len(path))):
            leave[path.pop()] = segment
        path.append(segment)
    return of_tokens(range(len(sizes)), sizes), of_tokens(leave, sizes)
