"""The contract of a schedule: the messages and steps of a forward and of a backward pass on one rank."""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Tensor

from tritoncp.distributed.collectives import Requests
from tritoncp.planning.plan import Plan
from tritoncp.planning.step_tables import StepEngine

E = TypeVar("E", bound=StepEngine, contravariant=True)


class Schedule(Protocol[E]):
    """A schedule brings keys to the queries that see them. Each pass is a generator that yields messages and
    waits (:mod:`tritoncp.distributed.collectives`), and has the engine compute a step between them.

    plan:   the plan of this rank; all ranks make equal requests in the same turn
    engine: the engine of this call. A Schedule[StepEngine] computes all heads of its tensors in one step
    q:      [B, Hq, S, D], k: [B, Hkv, S_kv, D], v: [B, Hkv, S_kv, E]: this rank's shards, of one dtype; under
            ``expand=`` k is a latent and v has no channels
    """

    def forward(
        self, plan: Plan, engine: E, q: Tensor, k: Tensor, v: Tensor, want_max: bool
    ) -> Requests[tuple[Tensor, Tensor, Tensor | None]]:
        """Return out [B, Hq, S, E] in q's dtype, lse and, if requested, max_scores [B, Hq, S] in float32
        (float64 for float64 tensors)."""

    def backward(
        self, plan: Plan, engine: E, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor
    ) -> Requests[tuple[Tensor, Tensor, Tensor]]:
        """Return the gradients of q, k and v, in their dtypes or lse's; add the gradients of captures to the
        engine's buffers.

        dout: [B, Hq, S, E]; lse, delta: [B, Hq, S] in the dtype of lse
        """
