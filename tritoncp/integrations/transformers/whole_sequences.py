"""Hooks that run recurrent layers on whole sequences or single documents, and that pass plans to attention.

Recurrences, linear attention and convolutions (Mamba, gated delta nets) need all tokens in order. Under
context parallelism every rank gathers their input, runs them on the whole sequence, or on each of its
documents alone, and keeps its shard of the output.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tritoncp.api.reshard import unshard
from tritoncp.api.shards import shard
from tritoncp.integrations.transformers.images.own_images import OwnFeatures, hook_features
from tritoncp.integrations.transformers.model_classes import (
    attention_without_arguments,
    has_cache,
    is_recurrent,
)
from tritoncp.integrations.transformers.plans import ContextParallelPlan

CURRENT = "_tritoncp_current_plan"  # attribute of models that have the hooks
# Attributes that contain the checkpoint function: of transformers' layers, and of torch's CheckpointWrapper.
CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")


class CurrentPlan:
    """The plan of the running call of a model, for modules that do not get it as an argument. Copies of the
    model do not copy it."""

    def __init__(self) -> None:
        self.calls: list[tuple[nn.Module | None, ContextParallelPlan | None]] = []  # the innermost is last
        self.had_plan = False

    def __reduce__(self) -> Any:
        return CurrentPlan, ()

    def of(self, kwargs: dict[str, Any]) -> ContextParallelPlan | None:
        """Return the plan of a call: its argument, or else the plan of the enclosing call."""
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

    @contextmanager
    def without_plan(self) -> Iterator[None]:
        """Run code that gets no tokens of the batch, such as a vision tower, as if there were no plan."""
        self.calls.append((None, None))
        try:
            yield
        finally:
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


@dataclass
class OnWholeSequences:
    """The forward method of a recurrent layer, which runs on whole sequences or documents in calls with a
    plan.

    is_causal: whether the output of a token does not depend on later tokens
    """

    current: CurrentPlan
    forward: Callable[..., Any]
    is_causal: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plan = self.current.of(kwargs)
        if plan is None:
            return self.forward(*args, **kwargs)
        plan.reached = True

        def gather(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.shape[:2] != plan.shape:
                return x
            return unshard(x, plan.plan, plan.mesh, dim=1, grad="sum")

        args, kwargs = tree_map(gather, args), tree_map(gather, kwargs)
        call = self._with_mask(plan.attention_mask, *args, **kwargs)
        if plan.documents is None:
            out = self.forward(*call.args, **call.kwargs)
        else:
            out = plan.packed_rows(self.is_causal).run(self.forward, *call.args, **call.kwargs)
        whole = plan.shape[0], plan.plan.q.length
        return tree_map(
            lambda x: shard(x, plan.plan, dim=1) if isinstance(x, Tensor) and x.shape[:2] == whole else x, out
        )

    def _with_mask(self, mask: Tensor | None, *args: Any, **kwargs: Any) -> inspect.BoundArguments:
        """Return the arguments of a call, with the mask of a shard replaced by the batch's padding."""
        signature = inspect.signature(self.forward)
        call = signature.bind(*args, **kwargs)
        rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
        if "attention_mask" in signature.parameters:
            call.arguments["attention_mask"] = mask
        elif rest is not None:
            call.arguments[rest] = {**call.arguments.get(rest, {}), "attention_mask": mask}
        return call


def hook_layers(model: nn.Module) -> None:
    """Prepare a model for calls with a plan: its recurrent layers will run on whole sequences, its images are
    embedded for shards, and attention that does not get the plan as an argument will find it. A second call
    has no effect."""
    if CURRENT in vars(model):
        return
    current = _find_current(model)
    for module in (model, *(without_arguments := attention_without_arguments(model))):
        setattr(module, CURRENT, current)
    needs_plan = hook_features(model, current) or bool(without_arguments)
    for module in model.modules():
        if is_recurrent(module):
            if not isinstance(module.forward, OnWholeSequences):
                module.forward = OnWholeSequences(current, module.forward, has_cache(module))
        elif any(is_recurrent(part) for part in module.modules()) or (module is model and needs_plan):
            module.register_forward_pre_hook(partial(current.enter, is_top=module is model), with_kwargs=True)
            module.register_forward_hook(current.leave, always_call=True)


def _find_current(model: nn.Module) -> CurrentPlan:
    """Return the CurrentPlan for a model: that of a part of it, or of a model it is part of, if one of these
    was prepared before."""
    for module in model.modules():
        for one in vars(module).values():
            if isinstance(one, CurrentPlan):
                return one
            if isinstance(one, OwnFeatures | OnWholeSequences):
                found: CurrentPlan = one.current
                return found
    return CurrentPlan()


def plan_of_call(module: nn.Module) -> ContextParallelPlan | None:
    """Return the plan of the running call of a model, for attention that does not get it as an argument."""
    current = vars(module).get(CURRENT)
    return None if current is None else current.of({})
