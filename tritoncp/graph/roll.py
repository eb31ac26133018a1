"""The op of `roll`, which shifts the rows of shards within documents."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritoncp.core.bounded_cache import TensorCache
from tritoncp.core.handles import object_of
from tritoncp.core.upload import DeviceCopy
from tritoncp.distributed import collectives
from tritoncp.distributed.consistency import Text, fact
from tritoncp.graph.row_moves import (
    as_bytes,
    copy_to_device,
    from_bytes,
    log_message,
    register_move,
    rows_first,
)
from tritoncp.planning.placement import as_movable, as_word
from tritoncp.planning.shifts import Shift, ShiftMoves


class Roll(NamedTuple):
    """The arguments of the op besides its tensor.

    shift:     handle of a Shift
    dim:       dimension of the sequence; batch_dim: dimension of the batch, None if the tensor has none
    pad:       value of rows without a source
    world:     name of the process group; "": one process
    is_back:   whether rows return to where they came from, and are summed there: the backward pass
    """

    shift: Tensor
    dim: int
    batch_dim: int | None
    pad: float
    world: str
    is_back: bool = False

    @property
    def name(self) -> str:
        """Name of the public function of the call."""
        return "roll"

    @property
    def op(self) -> Any:
        return roll_op

    @property
    def only_local(self) -> bool:
        return False

    def back(self, rows: int) -> Roll:
        """Return the arguments of the backward pass."""
        return self._replace(pad=0, is_back=not self.is_back)

    def placement_fact(self, x: Tensor, world_size: int) -> tuple[Text, bytes]:
        """Return the plan, documents and shift as text and digest, equal on all ranks."""
        digest = object_of(self.shift).digest
        return fact(f"plan, documents and shift {digest.hex()[:8]}", digest)

    def schedule(self, x: Tensor, rank: int, world_size: int) -> collectives.Requests[Tensor]:
        return return_rows(x, self, rank) if self.is_back else shift_rows(x, self, rank)


_MOVES = TensorCache(64)


@torch.inference_mode(False)
def _moves_of(shift: Shift, rank: int, device: torch.device) -> ShiftMoves:
    """Return the row indices of a rank on a device, from a cache."""
    key = id(shift.source), rank, device
    copy: DeviceCopy[ShiftMoves] | None = _MOVES.find(key, [shift.source])
    if copy is None:
        names = "kept", "kept_at", "sent", "arrivals", "arrivals_at"
        copy = copy_to_device(shift.moves(rank), names, device)
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
        log_message("roll", rank, message, before.shape[: len(moves.sent)].numel())
        flight = yield collectives.AllToAll(as_bytes(message), moves.counts, moves.sources)
    after[moves.kept_at.unbind()] = before[moves.kept.unbind()]
    if flight is not None:
        after[moves.arrivals_at.unbind()] = from_bytes((yield flight), message)[moves.arrivals]
    return out if out.dtype == dtype else out.view(dtype)


def return_rows(x: Tensor, call: Roll, rank: int) -> collectives.Requests[Tensor]:
    """Send the rows of one rank's gradient back to the rows that they came from, and sum them there, in
    float32 if a row gets several."""
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
        log_message("roll", rank, message, before.shape[: len(moves.sent)].numel())
        flight = yield collectives.AllToAll(as_bytes(message), moves.sources, moves.counts)
    after.index_put_(moves.kept.unbind(), before[moves.kept_at.unbind()].to(dtype), accumulate=several)
    if flight is not None:
        after.index_put_(moves.sent.unbind(), from_bytes((yield flight), message), accumulate=several)
    return out.to(x.dtype)


def _fake(x: Tensor, *arguments: Any) -> Tensor:
    return x.new_empty(x.shape)


SCHEMA = "Tensor shift, int dim, int? batch_dim, Scalar pad, str world, bool back"
roll_op = register_move("roll", Roll, _fake, SCHEMA)
