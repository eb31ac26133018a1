"""Functions of libdevice for Triton's interpreter, which has none: torch computes them in float64."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as cuda_functions
from triton.language.extra import libdevice as functions_of_any_target
from triton.runtime.interpreter import InterpretedFunction, TensorHandle

from tritoncp.mods.translate.pointwise_ops import LIBDEVICE

# Functions of several operands, and functions with another rule for some dtype.
_OTHERS = "atan2", "copysign", "fmod", "hypot", "pow", "tanh", "trunc"
# Functions that only hand-written mods call, by the names of torch's functions.
_HAND_WRITTEN = {
    "abs": "abs", "ceil": "ceil", "cos": "cos", "erf": "erf", "exp": "exp", "exp2": "exp2", "floor": "floor",
    "log": "log", "log2": "log2", "nearbyint": "round", "rsqrt": "rsqrt", "sin": "sin", "sqrt": "sqrt",
    "fast_cosf": "cos", "fast_dividef": "div", "fast_expf": "exp", "fast_log10f": "log10",
    "fast_log2f": "log2", "fast_logf": "log", "fast_powf": "pow", "fast_sinf": "sin", "fast_tanf": "tan",
    "fast_tanhf": "tanh", "div_rn": "div", "sqrt_rn": "sqrt", "rsqrt_rn": "rsqrt", "rcp_rn": "reciprocal",
}  # fmt: skip


def _interpreted(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """Apply a torch function to the data of interpreted operands of one float type; numbers are passed on."""

    def call(*operands: Any) -> Any:
        tensors = [x for x in operands if isinstance(x, tl.tensor)]
        data = [
            torch.from_numpy(x.handle.data.astype("f8"))
            if isinstance(x, tl.tensor)
            else torch.tensor(float(getattr(x, "value", x)), dtype=torch.float64)
            for x in operands
        ]
        dtype, is_block = tensors[0].dtype, any(x.type.is_block() for x in tensors)
        result = function(*torch.broadcast_tensors(*data)).numpy().astype(tensors[0].handle.data.dtype)
        kind = tl.block_type(dtype, list(result.shape)) if is_block else dtype
        return tl.tensor(TensorHandle(result, dtype), kind)

    return call


libdevice = SimpleNamespace(
    rint=_interpreted(torch.round),
    **{name: _interpreted(getattr(torch, name)) for name in (*LIBDEVICE, *_OTHERS)},
)
_EVERY = {
    **vars(libdevice), **{name: _interpreted(getattr(torch, of)) for name, of in _HAND_WRITTEN.items()}
}  # fmt: skip
_MODULES = functions_of_any_target, cuda_functions.libdevice
_COPIES: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class _Functions(SimpleNamespace):
    """Takes the place of the module libdevice in hand-written mods."""

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(
            f"libdevice.{name} cannot run interpreted (TRITON_INTERPRET=1): write it with "
            f"operations of triton.language, or with one of {', '.join(sorted(_EVERY))}"
        )


def with_libdevice(fn: Any) -> Any:
    """Return an interpreted function that can call libdevice, also in the @triton.jit functions that it
    calls: a copy with other globals, or ``fn`` itself if it does not use libdevice."""
    if not isinstance(fn, InterpretedFunction):
        return fn
    if (copy := _COPIES.get(fn)) is None:
        scope, replaced = fn.fn.__globals__, {}
        _COPIES[fn] = fn  # functions may call each other
        for name in fn.fn.__code__.co_names:
            if (value := scope.get(name)) is not None and (other := _replace(value)) is not value:
                replaced[name] = other
        copy = _copy(fn, {**scope, **replaced}) if replaced else fn
        _COPIES[fn] = copy
    return copy


def _replace(value: Any) -> Any:
    if isinstance(value, InterpretedFunction):
        return with_libdevice(value)
    if any(value is module for module in _MODULES):
        return _Functions(**_EVERY)
    if any(value is getattr(module, getattr(value, "__name__", ""), None) for module in _MODULES):
        return getattr(_Functions(**_EVERY), value.__name__)
    return value


def _copy(fn: Any, scope: dict[str, Any]) -> Any:
    plain = fn.fn
    function = types.FunctionType(
        plain.__code__, scope, plain.__name__, plain.__defaults__, plain.__closure__
    )
    function.__kwdefaults__, function.__module__ = plain.__kwdefaults__, plain.__module__
    function.__annotations__, function.__qualname__ = plain.__annotations__, plain.__qualname__
    return InterpretedFunction(function, **fn.kwargs)
