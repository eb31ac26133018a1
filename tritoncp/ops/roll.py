"""The op of `roll`, which shifts the rows of shards within documents, and its autograd function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritoncp.core.bounded_cache import TensorCache
from tritoncp.core.dynamo_boundary import untraced
from tritoncp.core.handles import object_of
from tritoncp.core.log_lines import area_logger, log_decision
from tritoncp.core.tracing import fresh_dispatch
from tritoncp.core.upload import DeviceCopy
from tritoncp.distributed import collectives, consistency, failures, groups
from tritoncp.distributed.collectives import dtype_name
from tritoncp.distributed.consistency import fact
from tritoncp.ops.dispatch import as_inputs, call_op, fake_mode_of, register_op
from tritoncp.ops.reshard import as_bytes, compare_reshard, from_bytes, rows_first
from tritoncp.planning.placement import as_movable, as_word
from tritoncp.planning.shifts import Shift, ShiftMoves

messages_log = area_logger("messages")


class Roll(NamedTuple):
    """The arguments of the op besides its tensor.

    shift:     handle of a Shift
    dim:       dimension of the sequence; batch_dim: of the batch, None if the tensor has none
    pad:       value of the rows that get none
    world:     name of the process group; "": one process
    back:      whether rows return to where they came from, and are summed there: the backward pass
    """

    shift: Tensor
    dim: int
    batch_dim: int | None
    pad: float
    world: str
    back: bool = False

    @property
    def name(self) -> str:
        """Name of the public function of the call."""
        return "roll"

    def facts(self, x: Tensor, world_size: int) -> consistency.Compared:
        """Return the facts of a call that must be equal on all ranks. x: a rank's shard"""
        digest = object_of(self.shift).digest
        sizes = ", ".join(map(str, [*x.shape[: self.dim], "rows", *x.shape[self.dim + 1 :]]))
        return {
            "plans": fact(f"plan, documents and shift {digest.hex()[:8]}", digest),
            "device": fact(x.device.type),
            "dtype": fact(dtype_name(x)),
            "shape": fact(f"[{sizes}] with dim={self.dim}, batch_dim={self.batch_dim}"),
        }


_MOVES = TensorCache(64)


@torch.inference_mode(False)
def _moves_of(shift: Shift, rank: int, device: torch.device) -> ShiftMoves:
    """Return, cached, the row indices of a rank on a device."""
    key = id(shift.source), rank, device
    copy: DeviceCopy[ShiftMoves] | None = _MOVES.find(key, [shift.source])
    if copy is None:
        host = shift.moves(rank)
        names = "kept", "kept_at", "sent", "arrivals", "arrivals_at"
        copy = DeviceCopy(
            [getattr(host, name) for name in names], device, lambda *x: replace(host, **dict(zip(names, x)))
        )
        _MOVES.keep(key, [shift.source], copy)
    return copy.on_current_stream()


def shift_rows(x: Tensor, call: Roll, rank: int) -> collectives.Requests[Tensor]:
    """Shift the rows of one rank's shard: an all-to-all of the rows that change ranks, and, meanwhile, copies
    of the others."""
    shift: Shift = object_of(call.shift)
    moves, dtype = _moves_of(shift, rank, x.device), x.dtype
    x, pad = as_movable(x), as_word(call.pad, dtype)
    out = x.new_full(x.shape, pad)
    before, after = (rows_first(t, call, shift.batch) for t in (x, out))
    flight = None
    if not shift.is_local:
        message = before[moves.sent.unbind()].contiguous()
        _log(rank, message, before, moves)
        flight = yield collectives.AllToAll(as_bytes(message), moves.counts, moves.sources)
    after[moves.kept_at.unbind()] = before[moves.kept.unbind()]
    if flight is not None:
        after[moves.arrivals_at.unbind()] = from_bytes((yield flight), message)[moves.arrivals]
    return out if out.dtype == dtype else out.view(dtype)


def return_rows(x: Tensor, call: Roll, rank: int) -> collectives.Requests[Tensor]:
    """Send the rows of one rank's gradient back to the rows that they came from, and sum them there, in
    float32 where a row has several."""
    shift: Shift = object_of(call.shift)
    moves, several = _moves_of(shift, rank, x.device), not shift.is_injective
    dtype = torch.promote_types(x.dtype, torch.float32) if several else x.dtype
    out = torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    before, after = (rows_first(t, call, shift.batch) for t in (x, out))
    flight = None
    if not shift.is_local:
        message = before.new_zeros(
            (sum(moves.sources), *before.shape[len(moves.sent) :]), dtype=dtype
        ).index_put_((moves.arrivals,), before[moves.arrivals_at.unbind()].to(dtype), accumulate=several)
        _log(rank, message, before, moves)
        flight = yield collectives.AllToAll(as_bytes(message), moves.sources, moves.counts)
    after.index_put_(moves.kept.unbind(), before[moves.kept_at.unbind()].to(dtype), accumulate=several)
    if flight is not None:
        after.index_put_(moves.sent.unbind(), from_bytes((yield flight), message), accumulate=several)
    return out.to(x.dtype)


def _log(rank: int, message: Tensor, rows: Tensor, moves: ShiftMoves) -> None:
    log_decision(
        messages_log, "roll, rank %d: sends %d of %d rows, %d bytes",
        rank, len(message), rows.shape[: len(moves.sent)].numel(), message.nbytes,
    )  # fmt: skip


def _schedule(x: Tensor, call: Roll, rank: int) -> collectives.Requests[Tensor]:
    return return_rows(x, call, rank) if call.back else shift_rows(x, call, rank)


def _body(x: Tensor, *arguments: Any) -> Tensor:
    call = Roll(*arguments)
    if not call.world:
        return collectives.lockstep([_schedule(x, call, 0)])[0]
    group = groups.group_by_name(call.world)
    with failures.closing(group):
        compare_reshard(call, group, x)
        return collectives.run(_schedule(x, call, group.rank()), group, call.name)


def _fake(x: Tensor, *arguments: Any) -> Tensor:
    return x.new_empty(x.shape)


class ShiftRows(torch.autograd.Function):
    """Autograd function of one rank's op, or of all ranks of a simulated world. xs: their shards."""

    @staticmethod
    def forward(ctx: Any, call: Roll, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        if len(xs) == 1:
            return (call_op(roll_op, xs[0], *call),)
        with fresh_dispatch():
            return tuple(collectives.lockstep([_schedule(x, call, rank) for rank, x in enumerate(xs)]))

    @staticmethod
    @untraced
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        call = ctx.call._replace(pad=0, back=not ctx.call.back)
        return None, *ShiftRows.apply(call, *grads)


def _autograd(x: Tensor, *arguments: Any) -> Tensor:
    """The Autograd kernel of the op."""
    return ShiftRows.apply(Roll(*arguments), x)[0]


def roll_rows(call: Roll, xs: Sequence[Tensor]) -> list[Tensor]:
    """Run the op on one rank's shard, or on those of all ranks of a simulated world."""
    if len(xs) > 1:
        return list(ShiftRows.apply(call, *xs))
    with fake_mode_of(xs[0]):
        return [roll_op(xs[0], *as_inputs((call.shift,)), *call[1:])]


SCHEMA = "(Tensor x, Tensor shift, int dim, int? batch_dim, Scalar pad, str world, bool back) -> Tensor"
roll_op = register_op("roll", _body, _fake, _autograd, SCHEMA, "roll")
