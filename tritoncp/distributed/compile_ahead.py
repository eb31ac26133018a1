"""Compilation of the kernels of a pass before it runs: its schedule without messages and launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

from torch import Tensor

from tritoncp.distributed.collectives import Requests, run_dry
from tritoncp.planning.step_tables import BackwardStep, Engine, ForwardStep, PreparedStep, Tables


def compile_pass(start: Callable[[Engine], Requests[Any]], engine: Engine, world_size: int) -> None:
    """Compile the kernels of the pass that ``start(engine)`` begins. Its buffers are allocated and freed, as
    the pass itself does."""
    run_dry(start(CompilingEngine(engine)), world_size)


class CompilingEngine(NamedTuple):
    """An engine that compiles the kernels of a step in place of launching them. It has no selected keys, and
    expands no latents."""

    engine: Any  # TritonEngine

    def forward(self, step: ForwardStep) -> PreparedStep:
        return cast(PreparedStep, self.engine.forward(step).compile)

    def dq(self, step: BackwardStep, dq: Tensor, *, add: bool = False) -> PreparedStep:
        return cast(PreparedStep, self.engine.dq(step, dq, add=add).compile)

    def dkdv(
        self, step: BackwardStep, dk: Tensor, dv: Tensor, dq: Tensor, *, add: bool = False, split: int = 1
    ) -> PreparedStep:
        return cast(PreparedStep, self.engine.dkdv(step, dk, dv, dq, add=add, split=split).compile)

    def delta(self, out: Tensor, dout: Tensor, dlse: Tensor | None, delta: Tensor) -> PreparedStep:
        return cast(PreparedStep, self.engine.delta(out, dout, dlse, delta).compile)

    def split(self, q: Tensor, k: Tensor, tables: Tables) -> int:
        return cast(int, self.engine.split(q, k, tables))

    def from_head(self, first: int) -> CompilingEngine:
        return CompilingEngine(self.engine.from_head(first))

    @property
    def fused(self) -> bool:
        return cast(bool, self.engine.fused)

    @property
    def selected(self) -> None:
        return None

    @property
    def v_head_dim(self) -> None:
        return None
