"""Training on prefix trees: `pack_trajectories` merges common prefixes, `tree_edges` gives rows and labels of
the loss."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritoncp.core.dynamo_boundary import host_only
from tritoncp.core.host_copy import on_host
from tritoncp.core.upload import upload
from tritoncp.masks.classification.interval_arithmetic import is_integer
from tritoncp.masks.prefix_tree import Tree, as_host_tensor
from tritoncp.masks.runs.block_runs import content
from tritoncp.planning.plan import Plan
from tritoncp.planning.shifts import token_ancestors

NUMBERS = "a list of numbers or a tensor [tokens]"  # the type of a trajectory, and of its weights


class TreeEdges(NamedTuple):
    """Rows and labels for the loss of one rank: an edge joins a token to a token that follows it on a path.

    ``(logits.logsumexp(-1)[rows] - logits[rows, labels]) * weights``, summed over edges and ranks, is the
    loss; logits: [S_local, vocabulary], or [B * S_local, vocabulary]. Every rank has the same number of
    edges, the max over ranks, or none if it has no rows. Padding comes last: row, label and weight 0, target
    -1.
    """

    rows: Tensor  # int64 [E]: local row b * S_local + i of the edge's source
    labels: Tensor  # integers [E]: token at the edge's target, of the dtype of ``tokens``
    weights: Tensor  # floats [E]
    targets: Tensor  # int64 [E]: global position b * N + i of the edge's target


@host_only
def tree_edges(plan: Plan, tree: Tree, tokens: Tensor, weights: Tensor | None = None) -> TreeEdges:
    """Return rows and labels for the loss of this rank's part of a prefix tree, without communication.

    >>> from tritoncp import create_block_mask, make_plan, tree
    >>> answers = tree([-1, 0, 0], [2, 1, 2])       # a prompt of 2 tokens with answers of 1 and 2
    >>> plan = make_plan(create_block_mask(answers, 1, 1, 5, 5, BLOCK_SIZE=2), world_size=2, balancer=None)
    >>> [tree_edges(plan.for_rank(r), answers, torch.arange(10, 15))[:2] for r in (0, 1)]
    [(tensor([0, 1, 1]), tensor([11, 12, 13])), (tensor([0, 0, 0]), tensor([14,  0,  0]))]

    Every token but the first of a root is the label of the token before it on its path. This pair is an edge,
    which is on the rank of the earlier token. A token with several children has several labels.

    Args:
        plan: plan of a mask of the whole buffer; ``plan.for_rank(r)`` for another rank's edges.
        tree: mask of the prefix tree, ``tritoncp.tree(parent, lengths)``.
        tokens: ids of the whole buffer, integers [N] or [B, N]. The results are on their device.
        weights: weight of each token as a label, floats [N] or [B, N]; None: 1. With the sum of a token's
            weights in all trajectories (``PackedTree.weights``), a loss that is linear in log-probabilities
            equals the loss of the trajectories.

    Returns:
        A :class:`TreeEdges`: (rows, labels, weights, targets).

    Raises:
        ValueError: if tokens, weights, tree and plan differ in length or batch rows.
        TypeError: for arguments of another type, and for tokens that are not integers.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan is a {type(plan).__name__}; a Plan is needed: make_plan(block_mask, mesh)")
    if not isinstance(tree, Tree):
        raise TypeError(f"tree is a {type(tree).__name__}; tritoncp.tree(parent, lengths) is needed")
    _check_types(tokens, weights)
    weights = torch.ones(tokens.shape, device=tokens.device) if weights is None else weights
    batch = _check_batch(plan, tree, tokens, weights)
    rows, targets = _local_edges(plan, tree, batch)
    rows, targets = upload([rows, targets], tokens.device)
    real = targets >= 0
    labels, weight = (x.expand(batch, -1).flatten()[targets.clamp(min=0)] for x in (tokens, weights))
    return TreeEdges(rows, labels.masked_fill(~real, 0), weight.masked_fill(~real, 0), targets)


def _check_types(tokens: Any, weights: Any) -> None:
    """Raise TypeError unless tokens are a tensor of integers, and weights a tensor or None."""
    for name, x in (("tokens", tokens), ("weights", weights)):
        if not isinstance(x, Tensor) and (x is not None or name == "tokens"):
            raise TypeError(f"{name} is a {type(x).__name__}; a tensor [N] or [B, N] is needed")
    if not is_integer(tokens.dtype):
        raise TypeError(f"tokens is {tokens.dtype}; integers are needed: tokens.long()")


def _check_batch(plan: Plan, tree: Tree, tokens: Tensor, weights: Tensor) -> int:
    """Check that plan, tree, tokens and weights have the same length and batch rows; return the batch
    size."""
    length = plan.q.length
    shapes = {"tokens": tokens.shape, "weights": weights.shape, "tree": tree.leave.shape}
    rows = {name: shape[0] if len(shape) == 2 else 1 for name, shape in shapes.items()}
    rows["plan"] = plan.q.batch
    batch = max(rows.values())
    if not all(shape and len(shape) <= 2 and shape[-1] == length for shape in shapes.values()) or not all(
        count in (1, batch) for count in rows.values()
    ):
        text = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ValueError(
            f"tree_edges: the plan is of {length} tokens, and places {plan.q.batch} batch rows; got {text}, "
            f"[{length}] or [B, {length}] is needed"
        )
    return batch


@on_host
def _local_edges(plan: Plan, tree: Tree, batch: int) -> tuple[Tensor, Tensor]:
    """Return rows and targets of this rank's edges, sorted by row and padded: int64 [E] each."""
    depth = tree.depth.detach().cpu().long().view(-1, plan.q.length)
    source = torch.stack([token_ancestors(row, 1) for row in depth]).expand(batch, -1)
    place = plan.q.inverse.expand(batch, -1).gather(1, source.clamp(min=0))  # row of the gathered buffer
    owner = torch.where(source >= 0, place // plan.q.s_max, -1)
    counts = torch.bincount(owner[owner >= 0], minlength=1)
    b, target = (owner == plan.rank).nonzero(as_tuple=True)
    rows = b * plan.q.lengths[plan.rank] + place[b, target] % plan.q.s_max
    rows, order = rows.sort(stable=True)
    has_rows = plan.q.lengths[plan.rank] > 0  # padding edges have row 0
    padding = (0, int(counts.max()) - len(rows) if has_rows else 0)
    targets = (b * plan.q.length + target)[order]
    return torch.nn.functional.pad(rows, padding), torch.nn.functional.pad(targets, padding, value=-1)


class PackedTree(NamedTuple):
    """Trajectories packed into a prefix tree of N tokens in n segments.

    Its mask_mod is ``tree(packed.parent, packed.lengths)``. Trajectory j is ``tokens[paths[j]]``, and its
    edges have the targets ``paths[j][1:]``.
    """

    tokens: Tensor  # int64 [N], the buffer
    weights: Tensor  # floats [N]: the sum, over the trajectories through a token, of their weights for it
    parent: Tensor  # int64 [n]
    lengths: Tensor  # int64 [n]
    paths: list[Tensor]  # int64 [tokens of the trajectory]

    def unpack(self, values: Tensor) -> list[Tensor]:
        """Split values [N, ...] of the buffer's tokens into one tensor [tokens, ...] for each trajectory.

        Differentiable: a token's gradient is the sum over the trajectories through it.
        """
        if not isinstance(values, Tensor) or values.shape[:1] != self.tokens.shape:
            got = list(values.shape) if isinstance(values, Tensor) else f"a {type(values).__name__}"
            raise ValueError(f"values is {got}; a tensor [{len(self.tokens)}, ...] is needed")
        (index,) = upload([torch.cat(self.paths)], values.device)
        return list(values[index].split([len(path) for path in self.paths]))


@host_only
@on_host
def pack_trajectories(
    trajectories: Sequence[Sequence[int] | Tensor], weights: Sequence[Sequence[float] | Tensor] | None = None
) -> PackedTree:
    """Pack trajectories into a prefix tree, which stores common prefixes once.

    >>> packed = pack_trajectories([[7, 8, 1], [7, 8, 2, 3], [7, 8, 1]])
    >>> packed.tokens.tolist(), packed.weights.tolist()
    ([7, 8, 1, 2, 3], [3.0, 3.0, 2.0, 1.0, 1.0])
    >>> packed.parent.tolist(), packed.lengths.tolist()
    ([-1, 0, 0], [2, 1, 2])
    >>> [values.tolist() for values in packed.unpack(packed.tokens)]
    [[7, 8, 1], [7, 8, 2, 3], [7, 8, 1]]
    >>> pack_trajectories([[7, 8, 1], [7, 8, 2]], [[0, 0, 1], [0, 0, 1]]).weights.tolist()  # 0 for prompts
    [0.0, 0.0, 1.0, 1.0]

    Args:
        trajectories: token ids of each, a list or an integer tensor [L_j] on any device; they may be equal,
            empty, or a prefix of another.
        weights: floats [L_j] for each, the weight of each token as a label; None: 1.

    Returns:
        A :class:`PackedTree` on the CPU, equal on all ranks for equal arguments.

    Raises:
        ValueError: for trajectories that are not integers [L_j], for weights of other lengths or that require
            grad, and if there is no token.
        TypeError: for trajectories or weights that are not lists of numbers or tensors.
    """
    _check_lists("trajectories", trajectories)
    sequences = [_token_ids(j, x) for j, x in enumerate(trajectories)]
    if not any(map(len, sequences)):
        raise ValueError(f"trajectories: {len(sequences)} without a token; pass at least one token")
    order = sorted(range(len(sequences)), key=[content(x) for x in sequences].__getitem__)
    none = torch.empty(0, dtype=torch.int64)
    suffixes: list[Tensor] = []
    paths = [none] * len(sequences)
    source = {}  # first token of each suffix -> token before it on its path
    size, last, path = 0, none, none
    for j in order:  # sorted, so that neighbours have the longest common prefixes
        shared = _common_length(last, sequences[j])
        last, suffix = sequences[j], sequences[j][shared:]
        if len(suffix):
            source[size] = int(path[shared - 1]) if shared else -1
        path = paths[j] = torch.cat([path[:shared], torch.arange(size, size + len(suffix))])
        suffixes.append(suffix)
        size += len(suffix)
    parent, lengths = _segments(source, size)
    return PackedTree(torch.cat(suffixes), _sum_weights(paths, weights, size), parent, lengths, paths)


def _token_ids(j: int, x: Any) -> Tensor:
    """Return the tokens of trajectory j as int64 [L] on the CPU."""
    ids = as_host_tensor(f"trajectory {j}", x, NUMBERS)
    if ids.ndim != 1 or (len(ids) and not is_integer(ids.dtype)):
        raise ValueError(f"trajectories[{j}] is {ids.dtype} {list(ids.shape)}; integers [tokens] are needed")
    return ids.long()


def _check_lists(name: str, x: Any) -> None:
    """Raise TypeError unless x is an iterable other than text or a mapping."""
    if isinstance(x, str | bytes | Mapping) or not isinstance(x, Iterable):
        raise TypeError(
            f"{name} is a {type(x).__name__}; a list with a list or tensor for each trajectory is needed"
        )


def _common_length(one: Tensor, two: Tensor) -> int:
    """Return the length of the common prefix of two sequences."""
    n = min(len(one), len(two))
    differs = (one[:n] != two[:n]).nonzero()
    return int(differs[0]) if len(differs) else n


def _segments(source: dict[int, int], size: int) -> tuple[Tensor, Tensor]:
    """Return parent and lengths of a tree's segments, int64 [n] each.

    source: first token of each suffix -> token before it on its path. A segment begins at every suffix, and
    after every token from which another suffix branches off.

    >>> _segments({0: -1, 5: 1}, 6)     # the suffix at 5 continues token 1
    (tensor([-1,  0,  0]), tensor([2, 3, 1]))
    """
    first = sorted({*source, *(token + 1 for token in source.values())} - {size})
    token_before = [source.get(start, start - 1) for start in first]
    parent = [bisect_right(first, token) - 1 for token in token_before]
    return torch.tensor(parent), torch.tensor([end - start for start, end in pairwise([*first, size])])


def _sum_weights(paths: list[Tensor], weights: Any, size: int) -> Tensor:
    """Sum the weights of each token over trajectories: floats [size]."""
    if weights is None:
        weights = [torch.ones(len(path)) for path in paths]
    _check_lists("weights", weights)
    weights = list(weights)
    learned = [j for j, x in enumerate(weights) if isinstance(x, Tensor) and x.requires_grad]
    if learned:
        raise ValueError(
            f"weights[{learned[0]}] requires grad, and the packed weights have no gradient: pass "
            "weight.detach(), and multiply the loss of each trajectory by what is learned"
        )
    tensors = [as_host_tensor(f"weights[{j}]", x, NUMBERS) for j, x in enumerate(weights)]
    if [list(x.shape) for x in tensors] != [[len(path)] for path in paths]:
        shapes = [list(x.shape) for x in tensors[:8]]
        raise ValueError(
            f"weights has {len(tensors)} tensors of shapes {shapes}; one of shape [tokens] is needed for "
            f"each of {len(paths)} trajectories"
        )
    flat = torch.cat(tensors)
    total = torch.zeros(size, dtype=torch.float64).index_add_(0, torch.cat(paths), flat.double())
    return total.to(torch.promote_types(flat.dtype, torch.float32))
