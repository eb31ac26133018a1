"""Layers without a mask on packed documents: they run on each document alone.

Kernels of recurrences and convolutions reset their state where a document begins; the plain code of
transformers does not. If documents are rows of a batch, plain code is correct too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tritoncp.core.host_copy import to_host


class PackedRows:
    """Rows [B, S] of packed documents, as a few batches of documents of one length.

    documents:     index of the document of each token, [B, S]
    is_causal:     whether a document's results do not depend on what follows it. Then documents of up to
                   twice the length share a batch, and there are up to log2(S) batches

    >>> rows = PackedRows(torch.tensor([[0, 0, 0, 1, 1, 2, 2]]), is_causal=False)
    >>> rows.run(lambda x: x.cumsum(1), torch.ones(1, 7, dtype=torch.int64))
    tensor([[1, 2, 3, 1, 2, 1, 2]])
    """

    def __init__(self, documents: Tensor, *, is_causal: bool) -> None:
        self.shape, device = documents.shape, documents.device
        ids = to_host([documents])[0]
        first = torch.nn.functional.pad(ids.diff(dim=1) != 0, (1, 0), value=True).flatten().nonzero()[:, 0]
        lengths = torch.cat([first, torch.tensor([ids.numel()])]).diff()
        sizes = lengths
        if is_causal:
            sizes = (2 ** lengths.double().log2().ceil().long()).clamp(max=int(lengths.max()))
        self._batches: list[tuple[Tensor, Tensor]] = []  # tokens [n, size] in flat rows; is no padding
        for size in sizes.unique().tolist():
            of_size = sizes == size
            at, length = torch.arange(size), lengths[of_size, None]
            index = first[of_size, None] + at.minimum(length - 1)  # padding repeats the last token
            self._batches.append((index.to(device), (at < length).flatten().to(device)))
        order = torch.cat([index.flatten()[keep] for index, keep in self._batches])
        self._places = order.argsort()

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of tensors [n, size, ...] for each batch of documents, with the documents' parts of
        arguments [B, S, ...]; return its results as [B, S, ...]."""
        results = []
        for index, _ in self._batches:

            def pick(x: Any, index: Tensor = index) -> Any:
                is_of_rows = isinstance(x, Tensor) and x.shape[:2] == self.shape
                return x.flatten(0, 1)[index] if is_of_rows else x

            results.append(function(*tree_map(pick, args), **tree_map(pick, kwargs)))

        def join(*parts: Any) -> Any:
            if not isinstance(parts[0], Tensor) or parts[0].shape[:2] != self._batches[0][0].shape:
                return parts[0]
            tokens = [x.flatten(0, 1)[keep] for x, (_, keep) in zip(parts, self._batches, strict=True)]
            return torch.cat(tokens)[self._places].unflatten(0, self.shape)

        return tree_map(join, *results)
