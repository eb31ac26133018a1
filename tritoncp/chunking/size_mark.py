"""Marks of sizes that chunks will cut, before a graph is captured."""

from __future__ import annotations

from torch import Tensor
from torch._dynamo.decorators import mark_unbacked

from tritoncp.chunking.report import ChunkingError

MAX_ROWS = 1 << 30  # kernels count in 32 bits


def mark(x: Tensor, dim: int, chunks: int) -> None:
    """Mark a dimension of an input, so that a graph that is captured has a symbol for its size and can be cut
    into ``chunks``.

    x: an input of the compiled function; dim: its batch or its sequence. Mark the same size of every input:
    all that are marked are taken to be equal where they meet. The symbol is unbacked: code that branches on
    the size, and would make a constant of it, is an error that names the line. Raises ChunkingError, a
    ValueError, for a size that cannot be cut.

    >>> import torch
    >>> mark(torch.ones(1, 10), 1, 4)
    Traceback (most recent call last):
    tritoncp.chunking.report.ChunkingError: 10 rows of dimension 1 are no multiple of 4 chunks; pad them to 12
    """
    rows = x.shape[dim]
    if rows % chunks:
        padded = -(-rows // chunks) * chunks
        raise ChunkingError(
            f"{rows} rows of dimension {dim} are no multiple of {chunks} chunks; pad them to {padded}"
        )
    if rows < 2 * chunks:
        raise ChunkingError(
            f"{rows} rows of dimension {dim} in {chunks} chunks: a chunk of one row makes a constant of its "
            f"size, as torch guards on 1; cut {rows // 2} chunks or fewer"
        )
    mark_unbacked(x, dim, hint_override=rows, min=2 * chunks, max=MAX_ROWS, shape_id=f"rows of {rows}")
