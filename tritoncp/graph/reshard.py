"""The op of `reshard` and `unshard`, which moves rows between two placements or gathers shards to the global
tensor."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritoncp.core.bounded_cache import TensorCache
from tritoncp.core.handles import object_of
from tritoncp.core.log_lines import log_decision
from tritoncp.core.upload import DeviceCopy
from tritoncp.distributed import collectives
from tritoncp.distributed.consistency import Text, fact
from tritoncp.graph.row_moves import (
    as_bytes,
    check_batch,
    copy_to_device,
    from_bytes,
    log_message,
    messages_log,
    register_move,
    rows_first,
)
from tritoncp.planning.moves import Moves, moves_between
from tritoncp.planning.placement import Placement, as_movable, as_word, in_order, lengthen, take
from tritoncp.planning.plan import Plan


class Reshard(NamedTuple):
    """The arguments of the op besides its tensor.

    source, target: handles of a Plan or of a Placement; None: natural order
    side:      side of the plans, "q" or "kv"
    dim:       dimension of the sequence; batch_dim: dimension of the batch, None if the tensor has none
    rows:      rows of the result along ``dim``
    pad:       value of the result's padding rows
    world:     name of the process group; "": one process
    whole:     "source" or "target": the one that is the global tensor on every rank; "": both are shards
    grad:      gradient of the global tensor: "sum" (over ranks), or "slice" (all ranks have the same)
    """

    source: Tensor | None
    target: Tensor | None
    side: str
    dim: int
    batch_dim: int | None
    rows: int
    pad: float
    world: str
    whole: str = ""
    grad: str = ""

    @property
    def name(self) -> str:
        """Name of the public function of the call."""
        return "unshard" if self.whole else "reshard"

    def back(self, rows: int) -> Reshard:
        """Return the arguments of the backward pass. rows: length of the input along ``dim``"""
        whole = {"source": "target", "target": "source"}.get(self.whole, "")
        return self._replace(source=self.target, target=self.source, rows=rows, pad=0, whole=whole)

    def shards_of(self, x: Tensor, world_size: int) -> Placement:
        """Return the placement of the shards, if the other end is the global tensor. x: the input"""
        handle = self.source if self.whole == "target" else self.target
        if handle is None:
            return in_order(self.rows if self.whole == "target" else x.shape[self.dim], world_size)
        return object_of(handle).side(self.side)

    def placements(self) -> tuple[Placement, Placement]:
        """Return the placements of source and target."""
        named = [None if x is None else object_of(x) for x in (self.source, self.target)]
        sides = [x.side(self.side) if isinstance(x, Plan) else x for x in named]
        like: Any = sides[1] if sides[0] is None else sides[0]
        source, target = (in_order(like.length, like.world_size) if x is None else x for x in sides)
        return source, target

    @property
    def op(self) -> Any:
        return reshard_op

    @property
    def only_local(self) -> bool:
        """Whether this rank cuts its shard from a gradient that all ranks have."""
        return self.grad == "slice" and self.whole == "source"

    def placement_fact(self, x: Tensor, world_size: int) -> tuple[Text, bytes]:
        """Return the placements as text and digest, equal on all ranks. x: a rank's shard"""
        handles, digests = (self.source, self.target), [b"", b""]
        if self.whole:
            digests[self.whole == "source"] = self.shards_of(x, world_size).digest
        elif handles != (None, None):
            digests = [place.digest for place in self.placements()]
        names = [
            "natural order" if handle is None else f"plan {digest.hex()[:8]}"
            for handle, digest in zip(handles, digests)
        ]
        if self.whole:
            names[self.whole == "target"] = f"the global tensor, grad={self.grad!r}"
        text = f"{' to '.join(names)}, side={self.side!r}"
        return fact(text, b" to ".join(digests) + self.grad.encode())

    def schedule(self, x: Tensor, rank: int, world_size: int) -> collectives.Requests[Tensor]:
        return gather_or_cut(x, self, rank, world_size) if self.whole else exchange_rows(x, self, rank)


_MOVES = TensorCache(64)


@torch.inference_mode(False)
def _moves_of(source: Placement, target: Placement, rank: int, device: torch.device) -> Moves:
    """Return the row indices that a rank sends, keeps and receives between two placements, from a cache."""
    slots = source.slots[0], target.slots[0]  # a tensor of each placement, never edited: the cache's key
    key = *map(id, slots), source.lengths, target.lengths, rank, device
    copy: DeviceCopy[Moves] | None = _MOVES.find(key, slots)
    if copy is None:
        names = "sent", "kept", "kept_at", "arrivals"
        copy = copy_to_device(moves_between(source, target, rank), names, device)
        _MOVES.keep(key, slots, copy)
    return copy.on_current_stream()


def exchange_rows(x: Tensor, call: Reshard, rank: int) -> collectives.Requests[Tensor]:
    """Redistribute one rank's shard: an all-to-all of the rows that change ranks, and, meanwhile, copies of
    the others."""
    source, target = call.placements()
    moves, rows, dtype = _moves_of(source, target, rank, x.device), target.lengths[rank], x.dtype
    x, pad = as_movable(x), as_word(call.pad, dtype)
    shape = [*x.shape[: call.dim], rows, *x.shape[call.dim + 1 :]]
    out = x.new_empty(shape) if moves.is_full else x.new_full(shape, pad)
    before, after = (rows_first(t, call, max(source.batch, target.batch)) for t in (x, out))
    flight = None
    if not moves.is_local:
        message = before[moves.sent.unbind()].contiguous()
        log_message("reshard", rank, message, before.shape[: len(moves.sent)].numel())
        flight = yield collectives.AllToAll(as_bytes(message), moves.counts, moves.sources)
    after[moves.kept_at.unbind()] = before[moves.kept.unbind()]
    if flight is not None:
        after[moves.arrivals.unbind()] = from_bytes((yield flight), message)
    return out if out.dtype == dtype else out.view(dtype)


def gather_or_cut(x: Tensor, call: Reshard, rank: int, world_size: int) -> collectives.Requests[Tensor]:
    """All-gather the shards into the global tensor (``call.whole == "target"``); else cut this rank's shard
    from the sum of the ranks' global tensors (a reduce-scatter), or from this rank's global tensor."""
    place, dim, batch_dim = call.shards_of(x, world_size), call.dim, call.batch_dim
    check_batch(x, call, place.batch)
    if call.whole == "target":
        own = lengthen(as_movable(x), dim, place.s_max).movedim(dim, 0).contiguous()
        log_decision(messages_log, "unshard: %d bytes go to each of %d other ranks", x.nbytes, world_size - 1)
        rows = from_bytes((yield (yield collectives.AllGather(as_bytes(own)))), own)
        whole = take(rows.movedim(0, dim), place.inverse, dim, batch_dim, 0)
        return whole if whole.dtype == x.dtype else whole.view(x.dtype)
    if call.grad == "slice":
        return take(x, place.positions(rank), dim, batch_dim, 0)
    rows = take(x, place.gathered_positions, dim, batch_dim, 0).movedim(dim, 0).contiguous()
    part: Tensor = yield (yield collectives.ReduceScatter(rows))
    return part.movedim(0, dim).narrow(dim, 0, call.rows).contiguous()


def _fake(x: Tensor, *arguments: Any) -> Tensor:
    call = Reshard(*arguments)
    return x.new_empty([*x.shape[: call.dim], call.rows, *x.shape[call.dim + 1 :]])


SCHEMA = (
    "Tensor? source, Tensor? target, str side, int dim, int? batch_dim, SymInt rows, Scalar pad, str world, "
    "str whole, str grad"
)
reshard_op = register_move("reshard", Reshard, _fake, SCHEMA)
