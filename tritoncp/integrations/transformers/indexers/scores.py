"""Queries, keys and weights of an indexer, read from its own code: it runs up to the product of queries and
keys, which is not computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

RELU = (torch.nn.functional.relu, torch.relu, Tensor.relu)


@dataclass(frozen=True)
class IndexerScores:
    """Stands for the scores of all pairs in the code of an indexer.

    query:   [B, S, H, D] or [B, H, S, D], float32; a factor of the scores is in it
    key:     [B, 1, D, keys], float32
    weights: [B, S, H], by which the heads are summed, after relu; None: as yet, they are not
    """

    query: Tensor
    key: Tensor
    weights: Tensor | None = None

    def __mul__(self, factor: float) -> IndexerScores:
        return replace(self, query=self.query * factor)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise ValueError for a function of scores that :class:`_Reading` does not know."""
        raise ValueError(
            f"an indexer calls {getattr(function, '__name__', function)} of its scores, which has no form by "
            'tiles: load the model with attn_implementation="eager", on one process'
        )


class _Done(Exception):
    """Ends the code of an indexer when its scores are known."""

    def __init__(self, scores: IndexerScores) -> None:
        super().__init__()
        self.scores = scores


class _Reading(TorchFunctionMode):
    """Replaces the product of queries and keys by :class:`IndexerScores`; ends the code when all are known.

    summed: whether the scores of heads are summed by weights, after relu
    """

    def __init__(self, summed: bool) -> None:
        super().__init__()
        self.summed = summed

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        scores = next((x for x in args[:2] if isinstance(x, IndexerScores)), None)
        if scores is None:
            if function is torch.matmul and args[0].ndim == 4:
                scores = IndexerScores(args[0], args[1])
                if not self.summed:
                    raise _Done(scores)
                return scores
            return function(*args, **(kwargs or {}))
        if function in RELU:
            return scores
        if function is torch.matmul and args[1] is scores:
            raise _Done(replace(scores, weights=args[0].squeeze(-2)))
        return IndexerScores.__torch_function__(function, types, args, kwargs)


def read_scores(forward: Callable[..., Any], *args: Any, summed: bool, **kwargs: Any) -> IndexerScores:
    """Run the forward method of an indexer up to its scores, and return what they are computed from.

    summed: whether the scores of heads are summed by weights, after relu
    """
    try:
        with torch.no_grad(), _Reading(summed):
            forward(*args, **kwargs)
    except _Done as done:
        return done.scores
    raise ValueError(
        "an indexer has no product of queries and keys by torch.matmul: load the model with "
        'attn_implementation="eager", on one process'
    )
