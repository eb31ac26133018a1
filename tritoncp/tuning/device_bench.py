"""Single kernels on the GPU of this process: checks of their results, and their times."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tritoncp.analysis.launches import Problem
from tritoncp.kernels.tile_rules import Config
from tritoncp.masks.expressions import score_of
from tritoncp.ops.engine_factory import name_functions
from tritoncp.perf.suite import baselines, check
from tritoncp.perf.suite.cases import Case
from tritoncp.perf.suite.timing import Clock, DeviceClock, WallClock
from tritoncp.tuning.targets import Target


class DeviceBench:
    """Launches single kernels on the GPU of this process."""

    def __init__(self, device: torch.device) -> None:
        name_functions()  # as in the compiler processes, so that cache keys agree
        self._device = device
        self._clock: Clock = DeviceClock(device) if device.type == "cuda" else WallClock()
        self._problem: tuple[Target, ReferenceProblem] | None = None
        self._device_error = ""

    def _problem_for(self, target: Target) -> ReferenceProblem:
        shape = replace(target, kernel="few" if target.queries else "")
        if self._problem is None or self._problem[0] != shape:
            self._problem = None  # frees the tensors of the last shape
            self._problem = shape, ReferenceProblem(target, self._device)
        return self._problem[1]

    def wrong(self, target: Target, config: Config) -> str | None:
        self._check_device()
        try:
            return self._problem_for(target).wrong(target.kernel, config)
        except Exception as error:  # any error of a compiler or launch: other candidates go on
            why = f"{type(error).__name__}: {str(error).strip()[:300]}"
            self._device_error = why if isinstance(error, torch.AcceleratorError) else ""
            return why

    def _check_device(self) -> None:
        """Raise after an error on the device: it runs no more kernels in this process, so later failures say
        nothing about the candidates."""
        if self._device_error:
            raise RuntimeError(
                f"the GPU runs no kernels in this process since one candidate failed ({self._device_error}); "
                "all findings are written down, and that candidate is marked: go on with --resume"
            )

    def milliseconds(self, target: Target, config: Config) -> float:
        self._check_device()
        launch = self._problem_for(target).problem.launch(target.kernel, config)
        return self._clock.sample(lambda: launch()).device


class ReferenceProblem:
    """A problem on random tensors, and its reference results in float32."""

    def __init__(self, target: Target, device: torch.device) -> None:
        case = Case(
            target.mask,
            "backward",
            target.seq,
            heads=target.heads,
            kv_heads=target.kv_heads,
            dim=target.head_dim,
            v_dim=target.v_dim,
            dtype=target.dtype,
            queries=target.queries,
        )
        inputs = baselines.inputs(case, device)
        score = score_of(target.score, target.heads, device) if target.score else None
        self.expected = check.reference(case, inputs, score)
        self._dtype = case.torch_dtype
        tensors = [x.detach() for x in (inputs.q, inputs.k, inputs.v, inputs.dout)]
        self.problem = Problem(target.job("", None), device, tensors)
        for kernel in ("forward", "delta"):  # the inputs of the backward pass
            self.problem.launch(kernel, None)()
        self._lse = self.problem.results("route")["lse"].clone()

    def wrong(self, kernel: str, config: Config) -> str | None:
        results = self.problem.results(kernel)
        for name, tensor in results.items():
            tensor.fill_(0.0 if (kernel, name) == ("fused", "dq") else float("nan"))  # it adds to dq
        self.problem.launch(kernel, config)()
        if kernel == "route":
            results["out in steps"] = self.problem.in_steps(kernel, config)
        for name, tensor in results.items():
            errors, dtype = self._errors(name, tensor)
            if not check.acceptable(errors, dtype):
                return f"{name} is off by {errors.whole:.3g}, its worst rows by {errors.worst:.3g}"
        return None

    def _errors(self, name: str, tensor: Tensor) -> tuple[check.Errors, torch.dtype]:
        """Errors of a result and the dtype that sets its tolerance. lse, which the gradients are computed
        from, is compared with the lse of the loops and then replaced by it."""
        if name != "lse":
            return check.errors(tensor, getattr(self.expected, name.split()[0])), self._dtype
        errors = check.errors(tensor, self._lse)
        tensor.copy_(self._lse)
        return errors, torch.float32
