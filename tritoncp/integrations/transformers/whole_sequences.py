"""Recurrent and convolutional layers of a model, run on whole sequences.

Recurrences, linear attention and convolutions (Mamba, gated delta nets) read the tokens in their order. On a
shard they run on the whole sequence: every rank gathers their input, runs them, and keeps its own part of
the output.
"""

from __future__ import annotations

import inspect
import weakref
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tritoncp.api.shards import shard, unshard
from tritoncp.integrations.transformers.model_classes import is_recurrent
from tritoncp.integrations.transformers.plans import ContextParallelPlan

_PREPARED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class _Current:
    """The plan of the call of a model that is running, for modules that do not get it as an argument."""

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)
        self.plan: ContextParallelPlan | None = None

    def set(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if "context_parallel" in kwargs or module is self.model():
            self.plan = kwargs.get("context_parallel")


def run_recurrent_layers_whole(model: nn.Module) -> None:
    """Have the recurrent layers of a model run on whole sequences where a call has a plan, by hooks. A second
    call changes nothing."""
    if model in _PREPARED:
        return
    _PREPARED.add(model)
    current = _Current(model)
    for module in model.modules():
        if is_recurrent(module):
            module.register_forward_pre_hook(partial(_gather_input, current), with_kwargs=True)
            module.register_forward_hook(partial(_shard_output, current), with_kwargs=True)
        elif any(is_recurrent(part) for part in module.modules()):
            module.register_forward_pre_hook(current.set, with_kwargs=True)


def _gather_input(current: _Current, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Replace shards among the arguments by whole tensors, and a mask by the padding of the whole batch."""
    plan = kwargs.get("context_parallel", current.plan)
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
        others = {name: x for name, x in plan.whole.items() if name not in signature.parameters}
        call.arguments[rest] = {**call.arguments.get(rest, {}), **others}
    return call.args, call.kwargs


def _shard_output(current: _Current, module: nn.Module, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
    """Replace whole tensors of the output by this rank's shards."""
    plan = kwargs.get("context_parallel", current.plan)
    if plan is None:
        return None
    shape = (len(plan.position_ids), plan.plan.q.length)
    return tree_map(
        lambda x: shard(x, plan.plan, dim=1) if isinstance(x, Tensor) and x.shape[:2] == shape else x, out
    )
