"""Modes of torch around a call: autocast, tracing, and tensors without values.

A call that is traced, or whose tensors have shapes and no values, runs as in a compiled graph: the plan is
made by an op, which has a fake, so that nothing reads values before they exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from tritoncp.ops.dispatch import PLAIN_TYPES

_Key = torch._C._TorchDispatchModeKey


def cast_for_autocast(*tensors: Any) -> tuple[Any, ...]:
    """Cast floating-point tensors to the autocast dtype of their device, if autocast is on for it; float64
    stays, as in torch's own attention.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     [x.dtype for x in cast_for_autocast(torch.zeros(1), torch.zeros(1, dtype=torch.float64))]
    [torch.bfloat16, torch.float64]
    """
    return tuple([_cast(x) if isinstance(x, Tensor) else x for x in tensors])


def _cast(x: Tensor) -> Tensor:
    device = x.device.type
    if device == "meta" or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def is_traced(q: Any) -> bool:
    """Return whether a call is recorded in a graph, or its query has no values: inside torch.compile, under
    tracing and fake tensor modes, on fake and on meta tensors."""
    if torch.compiler.is_dynamo_compiling():
        return True
    if torch._C._len_torch_dispatch_stack() and any(map(torch._C._get_dispatch_mode, _TRACING)):
        return True
    if type(q) in PLAIN_TYPES:
        return q.is_meta
    return isinstance(q, FakeTensor | FunctionalTensor)


_TRACING = (_Key.FAKE, _Key.PROXY, _Key.FUNCTIONAL)


def fake_mode_of(q: Tensor) -> AbstractContextManager[Any]:
    """Return the fake tensor mode of a fake query, to run in it also after the program has left that mode."""
    if isinstance(q, FakeTensor) and torch._C._get_dispatch_mode(_Key.FAKE) is None:
        return q.fake_mode
    return nullcontext()


def as_inputs(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors as inputs of an op: in a fake tensor mode, those with values become fake ones, and
    constants of the graph that a tracer records."""
    if torch.compiler.is_dynamo_compiling() or torch._C._get_dispatch_mode(_Key.FAKE) is None:
        return list(tensors)
    return [torch.ops.aten.lift_fresh(x) if type(x) in PLAIN_TYPES else x for x in tensors]


def run_on_values(op: Any, tensors: Sequence[Tensor], ints: Sequence[Any], *args: Any) -> Tensor:
    """Run an op that returns a handle. In a fake tensor mode that no tracer uses it runs on values, if all
    its inputs have some: its checks apply, and its result is known."""
    if torch.compiler.is_dynamo_compiling():
        return op(tensors, ints, *args)
    others = map(torch._C._get_dispatch_mode, (_Key.PROXY, _Key.FUNCTIONAL))
    is_fake = isinstance(torch._C._get_dispatch_mode(_Key.FAKE), FakeTensorMode) and not any(others)
    leaves = tree_leaves((tensors, ints, args))
    is_symbolic = any(isinstance(x, torch.SymInt | Tensor) and type(x) not in PLAIN_TYPES for x in leaves)
    if is_fake and not is_symbolic:
        with _disable_current_modes():
            handle = op(tensors, ints, *args)
        return as_inputs([handle])[0]
    return op(as_inputs(tensors), ints, *args)
