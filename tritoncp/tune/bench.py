"""Single kernels on the GPU of this process: whether they are right, and how long they take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tritoncp.kernels.configs import Config
from tritoncp.kernels.engine import Launch, Mods, TritonEngine
from tritoncp.masks import create_block_mask, full_mask
from tritoncp.offline import options_of
from tritoncp.perf import baselines, check
from tritoncp.perf.cases import MASKS, Case
from tritoncp.perf.timing import Clock, DeviceClock, WallClock
from tritoncp.plan import build
from tritoncp.tune.targets import Target


class DeviceBench:
    """Launches single kernels on the GPU of this process."""

    def __init__(self, device: torch.device) -> None:

        self._device = device
        self._clock: Clock = DeviceClock(device) if device.type == "cuda" else WallClock()
        self._problem: tuple[Any, Problem] | None = None

    def _of(self, target: Target) -> Problem:
        shape = replace(target, kernel="")
        if self._problem is None or self._problem[0] != shape:
            self._problem = None  # what the last shape held is not needed any more
            self._problem = shape, Problem(target, self._device)
        return self._problem[1]

    def wrong(self, target: Target, config: Config) -> str | None:
        try:
            return self._of(target).wrong(target.kernel, config)
        except Exception as error:  # whatever a compiler or a launch throws: the others go on
            return f"{type(error).__name__}: {str(error).strip()[:300]}"

    def milliseconds(self, target: Target, config: Config) -> float:
        launch = self._of(target).launch(target.kernel, config)
        return self._clock.sample(lambda: launch()).device


class Problem:
    """Tensors of a shape, the right answer in float32, and launches of single kernels."""

    def __init__(self, target: Target, device: torch.device) -> None:
        case = Case(
            target.mask,
            "backward",
            target.seq,
            heads=target.heads,
            kv_heads=target.kv_heads,
            dim=target.head_dim,
            v_dim=target.head_dim,
            dtype=target.dtype,
        )
        given = baselines.inputs(case, device)
        self._expected = check.reference(case, given)
        self._dtype = case.torch_dtype
        self._q, self._k, self._v, self._dout = (x.detach() for x in (given.q, given.k, given.v, given.dout))
        closed = MASKS[target.mask].closed(target.seq)
        length = target.seq, target.seq
        mask = full_mask(*length) if closed is None else create_block_mask(closed, 1, 1, *length)
        self._tables = build(mask).tables(str(device), 1, target.heads)
        self._out = torch.empty_like(self._dout)
        stats = torch.empty(self._q.shape[:3], dtype=torch.float32, device=device)
        self._lse, self._delta = stats, torch.empty_like(stats)
        self._dq = torch.empty_like(self._q)
        self._dk, self._dv = torch.empty_like(self._k), torch.empty_like(self._v)
        self.launch("forward", None)()
        self.launch("delta", None)()

    def launch(self, kernel: str, config: Config | None) -> Launch | Callable[[], None]:
        engine = TritonEngine(Mods(), self._q.shape[3] ** -0.5, options_of(kernel, config))
        q, k, v, tables = self._q, self._k, self._v, self._tables
        if kernel == "forward":
            return engine.loops(q, k, v, tables, out=self._out, lse=self._lse)
        if kernel == "delta":
            return engine.delta(self._out, self._dout, None, self._delta)
        given = (q, k, v, self._dout, self._lse, self._delta, tables)
        if kernel == "dq":
            return engine.dq(*given, dq=self._dq)
        return engine.dkdv(*given, dk=self._dk, dv=self._dv)

    def wrong(self, kernel: str, config: Config) -> str | None:
        names = {"forward": ("out",), "dq": ("dq",), "dkdv": ("dk", "dv")}[kernel]
        for name in names:
            getattr(self, f"_{name}").fill_(float("nan"))
        self.launch(kernel, config)()
        for name in names:
            found = check.errors(getattr(self, f"_{name}"), getattr(self._expected, name))
            if not check.acceptable(found, self._dtype):
                return f"{name} is off by {found.whole:.3g}, its worst rows by {found.worst:.3g}"
        return None
