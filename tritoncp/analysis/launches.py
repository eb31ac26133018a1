"""Launches of single kernels of an attention call on one device. Compilation, checks and timing use the same
launches, so that Triton's cache has the kernels that were compiled offline."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tritoncp.analysis.jobs import VARIANTS, Job, kernel_of, options_of
from tritoncp.core.upload import upload
from tritoncp.distributed.collectives import lockstep
from tritoncp.distributed.schedules import schedule_of
from tritoncp.kernels.engine import TritonEngine, route_of
from tritoncp.kernels.launch import Launch, Launches, State
from tritoncp.kernels.operands import Mods
from tritoncp.kernels.options import ROUTES
from tritoncp.kernels.tile_rules import Config
from tritoncp.masks.mask import Mask
from tritoncp.mods import Mod, mask_mod
from tritoncp.mods.mod import arguments, gradient_arguments
from tritoncp.ops import call_mods, engine_factory
from tritoncp.planning.build import build
from tritoncp.planning.placement import lengthen, take
from tritoncp.planning.problem import Problem
from tritoncp.planning.step_tables import BackwardStep, ForwardStep


class CallTensors:
    """The tensors of a problem's call on one device, with the layouts of a single-rank schedule.

    tensors: q [1, Hq, Q, D], k [1, Hkv, S, D], v [1, Hkv, S, E], dout [1, Hq, Q, E]; default: uninitialised
    mask:    replaces the problem's
    """

    def __init__(
        self,
        problem: Problem,
        device: torch.device,
        tensors: Sequence[Tensor] = (),
        mask: Mask | None = None,
    ) -> None:
        heads, kv_heads, d, e = problem.heads, problem.kv_heads, problem.dim, problem.v_dim
        if not tensors:
            rows, seq = problem.rows, problem.seq
            shapes = (heads, rows, d), (kv_heads, seq, d), (kv_heads, seq, e), (heads, rows, e)
            tensors = [torch.empty(1, *shape, dtype=problem.torch_dtype, device=device) for shape in shapes]
        self.q, self.k, self.v, self.dout = tensors
        self._mask = problem.block_mask() if mask is None else mask
        self._tables = build(self._mask).tables(str(device), 1, heads)
        mod = self._mask.mask_mod if self._tables.mask == "mod" else None
        self._mods = mods_of(problem, self.q, mask_mod(mod) if mod else None)
        self._out = torch.empty_like(self.dout)
        self._lse, self._delta = torch.empty(2, *self.q.shape[:3], device=device).unbind()
        self._dq, self._dk, self._dv = map(torch.empty_like, (self.q, self.k, self.v))
        self._dq_sum = torch.empty_like(self.q, dtype=torch.float32)  # accumulator of the fused kernel

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
        """Prepare a launch of a kernel. config: its tiles, None: the default; arch: of an absent GPU. Raises
        ValueError if a route is not possible."""
        kernel, config = kernel_of(kernel, config)
        engine = self._engine(kernel, config, arch)
        q, k, v, tables = self.q, self.k, self.v, self._tables
        forward_step = ForwardStep(q, k, v, tables, self._out, self._lse)
        if kernel in ("forward", "few"):
            return engine.loops(forward_step)
        if kernel in ROUTES:
            for why in route_of(kernel).obstacles(engine, forward_step):
                raise ValueError(why)
            return route_of(kernel).launch(engine, forward_step)
        if kernel == "delta":
            return engine.delta(self._out, self.dout, None, self._delta)
        step = BackwardStep(q, k, v, self.dout, self._lse, self._delta, tables)
        if kernel == "dq":
            return engine.dq(step, self._dq)
        return engine.dkdv(step, self._dk, self._dv, self._dq_sum if kernel == "fused" else None)

    def in_steps(self, kernel: str, config: Config | None) -> Tensor:
        """Compute out in two steps, the second from the state of the first, as in a ring of two ranks."""
        engine = self._engine(*kernel_of(kernel, config), None)
        plan = build(self._mask, 2, schedule="ring")
        sides = (self.q, plan.q), (self.k, plan.kv), (self.v, plan.kv)
        shards = [[take(x, side.positions(rank), 2, 0, 0) for x, side in sides] for rank in range(2)]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "ROUTE=")  # a step without this route uses "loops"
            ranks = [
                schedule_of(p).forward(p, engine, *x, False)
                for p, x in ((plan.seen_by(rank), x) for rank, x in enumerate(shards))
            ]
            outs = [lengthen(result[0], 2, plan.q.s_max) for result in lockstep(ranks)]
        return take(torch.cat(outs, 2), plan.q.inverse, 2, 0, 0)

    def _engine(self, kernel: str, config: Config | None, arch: str | None) -> TritonEngine:
        options = options_of(kernel, config) | {"deterministic": False, "FUSED_BACKWARD": kernel == "fused"}
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
    mod, tensors = call_mods.translate_score(score, q)
    grads = [torch.zeros(tensors[i].shape, dtype=torch.float32, device=q.device) for i in mod.wants]
    caps = arguments(upload(tensors, q.device), mod.numbers)
    return engine_factory.kernel_mods(mask, mod, caps, gradient_arguments(grads))


def launch_of(job: Job) -> Any:
    """Return the engine's launch of one job, with uninitialised CPU tensors."""
    problem = job.problem
    if not job.variant:
        tensors = CallTensors(problem, torch.device("cpu"))
        launch: Any = tensors.launch(job.kernel, job.config, job.arch)
        return launch.parts[0]
    variant, dtype, d, e = VARIANTS[job.variant], problem.torch_dtype, problem.dim, problem.v_dim
    mask, heads, kv_heads = problem.block_mask(), problem.heads, problem.kv_heads
    tables = build(mask, problem.world).tables("cpu", 1, heads)
    mod = mask_mod(mask.mask_mod) if tables.mask == "mod" and mask.mask_mod else None
    options = options_of(job.kernel, job.config) | dict(variant.options)
    options["FUSED_BACKWARD"] = job.kernel == "fused"
    rows, keys = tables.q_rows, tables.kv_rows
    q, dq = (torch.empty(1, rows, heads, d, dtype=dtype).transpose(1, 2) for _ in range(2))
    out, dout = (torch.empty(1, rows, heads, e, dtype=dtype).transpose(1, 2) for _ in range(2))
    k, v = torch.empty(keys, 1, kv_heads, d + e, dtype=dtype).permute(1, 2, 0, 3).split([d, e], dim=3)
    lse, delta, m, l = torch.empty(4, 1, heads, rows).unbind()
    acc, dq_sum = torch.empty(1, heads, rows, e), torch.empty(1, heads, rows, d)
    dk, dv = torch.empty(keys, 1, kv_heads, d + e).permute(1, 2, 0, 3).split([d, e], dim=3)
    engine = TritonEngine(mods_of(problem, q, mod), d**-0.5, options, arch=job.arch)
    if job.kernel in ("forward", "few", "combine", "gluon"):
        state = State(acc, m, l) if variant.load or variant.store else None
        step = ForwardStep(q, k, v, tables, out, lse, None, state, variant.load, variant.store)
        launch = route_of(job.kernel).launch(engine, step) if job.kernel in ROUTES else engine.loops(step)
        return launch.parts[-1 if job.kernel == "combine" else 0]
    if job.kernel == "delta":
        return engine.delta(out, dout, lse, delta)
    inputs = BackwardStep(q, k, v, dout, lse, delta, tables)
    if job.kernel == "dq":
        return engine.dq(inputs, dq_sum if variant.load else dq, add=variant.load)
    into = torch.empty(1, rows, heads, d).transpose(1, 2) if job.kernel == "fused" else None
    return engine.dkdv(inputs, dk, dv, into, add=variant.load)
