"""Sequences as a prefix tree whose tokens have one label each."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tritoncp.api.trees import PackedTree, pack_trajectories
from tritoncp.core.host_copy import to_host
from tritoncp.integrations.transformers.plans import IGNORED


class TreeRows(NamedTuple):
    """Sequences as a prefix tree whose tokens have one label each.

    A token with several next tokens is there once for each of them: a loss of rows then needs no edges.
    """

    tree: PackedTree
    labels: Tensor  # int64 [S]: the next token, IGNORED where no sequence needs it
    source: Tensor  # int64 [B, keep]: the token of the tree that predicts each of the last tokens; S if none


def pack_rows(ids: Tensor, mask: Tensor, keep: int) -> TreeRows:
    """Pack sequences [B, T] into a tree. mask: [B, T], which tokens are no padding; keep: the number of last
    tokens, which are predicted.

    >>> ids, mask = torch.tensor([[7, 8, 1, 2], [7, 8, 3, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    >>> rows = pack_rows(ids, mask, 2)
    >>> rows.tree.tokens.tolist(), rows.labels.tolist()
    ([7, 8, 1, 2, 8, 3], [-100, 1, 2, -100, 3, -100])
    >>> rows.source.tolist()
    [[1, 2], [4, 6]]
    """
    ids, mask = to_host([ids, mask])
    is_token, end = mask.bool(), int(ids.max()) + 1  # `end` stands for the token after the last one
    is_last = torch.arange(ids.shape[1]) >= ids.shape[1] - keep
    pairs, wanted = [], []
    for row, tokens in zip(ids, is_token, strict=True):
        following = torch.nn.functional.pad(row[tokens][1:], (0, 1), value=end)
        pairs.append(row[tokens] * (end + 1) + following)
        wanted.append(torch.nn.functional.pad(is_last[tokens][1:].float(), (0, 1)))
    packed = pack_trajectories(pairs, wanted)
    labels = (packed.tokens % (end + 1)).masked_fill(packed.weights == 0, IGNORED)
    index = torch.full(ids.shape, len(labels))
    for row, tokens, path in zip(index, is_token, packed.paths, strict=True):
        row[tokens.nonzero()[1:, 0]] = path[:-1]
    return TreeRows(packed._replace(tokens=packed.tokens // (end + 1)), labels, index[:, -keep:])
