"""Common parts of the ops that move rows between ranks, `reshard` and `roll`: body, autograd function,
comparison of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tritoncp.core.bounded_cache import BoundedCache, OwnedState
from tritoncp.core.dynamo_boundary import untraced
from tritoncp.core.log_lines import area_logger, log_decision
from tritoncp.core.records import replace
from tritoncp.core.upload import DeviceCopy
from tritoncp.distributed import collectives, consistency, failures, groups
from tritoncp.distributed.collectives import dtype_name
from tritoncp.distributed.consistency import fact
from tritoncp.graph.dispatch import as_inputs, call_op, fake_mode_of, register_op
from tritoncp.mods.tracing import fresh_dispatch

messages_log = area_logger("messages")


class RowMove(Protocol):
    """The arguments of an op that moves rows, besides its tensor: a tuple in the order of its schema.

    dim:        dimension of the sequence; batch_dim: dimension of the batch, None if the tensor has none
    world:      name of the process group; "": one process
    name:       name of the public function
    op:         the registered op
    only_local: whether no other rank takes part
    """

    @property
    def dim(self) -> int: ...
    @property
    def batch_dim(self) -> int | None: ...
    @property
    def world(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def op(self) -> Any: ...
    @property
    def only_local(self) -> bool: ...
    def __iter__(self) -> Iterator[Any]: ...
    def back(self, rows: int) -> RowMove:
        """Return the arguments of the backward pass. rows: length of the input along ``dim``"""

    def placement_fact(self, x: Tensor, world_size: int) -> tuple[consistency.Text, bytes]:
        """Return the fact that decides where rows go, equal on all ranks. x: a rank's shard"""

    def schedule(self, x: Tensor, rank: int, world_size: int) -> collectives.Requests[Tensor]:
        """Return the schedule that moves the rows of one rank's tensor."""


class MoveRows(torch.autograd.Function):
    """Autograd function of one rank's op, or of all ranks of a simulated world. xs: shards of these ranks.
    The backward pass moves the rows back."""

    @staticmethod
    def forward(ctx: Any, call: RowMove, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.rows = call, xs[0].shape[call.dim]
        if len(xs) == 1:
            return (call_op(call.op, xs[0], *call),)
        with fresh_dispatch():
            return tuple(collectives.lockstep([call.schedule(x, i, len(xs)) for i, x in enumerate(xs)]))

    @staticmethod
    @untraced
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *MoveRows.apply(ctx.call.back(ctx.rows), *grads)


def move_rows(call: RowMove, xs: Sequence[Tensor]) -> list[Tensor]:
    """Run an op on one rank's shard, or on the shards of all ranks of a simulated world."""
    if len(xs) > 1:
        return list(MoveRows.apply(call, *xs))
    with fake_mode_of(xs[0]):
        return [call.op(xs[0], *as_inputs(call))]


def register_move(name: str, kind: Callable[..., RowMove], fake: Callable[..., Tensor], schema: str) -> Any:
    """Register the op of a kind of call that moves rows. schema: schema of its arguments after the tensor"""

    def body(x: Tensor, *arguments: Any) -> Tensor:
        return _run(kind(*arguments), x)

    def autograd_kernel(x: Tensor, *arguments: Any) -> Tensor:
        moved: Tensor = MoveRows.apply(kind(*arguments), x)[0]
        return moved

    return register_op(name, body, fake, autograd_kernel, f"(Tensor x, {schema}) -> Tensor", name)


def _run(call: RowMove, x: Tensor) -> Tensor:
    """Move the rows of one rank's tensor; the body of the ops."""
    group = groups.group_by_name(call.world) if call.world else None
    rank, world_size = (0, 1) if group is None else (group.rank(), group.size())
    schedule = call.schedule(x, rank, world_size)
    if group is None:
        return collectives.lockstep([schedule])[0]
    if call.only_local:
        return collectives.run_alone(schedule)
    with failures.closing(group):
        compare_move(call, group, x)
        return collectives.run(schedule, group, call.name)


# Compared placements and shapes of tensors, by group. They are equal on its ranks, which make the same calls.
_COMPARED = OwnedState(lambda: BoundedCache[Any, bool](1024))


def compare_move(call: RowMove, group: Any, x: Tensor) -> None:
    """Compare a call that moves rows across ranks, if its placements or its tensor's shape and dtype are new
    to the group, or if TRITONCP_CHECK=1.

    Raises Disagreement on every rank if the ranks differ. Under CUDA-graph capture nothing is compared.
    """
    if not consistency.can_compare(group):
        return
    sizes = ", ".join(map(str, [*x.shape[: call.dim], "rows", *x.shape[call.dim + 1 :]]))
    placed = call.placement_fact(x, group.size())
    rows = {
        "device": fact(x.device.type),
        "dtype": fact(dtype_name(x)),
        "shape": fact(f"[{sizes}] with dim={call.dim}, batch_dim={call.batch_dim}"),
    }
    compared, kind = _COMPARED.of(group), tuple(digest for _, digest in rows.values())
    if compared.get(placed[1]) and compared.get(kind) and not consistency.CHECKED:
        return
    purpose = f"{call.name} of {list(x.shape)} in {dtype_name(x)}"
    facts = {"call": fact(purpose, call.name.encode()), "plans": placed, **rows}
    consistency.together(group, purpose, lambda: (None, facts, ()))
    compared[placed[1]] = compared[kind] = True


# -- rows of a tensor ----------------------------------------------------------------------------------------


def copy_to_device(moves: Any, names: Sequence[str], device: torch.device) -> DeviceCopy[Any]:
    """Copy these fields of a record, indices of rows, to a device."""
    return DeviceCopy(
        [getattr(moves, name) for name in names], device, lambda *x: replace(moves, **dict(zip(names, x)))
    )


def rows_first(x: Tensor, call: RowMove, batch: int) -> Tensor:
    """View a tensor as [rows, ...], or as [batch, rows, ...] if batch rows are placed differently."""
    if batch == 1:
        return x.movedim(call.dim, 0)
    check_batch(x, call, batch)
    return x.movedim((call.batch_dim, call.dim), (0, 1))  # type: ignore[arg-type]  # it is a number here


def check_batch(x: Tensor, call: RowMove, batch: int) -> None:
    """Raise ValueError unless a tensor has the batch rows that the plans place."""
    if batch > 1 and (call.batch_dim is None or x.shape[call.batch_dim] != batch):
        raise ValueError(
            f"batch_dim={call.batch_dim}: the plans place {batch} batch rows differently; pass the dimension "
            f"of the tensor {tuple(x.shape)} that has {batch} batch rows"
        )


def as_bytes(rows: Tensor) -> Tensor:
    """View rows [n, ...] as bytes [n, bytes of a row], which every backend sends."""
    # By one dimension: a dimension of size 1 may have any stride in a contiguous tensor, but not in a view as
    # bytes.
    return rows.view(-1).view(torch.uint8).view(len(rows), rows.shape[1:].numel() * rows.element_size())


def from_bytes(sent: Tensor, rows: Tensor) -> Tensor:
    """Invert :func:`as_bytes`, for rows with the dtype and sizes of ``rows``."""
    # By one dimension, as in as_bytes: rows of no bytes have a stride that torch views as no wider dtype.
    return sent.reshape(-1).view(rows.dtype).view(len(sent), *rows.shape[1:])


def log_message(name: str, rank: int, message: Tensor, rows: int) -> None:
    """Log how many of a rank's rows a message carries."""
    line = "%s, rank %d: sends %d of %d rows, %d bytes"
    log_decision(messages_log, line, name, rank, len(message), rows, message.nbytes)
