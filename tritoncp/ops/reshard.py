"""The op of `reshard` and `unshard`, which moves rows between two placements or gathers shards to the global
tensor, and its autograd function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

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
from tritoncp.ops.signatures import table_of
from tritoncp.planning.moves import Moves, moves_between
from tritoncp.planning.placement import Placement, as_movable, as_word, in_order, lengthen, take
from tritoncp.planning.plan import Plan

messages_log = area_logger("messages")


class Reshard(NamedTuple):
    """The arguments of the op besides its tensor.

    source, target: handles of a Plan or of a Placement; None: natural order
    side:      side of the plans, "q" or "kv"
    dim:       dimension of the sequence; batch_dim: of the batch, None if the tensor has none
    rows:      rows of the result along ``dim``
    pad:       value of the result's padding rows
    world:     name of the process group; "": one process
    whole:     "source" or "target": the one that is the global tensor on every rank; "": both are shards
    grad:      gradient of the global tensor: "sum" over ranks, or "slice": all ranks have the same one
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
        """Return the placement of the shards where the other end is the global tensor. x: the input"""
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

    def facts(self, x: Tensor, world_size: int) -> consistency.Compared:
        """Return the facts of a call that must be equal on all ranks. x: a rank's shard"""
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
        sizes = ", ".join(map(str, [*x.shape[: self.dim], "rows", *x.shape[self.dim + 1 :]]))
        return {
            "plans": fact(
                f"{' to '.join(names)}, side={self.side!r}", b" to ".join(digests) + self.grad.encode()
            ),
            "device": fact(x.device.type),
            "dtype": fact(dtype_name(x)),
            "shape": fact(f"[{sizes}] with dim={self.dim}, batch_dim={self.batch_dim}"),
        }


class RowCall(Protocol):
    """What the arguments of an op that moves rows have in common."""

    @property
    def dim(self) -> int: ...
    @property
    def batch_dim(self) -> int | None: ...
    @property
    def name(self) -> str: ...
    def facts(self, x: Tensor, world_size: int) -> consistency.Compared: ...


_MOVES = TensorCache(64)


@torch.inference_mode(False)
def _moves_of(source: Placement, target: Placement, rank: int, device: torch.device) -> Moves:
    """Return, cached, the row indices that a rank sends, keeps and receives between two placements."""
    slots = source.slots[0], target.slots[0]  # tensors of one placement each, never edited: the cache's key
    key = *map(id, slots), source.lengths, target.lengths, rank, device
    copy: DeviceCopy[Moves] | None = _MOVES.find(key, slots)
    if copy is None:
        host = moves_between(source, target, rank)
        names = "sent", "kept", "kept_at", "arrivals"
        copy = DeviceCopy(
            [getattr(host, name) for name in names], device, lambda *x: replace(host, **dict(zip(names, x)))
        )
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
        log_decision(
            messages_log, "reshard, rank %d: sends %d of %d rows, %d bytes",
            rank, len(message), before.shape[: len(moves.sent)].numel(), message.nbytes,
        )  # fmt: skip
        flight = yield collectives.AllToAll(as_bytes(message), moves.counts, moves.sources)
    after[moves.kept_at.unbind()] = before[moves.kept.unbind()]
    if flight is not None:
        after[moves.arrivals.unbind()] = from_bytes((yield flight), message)
    return out if out.dtype == dtype else out.view(dtype)


def gather_or_cut(x: Tensor, call: Reshard, rank: int, world_size: int) -> collectives.Requests[Tensor]:
    """All-gather the shards into the global tensor (``call.whole == "target"``); else cut this rank's shard
    from a global tensor: from the sum over ranks (a reduce-scatter), or from its own."""
    place, dim, batch_dim = call.shards_of(x, world_size), call.dim, call.batch_dim
    _check_batch(x, call, place.batch)
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


def as_bytes(rows: Tensor) -> Tensor:
    """View rows [n, ...] as bytes [n, bytes of a row], which every backend sends."""
    # By one dimension: one of size 1 may have any stride in a contiguous tensor, and a view as bytes may not.
    return rows.view(-1).view(torch.uint8).view(len(rows), rows.shape[1:].numel() * rows.element_size())


def from_bytes(sent: Tensor, rows: Tensor) -> Tensor:
    """Invert :func:`as_bytes`, for rows like these."""
    return sent.view(rows.dtype).view(len(sent), *rows.shape[1:])


def _check_batch(x: Tensor, call: RowCall, batch: int) -> None:
    if batch > 1 and (call.batch_dim is None or x.shape[call.batch_dim] != batch):
        raise ValueError(
            f"batch_dim={call.batch_dim}: the plans place {batch} batch rows differently; pass the dimension "
            f"of the tensor {tuple(x.shape)} that has {batch} batch rows"
        )


def rows_first(x: Tensor, call: RowCall, batch: int) -> Tensor:
    """View a tensor as [rows, ...], or as [batch, rows, ...] where batch rows are placed differently."""
    if batch == 1:
        return x.movedim(call.dim, 0)
    _check_batch(x, call, batch)
    return x.movedim((call.batch_dim, call.dim), (0, 1))  # type: ignore[arg-type]  # it is a number here


def compare_reshard(call: RowCall, group: Any, x: Tensor) -> None:
    """Compare a call that moves rows across ranks, if its placements or its tensor's shape and dtype are new
    to the group, or if TRITONCP_CHECK=1.

    Raises Disagreement on every rank where the ranks differ. Under CUDA-graph capture nothing is compared.
    """
    if not consistency.can_compare(group):
        return
    facts, moves = call.facts(x, group.size()), table_of(group).moves
    placed = facts["plans"][1]
    kind = tuple(facts[name][1] for name in ("device", "dtype", "shape"))
    if moves.get(placed) and moves.get(kind) and not consistency.CHECKED:
        return
    purpose = f"{call.name} of {list(x.shape)} in {dtype_name(x)}"
    facts = {"call": fact(purpose, call.name.encode()), **facts}
    consistency.together(group, purpose, lambda: (None, facts, ()))
    moves[placed] = moves[kind] = True


def _body(x: Tensor, *arguments: Any) -> Tensor:
    call = Reshard(*arguments)
    group = groups.group_by_name(call.world) if call.world else None
    rank, world_size = (0, 1) if group is None else (group.rank(), group.size())
    schedule = gather_or_cut(x, call, rank, world_size) if call.whole else exchange_rows(x, call, rank)
    if group is None:
        return collectives.lockstep([schedule])[0]
    if call.grad == "slice" and call.whole == "source":  # no other rank takes part
        return collectives.run_alone(schedule)
    with failures.closing(group):
        compare_reshard(call, group, x)
        return collectives.run(schedule, group, call.name)


def _fake(x: Tensor, *arguments: Any) -> Tensor:
    call = Reshard(*arguments)
    return x.new_empty([*x.shape[: call.dim], call.rows, *x.shape[call.dim + 1 :]])


class MoveRows(torch.autograd.Function):
    """Autograd function of one rank's op, or of all ranks of a simulated world. xs: their shards. The
    backward pass moves the rows back."""

    @staticmethod
    def forward(ctx: Any, call: Reshard, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.rows = call, xs[0].shape[call.dim]
        if len(xs) == 1:
            return (call_op(reshard_op, xs[0], *call),)
        with fresh_dispatch():
            return tuple(collectives.lockstep([exchange_rows(x, call, rank) for rank, x in enumerate(xs)]))

    @staticmethod
    @untraced
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *MoveRows.apply(ctx.call.back(ctx.rows), *grads)


def _autograd(x: Tensor, *arguments: Any) -> Tensor:
    """The Autograd kernel of the op."""
    return MoveRows.apply(Reshard(*arguments), x)[0]


def move_rows(call: Reshard, xs: Sequence[Tensor]) -> list[Tensor]:
    """Run the op on one rank's shard, or on those of all ranks of a simulated world."""
    if len(xs) > 1:
        return list(MoveRows.apply(call, *xs))
    with fake_mode_of(xs[0]):
        source, target = as_inputs((call.source, call.target))
        return [reshard_op(xs[0], source, target, *call[2:])]


SCHEMA = (
    "(Tensor x, Tensor? source, Tensor? target, str side, int dim, int? batch_dim, SymInt rows, Scalar pad, "
    "str world, str whole, str grad) -> Tensor"
)
reshard_op = register_op("reshard", _body, _fake, _autograd, SCHEMA, "reshard")
