"""Measurement of the memory that one rank's schedule allocates, without kernels and without other ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tritoncp import Plan
from tritoncp.distributed.collectives import AllGather, AllToAll, ReduceScatter, Ticket
from tritoncp.distributed.schedules import schedule_of
from tritoncp.planning.cost import Shape
from tritoncp.planning.step_tables import BackwardStep, ForwardStep

META = torch.device("meta")


class LiveBytes(TorchDispatchMode):
    """Dispatch mode that counts the bytes of storages made in it that are alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self._known: set[int] = set()

    def ignore(self, tensors: list[Tensor]) -> None:
        """Leave these tensors' memory out of the count."""
        self._known |= {x.untyped_storage()._cdata for x in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if (
                isinstance(x, Tensor)
                and x.device == META
                and (key := x.untyped_storage()._cdata) not in self._known
            ):
                self._known.add(key)
                self.live += x.untyped_storage().nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(x.untyped_storage(), self._release, key, x.untyped_storage().nbytes())
        return out

    def _release(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes


class NoEngine:
    """An engine that computes nothing."""

    fused, v_head_dim = False, None

    def _nothing(self, *args: Any, **kwargs: Any) -> Callable[[], None]:
        return lambda: None

    forward = delta = dq = dkdv = _nothing

    def split(self, *args: Any) -> int:
        return 1

    def from_head(self, first: int) -> NoEngine:
        return self


class ExpandingNoEngine(NoEngine):
    """An engine that allocates the keys and values of a step, and backward their gradients, wide and
    rounded."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.v_head_dim = shape, shape.v_head_dim
        self.expanded: Tensor | None = None

    def _expand(self, latent: Tensor) -> Tensor:
        batch = latent.shape[0] if latent.stride(0) else 1  # of the rows in memory
        return latent.new_empty(batch * latent.shape[2] * self.shape.expanded_row // self.shape.batch)

    def forward(self, step: ForwardStep, **options: Any) -> Callable[[], None]:
        self._expand(step.k)
        return lambda: None

    def dq(self, step: BackwardStep, *grads: Tensor, **options: Any) -> Callable[[], None]:
        return self._backward(step.k)

    dkdv = dq

    def _backward(self, k: Tensor) -> Callable[[], None]:
        if self.expanded is None:
            self.expanded = self._expand(k)
        else:
            wide = torch.empty_like(self.expanded, dtype=torch.promote_types(k.dtype, torch.float32))
            wide.to(k.dtype)
            self.expanded = None
        return lambda: None


def drive(schedule: Any, world_size: int, watch: Callable[[Any], Any] = id) -> Any:
    """Run one rank's schedule; messages from other ranks arrive as uninitialised memory. watch: called with
    each collective"""
    answer: Any = None
    while True:
        try:
            request = schedule.send(answer)
        except StopIteration as stop:
            return stop.value
        if isinstance(request, Ticket):
            answer = request.take_result()
        else:
            watch(request)
            answer = Ticket(receive(request, world_size), None, request)


def receive(request: Any, world_size: int) -> Any:
    """Allocate the result of a collective as a process group does."""
    match request:
        case AllGather(x):
            return x.new_empty(x.shape[0] * world_size, *x.shape[1:])
        case ReduceScatter(x):
            return x.new_empty(x.shape[0] // world_size, *x.shape[1:])
        case AllToAll(x, _, takes, target):
            return x.new_empty(sum(takes), *x.shape[1:]) if target is None else target


def sent_bytes(request: Any, world_size: int, rank: int) -> int:
    """Return the bytes that a rank sends for a collective."""
    match request:
        case AllToAll(x, sends):
            return (sum(sends) - sends[rank]) * x[:1].nbytes
        case AllGather(x):
            return x.nbytes * (world_size - 1)
        case ReduceScatter(x):
            return x.nbytes * (world_size - 1) // world_size
    raise TypeError(f"{type(request).__name__} is no collective")


def own_memory(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a gradient as the op does, which copies views of larger memory."""
    return grad.to(dtype, copy=grad.untyped_storage().nbytes() > grad.nbytes)


def measure(plan: Plan, shape: Shape) -> tuple[list[int], list[int]]:
    """Return the bytes that the plan's rank allocates at most in a forward and in a backward pass, less those
    of the results: out and lse, and dq, dk and dv; and the bytes that it sends in each."""
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[shape.itemsize]
    kv_heads, d, e = shape.kv_heads, shape.head_dim, shape.v_head_dim
    engine = NoEngine()
    if shape.latent:
        kv_heads, d, e, engine = 1, shape.latent, 0, ExpandingNoEngine(shape)
    q, k, v, dout = (
        torch.empty(shape.batch, heads, rows, dim, dtype=dtype, device=META)
        for heads, rows, dim in (
            (shape.heads, plan.s_local, shape.head_dim),
            (kv_heads, plan.kv.lengths[plan.rank], d),
            (kv_heads, plan.kv.lengths[plan.rank], e),
            (shape.heads, plan.s_local, shape.v_head_dim),
        )
    )
    schedule, extra, sent = schedule_of(plan), [], [0, 0]

    def run(turn: int, generator: Any) -> Any:
        def watch(request: Any) -> None:
            sent[turn] += sent_bytes(request, plan.world_size, plan.rank)

        return drive(generator, plan.world_size, watch)

    with LiveBytes() as meter:
        meter.ignore([q, k, v, dout])
        out, lse, _ = run(0, schedule.forward(plan, engine, q, k, v, False))
        extra.append(meter.peak - sum(x.untyped_storage().nbytes() for x in (out, lse)))
    with LiveBytes() as meter:
        meter.ignore([q, k, v, dout, out, lse])
        parts = run(1, schedule.backward(plan, engine, q, k, v, dout, lse, torch.empty_like(lse)))
        grads = [own_memory(part, dtype) for part in parts]
        extra.append(meter.peak - sum(x.nbytes for x in grads))
    return extra, sent
