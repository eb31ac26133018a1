"""Process groups: the group of a mesh, and the communicators that accompany a group.

A group has up to two companions of the same ranks: the control communicator carries integers, the data
communicator carries the tensors of schedules.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tritoncp.core import log_lines
from tritoncp.core.dynamo_boundary import constant_result
from tritoncp.distributed import failures


def _name_own_rank() -> str:
    """Return "rank 3 of 8" of the default group; "" before it is made."""
    return f"rank {dist.get_rank()} of {dist.get_world_size()}" if dist.is_initialized() else ""


log_lines.name_rank_by(_name_own_rank)


Mesh = dist.DeviceMesh | dist.ProcessGroup | None  # of the ranks of a call; None: this process alone
# Names of groups' data communicators. Only torch refers to the objects, so that destroy_process_group() ends
# their threads.
_COMPANIONS: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()
_CONNECTED: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # groups with data communicators
CONTROL_NAME, DATA_NAME = "tritoncp control", "tritoncp data"


def control_communicator(group: dist.ProcessGroup, purpose: str = "a first call") -> Any:
    """Return the control communicator of a group, which carries integers: a gloo communicator, which waits
    for no GPU. It is made at its first use.

    Integers sent over the group itself could meet another rank's keys and values in one collective and come
    back as garbage, without an error.
    """
    record = failures.record_of(group)
    if record.control is None:
        store = dist.PrefixStore(CONTROL_NAME, group.get_group_store())

        def connect() -> Any:
            return dist.ProcessGroupGloo(store, group.rank(), group.size(), failures.timeout(group))

        record.control = _connect(group, store, purpose, connect)
    return record.control


def data_communicator(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Return the communicator that carries all tensors of schedules on ``device``. There is only one, so that
    every rank starts messages in the same order.

    It is the group itself, unless NCCL uses a stream of normal priority: its blocks would start only after
    the attention kernel that fills the GPU, so that nothing overlaps. Then it is a companion, a communicator
    of the same ranks with a high-priority stream, which all ranks make in :func:`connect_data`.
    """
    if device.type != "cuda":
        return group
    name = _COMPANIONS.get(group)
    if name is None and not _has_normal_priority(group):
        return group
    return group_by_name(name or _COMPANIONS.setdefault(group, _make_companion(group)))


def connect_data(group: dist.ProcessGroup, device: torch.device | None = None) -> None:
    """Connect the NCCL communicator of a group's CUDA tensors, by one collective of all ranks. NCCL connects
    at the first message and waits for all ranks, but a schedule's first message may involve only some.

    device: device of the call's tensors; None while a plan is made. A group that also serves CPU tensors is
        connected only by a call with GPU tensors, since NCCL refuses ranks that share a GPU.
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
    """Return whether a group carries CPU tensors besides GPU tensors, like the default group of
    init_process_group()."""
    backend = dist.get_backend(group)
    return backend == "undefined" or "cpu:" in backend


def _has_normal_priority(group: dist.ProcessGroup) -> bool:
    """Return whether NCCL carries the CUDA tensors of a group on a stream of normal priority."""
    backend = _nccl_of(group)
    if backend is None or group.size() == 1:
        return False
    forced = os.environ.get("TORCH_NCCL_HIGH_PRIORITY", "0").upper() in ("1", "Y", "YES", "T", "TRUE")
    return not (forced or backend.options.is_high_priority_stream)


def _nccl_of(group: dist.ProcessGroup) -> Any:
    """Return the NCCL backend that carries the CUDA tensors of a group, or None."""
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:  # the group has no backend for CUDA
        return None
    return backend if backend.name() == "nccl" else None


def _make_companion(group: dist.ProcessGroup) -> str:
    """Make a group's NCCL companion with a high-priority stream, whose blocks start before the blocks of
    other streams. All ranks of the group call this together. Returns its name.

    It is made like torch's new_group does, but with a fixed name: the names that new_group chooses depend on
    the number of groups that a rank has made, which may differ between ranks.
    """
    store, ranks = group.get_group_store(), dist.get_process_group_ranks(group)
    torchs: Any = dist.distributed_c10d

    def connect() -> str:
        options = torchs.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = failures.timeout(group)
        with _without_split(torchs._get_default_group()):
            companion, _ = torchs._new_process_group_helper(
                len(ranks), group.rank(), ranks, dist.Backend("nccl"), store,
                f"{group.group_name} {DATA_NAME}", options, options._timeout, group_desc=DATA_NAME,
            )  # fmt: skip
        torchs._world.pg_group_ranks[companion] = {rank: index for index, rank in enumerate(ranks)}
        return companion.group_name

    purpose = "making the communicator of keys and values"
    return _connect(group, dist.PrefixStore(DATA_NAME, store), purpose, connect)


@contextlib.contextmanager
def _without_split(world: dist.ProcessGroup) -> Iterator[None]:
    """Make new communicators without ncclCommSplit of the world's communicator, in a ``with`` block.

    If the world's group is bound to a device, torch splits new communicators from it. That waits for every
    rank of the world, while ranks outside of the group do not take part.
    """
    device = world.bound_device_id
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device


def _connect(group: dist.ProcessGroup, store: dist.Store, purpose: str, connect: Callable[[], Any]) -> Any:
    """Call connect(), a collective, after a barrier of all ranks. Raises PeerLost if a rank does not
    arrive."""
    if is_dry_run(group):
        return connect()
    if store.add("present", 1) == group.size():
        store.set("complete", "yes")
    record, start = failures.record_of(group), time.monotonic()
    message = failures.AwaitedMessage(record.messages, "exchange", lambda: purpose)
    while True:
        try:
            store.wait(["complete"], timedelta(seconds=failures.SLICE))
            break
        except RuntimeError as error:
            failures.check(group, record, message, time.monotonic() - start, error)
    try:
        return connect()
    except RuntimeError as error:
        raise failures.peer_lost(group, record, message, error) from error


def is_dry_run(group: dist.ProcessGroup) -> bool:
    """Return whether a group uses torch's "fake" backend, under which the other ranks do not exist."""
    return dist.get_backend(group) == "fake"


def group_by_name(name: str) -> dist.ProcessGroup:
    """Return the process group with this name. Raises ValueError for one that was destroyed."""
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
    """Return the process group of all ranks of a DeviceMesh of one or two dimensions; return a ProcessGroup
    and None as they are. Raises ValueError, before any message is sent, for a group that was destroyed or
    does not contain this process."""
    if mesh is None:
        return None
    group = mesh if isinstance(mesh, dist.ProcessGroup) else _group_of_mesh(mesh)
    if group not in dist.distributed_c10d._world.pg_map:
        raise ValueError(_DESTROYED.format(name=group.group_name))
    return group


def _group_of_mesh(mesh: Any) -> dist.ProcessGroup:
    """Return the process group of a mesh, or raise an error that says what is wrong with the argument."""
    if not is_mesh(mesh):
        raise TypeError(f"mesh is a DeviceMesh, a ProcessGroup or None; got a {type(mesh).__name__}")
    if not isinstance(mesh, dist.DeviceMesh):
        raise ValueError(_NOT_A_MEMBER.format(which="this process group"))
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


def is_mesh(x: Any) -> bool:
    """Return whether an argument is a mesh or a process group, also a group of other ranks."""
    # Under Dynamo isinstance(group, A | B) is False for a group.
    if isinstance(x, dist.DeviceMesh) or isinstance(x, dist.ProcessGroup):  # noqa: SIM101
        return True
    not_a_member = dist.GroupMember.NON_GROUP_MEMBER
    return type(x) is type(not_a_member) and bool(x == not_a_member)


def degree_of(mesh: Any) -> int:
    """Return the number of ranks that exchange heads: the second dimension of a two-dimensional mesh, 0 for
    any other mesh."""
    return mesh.size(1) if isinstance(mesh, dist.DeviceMesh) and mesh.ndim == 2 else 0


@constant_result
def place_in_group(mesh: Any) -> tuple[str, int, int]:
    """Return (group name, world size, rank) of a mesh: constants of a graph under Dynamo."""
    group = group_of(mesh)
    return ("", 1, 0) if group is None else (group.group_name, group.size(), group.rank())
