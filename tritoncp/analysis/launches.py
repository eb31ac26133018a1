"""Launches of single kernels of an attention call on one device. Compilation, checks and timing use the same
launches, so that Triton's cache has the kernels that were compiled offline."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from tritoncp.analysis.jobs import VARIANTS, Job, Variant, kernel_of
from tritoncp.call import call_mods, engine_factory
from tritoncp.core.upload import upload
from tritoncp.distributed.collectives import lockstep
from tritoncp.distributed.schedules import schedule_of
from tritoncp.kernels.engine import TritonEngine, route_of
from tritoncp.kernels.launch import Launch, Launches, State
from tritoncp.kernels.operands import Mods
from tritoncp.kernels.options import ROUTES
from tritoncp.kernels.tile_rules import Config
from tritoncp.mods import Mod, mask_mod
from tritoncp.perf.problem import Problem
from tritoncp.planning.build import build
from tritoncp.planning.placement import lengthen, take
from tritoncp.planning.selected_rows import SelectedRows
from tritoncp.planning.step_tables import BackwardStep, Engine, ForwardStep
from tritoncp.selection.triton_engine import SelectedTritonEngine
from tritoncp.selection.visible import VisiblePairs


class CallTensors:
    """The tensors of a problem's call on one device, or of a step of a schedule, and its launches.

    tensors: q [1, Hq, Q, D], k [1, Hkv, S, D], v [1, Hkv, S, E], dout [1, Hq, Q, E]; default: uninitialised
    variant: the kind of launch in a schedule; None: the launch of a call. A step with a state adds to float32
        gradients, a call writes gradients of the inputs' dtype
    """

    def __init__(
        self,
        problem: Problem,
        device: torch.device,
        tensors: Sequence[Tensor] = (),
        variant: Variant | None = None,
    ) -> None:
        heads, kv_heads, d, e = problem.heads, problem.kv_heads, problem.dim, problem.v_dim
        self._mask, self._variant = problem.block_mask(), variant or Variant(problem)
        self._problem, self._plan = problem, build(self._mask, problem.world)
        self._tables = self._plan.tables(str(device), 1, heads)
        if not tensors:
            rows, keys = self._tables.q_rows, self._tables.kv_rows
            shapes = (heads, rows, d), (kv_heads, keys, d), (kv_heads, keys, e), (heads, rows, e)
            tensors = [torch.empty(1, *shape, dtype=problem.torch_dtype, device=device) for shape in shapes]
        self.q, self.k, self.v, self.dout = tensors
        mod = self._mask.mask_mod if self._tables.mask == "mod" else None
        self._mods = mods_of(problem, self.q, mask_mod(mod) if mod else None)
        self._out = torch.empty_like(self.dout)
        self._lse, self._delta, *stats = torch.empty(4, *self.q.shape[:3], device=device).unbind()
        has_state = self._variant.load or self._variant.store
        self._state = State(torch.empty_like(self.dout, dtype=torch.float32), *stats) if has_state else None
        sums = torch.float32 if has_state else problem.torch_dtype
        self._dq = torch.empty_like(self.q)
        self._dk, self._dv = (torch.empty_like(x, dtype=sums) for x in (self.k, self.v))
        self._dq_sum = torch.empty_like(self.q, dtype=torch.float32)  # for the fused kernel and for steps

    def results(self, kernel: str) -> dict[str, Tensor]:
        """Return the tensors that a kernel writes, by name."""
        dkdv = {"dk": self._dk, "dv": self._dv}
        return {
            "forward": {"out": self._out},
            "few": {"out": self._out},
            "route": {"out": self._out, "lse": self._lse[..., None]},
            "delta": {"delta": self._delta},
            "dq": {"dq": self._dq},
            "dkdv": dkdv,
            "fused": {"dq": self._dq_sum, **dkdv},
        }[kernel]

    def launch(
        self, kernel: str, config: Config | None, arch: str | None = None
    ) -> Launch | Launches | Callable[[], None]:
        """Prepare a launch of a kernel. config: its tiles, None: the default; arch: architecture of an absent
        GPU. Raises ValueError if a route is not possible."""
        kernel, config = kernel_of(kernel, config)
        engine: Any = self._engine(kernel, config, arch)
        q, k, v, tables, variant = self.q, self.k, self.v, self._tables, self._variant
        results = self._out, self._lse, None, self._state
        forward_step = ForwardStep(q, k, v, tables, *results, variant.load, variant.store)
        if self._variant.chosen is not None:
            engine = self._selected_engine(engine)
            if kernel == "forward":
                return engine.forward(forward_step)
        if kernel in ("forward", "few", "combine"):
            return engine.loops(forward_step)
        if kernel in ROUTES:
            for why in route_of(kernel).obstacles(engine, forward_step):
                raise ValueError(why)
            return route_of(kernel).launch(engine, forward_step)
        if kernel == "delta":
            return engine.delta(self._out, self.dout, self._lse if self._state else None, self._delta)
        step = BackwardStep(q, k, v, self.dout, self._lse, self._delta, tables)
        if kernel == "dq":
            return engine.dq(step, self._dq_sum if variant.load else self._dq, add=variant.load)
        dq = self._dq_sum if kernel == "fused" else None
        return engine.dkdv(step, self._dk, self._dv, dq, add=variant.load)

    def run_two_steps(self, kernel: str, config: Config | None) -> Tensor:
        """Compute out in two steps, the second from the state of the first, as in a ring of two ranks."""
        engine = self._engine(*kernel_of(kernel, config), None)
        plan = build(self._mask, 2, schedule="ring")
        sides = (self.q, plan.q), (self.k, plan.kv), (self.v, plan.kv)
        shards = [[take(x, side.positions(rank), 2, 0, 0) for x, side in sides] for rank in range(2)]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "ROUTE=")  # a step without this route uses "loops"
            ranks = [
                schedule_of(plan).forward(plan.for_rank(rank), engine, q, k, v, False)
                for rank, (q, k, v) in enumerate(shards)
            ]
            outs = [lengthen(result[0], 2, plan.q.s_max) for result in lockstep(ranks)]
        return take(torch.cat(outs, 2), plan.q.inverse, 2, 0, 0)

    def _selected_engine(self, engine: TritonEngine) -> Engine:
        """Return the engine for the selected keys of the variant."""
        assert self._variant.chosen is not None
        pairs = VisiblePairs(self._mask, self._mask.mask_mod, 0, self.q.device)
        positions, heads, kv_heads = self._plan.positions, self.q.shape[1], self.k.shape[1]
        indices, block_size, query_block = self._variant.chosen.draw(self._problem, positions[0])
        rows = SelectedRows(
            indices, block_size, query_block, positions, heads, heads // kv_heads, indices.shape[1]
        )
        return SelectedTritonEngine(engine, rows, pairs)

    def _engine(self, kernel: str, config: Config | None, arch: str | None) -> TritonEngine:
        options = {"deterministic": False, "FUSED_BACKWARD": kernel == "fused", **dict(self._variant.options)}
        if config:
            options["CONFIGS"] = ((kernel, tuple(asdict(config).items())),)
        if kernel in ROUTES:
            options["ROUTE"] = kernel
        if kernel == "few" and self.q.device.type == "cpu":  # without multiprocessors to fill
            options["SPLIT_KV"] = 4
        return TritonEngine(self._mods, self.q.shape[3] ** -0.5, options, arch)


def mods_of(problem: Problem, q: Tensor, mask: Mod | None = None) -> Mods:
    """Prepare a problem's score_mod, and a mask_mod, for kernels. Gradients of the score_mod's captures are
    written to buffers that are discarded."""
    score = problem.score_mod(q.device)
    if score is None:
        return engine_factory.kernel_mods(mask, None)
    mod, tensors = call_mods.translate_score(score, q.dtype, q.device)
    grads = [torch.zeros(tensors[i].shape, dtype=torch.float32, device=q.device) for i in mod.wants]
    return engine_factory.kernel_mods(mask, mod, mod.caps(upload(tensors, q.device)), mod.dcaps(grads))


def launch_of(job: Job) -> Any:
    """Return the engine's launch of one job, with uninitialised CPU tensors."""
    variant = VARIANTS[job.variant] if job.variant else None
    kernel = "dkdv" if job.kernel in ("dk", "dv") else job.kernel
    call: Any = CallTensors(job.problem, torch.device("cpu"), variant=variant)
    parts = call.launch(kernel, job.config, job.arch).parts
    if job.kernel in ("combine", "sums"):
        return parts[-1]
    # The last of several launches for parts of the channels has the most.
    same = [part for part in parts if part.kernel is parts[0].kernel]
    return [part for part in same if kernel == job.kernel or part.args["RESULTS"] == job.kernel][-1]
