"""Host computations without the caller's torch modes, and copies of tensors from a device to the CPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

from tritoncp.core.dynamo_boundary import untraced

P = ParamSpec("P")
T = TypeVar("T")


def has_default_device() -> bool:
    """Return whether the default device is not the CPU."""
    return torch._C._len_torch_function_stack() > 0 and torch.get_default_device().type != "cpu"


def has_modes() -> bool:
    """Return whether the caller has a mode that affects operations: a function mode, as a default device,
    autocast, a transform of torch.func, or a dispatch mode, as for fake tensors, tracing and counting. Under
    Dynamo only another default device counts: others act on the graph when it runs."""
    if torch.compiler.is_dynamo_compiling():
        return has_default_device()
    modes = torch._C._len_torch_dispatch_stack() > 0 or torch._C._len_torch_function_stack() > 0
    return modes or _is_any_autocast_enabled() or peek_interpreter_stack() is not None


def makes_inference_tensors() -> bool:
    """Return whether inference mode is on; False under Dynamo, which cannot trace the query."""
    return not torch.compiler.is_dynamo_compiling() and torch.is_inference_mode_enabled()


def host() -> AbstractContextManager[object]:
    """Return a context without the caller's modes (:func:`has_modes`), with the CPU as the default device.
    New tensors are normal tensors, under inference mode too: masks and plans outlive a call, and autograd
    saves their tensors in later ones."""
    if has_modes():  # only if needed, since a mode slows every operation
        return _without_modes()
    return normal_tensors() if makes_inference_tensors() else contextlib.nullcontext()


@contextlib.contextmanager
def _without_modes() -> Iterator[None]:
    if torch.compiler.is_dynamo_compiling():
        with torch.device("cpu"):
            yield
        return
    transforms = temporarily_clear_interpreter_stack()  # modes of torch.func
    # Dynamo does not compile frames under dispatch modes; without the modes it would.
    callback = set_eval_frame(None)
    try:
        with (
            transforms,
            _no_function_modes(),
            _disable_current_modes(),
            torch._C._DisableAutocast(),
            normal_tensors(),
        ):
            yield
    finally:
        set_eval_frame(callback)


@contextlib.contextmanager
def _no_function_modes() -> Iterator[None]:
    """Turn off function modes, such as the default device, in a ``with`` block."""
    modes = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


@contextlib.contextmanager
def normal_tensors() -> Iterator[None]:
    """Make new tensors normal tensors, under inference mode too, without gradient recording, in a ``with``
    block.

    >>> with torch.inference_mode(), normal_tensors():
    ...     torch.zeros(1).is_inference(), torch.is_grad_enabled()
    (False, False)
    """
    if not makes_inference_tensors():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():  # inference_mode(False) alone would record gradients
        yield


_HOOKS_HIDDEN: ContextVar[bool] = ContextVar("hooks_hidden", default=False)


def has_saved_tensor_hooks() -> bool:
    """Return whether the caller has saved-tensor hooks, also within :func:`no_saved_tensor_hooks`."""
    return _HOOKS_HIDDEN.get() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@contextlib.contextmanager
def no_saved_tensor_hooks() -> Iterator[None]:
    """Turn off the caller's saved-tensor hooks, for example for offloading of activations, in a ``with``
    block: they must not see fake tensors, and torch.func refuses them.

    >>> with torch.autograd.graph.saved_tensors_hooks(print, print), no_saved_tensor_hooks():
    ...     _ = torch.ones(1, requires_grad=True).exp()
    """
    hooks, autograd = [], torch._C._autograd
    hidden = _HOOKS_HIDDEN.set(has_saved_tensor_hooks())
    while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        _HOOKS_HIDDEN.reset(hidden)
        refusal = autograd._saved_tensors_hooks_get_disabled_error_message() if hooks else None
        if refusal is not None:  # a compiled region that has the hooks in its graph refuses new ones
            autograd._saved_tensors_hooks_enable()
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)
        if refusal is not None:
            autograd._saved_tensors_hooks_disable(refusal, False)


@contextlib.contextmanager
def plain_autograd() -> Iterator[None]:
    """Make it possible to record a run with its gradient, in a ``with`` block: without the caller's
    saved-tensor hooks and anomaly detection, which reads values of gradients."""
    with torch.inference_mode(False), no_saved_tensor_hooks():
        if not torch.is_anomaly_enabled():
            yield
            return
        with torch.autograd.set_detect_anomaly(False):
            yield


def on_host(call: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function to run within `host()`; Dynamo compiles none of its frames.

    >>> with torch.device("meta"):
    ...     torch.zeros(1).device.type, on_host(lambda: torch.zeros(1).device.type)()
    ('meta', 'cpu')
    """

    @functools.wraps(call)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        if not has_modes() and not makes_inference_tensors():
            return call(*args, **kwargs)
        with host():
            return call(*args, **kwargs)

    return untraced(wrapped)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors from their devices to the CPU."""
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


def is_remote(tensor: Tensor) -> bool:
    """Return whether the tensor is on a device, so that to read it needs a synchronising copy."""
    return tensor.device.type != "cpu"


def is_dtensor(x: Any) -> bool:
    """Return whether an argument is a DTensor. (To import its class takes a second.)"""
    return type(x) is not Tensor and isinstance(x, Tensor) and hasattr(x, "device_mesh")


def refuse_dtensor(x: Any, name: str, remedy: str) -> None:
    """Raise TypeError for a DTensor. name: name of the argument, or description of what captures it

    >>> refuse_dtensor(torch.zeros(1), "x", "pass x.to_local()")
    """
    if is_dtensor(x):
        raise TypeError(
            f"{name} is a DTensor {tuple(x.shape)} placed {x.placements} over {x.device_mesh}; a plain "
            f"tensor is needed: {remedy}"
        )
