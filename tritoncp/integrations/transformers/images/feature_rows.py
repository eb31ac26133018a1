"""Rows of features, such as those of images, on their way from the ranks that compute them to those that have
their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from tritoncp.core.dynamo_boundary import untraced
from tritoncp.core.host_copy import to_host
from tritoncp.distributed import collectives, failures
from tritoncp.graph.row_moves import as_bytes, from_bytes
from tritoncp.planning.placement import Placement


class FeatureRows:
    """Where the rows of features belong: row i to the i-th token that stands for features in a batch.

    readers: the rank of each of these tokens, int64 [rows] on the host

    >>> FeatureRows(torch.tensor([0, 1, 1])).wanted_by(1).tolist()
    [1, 2]
    """

    def __init__(self, readers: Tensor) -> None:
        self.readers = readers

    @classmethod
    def of(cls, is_feature: Tensor, placement: Placement) -> FeatureRows:
        """Make the record of a batch from the tokens that stand for features, bool [B, S]."""
        places = to_host([is_feature])[0].nonzero()
        row = places[:, 0] if placement.batch > 1 else torch.zeros_like(places[:, 0])
        return cls(placement.inverse[row, places[:, 1]] // placement.s_max)

    def __len__(self) -> int:
        return len(self.readers)

    def wanted_by(self, rank: int) -> Tensor:
        """Return the rows of a rank's tokens, in the order of its tokens."""
        return (self.readers == rank).nonzero()[:, 0]


class RowExchange:
    """One exchange of rows between the ranks of a group, and its way back.

    rows:  where rows belong
    owned: number of rows that each rank computes; their order is the order of ranks
    """

    def __init__(self, rows: FeatureRows, owned: Sequence[int], group: Any) -> None:
        self.rows, self.group, self.rank = rows, group, group.rank()
        self.first = [0, *accumulate(owned)]

    @cached_property
    def sent(self) -> Tensor:
        """This rank's rows in the order of their readers."""
        return self._readers_of_own.argsort(stable=True)

    @cached_property
    def _readers_of_own(self) -> Tensor:
        return self.rows.readers[self.first[self.rank] : self.first[self.rank + 1]]

    @cached_property
    def sends(self) -> list[int]:
        """The number of rows to each rank."""
        return torch.bincount(self._readers_of_own, minlength=self.group.size()).tolist()

    @cached_property
    def receives(self) -> list[int]:
        """The number of rows from each rank."""
        return [int((self.rows.readers[first:end] == self.rank).sum()) for first, end in pairwise(self.first)]

    def send(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Send rows [sum(sends), E] to all ranks in order; return those received, [sum(receives), E]."""

        def schedule() -> collectives.Requests[Tensor]:
            flight = yield collectives.AllToAll(as_bytes(x.contiguous()), sends, receives)
            return from_bytes((yield flight), x)

        with failures.closing(self.group):
            return collectives.run(schedule(), self.group, "images")


class _Exchange(torch.autograd.Function):
    """Autograd function of an exchange: gradients of rows go back to the rank that computed them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange, ctx.rows = exchange, len(x)
        return exchange.send(x[exchange.sent.to(x.device)], exchange.sends, exchange.receives)

    @staticmethod
    @untraced
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        exchange: RowExchange = ctx.exchange
        own = grad.new_zeros(ctx.rows, grad.shape[1])
        own[exchange.sent.to(grad.device)] = exchange.send(grad, exchange.receives, exchange.sends)
        return own, None


def send_features(x: Tensor, exchange: RowExchange) -> Tensor:
    """Return the rows of this rank's tokens, [n, E]. x: the rows that this rank computes, [rows, E], of which
    those beyond its number of owned rows are for no token"""
    result: Tensor = _Exchange.apply(x, exchange)
    return result
