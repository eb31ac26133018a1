"""Checks and timing of single kernels on the GPU of this process."""

from __future__ import annotations

import torch
from torch import Tensor

from tritoncp.analysis.launches import CallTensors
from tritoncp.call.engine_factory import name_functions
from tritoncp.kernels.tile_rules import Config
from tritoncp.perf.problem import Problem
from tritoncp.perf.suite import baselines, check
from tritoncp.perf.suite.timing import Clock, DeviceClock, WallClock
from tritoncp.tuning.targets import Target


class DeviceBench:
    """Checks and times single kernels on the GPU of this process."""

    def __init__(self, device: torch.device) -> None:
        name_functions()  # like the compiler processes, so that cache keys agree
        self._device = device
        self._clock: Clock = DeviceClock(device) if device.type == "cuda" else WallClock()
        self._problem: tuple[Problem, ReferenceProblem] | None = None
        self._device_error = ""

    def _problem_for(self, target: Target) -> ReferenceProblem:
        if self._problem is None or self._problem[0] != target.problem:
            self._problem = None  # free the tensors of the last problem first
            self._problem = target.problem, ReferenceProblem(target.problem, self._device)
        return self._problem[1]

    def wrong(self, target: Target, config: Config) -> str | None:
        self._check_device()
        try:
            return self._problem_for(target).wrong(target.kernel, config)
        except Exception as error:  # any error of compilation or launch: continue with other candidates
            why = f"{type(error).__name__}: {str(error).strip()[:300]}"
            self._device_error = why if isinstance(error, torch.AcceleratorError) else ""
            return why

    def _check_device(self) -> None:
        """Raise RuntimeError after an error on the device: it runs no more kernels in this process, so that
        later failures would be blamed on other candidates."""
        if self._device_error:
            raise RuntimeError(
                "the GPU runs no more kernels in this process after a candidate failed "
                f"({self._device_error}). All findings are stored, and that candidate is marked: continue "
                "with --resume"
            )

    def milliseconds(self, target: Target, config: Config) -> float:
        self._check_device()
        launch = self._problem_for(target).call.launch(target.kernel, config)
        return self._clock.sample(lambda: launch()).device


class ReferenceProblem:
    """A problem on random tensors, and its reference results in float32."""

    def __init__(self, problem: Problem, device: torch.device) -> None:
        inputs = baselines.inputs(problem, device)
        self.expected = check.reference(problem, inputs)
        self._dtype = problem.torch_dtype
        tensors = [x.detach() for x in (inputs.q, inputs.k, inputs.v, inputs.dout)]
        self.call = CallTensors(problem, device, tensors)
        for kernel in ("forward", "delta"):  # they compute the inputs of the backward pass
            self.call.launch(kernel, None)()
        self._lse = self.call.results("route")["lse"].clone()

    def wrong(self, kernel: str, config: Config) -> str | None:
        results = self.call.results(kernel)
        for name, tensor in results.items():
            tensor.fill_(0.0 if (kernel, name) == ("fused", "dq") else float("nan"))  # "fused" adds to dq
        self.call.launch(kernel, config)()
        if kernel == "route":
            results["out in steps"] = self.call.run_two_steps(kernel, config)
        faults = [self._find_fault(name, tensor) for name, tensor in results.items()]
        return next(filter(None, faults), None)

    def _find_fault(self, name: str, tensor: Tensor) -> str | None:
        """Describe the error of a result. lse is compared with the lse of route "loops", which then replaces
        it, since gradients are computed from it."""
        if name != "lse":
            return check.find_fault(name, tensor, getattr(self.expected, name.split()[0]), self._dtype)
        fault = check.find_fault(name, tensor, self._lse, torch.float32)
        tensor.copy_(self._lse)
        return fault
