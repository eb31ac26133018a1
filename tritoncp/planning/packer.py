"""Packers: which sequences form which micro-batch on which replica, computed from lengths alone.

The rule is "longest first, to the micro-batch with the lowest work that has room". A sequence with more work
than an even share, such as one that fills a micro-batch, makes the other replicas of its step wait: so this
step takes other long sequences for them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritoncp.masks.classification.interval_arithmetic import is_integer
from tritoncp.masks.closed_forms import as_int
from tritoncp.masks.mask_mod import MAX_TOKENS, UNBOUNDED, check_window
from tritoncp.masks.prefix_tree import as_host_tensor, segment_layout


class MicroBatch(NamedTuple):
    """The sequences that one replica packs into one row, in one step.

    step, replica: every step has a micro-batch for each replica
    sequences: indices into ``lengths``, ascending; none where there are fewer sequences than micro-batches
    tokens:    sum of their lengths
    pairs:     visible pairs of queries and keys, of one head
    """

    step: int
    replica: int
    sequences: list[int]
    tokens: int
    pairs: int


class Items(NamedTuple):
    """The units that a packer places, sequences or trees of segments, in the order in which they are placed:
    a list of numbers for each property."""

    tokens: list[int]
    work: list[float]
    pairs: list[int]
    first: list[int]  # index of the first sequence into lengths
    end: list[int]


def pack_batches(
    lengths: Sequence[int] | Tensor,
    tokens_per_rank: int,
    *,
    ranks: int,
    data_parallel: int = 1,
    window: tuple[int, int] | None = None,
    tree: Sequence[int] | Tensor | None = None,
    token_cost: float = 0,
    BLOCK_SIZE: int = 128,
) -> list[MicroBatch]:
    """Form micro-batches of sequences, so that the work of replicas is even and no rank has too many tokens.

    >>> for batch in pack_batches([500, 100, 300, 200, 900], 512, ranks=2, data_parallel=2):
    ...     print(*batch)           # step, replica, sequences, tokens, pairs
    0 0 [1, 4] 1000 410500
    0 1 [0, 2, 3] 1000 190500
    >>> trees = pack_batches([2, 1, 2, 4], 4, ranks=1, BLOCK_SIZE=4, tree=[-1, 0, -1, -1])
    >>> [batch.sequences for batch in trees]
    [[0, 1], [2], [3]]

    A micro-batch is packed into one row, ``document(lengths=...)``, and its plan gives all ranks even work.
    The result depends on numbers only: it is equal on every rank for equal arguments. 100,000 lengths take
    half a second.

    There are as many steps as the tokens need, seldom more. Micro-batches are sorted by step, then by
    replica; steps by their first sequence, so that their order is as random as the order of ``lengths``.

    Args:
        lengths: number of tokens of each sequence, integers [n].
        tokens_per_rank: max number of tokens of a micro-batch that a rank may have. Ranks have whole blocks,
            so it is rounded down to a multiple of ``BLOCK_SIZE``.
        ranks: number of ranks that share a micro-batch.
        data_parallel: number of replicas, each with a micro-batch in every step.
        window: (left, right), as in :func:`varlen_mask` with ``causal=True``; None: each token sees all
            tokens before it in its sequence.
        tree: segment that each entry of ``lengths`` continues, -1 where it is a root, as ``parent`` of
            :func:`tree`: all segments of a root are in one micro-batch.
        token_cost: work of a token outside of attention, in pairs of a query and a key that it sees; 0 evens
            attention alone. For a dense decoder with hidden size h it is about 6 h.
        BLOCK_SIZE: tokens of a block of the mask.

    Returns:
        A list of micro-batches: (step, replica, sequences, tokens, pairs).

    Raises:
        ValueError: for a sequence or tree that the ranks cannot hold, and for numbers out of range.
        TypeError: for arguments that are not numbers.
    """
    shape = _Shape.checked(tokens_per_rank, ranks, data_parallel, window, token_cost, BLOCK_SIZE)
    sizes = _as_lengths("pack_batches: lengths", lengths)
    items = _items(sizes, shape, tree)
    steps = _count_steps(items, shape)
    attempt = 0
    while isinstance(filled := _fill(items, steps, shape), int):
        attempt += 1
        steps += max(-(-filled // shape.replicas), 2**attempt - 1)
    return _number_batches(items, filled, shape)


def pack_stream(
    lengths: Iterable[int],
    tokens_per_rank: int,
    *,
    ranks: int,
    data_parallel: int = 1,
    window: tuple[int, int] | None = None,
    token_cost: float = 0,
    BLOCK_SIZE: int = 128,
    look_ahead: int = 8,
) -> Iterator[list[MicroBatch]]:
    """Form micro-batches of a stream of sequences, like :func:`pack_batches`, and yield one step after the
    other.

    >>> steps = pack_stream(iter([600, 300, 100, 900, 500, 400]), 512, ranks=2, look_ahead=2)
    >>> [batch.sequences for step in steps for batch in step]
    [[0, 1, 2], [3], [4, 5]]

    Sequences are read until they fill ``look_ahead`` steps; each sequence is in one of these steps, so that
    none is delayed by more. The last steps of a stream that ends may have fewer tokens.
    ``islice(pack_stream(...), done, None)`` resumes after ``done`` steps.

    Args:
        lengths: number of tokens of each sequence, in the stream's order, which may never end.
        tokens_per_rank: see :func:`pack_batches`.
        ranks: number of ranks that share a micro-batch.
        data_parallel: number of replicas, each with a micro-batch in every step.
        window: see :func:`pack_batches`.
        token_cost: see :func:`pack_batches`.
        BLOCK_SIZE: tokens of a block of the mask.
        look_ahead: number of steps that are packed together.

    Returns:
        An iterator of steps, each a list of micro-batches.

    Raises:
        ValueError: as :func:`pack_batches`, when the sequence is read.
    """
    shape = _Shape.checked(tokens_per_rank, ranks, data_parallel, window, token_cost, BLOCK_SIZE)
    together = _check_positive("look_ahead", look_ahead)
    return _packed_stream(iter(lengths), shape, together)


def _packed_stream(stream: Iterator[int], shape: _Shape, look_ahead: int) -> Iterator[list[MicroBatch]]:
    """Yield the steps of :func:`pack_stream`, after its checks."""
    step = first = 0  # first: number of the first pending sequence in the stream
    pending: list[int] = []
    while True:
        room, ended = look_ahead * shape.replicas * shape.room - sum(pending), False
        while room >= 0 and not ended:
            length = next(stream, None)
            if ended := length is None:
                break
            pending.append(_check_positive("pack_stream: a length", length))
            _check_fits(f"sequence {first + len(pending) - 1}", pending[-1], shape)
            room -= pending[-1]
        if not pending:
            return
        count = len(pending) - (not ended)  # the last sequence does not fit
        while True:
            items = _items(_as_lengths("pack_stream: lengths", pending[:count]), shape, first=first)
            steps = min(look_ahead, _count_steps(items, shape)) if ended else look_ahead
            filled = _fill(items, steps, shape)
            while isinstance(filled, int) and steps < look_ahead:
                steps += 1
                filled = _fill(items, steps, shape)
            if not isinstance(filled, int):
                break
            count -= max(1, count // 128)
        batches = _number_batches(items, filled, shape, step)
        yield from (batches[at : at + shape.replicas] for at in range(0, len(batches), shape.replicas))
        step, first = step + len(batches) // shape.replicas, first + count
        del pending[:count]


# -- checks of the arguments --------------------------------------------------------------------------------


class _Shape(NamedTuple):
    """Sizes of micro-batches: replicas, tokens of a micro-batch, and the work of what is in it."""

    replicas: int
    room: int
    window: int
    token_cost: float

    @classmethod
    def checked(
        cls, tokens_per_rank: Any, ranks: Any, data_parallel: Any, window: Any, token_cost: Any, block: Any
    ) -> _Shape:
        """Make a shape of the public functions' arguments."""
        size = _check_positive("BLOCK_SIZE", block)
        tokens = _check_positive("tokens_per_rank", tokens_per_rank)
        if tokens < size:
            raise ValueError(
                f"tokens_per_rank={tokens} is less than a block of {size} tokens, and ranks hold whole "
                "blocks: pass at least a block, or a smaller BLOCK_SIZE, here and to create_block_mask"
            )
        if not isinstance(token_cost, int | float) or not 0 <= token_cost < float("inf"):
            raise ValueError(f"token_cost={token_cost!r}: pass a number of pairs, at least 0")
        room = _check_positive("ranks", ranks) * (tokens // size) * size
        left = UNBOUNDED if window is None else check_window(window)[0]
        return cls(_check_positive("data_parallel", data_parallel), room, left, token_cost)


def _check_positive(name: str, number: Any) -> int:
    count = as_int(name, number)
    if count < 1:
        raise ValueError(f"{name}={count}: pass at least 1")
    return count


def _as_lengths(name: str, lengths: Any) -> Tensor:
    """Return lengths as int64 [n] on the CPU."""
    sizes = as_host_tensor(name, lengths, "a list or tensor of integers [n]")
    if sizes.ndim != 1 or (len(sizes) and not is_integer(sizes.dtype)):
        raise ValueError(f"{name} must be integers [n], got {sizes.dtype} {list(sizes.shape)}")
    sizes = sizes.long()
    if len(sizes) and not 0 <= int(sizes.min()) <= int(sizes.max()) <= MAX_TOKENS:
        index = int(((sizes < 0) | (sizes > MAX_TOKENS)).nonzero()[0])
        raise ValueError(f"{name}[{index}] is {int(sizes[index])}; 0 to {MAX_TOKENS} tokens are needed")
    return sizes


# -- sequences and their work -----------------------------------------------------------------------------


def _items(lengths: Tensor, shape: _Shape, parents: Any = None, first: int = 0) -> Items:
    """Return the sequences or trees by descending number of tokens; equal ones keep their order. first:
    number of the first sequence. Raises ValueError for one with more tokens than a micro-batch."""
    n = len(lengths)
    before, roots = torch.zeros_like(lengths), [*range(n)]
    if parents is not None:
        parent = _as_parents(parents, n)
        before = torch.tensor(segment_layout(parent, lengths.tolist())[0], dtype=torch.int64)
        roots = [i for i, above in enumerate(parent) if above < 0]
    pairs = _pairs_of_path(before + lengths, shape.window) - _pairs_of_path(before, shape.window)
    cuts = torch.tensor([*roots, n])
    tokens, seen = (torch.nn.functional.pad(x.cumsum(0), (1, 0))[cuts].diff() for x in (lengths, pairs))
    order = tokens.argsort(descending=True, stable=True)
    columns = tokens, seen + shape.token_cost * tokens, seen, first + cuts[:-1], first + cuts[1:]
    items = Items(*(column[order].tolist() for column in columns))
    if n:
        what = "sequence" if parents is None else "the tree of segment"
        _check_fits(f"{what} {items.first[0]}", items.tokens[0], shape)
    return items


def _check_fits(what: str, tokens: int, shape: _Shape) -> None:
    if tokens > shape.room:
        raise ValueError(
            f"{what} has {tokens} tokens, and a micro-batch up to {shape.room}, whole blocks on each rank: "
            "pass more ranks or tokens_per_rank, or cut what is longer"
        )


def _as_parents(parents: Any, count: int) -> list[int]:
    parent = as_host_tensor("pack_batches: tree", parents, "a list or tensor of integers [n]")
    if parent.shape != (count,) or (count and not is_integer(parent.dtype)):
        raise ValueError(
            f"pack_batches: tree must be integers [{count}], the parent of each entry of lengths, got "
            f"{parent.dtype} {list(parent.shape)}"
        )
    return parent.tolist()


def _pairs_of_path(tokens: Tensor, left: int) -> Tensor:
    """Count the visible pairs of a path of ``tokens``, int64: each token sees itself and up to ``left``
    before it.

    >>> _pairs_of_path(torch.tensor([0, 1, 2, 3, 4]), 1).tolist()
    [0, 1, 3, 5, 7]
    """
    ramp = tokens if left == UNBOUNDED else tokens.clamp(max=left + 1)
    return ramp * (ramp + 1) // 2 + (tokens - ramp) * ramp


# -- placement of sequences -------------------------------------------------------------------------------


def _count_steps(items: Items, shape: _Shape) -> int:
    """Return a lower bound of the number of steps: by the sum of tokens, and by the number of items longer
    than half a micro-batch, since no two of them share one."""
    full = -(-sum(items.tokens) // shape.room)
    long = sum(2 * tokens > shape.room for tokens in items.tokens)
    return -(-max(full, long, min(1, len(items.tokens))) // shape.replicas)


def _fill(items: Items, steps: int, shape: _Shape) -> list[list[int]] | int:
    """Place the items in the micro-batches of ``steps`` steps. Return the items of each; if the items do not
    fit, the number of further micro-batches that the remaining items would fill.

    Each step has a target of work. An item goes to the micro-batch with room that is farthest below its
    step's target. If all are at their target, a new step begins, with the item's work as its target; when no
    item is above the mean of the remaining work, this mean is the target of all further steps.

    A micro-batch without room waits until items are short enough.
    """
    batches: list[list[int]] = [[] for _ in range(steps * shape.replicas)]
    room = [shape.room] * len(batches)
    ready: list[tuple[float, int]] = []  # heap of (work above the step's target, micro-batch)
    waiting: list[tuple[int, float, int]] = []  # heap of (-room, work above the target, micro-batch)
    rest, begun = sum(items.work), 0
    for item, (tokens, work) in enumerate(zip(items.tokens, items.work)):
        while waiting and -waiting[0][0] >= tokens:
            heapq.heappush(ready, heapq.heappop(waiting)[1:])
        while ready and room[ready[0][1]] < tokens:
            excess, at = heapq.heappop(ready)
            heapq.heappush(waiting, (-room[at], excess, at))
        if begun < len(batches) and (not ready or ready[0][0] + work > 0):
            mean = rest / (len(batches) - begun)
            end = begun + shape.replicas if work > mean else len(batches)
            for at in range(begun, end):
                heapq.heappush(ready, (-max(mean, work), at))
            begun = end
        if not ready:
            return _count_rows(items.tokens[item:], shape.room)
        excess, at = ready[0]
        heapq.heapreplace(ready, (excess + work, at))
        batches[at].append(item)
        room[at] -= tokens
        rest -= work
    return batches


def _count_rows(lengths: Iterable[int], room: int) -> int:
    """Count the rows of ``room`` tokens that lengths fill if each row is filled before the next.

    >>> _count_rows([5, 5, 4, 3], 10)
    2
    """
    rows, left = 0, 0
    for tokens in lengths:
        if tokens > left:
            rows, left = rows + 1, room
        left -= tokens
    return rows


def _number_batches(
    items: Items, batches: Sequence[Sequence[int]], shape: _Shape, first: int = 0
) -> list[MicroBatch]:
    """Number steps, from ``first`` on, and replicas: a step has micro-batches of similar work, and the one
    with the highest work goes to the replica with the lowest work so far."""
    work = [sum(map(items.work.__getitem__, batch)) for batch in batches]
    order = sorted(range(len(batches)), key=lambda at: (-work[at], not batches[at]))
    groups = [order[at : at + shape.replicas] for at in range(0, len(order), shape.replicas)]
    groups = [group for group in groups if batches[group[0]]]  # empty ones are last
    earliest = [min(map(items.first.__getitem__, batch), default=math.inf) for batch in batches]
    groups.sort(key=lambda group: min(map(earliest.__getitem__, group)))
    totals = [0.0] * shape.replicas
    result = []
    for step, group in enumerate(groups, first):
        replicas = sorted(range(shape.replicas), key=totals.__getitem__)
        for replica, at in sorted(zip(replicas, group)):
            totals[replica] += work[at]
            batch = batches[at]
            sequences = sorted(chain(*(range(items.first[i], items.end[i]) for i in batch)))
            tokens, pairs = (sum(map(x.__getitem__, batch)) for x in (items.tokens, items.pairs))
            result.append(MicroBatch(step, replica, sequences, tokens, pairs))
    return result
