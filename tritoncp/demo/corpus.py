"""Real text that every machine with Python has: the source of the standard library, packed as documents."""

import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

IGNORE = -100  # the label that cross_entropy leaves out


class Window(NamedTuple):
    """One training step's text, the same on every rank: several documents in one sequence.

    tokens:  int64 [1, S], bytes
    labels:  int64 [1, S], the next byte of the same document; IGNORE where a document ends
    lengths: of the documents, adding up to S
    """

    tokens: Tensor
    labels: Tensor
    lengths: list[int]


def windows(seq_len: int, steps: int) -> Tensor:
    """Draw bytes and document numbers of every step: int64 [steps, 2, seq_len].

    >>> windows(64, 3).shape
    torch.Size([3, 2, 64])
    """
    pieces = documents(longest=max(seq_len // 2, 2))
    return torch.stack([pack(pieces, seq_len) for _ in range(steps)])


def documents(longest: int) -> Iterator[bytes]:
    """Source files in a fixed shuffled order, cut at ends of lines into documents of all lengths."""
    rng = random.Random(0)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: path.name)
    while True:
        rng.shuffle(files)
        for path in files:
            yield from cut(path.read_bytes(), longest, rng)


def cut(text: bytes, longest: int, rng: random.Random) -> Iterator[bytes]:
    while text:
        size = max(2, int(longest * rng.uniform(1 / 8, 1)))
        end = text.rfind(b"\n", 0, size) + 1
        size = end if end > size // 2 else size  # no line ends in the second half
        yield text[:size]
        text = text[size:]


def pack(pieces: Iterator[bytes], seq_len: int) -> Tensor:
    """Documents one after the other, the last one cut off: int64 [2, seq_len]."""
    text, numbers = bytearray(), []
    for number, piece in enumerate(pieces):
        piece = piece[: seq_len - len(text)]
        text += piece
        numbers += [number] * len(piece)
        if len(text) == seq_len:
            break
    return torch.stack([torch.tensor(list(text)), torch.tensor(numbers)])


def window(packed: Tensor) -> Window:
    """Make the inputs of a step from one entry of `windows`. Labels are shifted here, while the sequence is
    whole: after sharding, a token's neighbour may be on another rank.

    >>> w = window(torch.tensor([[104, 105, 10, 120, 10], [0, 0, 0, 1, 1]]))
    >>> w.labels.tolist(), w.lengths
    ([[105, 10, -100, 10, -100]], [3, 2])
    """
    tokens, number = packed
    labels = torch.full_like(tokens, IGNORE)
    labels[:-1] = torch.where(number[1:] == number[:-1], tokens[1:], IGNORE)
    lengths = torch.unique_consecutive(number, return_counts=True)[1]
    return Window(tokens[None], labels[None], lengths.tolist())
