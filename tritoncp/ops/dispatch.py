"""Registration of the ops ``tritoncp::*``, and calls of an op below autograd.

Registered directly: torch.library.custom_op and register_autograd search every list of tensors for nested
tensors, at each call and for each derivative, which takes longer than the rest of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from tritoncp.core.host_copy import has_default_device
from tritoncp.core.tracing import fresh_dispatch
from tritoncp.ops import flop_formulas
from tritoncp.ops.transforms import refuse_vmap

_OPS = torch.library.Library("tritoncp", "FRAGMENT")


def register_op(
    name: str, body: Callable[..., Any], fake: Callable[..., Any], autograd_kernel: Any = None,
    schema: str = "",
) -> Any:  # fmt: skip
    """Register the op ``tritoncp::name``: its body, its fake, and its Autograd kernel. schema: by default
    that of the body's annotations."""

    def run_body(*args: Any) -> Any:
        with fresh_dispatch():
            return body(*args)

    schema = schema or torch.library.infer_schema(body, mutates_args=())
    _OPS.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _OPS.impl(name, run_body, "CompositeExplicitAutograd")
    _OPS.impl(name, refuse_vmap, "FuncTorchBatched")
    if autograd_kernel is not None:
        _OPS.impl(name, autograd_kernel, "Autograd")
    torch.library.register_fake(f"tritoncp::{name}", fake, lib=_OPS)
    return getattr(torch.ops.tritoncp, name).default


def call_op(op: Any, *args: Any) -> Any:
    """Call an op below autograd, through the dispatcher."""
    flop_formulas.register_formulas()
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def call_body(body: Callable[..., Any], *args: Any) -> Any:
    """Call the body of an op without gradients, where nothing needs the dispatcher
    (:func:`needs_dispatcher`), which takes a third of a call."""
    if not torch.is_grad_enabled():
        return body(*args)
    torch._C._set_grad_enabled(False)  # as no_grad() does, in a fifth of the time
    try:
        return body(*args)
    finally:
        torch._C._set_grad_enabled(True)


DISPATCH_MODES = (  # functions that return a true value while a mode, functorch, autocast, ... is active
    torch._C._len_torch_dispatch_stack,
    has_default_device,
    torch._C._functorch.peek_interpreter_stack,
    torch._C._is_any_autocast_enabled,
    torch._C._get_tracing_state,
    torch.is_inference_mode_enabled,
    torch.autograd._profiler_enabled,
)
PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def needs_dispatcher(tensors: Iterable[Tensor]) -> bool:
    """Return whether the dispatcher has an effect on a call: under dispatch modes, functorch, autocast,
    tracing, inference mode, profilers or another default device, and for subclasses, meta tensors and lazily
    negated or zero tensors."""
    for is_active in DISPATCH_MODES:
        if is_active():
            return True
    for x in tensors:  # noqa: SIM110 - any() takes twice as long
        if type(x) not in PLAIN_TYPES or x.is_neg() or x._is_zerotensor() or x.is_meta:
            return True
    return False
