"""Memory of one rank's pass beyond its shards, and the bytes that it sends.

The memory is that of the buffers of each schedule at their largest. Each function follows the allocations of
the schedule of its name in `tritoncp.distributed.schedules`, where a sent tensor is freed after the wait for
its message. The sums do not contain results (out, lse, dq, dk, dv), nor tables, captured tensors and the
partial sums of kernels, which are tens of MiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tritoncp.core.records import replace
from tritoncp.planning import traffic

if TYPE_CHECKING:
    from tritoncp.planning.plan import Plan


@dataclass(frozen=True)
class Shape:
    """The shape of one attention layer. The ranking of schedules depends mainly on heads / kv_heads.

    latent: channels of a token that are sent in place of its keys and values, which each step expands
        (``flex_attention(..., expand=)``), of all heads of the latent; 0: keys and values are sent
    """

    batch: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    v_head_dim: int = 128
    itemsize: int = 2
    latent: int = 0

    @classmethod
    def of_layer(cls, plan: Plan, **sizes: int) -> Shape:
        """Return the shape of a layer that attends by ``plan``; its batch is the plan's if none is passed.

        sizes: fields of this class. Raises TypeError for other names and for sizes that are no ints, and
        ValueError for sizes that a call under this plan would refuse.
        """
        names = [item.name for item in fields(cls)]
        for name, size in sizes.items():
            if name not in names:
                raise TypeError(f"a layer's shape has no {name!r}; pass {', '.join(names)}")
            if isinstance(size, bool) or not isinstance(size, int):
                raise TypeError(f"{name} of a layer is a {type(size).__name__}; pass an int")
            if size < (name != "latent"):
                raise ValueError(f"{name}={size}: the sizes of a layer are at least 1")
        shape = cls(**{"batch": plan.batch, **sizes})
        if plan.batch not in (1, shape.batch):
            raise ValueError(
                f"batch={shape.batch}, but the plan is for {plan.batch} batch rows: leave batch out, or pass "
                "its plan of these rows, plan.batch_rows(first, count)"
            )
        if shape.heads % shape.kv_heads:
            raise ValueError(
                f"{shape.heads} query heads and {shape.kv_heads} key heads: query heads must be a multiple "
                "of key heads; give heads= and kv_heads="
            )
        return shape

    @property
    def row(self) -> int:
        """Elements that are sent of one token's K and V, over the batch."""
        return self.batch * self.latent if self.latent else self.expanded_row

    @property
    def expanded_row(self) -> int:
        """Elements of one token's K and V, over the batch."""
        return self.batch * self.kv_heads * (self.head_dim + self.v_head_dim)

    @property
    def sent_heads(self) -> int:
        """Heads of K and V that may be sent one after the other."""
        return 1 if self.latent else self.kv_heads


def check_latent(plan: Plan, argument: str) -> None:
    """Raise ValueError for a plan whose ranks exchange heads, of which a latent has none. argument: the
    caller's, for the error"""
    if plan.world_size > 1 and plan.schedule.startswith("ulysses"):
        raise ValueError(
            f"{argument} with a plan of schedule {plan.schedule!r}, which shards heads, while a latent is "
            "for all heads: make the plan with schedule='allgather', 'ring' or 'fetch'"
        )


class Peak(NamedTuple):
    """Bytes that a pass allocates at most, less those of its results."""

    forward: int
    backward: int


class TensorBytes(NamedTuple):
    """Bytes of a rank's tensors. "Wide" is float32, or float64 for float64 tensors.

    kv, wide_kv: K and V of this rank's rows; padded: of the longest shard's rows
    q, wide_q: queries and their gradient; o: out; stat: a number for each row and query head, as lse
    """

    kv: int
    wide_kv: int
    padded: int
    wide_padded: int
    q: int
    wide_q: int
    o: int
    wide_o: int
    stat: int

    @classmethod
    def of(cls, plan: Plan, shape: Shape, padded: bool = False) -> TensorBytes:
        """Return the sizes of this rank's shard. padded: with the rows of the longest shard"""
        q_rows, kv_rows = plan.s_local, plan.kv.lengths[plan.rank]
        if padded:
            q_rows, kv_rows = plan.q.s_max, plan.kv.s_max
        item, wide = shape.itemsize, max(4, shape.itemsize)
        keys, longest = kv_rows * shape.row, plan.kv.s_max * shape.row
        rows = q_rows * shape.batch * shape.heads
        q, o = rows * shape.head_dim, rows * shape.v_head_dim
        return cls(
            keys * item, keys * wide, longest * item, longest * wide, q * item, q * wide, o * item, o * wide,
            rows * wide,
        )  # fmt: skip

    @property
    def state(self) -> int:
        """(acc, m, l), carried between steps."""
        return self.wide_o + 2 * self.stat

    @property
    def shards(self) -> int:
        """Queries, keys, values, out and lse."""
        return self.q + self.o + self.kv + self.stat

    @property
    def results(self) -> int:
        """dq, dk and dv."""
        return self.q + self.kv

    def backward(self, *moments: int) -> int:
        """Peak of a backward pass that holds these bytes beside delta and wide dQ."""
        return max(moments) + self.stat + self.wide_q - self.results

    @property
    def rounding(self) -> int:
        """Wide gradients, beside the results to which they are rounded at the end."""
        return self.wide_padded + (self.wide_q if self.wide_q > self.q else 0)


def peak(plan: Plan, shape: Shape) -> Peak:
    """Predict the most memory that this rank allocates under the plan's schedule."""
    if plan.is_local:
        return _with_expanded(plan, shape, Peak(0, TensorBytes.of(plan, shape).stat))
    schedule = plan.schedule.partition("+")[0]
    predict = {"allgather": _allgather, "ring": _ring, "fetch": _fetch, "ulysses": _ulysses}[schedule]
    sent = predict(plan, shape)
    if predict in (_ring, _fetch):
        sent = sent._replace(backward=max(sent.backward, TensorBytes.of(plan, shape).rounding))
    return _with_expanded(plan, shape, sent)


def _with_expanded(plan: Plan, shape: Shape, sent: Peak) -> Peak:
    """Add the expanded keys of the largest step to the peak of a layer, as if they were allocated at that
    moment, and backward also their gradients, wide and rounded, but not temporaries of the expanding
    function."""
    if not shape.latent:
        return sent
    keys = max(rows_of_steps(plan)) * shape.expanded_row
    item, wide = shape.itemsize, max(4, shape.itemsize)
    return sent._replace(
        forward=sent.forward + keys * item, backward=sent.backward + keys * (2 * item + wide)
    )


def rows_of_steps(plan: Plan) -> list[int]:
    """Return the rows of keys that each step of this rank reads, averaged over the batch rows."""
    if plan.schedule == "fetch":
        own, remote = plan.kv.lengths[plan.rank], plan.traffic[plan.rank].clone()
        remote[plan.rank] = 0
        return [own, int(remote.sum()) // plan.batch]
    if plan.schedule == "ring":
        return [plan.kv.s_max if hop.reads else 0 for hop in plan.ring]
    return [plan.kv.s_max * (1 if plan.derived.reads_only_own_keys else plan.world_size)]


def peak_under(plan: Plan, schedule: str, ranks: Sequence[int], shape: Shape) -> Peak:
    """Predict the largest peaks of these ranks under a schedule that need not be the plan's."""
    other = replace(plan, schedule=schedule, handle=None)
    peaks = [peak(other.for_rank(rank), shape) for rank in ranks]
    return Peak(*map(max, zip(*peaks, strict=True)))


def _allgather(plan: Plan, shape: Shape) -> Peak:
    size, world = TensorBytes.of(plan, shape), plan.world_size
    *_, last = groups = traffic.head_groups(shape.sent_heads, size.padded)
    message = size.padded * last // sum(groups)  # of the last head group
    gathered = size.padded * world + message
    # Backward at first: all keys, and the first group's gradients with this rank's sums. At the end: the last
    # group's keys, and the gradients of all groups; or the last group's, all sums, and these joined.
    sums = size.wide_padded * max(world + 1, world * last // sum(groups) + 2)
    begin = gathered + size.wide_padded * (world + 1) * groups[0] // sum(groups)
    return Peak(gathered, max(begin, message * world + sums) + size.stat - size.kv)


def _ring(plan: Plan, shape: Shape) -> Peak:
    size, hops = TensorBytes.of(plan, shape), plan.ring
    buffers = [hop.holds + (hop.previous is not None) for hop in hops]
    moments, received = [], 0  # gradients received by the last message
    for turn, hop in enumerate(hops):
        is_new = turn > 0 and hop.holds and hops[turn - 1].dkv_next is None
        before, received = received, (hop.dkv_next is not None) + (hop.dkv_home is not None)
        gradients = 1 + before + is_new + received
        moments.append(size.padded * buffers[turn] + size.wide_padded * gradients)
    return Peak(size.padded * max(buffers) + size.state, size.backward(*moments))


def _fetch(plan: Plan, shape: Shape) -> Peak:
    size = TensorBytes.of(plan, shape)
    elements = elements_fetched(plan, shape)
    sends, takes = elements[:, plan.rank], elements[plan.rank]
    sent, fetched = int(sends.sum()), int(takes.sum())
    item, wide = shape.itemsize, max(4, shape.itemsize)
    copies = 2 if plan.batch > 1 else 1  # rows of each batch row, one after the other
    request = sent * item + max(copies * size.kv, fetched * item)
    local = size.kv + size.wide_kv  # K and V, and their gradient
    part = int(sends.max()) * wide  # of one rank, added to the gradient
    returning = local + fetched * (item + wide) + sent * wide + part
    return Peak(size.state + request, size.backward(returning))


def _ulysses(plan: Plan, shape: Shape) -> Peak:
    """Peak of the exchange of sequence for heads, the pass over this rank's heads, and the exchange back."""
    rows, q_heads, kv_heads, summed = trade_heads(plan, shape)
    at = plan.rank % len(q_heads)
    own = replace(shape, heads=len(q_heads[at]), kv_heads=len(kv_heads[at]))
    size = TensorBytes.of(plan, shape)  # of this rank's rows
    # Its messages: the rows of the longest shard, each KV head for each of its readers.
    sends = TensorBytes.of(plan, replace(shape, kv_heads=sum(map(len, kv_heads))), padded=True)
    whole = TensorBytes.of(rows, own)  # of this rank's heads: all tokens of its row of ranks
    many = not rows.is_local  # rows of ranks that read keys of each other
    predict = _ring if rows.schedule == "ring" else _fetch
    inner = predict(rows, own) if many else Peak(0, whole.stat)

    received, results = whole.q + whole.kv, whole.o + whole.stat
    running = received + results + inner.forward
    leaving = received + results + whole.stat + sends.stat + sends.o + size.o
    forward = max(sends.q + sends.kv + received, running, leaving) - size.o - size.stat

    received += whole.o + 2 * whole.stat
    arriving = received + sends.q + sends.kv + sends.o + 2 * sends.stat
    keys, sent_keys, own_keys = (x.wide_kv if summed else x.kv for x in (whole, sends, size))
    grads = whole.q + keys
    running = received + whole.stat + inner.backward + (whole.results if many else grads)
    copied = keys if many else 0  # views of a joint buffer of dK and dV
    largest = own_keys * max(shape.head_dim, shape.v_head_dim) // (shape.head_dim + shape.v_head_dim)
    # The message of dQ, of as many bytes, is freed before dK and dV are allocated.
    returning = grads + sends.q + sent_keys + max(size.q + copied, largest)
    peak_bytes = max(2 * size.stat + arriving, 2 * size.stat + running, returning)
    return Peak(forward, size.stat + peak_bytes - size.results)


def trade_heads(plan: Plan, shape: Shape) -> tuple[Plan, list[range], list[range], bool]:
    """Return the plan between rows of ranks that exchange sequence for heads, the query heads of each rank of
    a row, the KV heads that these read, and whether dK and dV are sums over ranks, which are wide."""
    degree, between = plan.degree_for(shape.heads), plan.schedule.partition("+")[2] or "fetch"
    rows = replace(plan.rows(degree, shape.heads), schedule=between, handle=None)
    q_heads, kv_heads = traffic.trade(shape.heads, shape.kv_heads, degree)
    return rows, q_heads, kv_heads, not rows.is_local or traffic.share(kv_heads)


def bytes_sent(plan: Plan, shape: Shape) -> tuple[Tensor, Tensor]:
    """Count the bytes that each rank sends in a forward and in a backward pass of a layer: int64 [W] each."""
    if not plan.schedule.startswith("ulysses"):
        keys, grads = elements_sent(plan, plan.schedule, shape)
        return keys * shape.itemsize, keys * shape.itemsize + grads * max(4, shape.itemsize)
    rows, _, kv_heads, _ = trade_heads(plan, shape)
    of_a_head = bytes_sent(rows, replace(shape, heads=1, kv_heads=1))
    between = (torch.outer(nbytes, _count(kv_heads)).flatten() for nbytes in of_a_head)
    forward, backward = map(torch.add, bytes_exchanged(plan, shape), between)
    return forward, backward


def bytes_exchanged(plan: Plan, shape: Shape) -> tuple[Tensor, Tensor]:
    """Count the bytes that each rank sends forward and backward to exchange sequence for heads and back:
    int64 [W] each."""
    rows, q_heads, kv_heads, summed = trade_heads(plan, shape)

    def exchange(heads: Sequence[range], tokens: int, to_heads: int, back: int) -> Tensor:
        """Count the bytes for heads of which a token has these bytes on its way to heads, and back."""
        own = _count(heads)
        nbytes = (own.sum() - own) * to_heads + own * (len(heads) - 1) * back
        return (nbytes * tokens * shape.batch).repeat(rows.world_size)

    queries, keys = (q_heads, plan.q.s_max), (kv_heads, plan.kv.s_max)
    item, wide, d, e = shape.itemsize, max(4, shape.itemsize), shape.head_dim, shape.v_head_dim
    both, grad = (d + e) * item, (d + e) * (wide if summed else item)
    forward = exchange(*queries, d * item, e * item + wide) + exchange(*keys, both, 0)  # back: out and lse
    # To heads also dout, lse and delta.
    return forward, exchange(*queries, both + 2 * wide, d * item) + exchange(*keys, both, grad)


def elements_sent(plan: Plan, schedule: str, shape: Shape) -> tuple[Tensor, Tensor]:
    """Count the elements of K and V that each rank sends in a pass of a schedule that exchanges no heads, and
    the elements of their gradients in a backward pass: int64 [W] each."""
    if schedule == "fetch":
        elements = elements_fetched(plan, shape)
        return elements.sum(0), elements.sum(1)
    hops = 0 if plan.derived.reads_only_own_keys else plan.world_size - 1
    step, reach = plan.derived.ring_route if schedule == "ring" else (1, torch.tensor(hops))
    ranks = torch.arange(plan.world_size)
    turn = (ranks[:, None] - ranks) * step % plan.world_size  # of each rank with each owner's keys
    sends, returns = turn < reach, (turn > 0) & (turn <= reach)
    return sends.sum(1) * plan.kv.s_max * shape.row, returns.sum(1) * plan.kv.s_max * shape.row


def elements_fetched(plan: Plan, shape: Shape) -> Tensor:
    """Count the elements of K and V of rank s that rank r fetches, at [r, s]: int64 [W, W]."""
    return plan.traffic.clone().fill_diagonal_(0) * (shape.row // (shape.batch if plan.batch > 1 else 1))


def _count(parts: Sequence[range]) -> Tensor:
    """Count the heads of each part: int64 [parts]."""
    return torch.tensor(list(map(len, parts)))
