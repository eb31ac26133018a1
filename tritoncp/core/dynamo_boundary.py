"""The boundary between torch.compile and code that runs on the host: plans, masks, uploads, launches.

Dynamo would trace into that code, frame by frame, wherever it is called outside of a graph but below a
compiled function. Marks on the code of public entry points keep it out. They cost nothing per call, and
setting them does not import torch._dynamo.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

Function = TypeVar("Function", bound=Callable[..., Any])

MOVE = "call it outside the compiled function and pass its result in"


def host_only(fn: Function) -> Function:
    """Mark a function that no graph contains: a call of it breaks the graph, and is an error under
    ``fullgraph=True``."""
    function: Any = fn
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = f"{fn.__qualname__} was called inside torch.compile; {MOVE}"
    return untraced(fn)


def graph_entry(fn: Function) -> Function:
    """Mark a function that a graph can contain. Dynamo traces through it from a compiled caller, or where it
    is compiled itself. Called after a graph break of its caller, it and all it calls run as plain Python.

    Of a function that wraps another (``functools.wraps``), Dynamo traces the inner one.
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
    """Copy a function for Dynamo to trace: marks on the code of the original are not on that of the copy."""
    function: Any = fn
    code = function.__code__.replace(co_filename=function.__code__.co_filename)
    copy: Any = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__, copy.__qualname__ = function.__kwdefaults__, function.__qualname__
    copy.__doc__, copy.__module__ = function.__doc__, function.__module__
    return copy


def untraced(fn: Function) -> Function:
    """Have Dynamo skip frames of a function, and all frames that it calls, where Python calls it. Where
    Dynamo traces its caller, it traces the function too."""
    function: Any = fn
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return fn


def constant_result(fn: Function) -> Function:
    """Have a graph take the result of a call as a constant: ``torch.compiler.assume_constant_result``,
    without the import of torch._dynamo."""
    function: Any = fn
    function._dynamo_marked_constant = True
    return fn
