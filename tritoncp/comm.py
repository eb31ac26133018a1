"""The only collectives, and two drivers of one protocol.

A schedule is a generator: it yields a collective to start and gets back a ticket, yields ``Wait(ticket)`` and
gets back the tensor.  What lies between the two runs while bytes fly.  ``run`` drives one rank over a process
group; ``lockstep`` drives all ranks of a simulated world in one thread, one yield at a time.
"""

import itertools
import weakref
from collections.abc import Generator, Sequence
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
    """Every rank's ``x`` [n, ...], rank after rank: [W * n, ...]."""

    x: Tensor


@dataclass(eq=False, slots=True)
class ReduceScatter:
    """The sum over ranks of ``x`` [W * n, ...], this rank's part of it: [n, ...]."""

    x: Tensor


@dataclass(eq=False, slots=True)
class Swap:
    """Point to point: ``sends`` are (peer, tensor); ``takes`` are (peer, a tensor for what comes).
    The result is a list of these tensors, filled. Two ranks swap at most one tensor a direction.
    ``aside``: on a communicator of its own, where it need not queue behind other messages."""

    sends: Sequence[tuple[int, Tensor]]
    takes: Sequence[tuple[int, Tensor]]
    aside: bool = False


@dataclass(eq=False, slots=True)
class AllToAll:
    """Rows of ``x`` [sum(sends), ...] to every rank in order; the rows that come: [sum(takes), ...]."""

    x: Tensor
    sends: Sequence[int]
    takes: Sequence[int]


@dataclass(eq=False, slots=True)
class Wait:
    """Block until the collective behind ``ticket`` is done; its result."""

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
            asked = schedule.send(answer)
        except StopIteration as stop:
            return stop.value
        try:
            answer = _finish(asked.ticket) if isinstance(asked, Wait) else _start(asked, group)
        except RuntimeError as error:
            message = asked.ticket.source if isinstance(asked, Wait) else asked
            raise PeerLost(
                f"rank {group.rank()} of {group.size()}: {_described(message, group)}, turn {turn} of this "
                f"layer's schedule, did not end. A peer died, stalled or runs something else; what the other "
                f"ranks say comes first. ({error})"
            ) from error
    raise AssertionError("a schedule has no end")


class PeerLost(RuntimeError):
    """A message between ranks failed, or took longer than the group's timeout."""


def _described(message: Any, group: dist.ProcessGroup) -> str:
    name = type(message).__name__
    match message:
        case Swap(sends, takes, _):
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


def _start(asked: Collective, group: dist.ProcessGroup) -> Ticket:
    world = group.size()
    match asked:
        case AllGather(x):
            result = x.new_empty(x.shape[0] * world, *x.shape[1:])
            work = _all_gather(result, x, group=group, async_op=True)
        case ReduceScatter(x):
            result = x.new_empty(x.shape[0] // world, *x.shape[1:])
            work = _reduce_scatter(result, x, group=group, async_op=True)
        case AllToAll(x, sends, takes):
            result = x.new_empty(sum(takes), *x.shape[1:])
            work = dist.all_to_all_single(result, x, list(takes), list(sends), group=group, async_op=True)
        case Swap():
            return _swap(asked, aside(group) if asked.aside else group)
    return Ticket(result, [work], asked)


def _swap(asked: Swap, group: dist.ProcessGroup) -> Ticket:
    ops = [dist.P2POp(dist.isend, x, group=group, group_peer=peer) for peer, x in asked.sends]
    ops += [dist.P2POp(dist.irecv, x, group=group, group_peer=peer) for peer, x in asked.takes]
    result = [x for _, x in asked.takes]
    return Ticket(result, dist.batch_isend_irecv(ops) if ops else (), asked)


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
        asked, done = [], []
        for schedule, answer in zip(schedules, answers, strict=True):
            try:
                asked.append(schedule.send(answer))
            except StopIteration as stop:
                done.append(stop.value)
        if done and not asked:
            return done
        kinds = [type(a).__name__ for a in asked] + ["end"] * len(done)
        if len(set(kinds)) > 1:
            raise RuntimeError(f"the ranks' schedules differ: {', '.join(kinds)} in the same turn")
        answers = _turn(asked)


def _turn(asked: Sequence[Any]) -> list[Any]:
    match asked[0]:
        case Wait():
            return [a.ticket.result for a in asked]
        case Swap():
            return _swapped(asked)
        case AllToAll():
            return _dealt(asked)
    xs = [a.x for a in asked]
    if len({(x.shape, x.dtype) for x in xs}) > 1:
        given = ", ".join(f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in xs)
        raise RuntimeError(f"the ranks' {type(asked[0]).__name__}s differ: {given} in the same turn")
    if isinstance(asked[0], AllGather):
        whole = torch.cat(xs) if len(xs) > 1 else xs[0]
        return [Ticket(whole) for _ in xs]
    if xs[0].shape[0] % len(xs):
        raise RuntimeError(f"a ReduceScatter of {xs[0].shape[0]} rows does not divide by {len(xs)} ranks")
    total = xs[0] if len(xs) == 1 else torch.stack(list(xs)).sum(0)
    return [Ticket(part) for part in total.chunk(len(xs))]


def _swapped(asked: Sequence[Swap]) -> list[Ticket]:
    sent = {(rank, peer): x for rank, a in enumerate(asked) for peer, x in a.sends}
    taken = [(peer, rank) for rank, a in enumerate(asked) for peer, _ in a.takes]
    if sorted(sent) != sorted(taken):
        raise RuntimeError(
            f"sent {sorted(sent)} and taken {sorted(taken)}, each (from, to), differ in the same turn"
        )
    for rank, a in enumerate(asked):
        for peer, x in a.takes:
            comes = sent[peer, rank]
            if (comes.shape, comes.dtype) != (x.shape, x.dtype):
                raise RuntimeError(
                    f"rank {peer} sends {comes.dtype} {list(comes.shape)}, and rank {rank} has room for "
                    f"{x.dtype} {list(x.shape)}"
                )
            x.copy_(comes)
    return [Ticket([x for _, x in a.takes]) for a in asked]


def _dealt(asked: Sequence[AllToAll]) -> list[Ticket]:
    parts = [a.x.split(list(a.sends)) for a in asked]
    tickets = []
    for rank, a in enumerate(asked):
        mine = [part[rank] for part in parts]
        if [len(x) for x in mine] != list(a.takes):
            raise RuntimeError(
                f"{[len(x) for x in mine]} rows were sent to rank {rank}, which takes {list(a.takes)}"
            )
        some = [x for x in mine if len(x)]  # ranks that send nothing here may have rows of another shape
        tickets.append(Ticket(torch.cat(some) if some else a.x[:0]))
    return tickets


def exchange(numbers: Sequence[int], group: dist.ProcessGroup) -> list[list[int]]:
    """Every rank's integers, by rank: one small collective of the group's control communicator."""
    group = control(group)
    mine = torch.tensor(list(numbers), dtype=torch.int64, device=_device(group))
    rows = mine.new_empty(group.size() * len(numbers))
    _all_gather(rows, mine, group=group)
    return rows.view(group.size(), len(numbers)).tolist()


# Companions of a group, by name: torch alone owns them, so that destroy_process_group() ends their threads.
_COMPANIONS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, str]] = weakref.WeakKeyDictionary()


def control(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A communicator of the same ranks for what is not data, made when first asked for: integers that met
    somebody's keys and values in one collective would come back as garbage, without an error. On the host
    where there is gloo, so that nothing waits for a GPU."""
    return _companion(group, "tritoncp control", "gloo" if dist.is_gloo_available() else None)


def aside(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A second communicator of the same ranks for data: what a ring sends home need not queue behind what it
    passes on. Made with the first plan that needs it, so that no backward pass has to."""
    return _companion(group, "tritoncp gradients of keys and values", dist.get_backend(group))


def _companion(group: dist.ProcessGroup, purpose: str, backend: str | None) -> dist.ProcessGroup:
    """The communicator of a group's ranks for a purpose; every rank makes it when it first asks."""
    known = _COMPANIONS.setdefault(group, {})
    if purpose not in known:
        made = dist.new_group(
            dist.get_process_group_ranks(group), timeout=timeout(group), backend=backend,
            use_local_synchronization=True, group_desc=purpose,
        )  # fmt: skip
        known[purpose] = made.group_name
    return named(known[purpose])


def timeout(group: dist.ProcessGroup) -> timedelta:
    """How long the group waits: its companions wait no longer."""
    return group._get_backend(_device(group)).options._timeout


def _device(group: dist.ProcessGroup) -> torch.device:
    """Where the group's tensors lie."""
    nccl = "nccl" in dist.get_backend(group)
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def named(name: str) -> dist.ProcessGroup:
    """The process group with this name."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def group_of(mesh: Any) -> dist.ProcessGroup | None:
    """The process group of all ranks of a DeviceMesh of one or two dimensions, or a ProcessGroup; None for
    None."""
    if mesh is None or isinstance(mesh, dist.ProcessGroup):
        return mesh
    if not isinstance(mesh, dist.DeviceMesh):
        raise TypeError(f"mesh is a DeviceMesh, a ProcessGroup or None; got a {type(mesh).__name__}")
    if mesh.ndim > 2:
        raise ValueError(
            f"this mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names}; pass its context-parallel one, for "
            "example mesh['cp'], or two of them for ulysses and another schedule"
        )
    return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()


def degree_of(mesh: Any) -> int:
    """Ranks that trade heads: the second dimension of a mesh of two, 0 for any other."""
    return mesh.size(1) if isinstance(mesh, dist.DeviceMesh) and mesh.ndim == 2 else 0
