"""Memory of one rank's pass beyond its shards, and the bytes that it sends.

The memory is that of the buffers of each schedule at their largest. Each function follows the allocations of
the schedule of its name in `tritoncp.distributed.schedules`, where a sent tensor is freed after the wait for
its message. The sums do not contain results (out, lse, dq, dk, dv), nor tables, captured tensors and the
partial sums of kernels, which are tens of MiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, NamedTuple

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
    keys = max(rows_of_steps(plan, plan.schedule)) * shape.expanded_row
    item, wide = shape.itemsize, max(4, shape.itemsize)
    return sent._replace(
        forward=sent.forward + keys * item, backward=sent.backward + keys * (2 * item + wide)
    )


def rows_of_steps(plan: Plan, schedule: str) -> list[int]:
    """Return the rows of keys that each step of this rank reads under a schedule, averaged over the batch
    rows."""
    if schedule == "fetch":
        own, remote = plan.kv.lengths[plan.rank], plan.traffic[plan.rank].clone()
        remote[plan.rank] = 0
        return [own, int(remote.sum()) // plan.batch]
    if schedule == "ring" and plan.world_size > 1:
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
    # Backward at the end: the last group's keys, and the gradients of all groups for all ranks with this
    # rank's sums; or the last group's, all sums, and these joined.
    sums = size.wide_padded * max(world + 1, world * last // sum(groups) + 2)
    return Peak(size.padded * world + message, message * world + sums + size.stat - size.kv)


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
    width = shape.row // (shape.batch if plan.batch > 1 else 1)
    remote = plan.traffic.clone().fill_diagonal_(0)
    sends, takes = remote[:, plan.rank], remote[plan.rank]
    sent, fetched = int(sends.sum()) * width, int(takes.sum()) * width
    item, wide = shape.itemsize, max(4, shape.itemsize)
    copies = 2 if plan.batch > 1 and shape.batch > 1 else 1  # rows of each batch row, one after the other
    request = sent * item + max(copies * size.kv, fetched * item)
    local = size.kv + size.wide_kv  # K and V, and their gradient
    part = int(sends.max()) * width * wide  # of one rank, added to the gradient
    returning = local + fetched * (item + wide) + sent * wide + part
    start = copies * size.kv + sent * item
    return Peak(size.state + request, size.backward(start, returning))


def _ulysses(plan: Plan, shape: Shape) -> Peak:
    """Peak of the exchange of sequence for heads, the pass over this rank's heads, and the exchange back."""
    degree = plan.degree_for(shape.heads)
    rows, at = plan.rows(degree, shape.heads), plan.rank % degree
    q_heads, kv_heads = traffic.trade(shape.heads, shape.kv_heads, degree)
    own = replace(shape, heads=len(q_heads[at]), kv_heads=len(kv_heads[at]))
    size = TensorBytes.of(plan, shape)  # of this rank's rows
    # Its messages: the rows of the longest shard, each KV head for each of its readers.
    sends = TensorBytes.of(plan, replace(shape, kv_heads=sum(map(len, kv_heads))), padded=True)
    whole = TensorBytes.of(rows, own)  # of this rank's heads: all tokens of its row of ranks
    many = not rows.derived.reads_only_own_keys  # rows of ranks that read keys of each other
    predict = _ring if between_rows(plan.schedule) == "ring" else _fetch
    inner = predict(rows, own) if many else Peak(0, whole.stat)
    summed = many or traffic.share(kv_heads)  # dK and dV are sums over ranks, and wide

    received, results = whole.q + whole.kv, whole.o + whole.stat
    running = received + results + inner.forward
    leaving = received + results + whole.stat + sends.stat + sends.o + size.o
    forward = max(sends.q + sends.kv + received, running, leaving) - size.o - size.stat

    received += whole.o + 2 * whole.stat
    arriving = received + sends.q + sends.kv + sends.o + 2 * sends.stat
    keys, sent_keys, own_keys = (x.wide_kv if summed else x.kv for x in (whole, sends, size))
    grads = whole.q + keys
    running = received + whole.stat + inner.backward + (whole.results if many else grads)
    if many:  # dQ is rounded before it is sent
        running = max(running, received + 2 * whole.stat + whole.q + whole.wide_q + whole.wide_kv)
    copied = keys if many else 0  # views of a joint buffer of dK and dV
    largest = own_keys * max(shape.head_dim, shape.v_head_dim) // (shape.head_dim + shape.v_head_dim)
    # The message of dQ, of as many bytes, is freed before dK and dV are allocated.
    returning = grads + sends.q + sent_keys + max(size.q + copied, largest)
    peak_bytes = max(2 * size.stat + arriving, 2 * size.stat + running, returning)
    return Peak(forward, size.stat + peak_bytes - size.results)


def bytes_sent(plan: Plan, shape: Shape, backward: bool = True) -> int:
    """Count the bytes that a plan's rank sends in one layer, see :meth:`tritoncp.Plan.bytes_sent`."""
    item, wide, passes = shape.itemsize, max(4, shape.itemsize), 2 if backward else 1
    d, e = shape.head_dim, shape.v_head_dim

    def bytes_of_keys(view: Plan, channels: int) -> int:
        rows, grad_rows = _rows_sent(view, shape.batch)
        return channels * (passes * rows * item + backward * grad_rows * wide)

    if not plan.schedule.startswith("ulysses"):
        return bytes_of_keys(plan, shape.row // shape.batch)
    degree = plan.degree_for(shape.heads)
    rows = plan.rows(degree, shape.heads)
    at, (q_heads, kv_parts) = plan.rank % degree, traffic.trade(shape.heads, shape.kv_heads, degree)
    own, remote = len(q_heads[at]), shape.heads - len(q_heads[at])
    keys, own_keys = sum(map(len, kv_parts)) - len(kv_parts[at]), len(kv_parts[at])
    back = own * (degree - 1)
    q_rows, kv_rows = shape.batch * plan.q.s_max, shape.batch * plan.kv.s_max
    sent = q_rows * (remote * d * item + back * (e * item + wide)) + kv_rows * keys * (d + e) * item
    if backward:
        sent += q_rows * (remote * ((d + e) * item + 2 * wide) + back * d * item)
        summed = not rows.derived.reads_only_own_keys or traffic.share(kv_parts)  # of several ranks' parts
        grad = wide if summed else item
        sent += kv_rows * (d + e) * (keys * item + own_keys * (degree - 1) * grad)
    between = replace(rows, schedule=between_rows(plan.schedule))
    return sent + bytes_of_keys(between, own_keys * (d + e))


def _rows_sent(plan: Plan, batch: int) -> tuple[int, int]:
    """Count the rows of K and V that a plan's rank sends forward, and the rows of their gradient backward."""
    if plan.schedule == "fetch":
        copies, remote = 1 if plan.batch > 1 else batch, plan.traffic.clone().fill_diagonal_(0)
        return int(remote[:, plan.rank].sum()) * copies, int(remote[plan.rank].sum()) * copies
    hops = (0 if plan.is_local else plan.world_size - 1,) * 2
    if plan.schedule == "ring":
        hops = (
            sum(hop.next is not None for hop in plan.ring),
            sum(hop.dkv_to is not None for hop in plan.ring),
        )
    return hops[0] * plan.kv.s_max * batch, hops[1] * plan.kv.s_max * batch


def between_rows(schedule: str) -> str:
    """Return the schedule between the rows of the mesh under "ulysses"."""
    return schedule.partition("+")[2] or "fetch"
