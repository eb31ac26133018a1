"""Hooks that run recurrent layers on whole sequences, and pass the plan to layers that do not get it.

Recurrences, linear attention and convolutions (Mamba, gated delta nets) need all tokens in order. Under
context parallelism every rank gathers their input, runs them on the whole sequence, and keeps its shard of
the output.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tritoncp.api.reshard import unshard
from tritoncp.api.shards import shard
from tritoncp.integrations.transformers.model_classes import attention_without_arguments, is_recurrent
from tritoncp.integrations.transformers.plans import ContextParallelPlan

CURRENT = "_tritoncp_current_plan"  # attribute of models with the hooks
# Attributes with the checkpoint function: in transformers' layers, and in torch's CheckpointWrapper.
CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")


class CurrentPlan:
    """The plan of the running call of a model, for modules that do not get it as an argument. It is not
    copied with the model."""

    def __init__(self) -> None:
        self.calls: list[tuple[nn.Module | None, ContextParallelPlan | None]] = []  # the innermost is last
        self.had_plan = False

    def __reduce__(self) -> Any:
        return CurrentPlan, ()

    def of(self, kwargs: dict[str, Any]) -> ContextParallelPlan | None:
        """Return the plan of a call: its argument, or else the enclosing call's plan."""
        if "context_parallel" in kwargs:
            return kwargs["context_parallel"]
        if self.calls:
            return self.calls[-1][1]
        if self.had_plan and torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "a layer is recomputed in the backward pass by a checkpoint without the plan of its batch: "
                "use model.activation_checkpointing_enable(), or torch's checkpoint_wrapper"
            )
        return None

    def enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any], *, is_top: bool) -> None:
        """Start the call of a module that has the plan as an argument, or of the model itself."""
        if not is_top and "context_parallel" not in kwargs:
            return
        plan = kwargs.get("context_parallel")
        self.had_plan |= plan is not None
        self.calls.append((module, plan))
        for part in module.modules():
            for name in CHECKPOINTS:
                function = vars(part).get(name)
                if function is not None and not self._is_kept_by(function):
                    setattr(part, name, CheckpointWithPlan(self, function))

    def leave(self, module: nn.Module, args: Any, out: Any) -> None:
        """End the call of a module, also if it raised."""
        if self.calls and self.calls[-1][0] is module:
            self.calls.pop()

    def _is_kept_by(self, function: Any) -> bool:
        while isinstance(function, CheckpointWithPlan):
            if function.current is self:
                return True
            function = function.checkpoint
        return False


@dataclass
class CheckpointWithPlan:
    """Wrapper of a checkpoint function that restores the plan of the forward call in recomputation."""

    current: CurrentPlan
    checkpoint: Callable[..., Any]

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.checkpoint(function, *args, **kwargs)
        plan = self.current.of({})

        def with_plan(*args: Any, **kwargs: Any) -> Any:
            self.current.calls.append((None, plan))
            try:
                return function(*args, **kwargs)
            finally:
                self.current.calls.pop()

        return self.checkpoint(with_plan, *args, **kwargs)


def hook_layers(model: nn.Module) -> None:
    """Add hooks to a model: recurrent layers then run on whole sequences in calls with a plan, and attention
    that does not get the plan as an argument finds it. A second call has no effect."""
    if CURRENT in vars(model):
        return
    current = CurrentPlan()
    for module in (model, *(without_arguments := attention_without_arguments(model))):
        setattr(module, CURRENT, current)
    for module in model.modules():
        if is_recurrent(module):
            module.register_forward_pre_hook(partial(_gather_input, current), with_kwargs=True)
            module.register_forward_hook(partial(_shard_output, current), with_kwargs=True)
        elif any(is_recurrent(part) for part in module.modules()) or (module is model and without_arguments):
            module.register_forward_pre_hook(partial(current.enter, is_top=module is model), with_kwargs=True)
            module.register_forward_hook(current.leave, always_call=True)


def plan_of_call(module: nn.Module) -> ContextParallelPlan | None:
    """Return the plan of the running call of a model, for attention that does not get it as an argument."""
    current = vars(module).get(CURRENT)
    return None if current is None else current.of({})


def _gather_input(current: CurrentPlan, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Pre-hook: gather shards among the arguments to whole tensors; replace a mask by the batch's padding."""
    plan = current.of(kwargs)
    if plan is None:
        return None

    def gather(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.shape[:2] != plan.position_ids.shape:
            return x
        return unshard(x, plan.plan, plan.mesh, dim=1, grad="sum")

    signature = inspect.signature(module.forward)
    call = signature.bind(*tree_map(gather, args), **tree_map(gather, kwargs))
    call.arguments |= {name: x for name, x in plan.whole.items() if name in signature.parameters}
    rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
    if rest is not None:
        unnamed = {name: x for name, x in plan.whole.items() if name not in signature.parameters}
        call.arguments[rest] = {**call.arguments.get(rest, {}), **unnamed}
    return call.args, call.kwargs


def _shard_output(
    current: CurrentPlan, module: nn.Module, args: Any, kwargs: dict[str, Any], out: Any
) -> Any:
    """Hook: replace whole tensors in the output by this rank's shards."""
    plan = current.of(kwargs)
    if plan is None:
        return None
    shape = (len(plan.position_ids), plan.plan.q.length)
    return tree_map(
        lambda x: shard(x, plan.plan, dim=1) if isinstance(x, Tensor) and x.shape[:2] == shape else x, out
    )
