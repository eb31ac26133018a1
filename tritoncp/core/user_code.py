"""Functions that users pass (mask_mods, score_mods): names and lines for messages, checks of their results,
and errors with the remedy.

Torch evaluates them under vmap, and translation traces them; both refuse the same mistakes, for the reasons
below.
"""

from __future__ import annotations

import functools
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

READS_VALUE = (
    "a Python value or branch cannot depend on a tensor, which differs at every element "
    "(use torch.where, & | ~, or capture a Python number)"
)
IS_RANDOM = "random numbers differ at every evaluation"
HAS_DATA_DEPENDENT_SHAPE = "the shape of its result depends on data"

_SINGLE = "it is called for single elements (use operations on elements, as == for torch.equal)"

# For texts in messages of torch.vmap: what the user's function does, and why that cannot be.
_REFUSALS = {
    r"inplace arithmetic|doesn't match the broadcast shape": (
        "an edit in place by a value that differs at more pairs than the edited tensor",
        "it has no room for the results; write x = x + y for x += y",
    ),
    r"data-dependent control flow": (
        "`if`, `and`, `or`, `not`, `in`, max(), min() or bool() of a tensor, or a chained comparison",
        f"{READS_VALUE}; write (0 <= q_idx) & (q_idx < 8) for 0 <= q_idx < 8",
    ),
    r"\.item\(\)": ("Tensor.item(), int(), float(), range() or an index into a list", READS_VALUE),
    r"Cannot access data pointer": ("Tensor.tolist() or Tensor.numpy()", READS_VALUE),
    r"dynamic shape": (
        "an index by a bool tensor, or nonzero()",
        f"{HAS_DATA_DEPENDENT_SHAPE} (use torch.where)",
    ),
    r"random operation": ("a random operation", f"{IS_RANDOM}; capture a tensor of random numbers"),
    r"Batching rule not implemented": (
        "an operation that compares whole tensors or has no rule for vmap",
        _SINGLE,
    ),
    r"vmap over": ("an operation without a rule for vmap", _SINGLE),
}


def origin(fn: Any) -> str:
    """Return file:line of a function's definition, or a description of another callable."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    code = getattr(fn, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else describe(fn)


def describe(fn: Any) -> str:
    """Return a name for messages and comments: letters, digits, dots and underscores of `__qualname__`."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = (
        getattr(fn, "__qualname__", type(fn).__qualname__)
        .replace("<locals>.", "")
        .replace("<lambda>", "lambda")
    )
    return "".join(c if c.isascii() and (c.isalnum() or c in "_.") else "_" for c in str(name))[:80] or "mod"


_PACKAGE = __file__.rsplit("/", 2)[0]  # tritoncp
_LIBRARY_PATHS = (
    torch.__file__.rsplit("/", 1)[0],
    f"{_PACKAGE}/core",
    f"{_PACKAGE}/mods",
    "<string>",
    "<eval_with_key>",
    "<frozen",
)


def _is_user_file(filename: str) -> bool:
    """Whether a file holds neither torch, nor this package's evaluation of mods, nor generated code."""
    return not filename.startswith(_LIBRARY_PATHS) and "/contextlib.py" not in filename


def user_line() -> str:
    """file:line of the innermost frame of the stack that is in a user's file."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        if _is_user_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{line}"
    return "an unknown line"


def last_user_line(stack: Sequence[traceback.FrameSummary], default: str) -> str:
    """file:line of the innermost frame of a traceback that is in a user's file."""
    lines = [f"{frame.filename}:{frame.lineno}" for frame in stack if _is_user_file(frame.filename)]
    return lines[-1] if lines else default


def check_result(out: Any, fn: Any, kind: str = "mask_mod", ndim: int = 0) -> Tensor:
    """Return the result of a user's function. Raises TypeError unless it is a tensor of at most ``ndim``
    dimensions, of a mask_mod a bool.

    kind: of the function, "mask_mod" or "score_mod"; others in messages only. ndim: of the arguments, 0 for
    elements
    """
    is_mask = kind == "mask_mod"
    if not isinstance(out, Tensor):
        constant = "torch.ones_like(q_idx, dtype=torch.bool)" if is_mask else "torch.zeros_like(score)"
        remedy = (
            "return the result in every branch, written with & | ~ and torch.where"
            if out is None
            else f"compute it from the arguments with tensor operations; a constant is {constant}"
        )
        result = "None" if out is None else f"{out!r:.40}, of type {type(out).__name__}"
        raise TypeError(
            f"the {kind} at {origin(fn)} returns {result}; a {'bool ' * is_mask}tensor is needed: {remedy}"
        )
    if out.ndim > ndim:
        raise TypeError(
            f"the {kind} at {origin(fn)} returns a tensor {list(out.shape)}; one value for a pair is needed, "
            "whose b, h, q_idx and kv_idx have no dimensions: index captured tensors by them, or reduce"
        )
    if is_mask and out.dtype != torch.bool:
        raise TypeError(
            f"the mask_mod at {origin(fn)} returns {out.dtype}; a mask_mod must return bool: compare, as "
            "q_idx >= kv_idx, or call .bool()"
        )
    return out


@contextmanager
def explained_errors(fn: Callable[..., Any], kind: str) -> Iterator[None]:
    """Raise a TypeError that names the user's line and the remedy in place of torch.vmap's refusal of what a
    function does. Errors of other causes pass."""
    try:
        yield
    except RuntimeError as error:
        for pattern, (operation, reason) in _REFUSALS.items():
            if re.search(pattern, str(error)):
                line = last_user_line(traceback.extract_tb(error.__traceback__), origin(fn))
                raise TypeError(f"the {kind} at {line} uses {operation}: {reason}") from error
        raise
