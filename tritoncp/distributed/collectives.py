"""Requests for messages between ranks, and drivers of the schedules that yield them.

A pass of a schedule is a generator: it yields a collective to start and gets back a ticket, yields the ticket
to wait and gets back the tensor. Computation between the two overlaps with the messages. ``run`` drives one
rank over a process group; ``lockstep`` drives all ranks of a simulated world in one thread, one yield at a
time; ``run_alone`` drives a rank without a group; ``run_dry`` drives one without messages.
"""

import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tritoncp.distributed import failures, groups
from tritoncp.distributed.failures import AwaitedMessage, GroupClosed, Record
from tritoncp.distributed.profiler_ranges import message_range

T = TypeVar("T")
# torch 2.13 renamed these functions, and its old names warn.
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
class AllToAll:
    """Send rows of ``x`` [sum(sends), ...] to all ranks in order, and receive rows [sum(recvs), ...]; sends
    and recvs are the numbers of rows to and from each rank. target: memory to receive into; None: new."""

    x: Tensor
    sends: Sequence[int]
    recvs: Sequence[int]
    target: Tensor | None = None


@dataclass(eq=False, slots=True)
class Ticket:
    """A collective in flight. It is waited for once, and then keeps no buffer alive.

    on_host: whether a wait for it blocks the host, which it does for tensors on the CPU
    number:  number of the message among all messages of the group
    """

    result: Any
    work: Any = None
    source: Any = None
    on_host: bool = False
    number: int = 0

    def take_result(self) -> Any:
        """Return the result, and drop it and the sent tensor."""
        result, self.result, self.work, self.source = self.result, None, None, None
        return result


Collective = AllGather | ReduceScatter | AllToAll
Requests = Generator[Collective | Ticket, Any, T]  # of a schedule, which computes in between


def run(schedule: Requests[T], group: dist.ProcessGroup, name: str = "exchange", direction: str = "") -> T:
    """Drive one rank's schedule over a process group. Raises PeerLost if a message fails, cannot come, or
    does not end within the group's timeout. name, direction: names of the messages in a profiler's trace."""
    answer: Any = None
    record = failures.record_of(group)
    for turn in itertools.count(1):
        try:
            request = schedule.send(answer)
        except StopIteration as stop:
            record.calls += 1
            return stop.value
        collective = request.source if isinstance(request, Ticket) else request
        try:
            if isinstance(request, Ticket):
                with message_range(name, direction, "wait", collective):
                    answer = _finish(request, group, record, turn)
            else:
                answer = _start_numbered(request, group, record, name, direction)
        except GroupClosed:
            raise
        except RuntimeError as error:
            message = _message(record.messages, collective, group, turn)
            raise failures.peer_lost(group, record, message, error) from error
        del collective  # its tensor is freed before the schedule goes on
    raise AssertionError("a schedule has no end")


def run_alone(schedule: Requests[T]) -> T:
    """Drive the schedule of a rank without a group, which sends no messages."""
    try:
        request = next(schedule)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise RuntimeError(f"a rank without a process group requests a {type(request).__name__}: pass its mesh")


def run_dry(schedule: Requests[T], world_size: int, watch: Callable[[Collective], object] = id) -> T:
    """Drive the schedule of one of ``world_size`` ranks without messages: what it receives is uninitialised
    memory. watch: called with each collective"""
    answer: Any = None
    while True:
        try:
            request = schedule.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result
        if isinstance(request, Ticket):
            answer = request.take_result()
        else:
            watch(request)
            answer = Ticket(_empty_result(request, world_size), None, request)


def _empty_result(request: Collective, world_size: int) -> Tensor:
    """Allocate the result of a collective."""
    match request:
        case AllGather(x):
            return x.new_empty(x.shape[0] * world_size, *x.shape[1:])
        case ReduceScatter(x):
            return x.new_empty(x.shape[0] // world_size, *x.shape[1:])
        case AllToAll(x, _, recvs, target):
            return x.new_empty(sum(recvs), *x.shape[1:]) if target is None else target


def _describe(request: Any, group: dist.ProcessGroup, turn: int = 1) -> str:
    """Name a request and its peers, for an error."""
    name = f"turn {turn} of a layer's schedule, {type(request).__name__}"
    if isinstance(request, AllToAll):
        counts = request.sends, request.recvs
        targets, sources = ([peer for peer, rows in enumerate(part) if rows] for part in counts)
        return f"{name} to ranks {targets} and from ranks {sources}"
    return f"{name} with ranks {[rank for rank in range(group.size()) if rank != group.rank()]}"


def _message(number: int, request: Collective, group: dist.ProcessGroup, turn: int = 1) -> AwaitedMessage:
    """Describe the number-th message of a group."""
    return AwaitedMessage(number, "tensors", lambda: _describe(request, group, turn))


def _finish(ticket: Ticket, group: dist.ProcessGroup, record: Record, turn: int = 1) -> Any:
    if ticket.on_host:
        describe = partial(_message, ticket.number, ticket.source, group, turn)
        failures.wait(ticket.work, group, record, describe)
    else:
        ticket.work.wait()  # with a timeout, NCCL's would block the host
    return ticket.take_result()


def start_in_graph(request: Collective, group: dist.ProcessGroup, buffer: Tensor | None = None) -> Tensor:
    """Start a collective inside a graph; ``_c10d_functional.wait_tensor`` of the returned tensor waits for
    it. buffer: the tensor to return, which contains the request's target; None: the result."""
    record = failures.record_of(group)
    try:
        ticket = _start_numbered(request, group, record, "shared keys")
    except RuntimeError as error:
        message = _message(record.messages, request, group)
        raise failures.peer_lost(group, record, message, error) from error
    result = ticket.result if buffer is None else buffer
    if ticket.on_host:  # the graph's wait cannot tell that a rank failed
        _finish(ticket, group, record)
    else:
        torch._C._distributed_c10d._register_work(result, ticket.work)
    return result


def _start_numbered(
    request: Collective, group: dist.ProcessGroup, record: Record, name: str, direction: str = ""
) -> Ticket:
    """Start the next message of a group."""
    record.messages += 1
    with message_range(name, direction, "start", request):
        ticket = _start(request, group)
    ticket.number = record.messages
    return ticket


def _start(request: Collective, group: dist.ProcessGroup) -> Ticket:
    """Start a collective on the group's data communicator."""
    x, world = request.x, group.size()
    channel, on_host = groups.data_communicator(group, x.device), x.device.type == "cpu"
    match request:
        case AllGather():
            result = _empty_result(request, world)
            work = _all_gather(result, x, group=channel, async_op=True)
        case ReduceScatter() if on_host:  # gloo's all_gather does this too, but waits without a timeout
            total = x.clone()
            work = dist.all_reduce(total, group=channel, async_op=True)
            result = total.chunk(world)[group.rank()]
        case ReduceScatter():
            result = _empty_result(request, world)
            work = _reduce_scatter(result, x, group=channel, async_op=True)
        case AllToAll(x, sends, recvs):
            result = _empty_result(request, world)
            work = dist.all_to_all_single(result, x, list(recvs), list(sends), group=channel, async_op=True)
    return Ticket(result, work, request, on_host)


def lockstep(schedules: Sequence[Requests[T]]) -> list[T]:
    """Drive every rank of a simulated world, each as far as its next yield, in rank order.

    >>> def rank(i):
    ...     ticket = yield AllGather(torch.tensor([i]))
    ...     return (yield ticket).tolist()
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
    if isinstance(requests[0], Ticket):
        return [ticket.take_result() for ticket in requests]
    _check_buffers(requests)
    if isinstance(requests[0], AllToAll):
        return _run_all_to_alls(requests)
    xs = [request.x for request in requests]
    if len({(x.shape, x.dtype) for x in xs}) > 1:
        forms = ", ".join(f"{dtype_name(x)} {list(x.shape)}" for x in xs)
        raise RuntimeError(f"the ranks' {type(requests[0]).__name__}s differ: {forms} in the same turn")
    if isinstance(requests[0], AllGather):
        whole = torch.cat(xs)
        return [Ticket(whole) for _ in xs]
    if xs[0].shape[0] % len(xs):
        raise RuntimeError(f"a ReduceScatter of {xs[0].shape[0]} rows does not divide by {len(xs)} ranks")
    return [Ticket(part) for part in torch.stack(xs).sum(0).chunk(len(xs))]


def _check_buffers(requests: Sequence[Any]) -> None:
    """Raise RuntimeError for buffers that are not contiguous, which Gloo and NCCL refuse."""
    for rank, request in enumerate(requests):
        for use, x in ("sends", request.x), ("receives", getattr(request, "target", None)):
            if x is not None and not x.is_contiguous():
                raise RuntimeError(
                    f"rank {rank}'s {type(request).__name__} {use} a tensor {list(x.shape)} with strides "
                    f"{list(x.stride())}; a process group needs it contiguous: send x.contiguous(), and "
                    "receive into new memory"
                )


def dtype_name(x: Tensor) -> str:
    """Return the dtype's name without its module.

    >>> dtype_name(torch.zeros(1))
    'float32'
    """
    return str(x.dtype).removeprefix("torch.")


def _run_all_to_alls(requests: Sequence[AllToAll]) -> list[Ticket]:
    """Concatenate the rows that are sent to each rank, in the rank's target if it has one."""
    if len({request.x.dtype for request in requests}) > 1:
        dtypes = ", ".join(dtype_name(request.x) for request in requests)
        raise RuntimeError(f"the ranks' AllToAlls differ: {dtypes} in the same turn")
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
        rows = torch.cat(filled) if filled else request.x[:0]
        target = requests[rank].target
        tickets.append(Ticket(rows if target is None else target.copy_(rows.view(target.shape))))
    return tickets


def exchange(
    numbers: Sequence[int], group: dist.ProcessGroup, purpose: str = "an exchange of settings"
) -> list[list[int]]:
    """Gather every rank's integers, in rank order, by small messages on the group's control communicator.
    Every rank passes the same number of integers.

    purpose: the call that all ranks make, for the message of PeerLost, which names the absent ranks
    """
    if groups.is_dry_run(group):
        return [list(numbers)] * group.size()
    record = failures.record_of(group)
    record.messages += 1
    channel = groups.control_communicator(group, purpose)
    row = torch.tensor(list(numbers), dtype=torch.int64, device="cpu")
    rows = row.repeat(group.size(), 1)
    work = channel.allgather([list(rows)], [row])
    message = AwaitedMessage(record.messages, "exchange", lambda: purpose)
    failures.wait(work, group, record, lambda: message)
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
