"""Error messages about users' mask_mods and score_mods: names and lines, checks of results, explanations of
vmap's errors.

Torch evaluates mods under vmap, and translation traces them; both fail for the same mistakes, for the reasons
below.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import linecache
import re
import sys
import traceback
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor

READS_VALUE = (
    "a Python value or branch cannot depend on a tensor, which differs at every element "
    "(use torch.where, & | ~, or capture a Python number)"
)
IS_RANDOM = "random numbers differ at every evaluation"
HAS_DATA_DEPENDENT_SHAPE = "the shape of its result depends on data"

MUST_NOT_WRITE = (
    "a mod must not write to what it captures, as it runs for pairs in any order and any number of times"
)
SIGNATURES = {"mask_mod": "(b, h, q_idx, kv_idx)", "score_mod": "(score, b, h, q_idx, kv_idx)"}

_SINGLE = "it is called for single elements (use operations on elements, as == for torch.equal)"

# Pattern of torch.vmap's error message -> (operation in the user's function, reason why it fails).
_REFUSALS = {
    r"inplace arithmetic|doesn't match the broadcast shape": (
        "an edit in place by a value that differs at more pairs than the edited tensor",
        "it has no room for the results; write x = x + y for x += y",
    ),
    r"is not possible because there exists a Tensor `other`": (
        "a write to a tensor that all pairs share",
        f"{MUST_NOT_WRITE} (return the value; for a tensor made inside use torch.where)",
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
    """Return file:line of a function's definition, or a description of any other callable."""
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
    """Return whether a file is user code: not torch's, not generated, and not the part of this package that
    evaluates mods."""
    return not filename.startswith(_LIBRARY_PATHS) and "/contextlib.py" not in filename


def user_line(default: str = "an unknown line", callers: Container[CodeType] = ()) -> str:
    """Return file:line of the innermost stack frame in user code, else ``default``. callers: code of frames
    at which the search ends, since their callers run something else"""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        if frame.f_code in callers:
            break
        if _is_user_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{line}"
    return default


class Operands(NamedTuple):
    """The operands of an operation in its source.

    literals: (type, repr) of numbers
    names:    others that may be captured numbers: names, attributes, items and calls of functions; None
        without the source
    """

    literals: frozenset[tuple[type, str]] = frozenset()
    names: tuple[str, ...] | None = None

    def may_be_captured(self, number: int | float) -> bool:
        """Return whether an operand that has the value of a captured number may be that number."""
        return self.names != () and (type(number), repr(number)) not in self.literals


def user_operands(callers: Container[CodeType] = ()) -> Operands:
    """Return the operands of the expression that user code evaluates now; none without its source. callers:
    as in :func:`user_line`"""
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        if frame.f_code in callers:
            break
        if _is_user_file(frame.f_code.co_filename):
            return _operands(_source_of(frame.f_code, frame.f_lasti))
    return Operands()


def _source_of(code: CodeType, instruction: int) -> str:
    """Return the source of an instruction at a place in bytes; "" if it is unknown."""
    place = next(itertools.islice(code.co_positions(), instruction // 2, None), (None,) * 4)
    lines = linecache.getlines(code.co_filename)
    first, last, begin, end = place
    if first is None or last is None or begin is None or end is None or last > len(lines):
        return ""
    own = [line.encode() for line in lines[first - 1 : last]]
    own[-1] = own[-1][:end]
    own[0] = own[0][begin:]
    return b"".join(own).decode()


def _operands(source: str) -> Operands:
    """Return the operands of an expression or augmented assignment.

    >>> _operands("q - kv >= -1"), _operands("torch.where(keep, score, config.floor)")[1]
    (Operands(literals=frozenset({(<class 'int'>, '-1')}), names=()), ('keep', 'score', 'config.floor'))
    """
    try:
        tree: ast.AST = ast.parse(f"({source})", mode="eval").body
    except SyntaxError:
        try:
            tree = ast.parse(source.strip()).body[0]
        except (SyntaxError, IndexError):
            return Operands()
    parts: list[ast.expr] = []
    for _, value in ast.iter_fields(tree):
        parts += [x for x in (value if isinstance(value, list) else [value]) if isinstance(x, ast.expr)]
    parts += [word.value for word in getattr(tree, "keywords", ())]
    literals = set()
    for part in parts:
        with suppress(ValueError, TypeError, SyntaxError):  # it is not a literal
            value = ast.literal_eval(part)
            literals.add((type(value), repr(value)))
    own = parts[1:] if isinstance(tree, ast.Call) else parts
    return Operands(frozenset(literals), tuple([ast.unparse(x) for x in own if _may_be_number(x)]))


def _may_be_number(operand: ast.expr) -> bool:
    if isinstance(operand, ast.Call):
        return isinstance(operand.func, ast.Name)  # as float(n)
    return isinstance(operand, ast.Name | ast.Attribute | ast.Subscript)


def last_user_line(stack: Sequence[traceback.FrameSummary], default: str) -> str:
    """Return file:line of the innermost traceback frame in user code, else ``default``."""
    lines = [f"{frame.filename}:{frame.lineno}" for frame in stack if _is_user_file(frame.filename)]
    return lines[-1] if lines else default


def write_refused(mask_mod: Any, error: Exception) -> TypeError:
    """Return the error for a mask_mod that writes to a captured tensor. error: names the operation"""
    line = last_user_line(traceback.extract_tb(error.__traceback__), origin(mask_mod))
    return TypeError(
        f"the mask_mod at {line} uses {error}: {MUST_NOT_WRITE}. Return the value, or edit the tensor "
        "between calls"
    )


def call_mod(fn: Callable[..., Any], kind: str, *arguments: Any) -> Any:
    """Call a user's function; raise TypeError that names the signature of its ``kind`` if it has another."""
    try:
        return fn(*arguments)
    except TypeError as error:
        if kind in SIGNATURES and (names := _other_signature(fn, len(arguments))) is not None:
            needed = " and ".join(f"a {name} takes {text}" for name, text in SIGNATURES.items())
            raise TypeError(f"the {kind} at {origin(fn)} takes ({names}); {needed}, by position") from error
        raise


def _other_signature(fn: Callable[..., Any], count: int) -> str | None:
    """Return the parameters of a function that cannot be called with ``count`` positional arguments."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a builtin
        return None
    try:
        signature.bind(*range(count))
    except TypeError:
        bare = (p.replace(annotation=p.empty) for p in signature.parameters.values())
        return str(inspect.Signature([*bare]))[1:-1]
    return None


def check_result(out: Any, fn: Any, kind: str = "mask_mod", ndim: int = 0) -> Tensor:
    """Return the result of a user's function; raise TypeError unless it is a tensor of at most ``ndim``
    dimensions, of bool for a mask_mod and of numbers for a score_mod.

    kind: of the function, "mask_mod", "score_mod", or another name for messages. ndim: of the arguments, 0
    for scalars
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
            f"the {kind} at {origin(fn)} returns a tensor {list(out.shape)}; one value is needed for 0-d b, "
            "h, q_idx and kv_idx: index captured tensors by these, or reduce the result"
        )
    if is_mask and out.dtype != torch.bool:
        raise TypeError(
            f"the mask_mod at {origin(fn)} returns {out.dtype}; a mask_mod must return bool: compare, as "
            "q_idx >= kv_idx, or call .bool()"
        )
    if kind == "score_mod" and out.dtype == torch.bool:
        raise TypeError(
            f"the score_mod at {origin(fn)} returns torch.bool; a score_mod must return a number: hide pairs "
            "by a mask, create_block_mask(mask_mod, ...), or by torch.where(visible, score, -math.inf)"
        )
    return out


@contextmanager
def explained_errors(fn: Callable[..., Any], kind: str) -> Iterator[None]:
    """Context that replaces torch.vmap's errors about a user's function by a TypeError with the user's line
    and the remedy. Other errors are passed on."""
    try:
        yield
    except RuntimeError as error:
        for pattern, (operation, reason) in _REFUSALS.items():
            if re.search(pattern, str(error)):
                line = last_user_line(traceback.extract_tb(error.__traceback__), origin(fn))
                raise TypeError(f"the {kind} at {line} uses {operation}: {reason}") from error
        raise
