"""Decorators that stop torch.compile from tracing code for the host: plans, masks, uploads, launches.

After a graph break Dynamo would trace such code frame by frame. Marks on the code objects of public entry
points prevent this; they cost nothing per call, and setting them does not import torch._dynamo.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

Function = TypeVar("Function", bound=Callable[..., Any])

MOVE = "call it outside the compiled function and pass its result in"


def host_only(fn: Function) -> Function:
    """Decorate a function that cannot be part of a graph: a call of it is a graph break, and an error under
    ``fullgraph=True``."""
    function: Any = fn
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = f"{fn.__qualname__} was called inside torch.compile; {MOVE}"
    return untraced(fn)


def graph_entry(fn: Function) -> Function:
    """Decorate a function that can be part of a graph: Dynamo traces it from a compiled caller, or if it is
    compiled itself; after a graph break of the caller, it and its callees run as plain Python.

    If it is a wrapper (``functools.wraps``), Dynamo traces the wrapped function.
    """
    function: Any = fn
    if hasattr(function, "__wrapped__"):
        function._torchdynamo_inline = function._torchdynamo_orig_callable = function.__wrapped__
        function._torchdynamo_wrapper_id = id(function)
        return untraced(fn)
    function._torchdynamo_orig_callable = traced_copy(fn)
    function._torchdynamo_wrapper_id = id(function)
    return untraced(fn)


def traced_copy(fn: Function) -> Function:
    """Copy a function whose code is marked as untraced, so that Dynamo traces the copy."""
    function: Any = fn
    code = function.__code__.replace(co_filename=function.__code__.co_filename)
    copy: Any = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__, copy.__qualname__ = function.__kwdefaults__, function.__qualname__
    copy.__doc__, copy.__module__ = function.__doc__, function.__module__
    return copy


def untraced(fn: Function) -> Function:
    """Mark a function so that Dynamo skips its frames and its callees' frames when Python calls it. When
    Dynamo traces the caller, it traces the function too."""
    function: Any = fn
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return fn


def constant_result(fn: Function) -> Function:
    """Mark the result of a function as a constant of graphs: ``torch.compiler.assume_constant_result``
    without the import of torch._dynamo."""
    function: Any = fn
    function._dynamo_marked_constant = True
    return fn
