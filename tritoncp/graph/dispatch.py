"""Ops ``tritoncp::*`` and torch's dispatch modes: registration, autocast, tracing, fake tensors, and errors
for the transforms of torch.func.

Ops are registered directly: torch.library.custom_op and register_autograd search every list of tensors for
nested tensors, at each call and for each derivative, which takes longer than the rest of a call. A call that
is traced or has fake tensors runs as in a compiled graph: an op with a fake kernel makes the plan, so that no
values are read in tracing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    is_legacy_batchedtensor,
    peek_interpreter_stack,
)
from torch._ops import _get_dispatch_mode_pre_dispatch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from tritoncp.core.host_copy import refuse_dtensor
from tritoncp.graph import flop_formulas
from tritoncp.mods.tracing import fresh_dispatch

_OPS = torch.library.Library("tritoncp", "FRAGMENT")


def register_op(
    name: str, body: Callable[..., Any], fake: Callable[..., Any], autograd_kernel: Any = None,
    schema: str = "", caller: str = "flex_attention",
) -> Any:  # fmt: skip
    """Register the op ``tritoncp::name`` with its body, fake and Autograd kernel. schema: default: inferred
    from the body's annotations. caller: name of the public function, for error messages."""

    def run_body(*args: Any) -> Any:
        with fresh_dispatch():
            return body(*args)

    schema = schema or torch.library.infer_schema(body, mutates_args=())
    _OPS.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _OPS.impl(name, run_body, "CompositeExplicitAutograd")
    _OPS.impl(name, lambda *args: refuse_transform(TransformType.Vmap, caller), "FuncTorchBatched")
    _OPS.impl(name, lambda *args: refuse_several_gradients(caller), "Batched")
    if autograd_kernel is not None:
        _OPS.impl(name, autograd_kernel, "Autograd")
    torch.library.register_fake(f"tritoncp::{name}", fake, lib=_OPS)
    return getattr(torch.ops.tritoncp, name).default


def call_op(op: Any, *args: Any) -> Any:
    """Call an op below autograd, through the dispatcher. Raises TypeError for DTensors: an op has no sharding
    strategy, and calls that take them pass local parts."""
    for x in args:
        refuse_dtensor(x, f"an argument of tritoncp::{op._opname}", "pass its local part, x.to_local()")
    flop_formulas.register_formulas()
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


DISPATCH_MODES = (  # functions whose result is true while a mode, functorch, autocast, ... is active
    torch._C._len_torch_dispatch_stack,
    torch._C._len_torch_function_stack,
    torch._C._functorch.peek_interpreter_stack,
    torch._C._is_any_autocast_enabled,
    torch._C._get_tracing_state,
    torch.is_inference_mode_enabled,
    torch.autograd._profiler_enabled,
)
PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def needs_dispatcher(tensors: Iterable[Tensor]) -> bool:
    """Return whether a call has to go through torch's dispatcher: under dispatch and function modes (a
    default device is one), functorch, autocast, tracing, inference mode and profilers, and for tensor
    subclasses, meta tensors and lazily negated or zero tensors."""
    for is_active in DISPATCH_MODES:
        if is_active():
            return True
    for x in tensors:  # noqa: SIM110 - any() takes twice as long
        if type(x) not in PLAIN_TYPES or x.is_neg() or x._is_zerotensor() or x.is_meta:
            return True
    return False


# -- autocast, tracing, fake tensors -------------------------------------------------------------------------


_Key = torch._C._TorchDispatchModeKey


def cast_for_autocast(*tensors: Any) -> tuple[Any, ...]:
    """Cast floating-point tensors to the autocast dtype, if autocast is on for their device; float64 is not
    cast, as in torch's attention.

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
    """Return whether a call is traced or its query has no values: inside torch.compile, under tracing and
    fake tensor modes, for fake and meta tensors."""
    if torch.compiler.is_dynamo_compiling():
        return True
    if torch._C._len_torch_dispatch_stack() and any(map(torch._C._get_dispatch_mode, _TRACING)):
        return True
    if type(q) in PLAIN_TYPES:
        return q.is_meta
    return isinstance(q, FakeTensor | FunctionalTensor)


_TRACING = (_Key.FAKE, _Key.PROXY, _Key.FUNCTIONAL)
_MODES = (torch._C._get_dispatch_mode, _get_dispatch_mode_pre_dispatch)  # torch.export has the second kind


def is_traced_value(x: Any) -> bool:
    """Return whether a tensor or size is known only when the traced graph runs, so that it must not become a
    constant of the graph."""
    if not isinstance(x, Tensor):
        return isinstance(x, torch.SymInt)
    mode = next(filter(None, [mode_of(_Key.PROXY) for mode_of in _MODES]), None)
    if mode is None or isinstance(x, FakeTensor | FunctionalTensor):
        return isinstance(x, FakeTensor | FunctionalTensor)
    from torch.fx.experimental.proxy_tensor import has_proxy_slot  # late: it imports sympy

    return has_proxy_slot(x, mode.tracer)


def fake_mode_of(q: Tensor) -> AbstractContextManager[Any]:
    """Return the fake tensor mode of a fake query, if no such mode is active; else a null context."""
    if isinstance(q, FakeTensor) and torch._C._get_dispatch_mode(_Key.FAKE) is None:
        return q.fake_mode
    return nullcontext()


def as_inputs(tensors: Iterable[Any]) -> list[Any]:
    """Prepare tensors (or None) as inputs of an op: under a fake tensor mode, convert real tensors to fake
    tensors, which are constants of a traced graph."""
    if torch.compiler.is_dynamo_compiling() or torch._C._get_dispatch_mode(_Key.FAKE) is None:
        return list(tensors)
    return [torch.ops.aten.lift_fresh(x) if type(x) in PLAIN_TYPES else x for x in tensors]


def run_on_values(op: Any, tensors: Sequence[Tensor], ints: Sequence[Any], *args: Any) -> Tensor:
    """Run an op that returns a handle. Under a fake tensor mode without a tracer, run its real body if all
    inputs have values, so that its checks apply."""
    if torch.compiler.is_dynamo_compiling():
        return op(tensors, ints, *args)
    tracers = [mode_of(key) for mode_of in _MODES for key in (_Key.PROXY, _Key.FUNCTIONAL)]
    is_fake = isinstance(torch._C._get_dispatch_mode(_Key.FAKE), FakeTensorMode) and not any(tracers)
    leaves = tree_leaves((tensors, ints, args))
    is_symbolic = any(isinstance(x, torch.SymInt | Tensor) and type(x) not in PLAIN_TYPES for x in leaves)
    if is_fake and not is_symbolic:
        with _disable_current_modes():
            handle = op(tensors, ints, *args)
        return as_inputs([handle])[0]
    return op(as_inputs(tensors), ints, *args)


# -- transforms of torch.func --------------------------------------------------------------------------------


_CALLERS = {
    TransformType.Grad: "torch.func.grad, vjp, jacrev or hessian",
    TransformType.Vmap: "torch.vmap, jacrev or jacfwd",
    TransformType.Jvp: "forward-mode AD, as torch.func.jvp, jacfwd or linearize",
}
_REMEDIES = {
    TransformType.Grad: "call torch.autograd.grad or backward(), which it supports once",
    TransformType.Vmap: "fold the mapped dimension into the batch dimension",
    TransformType.Jvp: "use reverse mode, torch.autograd.grad",
}


def refuse_transforms() -> None:
    """Raise RuntimeError under a transform of torch.func other than functionalize."""
    if peek_interpreter_stack() is None or torch.compiler.is_dynamo_compiling():
        return
    for interpreter in reversed(get_interpreter_stack() or []):
        refuse_transform(interpreter.key())


def refuse_batched_gradients(*gradients: Tensor | None) -> None:
    """Raise RuntimeError in a backward pass of several gradients at once, for which autograd uses a vmap that
    torch.func does not know."""
    for gradient in gradients:
        if gradient is not None and is_legacy_batchedtensor(gradient):
            refuse_several_gradients()


def refuse_several_gradients(caller: str = "flex_attention") -> None:
    raise RuntimeError(
        f"tritoncp.{caller} has one gradient in a backward pass, and got several, as by "
        "is_grads_batched=True or jacobian(vectorize=True): call torch.autograd.grad once for each of them"
    )


def refuse_transform(kind: Any, caller: str = "flex_attention") -> None:
    """Raise RuntimeError if the function ``caller`` does not support a kind of transform."""
    if kind in _CALLERS:
        raise RuntimeError(
            f"tritoncp.{caller} was called under {_CALLERS[kind]}, which it does not support: "
            f"{_REMEDIES[kind]}"
        )
