"""The collectives, and two drivers of the schedules that use them.

A schedule is a generator: it yields a collective to start and gets back a ticket, yields ``Wait(ticket)`` and
gets back the tensor.  Computation between the two overlaps with the messages.  ``run`` drives one
rank over a process group; ``lockstep`` drives all ranks of a simulated world in one thread, one yield at a
time.
"""

import contextlib
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

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
class Swap:
    """Send and receive point to point: ``sends`` are (peer, tensor); ``takes`` are (peer, tensor to receive
    into). The result is a list of the received tensors. Two ranks swap at most one tensor a direction."""

    sends: Sequence[tuple[int, Tensor]]
    takes: Sequence[tuple[int, Tensor]]


@dataclass(eq=False, slots=True)
class AllToAll:
    """Send rows of ``x`` [sum(sends), ...] to every rank in order, and receive rows: [sum(takes), ...]."""

    x: Tensor
    sends: Sequence[int]
    takes: Sequence[int]


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


Collective = AllGather | ReduceScatter | Swap | AllToAll
Schedule = Generator[Collective | Wait, Any, T]


def run(schedule: Schedule[T], group: dist.ProcessGroup) -> T:
    """Drive one rank's schedule over a process group. Raises PeerLost where a message fails or, after the
    group's timeout, does not end."""
    answer: Any = None
    for turn in itertools.count(1):
        try:
            request = schedule.send(answer)
        except StopIteration as stop:
            return stop.value
        try:
            answer = _finish(request.ticket) if isinstance(request, Wait) else _start(request, group)
        except RuntimeError as error:
            message = request.ticket.source if isinstance(request, Wait) else request
            raise PeerLost(
                f"rank {group.rank()} of {group.size()}: {_describe(message, group)}, turn {turn} of this "
                "layer's schedule, did not end. A peer died, stalled or runs something else; look at the "
                f"output of the other ranks first. ({error})"
            ) from error
    raise AssertionError("a schedule has no end")


class PeerLost(RuntimeError):
    """Raised where a message between ranks failed, or took longer than the group's timeout. absent: the
    missing ranks of the group, where they are known."""

    def __init__(self, message: str, absent: Sequence[int] = ()):
        super().__init__(message)
        self.absent = tuple(absent)


def _describe(message: Any, group: dist.ProcessGroup) -> str:
    name = type(message).__name__
    match message:
        case Swap(sends, takes):
            to, come = ([peer for peer, _ in part] for part in (sends, takes))
            return f"{name} to ranks {to} and from ranks {come}"
        case AllToAll(_, sends, takes):
            to, come = ([peer for peer, rows in enumerate(part) if rows] for part in (sends, takes))
            return f"{name} to ranks {to} and from ranks {come}"
    return f"{name} with ranks {[rank for rank in range(group.size()) if rank != group.rank()]}"


def _finish(ticket: Ticket) -> Any:
    for work in ticket.works:
        work.wait()
    return ticket.result


def _start(request: Collective, group: dist.ProcessGroup) -> Ticket:
    if isinstance(request, Swap):
        return _swap(request, group)
    x, world = request.x, group.size()
    channel = data_communicator(group, x.device)
    match request:
        case AllGather():
            result = x.new_empty(x.shape[0] * world, *x.shape[1:])
            work = _all_gather(result, x, group=channel, async_op=True)
        case ReduceScatter():
            result = x.new_empty(x.shape[0] // world, *x.shape[1:])
            work = _reduce_scatter(result, x, group=channel, async_op=True)
        case AllToAll(x, sends, takes):
            result = x.new_empty(sum(takes), *x.shape[1:])
            work = dist.all_to_all_single(result, x, list(takes), list(sends), group=channel, async_op=True)
    return Ticket(result, [work], request)


def _swap(request: Swap, group: dist.ProcessGroup) -> Ticket:
    result = [x for _, x in request.takes]
    if not (request.sends or request.takes):
        return Ticket(result, (), request)
    device = (*request.sends, *request.takes)[0][1].device
    channel = data_communicator(group, device)
    ops = [dist.P2POp(dist.isend, x, group=channel, group_peer=peer) for peer, x in request.sends]
    ops += [dist.P2POp(dist.irecv, x, group=channel, group_peer=peer) for peer, x in request.takes]
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
        kinds = [type(a).__name__ for a in requests] + ["end"] * len(done)
        if len(set(kinds)) > 1:
            raise RuntimeError(f"the ranks' schedules differ: {', '.join(kinds)} in the same turn")
        answers = _turn(requests)


def _turn(requests: Sequence[Any]) -> list[Any]:
    if isinstance(requests[0], Wait):
        return [a.ticket.result for a in requests]
    _check_buffers(requests)
    match requests[0]:
        case Swap():
            return _match_swaps(requests)
        case AllToAll():
            return _match_all_to_alls(requests)
    xs = [a.x for a in requests]
    if len({(x.shape, x.dtype) for x in xs}) > 1:
        forms = ", ".join(f"{_dtype(x)} {list(x.shape)}" for x in xs)
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
    buffers = [(rank, name, x) for rank, a in enumerate(requests) for name, x in _buffers(a)]
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
    """The memory that a collective reads and writes, and whether it sends or receives it."""
    if isinstance(request, Swap):
        return [("sends", x) for _, x in request.sends] + [("receives", x) for _, x in request.takes]
    return [("sends", request.x)]


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _match_swaps(requests: Sequence[Swap]) -> list[Ticket]:
    sent = {(rank, peer): x for rank, a in enumerate(requests) for peer, x in a.sends}
    received = [(peer, rank) for rank, a in enumerate(requests) for peer, _ in a.takes]
    if sorted(sent) != sorted(received):
        raise RuntimeError(
            f"sent {sorted(sent)} and taken {sorted(received)}, each (from, to), differ in the same turn"
        )
    for rank, a in enumerate(requests):
        for peer, x in a.takes:
            comes = sent[peer, rank]
            if (comes.shape, comes.dtype) != (x.shape, x.dtype):
                raise RuntimeError(
                    f"rank {peer} sends {comes.dtype} {list(comes.shape)}, and rank {rank} has room for "
                    f"{x.dtype} {list(x.shape)}"
                )
            x.copy_(comes)
    return [Ticket([x for _, x in a.takes]) for a in requests]


def _match_all_to_alls(requests: Sequence[AllToAll]) -> list[Ticket]:
    if len({a.x.dtype for a in requests}) > 1:
        dtypes = ", ".join(_dtype(a.x) for a in requests)
        raise RuntimeError(f"the ranks' AllToAlls differ: {dtypes} in the same turn")
    for rank, a in enumerate(requests):
        if sum(a.sends) != len(a.x):
            raise RuntimeError(f"rank {rank} sends {list(a.sends)} rows of a tensor that has {len(a.x)}")
    parts = [a.x.split(list(a.sends)) for a in requests]
    tickets = []
    for rank, a in enumerate(requests):
        received = [part[rank] for part in parts]
        if [len(x) for x in received] != list(a.takes):
            raise RuntimeError(
                f"{[len(x) for x in received]} rows were sent to rank {rank}, which takes {list(a.takes)}"
            )
        filled = [x for x in received if len(x)]  # a rank that sends nothing may have rows of another shape
        if len({x.shape[1:] for x in filled}) > 1:
            shapes = ", ".join(str(list(x.shape)) for x in received)
            raise RuntimeError(f"rank {rank} gets parts of different rows: {shapes} from the ranks in order")
        tickets.append(Ticket(torch.cat(filled) if filled else a.x[:0]))
    return tickets


def exchange(
    numbers: Sequence[int], group: dist.ProcessGroup, purpose: str = "an exchange of settings"
) -> list[list[int]]:
    """Gather every rank's integers, in rank order: one small message between each pair of ranks, on the
    group's control communicator. Every rank passes equally many.

    purpose: the call that all ranks make, for the message of PeerLost, which names the absent ranks
    """
    if _is_fake(group):
        return [list(numbers)] * group.size()
    channel = control(group, purpose)
    row = torch.tensor(list(numbers), dtype=torch.int64, device=_device(group, channel))
    rows = row.repeat(group.size(), 1)
    if isinstance(channel, dist.ProcessGroup):
        _all_gather(rows.view(-1), row, group=channel)
        return rows.tolist()
    failures = _swap_rows(channel, rows, row, timeout(group).total_seconds())
    if failures:
        absent = sorted(failures)
        raise PeerLost(_peer_lost_message(group, purpose, absent, next(iter(failures.values()))), absent)
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


def _swap_rows(channel: Any, rows: Tensor, row: Tensor, seconds: float) -> dict[int, str]:
    """Send ``row`` to every other rank and receive its row, within ``seconds`` in all. Returns errors by
    peer."""
    failures: dict[int, str] = {}
    end, works = time.monotonic() + seconds, []
    peers = [peer for peer in range(channel.size()) if peer != channel.rank()]
    starts = [(peer, lambda peer=peer: channel.recv([rows[peer]], peer, 0)) for peer in peers]
    starts += [(peer, lambda peer=peer: channel.send([row], peer, 0)) for peer in peers]
    for peer, start in starts:
        try:
            works.append((peer, start()))
        except RuntimeError as error:  # it ended the connection
            failures.setdefault(peer, str(error))
    for peer, work in works:
        try:
            work.wait(timedelta(seconds=max(0.001, end - time.monotonic())))
        except RuntimeError as error:
            failures.setdefault(peer, str(error))
    return failures


def _peer_lost_message(group: dist.ProcessGroup, purpose: str, absent: Sequence[int], error: object) -> str:
    numbers = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
    ranks = f"rank{'s' * (len(absent) > 1)} {numbers}" if absent else "another rank"
    waited = f"{timeout(group).total_seconds():g} s"
    return (
        f"rank {group.rank()} of {group.size()} was at {purpose}, and {ranks} did not come within {waited} "
        "or ended the connection: it died, stalled, failed before this call or made another call. Look at "
        f"the output of those ranks first. ({error})"
    )


# Communicators that accompany a group. Registered ones are kept by name: torch alone owns them, so that
# destroy_process_group() ends their threads.
_CONTROLS: weakref.WeakKeyDictionary[dist.ProcessGroup, Any] = weakref.WeakKeyDictionary()
_COMPANIONS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, str]] = weakref.WeakKeyDictionary()
_CONNECTED: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # with data communicators
ANSWER = 2.0  # seconds to wait for a store's answer


def control(group: dist.ProcessGroup, purpose: str = "a first call") -> Any:
    """The control communicator of a group: the same ranks, for integers instead of data, made at its first
    use. Integers sent over the group itself could meet another rank's keys and values in one collective and
    come back as garbage, without an error. Uses gloo on the host where available, so that it waits for no
    GPU."""
    if not dist.is_gloo_available():
        return _companion(group, "tritoncp control", None, purpose)
    if group not in _CONTROLS:
        store = dist.PrefixStore("tritoncp control", group.get_group_store())

        def connect() -> Any:
            return dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout(group))

        _CONTROLS[group] = _connect(group, store, purpose, connect)
    return _CONTROLS[group]


DATA = "tritoncp data"


def data_communicator(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """The communicator that carries all tensors of a schedule on ``device``, in the same order on every rank.

    This is the group itself, except where NCCL would use a stream of normal priority: its blocks would start
    only after the attention kernel that fills the GPU, so that nothing overlaps.  There it is a companion: a
    communicator of the same ranks with a high-priority stream, which all ranks make in :func:`connect_data`.
    """
    if device.type != "cuda":
        return group
    name = _COMPANIONS.get(group, {}).get(DATA)
    if name is not None:
        return named(name)
    if not _has_normal_priority(group):
        return group
    purpose = "making the communicator of keys and values"
    return _companion(group, DATA, "nccl", purpose, high_priority=True)


def connect_data(group: dist.ProcessGroup, device: torch.device | None = None) -> None:
    """Connect the NCCL communicator of a group's CUDA tensors, by one collective of all ranks. NCCL connects
    at the first message and waits for all ranks, but a schedule's first message may involve only some.

    device: of the call's tensors; None while a plan is made. A group that also serves CPU tensors is
        connected by a call with GPU tensors only: its ranks may share one GPU, which NCCL refuses.
    """
    if group.size() == 1 or group in _CONNECTED or _nccl_of(group) is None:
        return
    if device is None and not _serves_cpu(group):
        device = torch.device("cuda", torch.cuda.current_device())
    if device is None or device.type != "cuda":
        return
    dist.all_reduce(torch.zeros(1, device=device), group=data_communicator(group, device))
    _CONNECTED.add(group)


def _serves_cpu(group: dist.ProcessGroup) -> bool:
    """Whether a group was made for tensors on the CPU besides those on GPUs, as init_process_group() does."""
    backend = dist.get_backend(group)
    return backend == "undefined" or "cpu:" in backend


def _has_normal_priority(group: dist.ProcessGroup) -> bool:
    """Whether NCCL carries the CUDA tensors of a group, on a stream of normal priority."""
    backend = _nccl_of(group)
    if backend is None or group.size() == 1:
        return False
    forced = os.environ.get("TORCH_NCCL_HIGH_PRIORITY", "0").upper() in ("1", "Y", "YES", "T", "TRUE")
    return not (forced or backend.options.is_high_priority_stream)


def _nccl_of(group: dist.ProcessGroup) -> Any:
    """The NCCL backend that carries the CUDA tensors of a group, or None."""
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:  # none for CUDA tensors
        return None
    return backend if backend.name() == "nccl" else None


def _companion(
    group: dist.ProcessGroup, name: str, backend: str | None, purpose: str, high_priority: bool = False
) -> dist.ProcessGroup:
    """The companion communicator of a group with this name, made by all of its ranks at the first use.

    It is made as by torch's new_group, but under a fixed name: the name that new_group chooses without all of
    the world's ranks depends on the number of groups of a rank, which may differ between the ranks.

    high_priority: run NCCL on a high-priority stream, whose blocks start before those of other streams
    """
    companions = _COMPANIONS.setdefault(group, {})
    if name not in companions:
        store, ranks = group.get_group_store(), dist.get_process_group_ranks(group)
        torchs: Any = dist.distributed_c10d

        def connect() -> str:
            options = None
            if high_priority:
                options = torchs.ProcessGroupNCCL.Options(is_high_priority_stream=True)
                options._timeout = timeout(group)
            with _without_split(torchs._get_default_group()):
                companion, _ = torchs._new_process_group_helper(
                    len(ranks), group.rank(), ranks, dist.Backend(backend or dist.get_backend(group)), store,
                    f"{group.group_name} {name}", options, timeout(group), group_desc=name,
                )  # fmt: skip
            torchs._world.pg_group_ranks[companion] = {rank: place for place, rank in enumerate(ranks)}
            return companion.group_name

        companions[name] = _connect(group, dist.PrefixStore(name, store), purpose, connect)
    return named(companions[name])


@contextlib.contextmanager
def _without_split(world: dist.ProcessGroup) -> Iterator[None]:
    """Make new communicators without ncclCommSplit of the world's communicator.

    Where the world's group is bound to a device, torch splits new communicators from it, which waits for
    every rank of the world, also for those outside the group, which do not take part.
    """
    device = world.bound_device_id
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device


def _connect(group: dist.ProcessGroup, store: dist.Store, purpose: str, connect: Callable[[], Any]) -> Any:
    """Call connect(), which needs every rank. Raises PeerLost, which names the absent ranks."""
    if _is_fake(group):
        return connect()
    store.set(f"came {group.rank()}", "yes")
    try:
        return connect()
    except RuntimeError as error:
        keys = [f"came {rank}" for rank in range(group.size())]
        raise PeerLost(_peer_lost_message(group, purpose, _absent_keys(store, keys), error)) from error


def _absent_keys(store: dist.Store, keys: Sequence[str]) -> list[int]:
    """List the indices of the keys that a store does not hold; empty where the store itself does not answer
    in time, as its host may be the rank that stopped."""
    absent: list[int] = []

    def ask() -> None:
        absent.extend([place for place, key in enumerate(keys) if not store.check([key])])

    asking = threading.Thread(target=ask, daemon=True)  # a store has no time limit of its own for this
    asking.start()
    asking.join(ANSWER)
    return [] if asking.is_alive() else absent


def timeout(group: dist.ProcessGroup) -> timedelta:
    """The timeout of a group, which its companions share."""
    return group._get_backend(_device(group)).options._timeout


def _is_fake(group: dist.ProcessGroup) -> bool:
    """Whether this is a dry run: torch's "fake" backend, under which the other ranks do not exist."""
    return dist.get_backend(group) == "fake"


def _device(group: dist.ProcessGroup, channel: Any = None) -> torch.device:
    """The device of a group's tensors, or of the tensors of its control communicator."""
    nccl = "nccl" in dist.get_backend(group) and (channel is None or isinstance(channel, dist.ProcessGroup))
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def named(name: str) -> dist.ProcessGroup:
    """The process group with this name. Raises ValueError for one that was destroyed."""
    try:
        return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except (LookupError, RuntimeError, ValueError) as error:
        raise ValueError(_DESTROYED.format(name=name)) from error


_DESTROYED = (
    "the process group {name!r} was destroyed, or never made in this process; pass a group that exists: make "
    "it, and all plans for it, again after destroy_process_group()"
)
_NOT_A_MEMBER = (
    "this process is not a member of {which}: only its ranks call this. Make the call where "
    "torch.distributed.get_rank(group) is not -1, or pass the group that this process belongs to"
)


def group_of(mesh: Any) -> dist.ProcessGroup | None:
    """The process group of all ranks of a DeviceMesh of one or two dimensions, or a ProcessGroup; None for
    None. Raises ValueError for a group that was destroyed or does not hold this process, before anything is
    sent."""
    if mesh is None:
        return None
    group = mesh if isinstance(mesh, dist.ProcessGroup) else _group_of_mesh(mesh)
    if group not in dist.distributed_c10d._world.pg_map:
        raise ValueError(_DESTROYED.format(name=group.group_name))
    return group


def _group_of_mesh(mesh: Any) -> dist.ProcessGroup:
    outside = dist.GroupMember.NON_GROUP_MEMBER
    if type(mesh) is type(outside) and mesh == outside:
        raise ValueError(_NOT_A_MEMBER.format(which="this process group"))
    if not isinstance(mesh, dist.DeviceMesh):
        raise TypeError(f"mesh is a DeviceMesh, a ProcessGroup or None; got a {type(mesh).__name__}")
    if mesh.ndim > 2:
        raise ValueError(
            f"this mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names}; pass its context-parallel one, for "
            "example mesh['cp'], or two of them for ulysses and another schedule"
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise ValueError(
            "this mesh has two dimensions without names, and torch joins only named ones; pass "
            "init_device_mesh(..., mesh_dim_names=('ring', 'ulysses')), or any two names"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(_NOT_A_MEMBER.format(which=f"the mesh {mesh}"))
    try:
        return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()
    except (LookupError, RuntimeError) as error:
        raise ValueError(_DESTROYED.format(name=str(mesh))) from error


def degree_of(mesh: Any) -> int:
    """The number of ranks that exchange heads: the second dimension of a two-dimensional mesh, 0 for any
    other."""
    return mesh.size(1) if isinstance(mesh, dist.DeviceMesh) and mesh.ndim == 2 else 0
