"""Training text of the demo: source files of Python's standard library, packed as documents."""

import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

IGNORE = -100  # the label that cross_entropy ignores


class Window(NamedTuple):
    """The text of one training step, equal on all ranks: several documents in one sequence.

    tokens:  int64 [1, S], bytes
    labels:  int64 [1, S], the next byte of the same document; IGNORE at its end
    lengths: lengths of the documents, which add up to S
    """

    tokens: Tensor
    labels: Tensor
    lengths: list[int]


def windows(seq_len: int, steps: int) -> list[Window]:
    """Draw the text of every step.

    >>> [window.tokens.shape for window in windows(64, 2)]
    [torch.Size([1, 64]), torch.Size([1, 64])]
    """
    pieces = documents(longest=max(seq_len // 2, 2))
    return [pack(pieces, seq_len) for _ in range(steps)]


def documents(longest: int) -> Iterator[bytes]:
    """Yield documents of various lengths: source files in a fixed shuffled order, split at line ends."""
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


def pack(pieces: Iterator[bytes], seq_len: int) -> Window:
    """Put documents one after the other, the last one cut off. Labels are shifted here, while the sequence is
    whole: after sharding, a token's neighbour may be on another rank.

    >>> w = pack(iter([b"hi\\n", b"x\\nyz"]), 5)
    >>> w.labels.tolist(), w.lengths
    ([[105, 10, -100, 10, -100]], [3, 2])
    """
    text, lengths = bytearray(), []
    while len(text) < seq_len:
        piece = next(pieces)[: seq_len - len(text)]
        text += piece
        lengths.append(len(piece))
    tokens = torch.tensor(list(text))
    labels = tokens.roll(-1)
    labels[torch.tensor(lengths).cumsum(0) - 1] = IGNORE
    return Window(tokens[None], labels[None], lengths)
