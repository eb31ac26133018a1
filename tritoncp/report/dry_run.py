"""Dry runs of schedules: the memory that a rank allocates, measured on tensors without contents.

A schedule runs as in a call, but alone, on meta tensors and with an engine that computes nothing; what other
ranks would send is uninitialised memory. So each buffer counts from where the pass allocates it to where it
frees it. The sums do not contain results (out, lse, dq, dk, dv), nor tables, captured tensors and the partial
sums of kernels, which are tens of MiB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tritoncp.core.bounded_cache import BoundedCache
from tritoncp.core.records import fields_of
from tritoncp.distributed.collectives import Collective, run_dry
from tritoncp.distributed.schedules import schedule_of
from tritoncp.planning.costs.layer import Shape
from tritoncp.planning.costs.traffic import Fetch, Hop
from tritoncp.planning.derived import PlanCache
from tritoncp.planning.plan import Plan
from tritoncp.planning.step_tables import BackwardStep, Engine, ForwardStep, PreparedStep, Tables
from tritoncp.report.memory_meter import MemoryMeter
from tritoncp.report.samples import differing_turns, ranks_to_measure

T = TypeVar("T")
META = torch.device("meta")
INDEX = torch.empty((), dtype=torch.int64, device=META)  # in place of a table of rows
MAX_PEAKS = 64  # max peaks of a plan
DTYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}  # by bytes of a number


class Peak(NamedTuple):
    """Max bytes that a pass allocates, without its results."""

    forward: int
    backward: int


# Of each plan: by schedule, degree and shape.
_PEAKS: PlanCache[BoundedCache[Any, Peak]] = PlanCache(lambda: BoundedCache(MAX_PEAKS))


def largest_peak(plan: Plan, shape: Shape) -> Peak:
    """Measure the max memory of a rank under the plan's schedule, in each pass, once for a shape."""
    known, key = _PEAKS.of(plan.derived), (plan.schedule, plan.degree, shape)
    if (peak := known.get(key)) is None:
        peaks = [measure(plan.for_rank(rank), shape) for rank in ranks_to_measure(plan, shape)]
        peak = known.put(key, Peak(*map(max, zip(*peaks, strict=True))))
    return peak


def measure(plan: Plan, shape: Shape, watch: Callable[[Collective], object] = id) -> Peak:
    """Measure the max memory that this rank allocates.

    watch: called with each collective. Under a latent, each step has the expanded keys and values of its
    buffer, and backward their gradients, wide and rounded, but no temporaries of the expanding function.
    """
    plan, engine, x = DryPlan.of(plan), DryEngine(shape), RankTensors.of(plan, shape)
    schedule = schedule_of(plan)
    with MemoryMeter((*x, INDEX)) as meter:
        pass_ = schedule.forward(plan, engine, x.q, x.k, x.v, False)
        out, lse, _ = run_dry(pass_, plan.world_size, watch)
        forward = meter.peak - sum(result.untyped_storage().nbytes() for result in (out, lse))
    with MemoryMeter((*x, INDEX, out, lse)) as meter:
        delta = torch.empty_like(lse)
        pass_ = schedule.backward(plan, engine, x.q, x.k, x.v, x.dout, lse, delta)
        grads = [_own_memory(grad, x.q.dtype) for grad in run_dry(pass_, plan.world_size, watch)]
        return Peak(forward, meter.peak - sum(grad.nbytes for grad in grads))


def _own_memory(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a gradient as the op does, which copies views of larger memory."""
    return grad.to(dtype, copy=grad.untyped_storage().nbytes() > grad.nbytes)


class RankTensors(NamedTuple):
    """Meta tensors of a rank's queries, keys, values and gradient of out."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @classmethod
    def of(cls, plan: Plan, shape: Shape) -> RankTensors:
        rows, keys = plan.s_local, plan.kv.lengths[plan.rank]
        kv_heads, d, e = shape.kv_heads, shape.head_dim, shape.v_head_dim
        sizes = [(shape.heads, rows, d), (kv_heads, keys, d), (kv_heads, keys, e), (shape.heads, rows, e)]
        if shape.latent:
            sizes[1:3] = (1, keys, shape.latent), (1, keys, 0)
        dtype = DTYPES[shape.itemsize]
        return cls(*(torch.empty(shape.batch, *size, dtype=dtype, device=META) for size in sizes))


class DryPlan(Plan):
    """A plan whose steps read nothing: it makes no tables and no rows to send, and a ring has the turns that
    differ alone."""

    @classmethod
    def of(cls, plan: Plan) -> DryPlan:
        return cls(**{name: getattr(plan, name) for name in fields_of(plan)})

    def tables_for(self, q: Tensor, buffer: int | str = "gathered") -> Tables:
        return None  # type: ignore[return-value] # a dry engine reads none

    def rows(self, degree: int, heads: int) -> Plan:
        plan = Plan(**{name: getattr(self, name) for name in fields_of(self)})
        return DryPlan.of(plan.rows(degree, heads))

    def keep(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """Make a value, which a call must not find."""
        return make()

    @cached_property
    def ring(self) -> tuple[Hop, ...]:
        return differing_turns(super().ring)

    @cached_property
    def fetch(self) -> Fetch:
        """The numbers of rows, without the rows."""
        sends, takes = (part.tolist() for part in (self.traffic[:, self.rank], self.traffic[self.rank]))
        sends[self.rank] = takes[self.rank] = 0
        nothing = torch.empty(0, device=META)
        return Fetch(self.batch > 1, nothing, tuple(sends), tuple(takes), nothing)

    def fetch_rows(self, device: torch.device) -> Tensor:
        return INDEX.expand(sum(self.fetch.sends))

    def returned_parts(self, grads: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pair the largest part, beside which the others allocate less."""
        most = max(self.fetch.sends)
        yield self.fetch_rows(grads.device)[:most], grads[:most]


class DryEngine:
    """An engine that computes nothing; for a latent it allocates the keys and values of a step."""

    fused = False
    selected = None

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._expanded: Tensor | None = None

    @property
    def v_head_dim(self) -> int | None:
        return self.shape.v_head_dim if self.shape.latent else None

    def from_head(self, first: int) -> Engine:
        return self

    def split(self, q: Tensor, k: Tensor, tables: Tables) -> int:
        return 1

    def delta(self, out: Tensor, dout: Tensor, dlse: Tensor | None, delta: Tensor) -> PreparedStep:
        return _start_nothing

    def forward(self, step: ForwardStep) -> PreparedStep:
        if self.shape.latent:
            self._expand(step.k)
        return _start_nothing

    def dq(self, step: BackwardStep, dq: Tensor, *, add: bool = False) -> PreparedStep:
        return self._differentiate(step.k)

    def dkdv(
        self, step: BackwardStep, dk: Tensor, dv: Tensor, dq: Tensor, *, add: bool = False, split: int = 1
    ) -> PreparedStep:
        return self._differentiate(step.k)

    def _expand(self, latent: Tensor) -> Tensor:
        """Allocate the keys and values of the rows in memory."""
        batch = latent.shape[0] if latent.stride(0) else 1
        return latent.new_empty(batch * latent.shape[2] * self.shape.expanded_row // self.shape.batch)

    def _differentiate(self, latent: Tensor) -> PreparedStep:
        """Expand a latent in the first of dq and dkdv of a step; the second allocates the gradients."""
        if self._expanded is not None:
            wide = torch.empty_like(self._expanded, dtype=torch.promote_types(latent.dtype, torch.float32))
            wide.to(latent.dtype)
            self._expanded = None
        elif self.shape.latent:
            self._expanded = self._expand(latent)
        return _start_nothing


def _start_nothing() -> None:
    pass
