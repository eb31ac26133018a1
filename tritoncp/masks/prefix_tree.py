"""Prefix trees: sequences that share beginnings, each shared token once in the buffer.

The buffer holds the segments of the tree in depth-first order, so that the descendants of a token follow it
without a gap: a key is visible to one interval of queries, which ends with the last descendant of its
segment.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritoncp.core.dynamo_boundary import host_only
from tritoncp.core.host_copy import host
from tritoncp.core.pytrees import as_tree
from tritoncp.core.records import record
from tritoncp.masks.classification.interval_arithmetic import is_integer
from tritoncp.masks.mask_mod import (
    MAX_TOKENS,
    UNBOUNDED,
    Intervals,
    MaskMod,
    batch_row,
    check_window,
    clip_intervals,
)
from tritoncp.masks.runs.block_runs import ramps


@as_tree
@record(repr=False)
class Tree(MaskMod):
    """Mask of a prefix tree: a query sees itself and the tokens before it on its path from the root.

    leave: position after the last descendant of each token, int32 [N] or [B, N]
    depth: number of tokens before each token on its path, int32 [N] or [B, N]
    left:  max number of tokens before it on its path that a query sees; -1 = all
    """

    leave: Tensor
    depth: Tensor
    left: int

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row = batch_row(self.leave, b)
        visible = (kv_idx <= q_idx) & (q_idx < self.leave[(*row, kv_idx)])
        if self.left == UNBOUNDED:
            return visible
        return visible & (self.depth[(*row, q_idx)] - self.depth[(*row, kv_idx)] <= self.left)

    def intervals(self, q_len: int, kv_len: int) -> Intervals | None:
        depth = self._rows(self.depth, q_len, kv_len)[..., :q_len]
        branches = (depth[..., 1:] > 0) & (depth[..., 1:] != depth[..., :-1] + 1)
        if self.left != 0 and bool(branches.any()):  # these tokens do not see the token before them
            return None
        q = torch.arange(q_len)
        first = q - (depth if self.left == UNBOUNDED else depth.clamp(max=self.left))
        return clip_intervals(first, (q + 1).expand_as(first), kv_len)

    def query_intervals(self, q_len: int, kv_len: int) -> Intervals | None:
        """Return (lo, hi), int64 [B or 1, 1, kv_len] on the CPU: key kv is visible to exactly lo <= q < hi.
        None with a window."""
        leave = self._rows(self.leave, q_len, kv_len)[..., :kv_len].long()
        if self.left != UNBOUNDED:  # the queries within the window are in several branches
            return None
        return clip_intervals(torch.arange(kv_len).expand_as(leave), leave, q_len)

    def positions(self, length: int) -> Tensor:
        """Return the depth of each token of a sequence of ``length``, int64 [B or 1, length] on the CPU."""
        return self._rows(self.depth, length, length)[:, 0, :length].long()

    def _rows(self, x: Tensor, q_len: int, kv_len: int) -> Tensor:
        """Return leave or depth as int32 [B or 1, 1, N] on the CPU. Raises ValueError if the mask needs more
        tokens."""
        tokens = x.shape[-1]
        if tokens < max(q_len, kv_len):
            raise ValueError(
                f"the segments of the tree have {tokens} tokens, the mask needs {max(q_len, kv_len)} "
                f"(q_len={q_len}, kv_len={kv_len}): append the padding as a separate root"
            )
        return x.detach().cpu().view(self.batch, 1, tokens)

    @property
    def batch(self) -> int:
        return self.leave.shape[0] if self.leave.ndim == 2 else 1

    def __repr__(self) -> str:
        window = "" if self.left == UNBOUNDED else f", left={self.left}"
        return f"tree(tokens={list(self.leave.shape)}{window})"


@host_only
def tree(
    parent: Sequence[int] | Sequence[Sequence[int]] | Tensor,
    lengths: Sequence[int] | Sequence[Sequence[int]] | Tensor,
    *,
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED),
) -> Tree:
    """Return the mask_mod of a prefix tree: a token sees itself and all tokens before it on its path.

    >>> answers = tree([-1, 0, 0], [2, 1, 2])        # a prompt of 2 tokens with answers of 1 and 2
    >>> index = torch.arange(5)
    >>> answers(None, None, index[:, None], index).int()
    tensor([[1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [1, 1, 1, 0, 0],
            [1, 1, 0, 1, 0],
            [1, 1, 0, 1, 1]], dtype=torch.int32)
    >>> answers.depth.tolist()                       # tokens before each token on its path
    [0, 1, 2, 2, 3]

    The buffer holds the tree's segments one after the other, in depth-first order: after a segment come its
    first child with all descendants, then the next child. Several roots are several trees in one buffer.

    Args:
        parent: segment that segment i continues, less than i; -1 where i is a root: integers [n], or [B, n]
            for a tree per batch row.
        lengths: number of tokens of each segment, of the same shape; 0 is allowed. If it is a tensor, the
            mask_mod's tensors are on its device.
        window: (left, right) as in :func:`varlen_mask` with ``causal=True``: ``left`` is the max number of
            tokens before it on its path that a query sees, -1 = all; ``right`` hides nothing, since no query
            sees a later token.

    Returns:
        A mask_mod with ``depth``, int32 [N] or [B, N].

    Raises:
        ValueError: for segments in another order, with the permutation that brings them into depth-first
            order; for parents or lengths of another shape, dtype or range.
        TypeError: for anything but a tensor or a list of numbers.
    """
    left = min(check_window(window)[0], MAX_TOKENS)
    device = lengths.device if isinstance(lengths, Tensor) else torch.get_default_device()
    with host():
        parents, sizes = _integers("parent", parent), _integers("lengths", lengths)
        _check_segments(parents, sizes)
        n = sizes.shape[-1]
        rows = [_layout(*row) for row in zip(parents.reshape(-1, n).tolist(), sizes.reshape(-1, n).long())]
        totals = [len(leave) for leave, _ in rows]
        if len(set(totals)) > 1:
            raise ValueError(
                f"tree: the lengths of every batch row must add up to the same, got {totals}: append the "
                "padding as a root of its own"
            )
        leave, depth = (torch.stack(tensors) for tensors in zip(*rows, strict=True))
        leave, depth = (x if sizes.ndim == 2 else x[0] for x in (leave, depth))
        return Tree(leave.to(device), depth.to(device), left)


def as_host_tensor(name: str, numbers: Any, form: str) -> Tensor:
    """Return a list of numbers or a tensor as a tensor on the CPU. Raises TypeError, with the text ``form``,
    for anything else."""
    try:
        return torch.as_tensor(numbers).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        text = f"{type(numbers).__name__} {reprlib.repr(numbers)}"
        raise TypeError(f"{name} is the {text}; {form} is needed ({error})") from error


def _integers(name: str, numbers: Any) -> Tensor:
    """Return parent or lengths on the CPU. Raises ValueError unless they are integers [n] or [B, n], and
    TypeError for anything but a tensor or a list of numbers."""
    x = as_host_tensor(f"tree: {name}", numbers, "a list or tensor of integers, [n] or [B, n],")
    if x.ndim not in (1, 2) or not x.numel() or not is_integer(x.dtype):
        few = "; pass at least one segment" * (not x.numel())
        raise ValueError(f"tree: {name} must be integers [n] or [B, n], got {x.dtype} {list(x.shape)}{few}")
    return x


def _check_segments(parent: Tensor, lengths: Tensor) -> None:
    """Raise ValueError unless both have one shape and lengths are >= 0."""
    if parent.shape != lengths.shape:
        shapes = f"{list(parent.shape)} and {list(lengths.shape)}"
        raise ValueError(f"tree: parent and lengths are {shapes}; pass both for every segment")
    if bool((lengths < 0).any()):
        raise ValueError(f"tree: lengths must be at least 0, got {int(lengths.min())}")
    most = int(lengths.double().sum(-1).max())
    if most > MAX_TOKENS:
        raise ValueError(f"tree: the lengths add up to {most} tokens; a mask has up to {MAX_TOKENS}")


def _layout(parent: list[int], lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return leave and depth of each token of one buffer, int32 [N] each. lengths: int64 [n]."""
    first_depth, end = segment_layout(parent, lengths.tolist())
    first = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    leave = first[torch.tensor(end)].repeat_interleave(lengths)
    return leave, ramps(torch.tensor(first_depth), lengths).int()


def segment_layout(parent: Sequence[int], length: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the number of tokens before each segment on its path, and the segment after its last descendant.
    Raises ValueError for segments that are not in depth-first order.

    >>> segment_layout([-1, 0, 1, 0, -1], [3, 2, 5, 4, 1])
    ([0, 3, 5, 3, 0], [4, 3, 3, 4, 5])
    """
    n = len(parent)
    first_depth, end = [0] * n, [n] * n
    path: list[int] = []
    for i, above in enumerate(parent):
        while path and path[-1] != above:
            end[path.pop()] = i
        if path:
            first_depth[i] = first_depth[above] + length[above]
        elif above != -1:
            raise _order_error(parent)
        path.append(i)
    return first_depth, end


def _order_error(parent: Sequence[int]) -> ValueError:
    """Return the error of segments that are not in depth-first order, with the permutation that sorts
    them."""
    n = len(parent)
    wrong = next((i for i, above in enumerate(parent) if not -1 <= above < n), None)
    if wrong is not None:
        return ValueError(
            f"tree: parent[{wrong}] is {parent[wrong]}; the number of one of the {n} segments is needed, or "
            "-1 for a root"
        )
    children: dict[int, list[int]] = {}
    for i in reversed(range(n)):
        children.setdefault(parent[i], []).append(i)
    order, stack = [], children.get(-1, [])
    while stack:
        order.append(stack.pop())
        stack += children.get(order[-1], [])
    if len(order) < n:
        return ValueError(f"tree: {n - len(order)} of {n} segments are on no path from a root, parent -1")
    return ValueError(
        f"tree: the segments are not in depth-first order; the permutation {order} brings them into it: "
        "put segment permutation[i] of the buffer, of lengths and of parent at place i, and number "
        "parents by their new places"
    )
