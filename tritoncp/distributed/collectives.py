"""Requests for messages between ranks, and two drivers of the schedules that yield them.

A schedule is a generator: it yields a collective to start and gets back a ticket, yields ``Wait(ticket)`` and
gets back the tensor.  Computation between the two overlaps with the messages.  ``run`` drives one
rank over a process group; ``lockstep`` drives all ranks of a simulated world in one thread, one yield at a
time.
"""

import itertools
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tritoncp.distributed import groups
from tritoncp.distributed.groups import PeerLost
from tritoncp.distributed.profiler_ranges import message_range

T = TypeVar("T")
# Renamed in torch 2.13, where the old names warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(eq=False, slots=True)
class AllGather:
    """Concatenate every rank's ``x`` [n, ...], in rank order: [W * n, ...]."""

    x: Tensor


@dataclass(eq=False, slots=True)
class ReduceScatter:
    """Sum ``x`` [W * n, ...] over ranks and return this rank's part: [n, ...]."""

    x: Tensor


@dataclass(eq=False, slots=True)
class SendRecv:
    """Send and receive point to point: ``sends`` are (peer, tensor), ``recvs`` are (peer, tensor to receive
    into). The result is the list of received tensors. A rank sends at most one tensor to each peer."""

    sends: Sequence[tuple[int, Tensor]]
    recvs: Sequence[tuple[int, Tensor]]


@dataclass(eq=False, slots=True)
class AllToAll:
    """Send rows of ``x`` [sum(sends), ...] to all ranks in order, and receive rows [sum(recvs), ...]; sends
    and recvs are the numbers of rows to and from each rank. target: memory to receive into; None: new."""

    x: Tensor
    sends: Sequence[int]
    recvs: Sequence[int]
    target: Tensor | None = None


@dataclass(eq=False, slots=True)
class Wait:
    """Block until the collective behind ``ticket`` is done, and return its result."""

    ticket: "Ticket"


@dataclass(eq=False, slots=True)
class Ticket:
    """A collective in flight: the buffers it uses live as long as the ticket."""

    result: Any
    works: Sequence[Any] = ()
    source: Any = None


Collective = AllGather | ReduceScatter | SendRecv | AllToAll
Schedule = Generator[Collective | Wait, Any, T]


def run(schedule: Schedule[T], group: dist.ProcessGroup, name: str = "exchange", direction: str = "") -> T:
    """Drive one rank's schedule over a process group. Raises PeerLost where a message fails or, after the
    group's timeout, does not end. name, direction: of the ranges of its messages in a profiler's trace."""
    answer: Any = None
    for turn in itertools.count(1):
        try:
            request = schedule.send(answer)
        except StopIteration as stop:
            return stop.value
        try:
            if isinstance(request, Wait):
                with message_range(name, direction, "wait", request.ticket.source):
                    answer = _finish(request.ticket)
            else:
                with message_range(name, direction, "start", request):
                    answer = _start(request, group)
        except RuntimeError as error:
            collective = request.ticket.source if isinstance(request, Wait) else request
            raise PeerLost(
                f"rank {group.rank()} of {group.size()}: {_describe(collective, group)}, turn {turn} of this "
                "layer's schedule, did not end. A peer died, stalled or runs something else; look at the "
                f"output of the other ranks first. ({error})"
            ) from error
    raise AssertionError("a schedule has no end")


def _describe(request: Any, group: dist.ProcessGroup) -> str:
    """Name a request and its peers, for an error."""
    name = type(request).__name__
    match request:
        case SendRecv(sends, recvs):
            targets, sources = ([peer for peer, _ in part] for part in (sends, recvs))
            return f"{name} to ranks {targets} and from ranks {sources}"
        case AllToAll(_, sends, recvs, _):
            targets, sources = ([peer for peer, rows in enumerate(part) if rows] for part in (sends, recvs))
            return f"{name} to ranks {targets} and from ranks {sources}"
    return f"{name} with ranks {[rank for rank in range(group.size()) if rank != group.rank()]}"


def _finish(ticket: Ticket) -> Any:
    for work in ticket.works:
        work.wait()
    return ticket.result


def start_in_graph(request: Collective, group: dist.ProcessGroup, buffer: Tensor | None = None) -> Tensor:
    """Start a collective that ``_c10d_functional.wait_tensor`` of the returned tensor waits for, elsewhere in
    a graph. buffer: the tensor to return, which holds the target of the request; None: the result."""
    try:
        with message_range("shared keys", "", "start", request):
            ticket = _start(request, group)
    except RuntimeError as error:
        raise PeerLost(f"{_describe(request, group)} did not start ({error})") from error
    result = ticket.result if buffer is None else buffer
    for work in ticket.works:
        torch._C._distributed_c10d._register_work(result, work)
    return result


def _start(request: Collective, group: dist.ProcessGroup) -> Ticket:
    """Start a collective on the group's data communicator."""
    if isinstance(request, SendRecv):
        return _start_send_recv(request, group)
    x, world = request.x, group.size()
    channel = groups.data_communicator(group, x.device)
    match request:
        case AllGather():
            result = x.new_empty(x.shape[0] * world, *x.shape[1:])
            work = _all_gather(result, x, group=channel, async_op=True)
        case ReduceScatter():
            result = x.new_empty(x.shape[0] // world, *x.shape[1:])
            work = _reduce_scatter(result, x, group=channel, async_op=True)
        case AllToAll(x, sends, recvs, target):
            result = x.new_empty(sum(recvs), *x.shape[1:]) if target is None else target
            work = dist.all_to_all_single(result, x, list(recvs), list(sends), group=channel, async_op=True)
    return Ticket(result, [work], request)


def _start_send_recv(request: SendRecv, group: dist.ProcessGroup) -> Ticket:
    result = [x for _, x in request.recvs]
    if not (request.sends or request.recvs):
        return Ticket(result, (), request)
    device = (*request.sends, *request.recvs)[0][1].device
    channel = groups.data_communicator(group, device)
    ops = [dist.P2POp(dist.isend, x, group=channel, group_peer=peer) for peer, x in request.sends]
    ops += [dist.P2POp(dist.irecv, x, group=channel, group_peer=peer) for peer, x in request.recvs]
    return Ticket(result, dist.batch_isend_irecv(ops), request)


def lockstep(schedules: Sequence[Schedule[T]]) -> list[T]:
    """Drive every rank of a simulated world, each as far as its next yield, in rank order.

    >>> def rank(i):
    ...     ticket = yield AllGather(torch.tensor([i]))
    ...     return (yield Wait(ticket)).tolist()
    >>> lockstep([rank(0), rank(1)])
    [[0, 1], [0, 1]]
    """
    answers: list[Any] = [None] * len(schedules)
    while True:
        requests, done = [], []
        for schedule, answer in zip(schedules, answers, strict=True):
            try:
                requests.append(schedule.send(answer))
            except StopIteration as stop:
                done.append(stop.value)
        if done and not requests:
            return done
        kinds = [type(request).__name__ for request in requests] + ["end"] * len(done)
        if len(set(kinds)) > 1:
            raise RuntimeError(f"the ranks' schedules differ: {', '.join(kinds)} in the same turn")
        answers = _run_turn(requests)


def _run_turn(requests: Sequence[Any]) -> list[Any]:
    """Carry out the requests of all ranks of a simulated world, and return their answers."""
    if isinstance(requests[0], Wait):
        return [request.ticket.result for request in requests]
    _check_buffers(requests)
    match requests[0]:
        case SendRecv():
            return _run_send_recvs(requests)
        case AllToAll():
            return _run_all_to_alls(requests)
    xs = [request.x for request in requests]
    if len({(x.shape, x.dtype) for x in xs}) > 1:
        forms = ", ".join(f"{dtype_name(x)} {list(x.shape)}" for x in xs)
        raise RuntimeError(f"the ranks' {type(requests[0]).__name__}s differ: {forms} in the same turn")
    if isinstance(requests[0], AllGather):
        whole = torch.cat(xs) if len(xs) > 1 else xs[0]
        return [Ticket(whole) for _ in xs]
    if xs[0].shape[0] % len(xs):
        raise RuntimeError(f"a ReduceScatter of {xs[0].shape[0]} rows does not divide by {len(xs)} ranks")
    total = xs[0] if len(xs) == 1 else torch.stack(list(xs)).sum(0)
    return [Ticket(part) for part in total.chunk(len(xs))]


def _check_buffers(requests: Sequence[Any]) -> None:
    """Refuse buffers that Gloo and NCCL refuse: not contiguous, or on several devices."""
    buffers = [(rank, name, x) for rank, request in enumerate(requests) for name, x in _buffers(request)]
    for rank, name, x in buffers:
        if not x.is_contiguous():
            raise RuntimeError(
                f"rank {rank}'s {type(requests[rank]).__name__} {name} a tensor {list(x.shape)} with strides "
                f"{list(x.stride())}; a process group needs it contiguous: send x.contiguous(), and receive "
                "into new memory"
            )
    devices = {x.device for *_, x in buffers}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise RuntimeError(f"{type(requests[0]).__name__} of tensors on {names}; one device a rank is needed")


def _buffers(request: Collective) -> list[tuple[str, Tensor]]:
    """List the tensors of a collective, each after its use: "sends" or "receives"."""
    if isinstance(request, SendRecv):
        return [("sends", x) for _, x in request.sends] + [("receives", x) for _, x in request.recvs]
    return [("sends", request.x)]


def dtype_name(x: Tensor) -> str:
    """The dtype's name without its module.

    >>> dtype_name(torch.zeros(1))
    'float32'
    """
    return str(x.dtype).removeprefix("torch.")


def _run_send_recvs(requests: Sequence[SendRecv]) -> list[Ticket]:
    """Copy the sent tensors of all ranks into the tensors of their receivers."""
    tensors = {(rank, peer): x for rank, request in enumerate(requests) for peer, x in request.sends}
    pairs = [(peer, rank) for rank, request in enumerate(requests) for peer, _ in request.recvs]
    if sorted(tensors) != sorted(pairs):
        raise RuntimeError(
            f"sends {sorted(tensors)} and receives {sorted(pairs)}, each (from, to), differ in the same turn"
        )
    for rank, request in enumerate(requests):
        for peer, x in request.recvs:
            source = tensors[peer, rank]
            if (source.shape, source.dtype) != (x.shape, x.dtype):
                raise RuntimeError(
                    f"rank {peer} sends {source.dtype} {list(source.shape)}, and rank {rank} has room for "
                    f"{x.dtype} {list(x.shape)}"
                )
            x.copy_(source)
    return [Ticket([x for _, x in request.recvs]) for request in requests]


def _run_all_to_alls(requests: Sequence[AllToAll]) -> list[Ticket]:
    """Join the rows that all ranks send to each rank."""
    if len({request.x.dtype for request in requests}) > 1:
        dtypes = ", ".join(dtype_name(request.x) for request in requests)
        raise RuntimeError(f"the ranks' AllToAlls differ: {dtypes} in the same turn")
    for rank, (x, sends) in enumerate((request.x, request.sends) for request in requests):
        if sum(sends) != len(x):
            raise RuntimeError(f"rank {rank} sends {list(sends)} rows of a tensor that has {len(x)}")
    parts = [request.x.split(list(request.sends)) for request in requests]
    tickets = []
    for rank, request in enumerate(requests):
        received = [part[rank] for part in parts]
        counts = [len(x) for x in received]
        if counts != list(request.recvs):
            raise RuntimeError(
                f"{counts} rows were sent to rank {rank}, which receives {list(request.recvs)}"
            )
        filled = [x for x in received if len(x)]  # a rank that sends nothing may have rows of another shape
        if len({x.shape[1:] for x in filled}) > 1:
            shapes = ", ".join(str(list(x.shape)) for x in received)
            raise RuntimeError(f"rank {rank} gets parts of different rows: {shapes} from the ranks in order")
        tickets.append(Ticket(torch.cat(filled) if filled else request.x[:0]))
    return tickets


def exchange(
    numbers: Sequence[int], group: dist.ProcessGroup, purpose: str = "an exchange of settings"
) -> list[list[int]]:
    """Gather every rank's integers, in rank order: one small message between each pair of ranks, on the
    group's control communicator. Every rank passes equally many.

    purpose: the call that all ranks make, for the message of PeerLost, which names the absent ranks
    """
    if groups.is_dry_run(group):
        return [list(numbers)] * group.size()
    channel = groups.control_communicator(group, purpose)
    row = torch.tensor(list(numbers), dtype=torch.int64, device=groups.device_of(group, channel))
    rows = row.repeat(group.size(), 1)
    if isinstance(channel, dist.ProcessGroup):
        _all_gather(rows.view(-1), row, group=channel)
        return rows.tolist()
    failures = _exchange_rows(channel, rows, row, groups.timeout(group).total_seconds())
    if failures:
        absent = sorted(failures)
        raise groups.peer_lost(group, purpose, absent, next(iter(failures.values())))
    return rows.tolist()


def exchange_bytes(
    content: bytes, length: int, group: dist.ProcessGroup, purpose: str = "an exchange of settings"
) -> list[bytes]:
    """Gather ``length`` bytes of every rank, in rank order, as :func:`exchange` gathers integers. Every rank
    passes the same length; longer content is cut, shorter content is padded with zeros."""
    padded = content[:length].ljust(-(-length // 8) * 8, b"\0")
    words = [int.from_bytes(padded[i : i + 8], "little", signed=True) for i in range(0, len(padded), 8)]
    rows = exchange(words, group, purpose)
    return [b"".join(word.to_bytes(8, "little", signed=True) for word in row)[:length] for row in rows]


def _exchange_rows(channel: Any, rows: Tensor, row: Tensor, seconds: float) -> dict[int, str]:
    """Send ``row`` to every other rank and receive its row, within ``seconds`` in all. Returns errors by
    peer."""
    failures: dict[int, str] = {}
    deadline, works = time.monotonic() + seconds, []
    peers = [peer for peer in range(channel.size()) if peer != channel.rank()]
    starts = [(peer, lambda peer=peer: channel.recv([rows[peer]], peer, 0)) for peer in peers]
    starts += [(peer, lambda peer=peer: channel.send([row], peer, 0)) for peer in peers]
    for peer, start in starts:
        try:
            works.append((peer, start()))
        except RuntimeError as error:  # the peer closed the connection
            failures.setdefault(peer, str(error))
    for peer, work in works:
        try:
            work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except RuntimeError as error:
            failures.setdefault(peer, str(error))
    return failures
