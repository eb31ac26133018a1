"""Parser of masks and score_mods written as text: mask expressions, document lengths, numbers of tokens.

An expression is parsed with Python's own parser, and its mask built from the syntax tree; it is never run.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from tritoncp.core.checked_json import parse_json
from tritoncp.core.tracing import Mod
from tritoncp.masks.closed_forms import (
    causal,
    document,
    prefix_lm,
    sliding_window,
)
from tritoncp.masks.mask_mod import MaskFn, and_masks, not_, or_masks
from tritoncp.masks.named import alibi, softcap

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
OPERATORS = {ast.BitAnd: and_masks, ast.BitOr: or_masks, ast.And: and_masks, ast.Or: or_masks}
Lengths = Sequence[int] | Sequence[Sequence[int]]
MAX_TOKENS = 1 << 40  # of any number of tokens: far from the end of int64, and no sequence is as long
MAX_DOCUMENT_TOKENS = 1 << 27  # tokens: a mask of documents holds a number for each
MASK_ARGUMENTS = ("b", "h", "q_idx", "kv_idx")
SCORE_ARGUMENTS = ("score", *MASK_ARGUMENTS)


class ExpressionError(ValueError):
    """An error in an expression. Its message shows the expression and marks text[start:end]."""

    def __init__(self, message: str, text: str, start: int, end: int) -> None:
        first = max(0, start - 60) if len(text) > 160 else 0  # of a long text, show the part around the mark
        text, start, end = text[first : first + 160], start - first, min(end - first, 160)
        super().__init__(f"{message}\n    {text}\n    {' ' * start}{'^' * max(1, end - start)}")


def brief(text: str, most: int = 80) -> str:
    """Return the repr of a text, shortened to ``most`` characters for a message.

    >>> brief("ab"), brief("9" * 100, 4)
    ("'ab'", "'9999'...")
    """
    return repr(text) if len(text) <= most else f"{text[:most]!r}..."


def count(text: str) -> int:
    """Parse a number of tokens, with a unit of 1024, 1024^2 or 1024^3. Raises ValueError for other text.

    >>> count("128K"), count("1M"), count("1000"), count("0.5M")
    (131072, 1048576, 1000, 524288)
    """
    match = re.fullmatch(r"(\d{1,40}(?:\.\d{1,40})?)([KMG]?)", text.strip(), re.IGNORECASE | re.ASCII)
    size = Fraction(match[1]) * UNITS.get(match[2].upper(), 1) if match else Fraction(1, 2)
    if size.denominator != 1:
        raise ValueError(f"{brief(text)} is no whole number of tokens, as 1000, 128K or 1M")
    if size > MAX_TOKENS:
        raise ValueError(f"{brief(text)} is more than any sequence has; at most 1024G tokens can be counted")
    return int(size)


def lengths(text: str) -> Lengths:
    """Parse the numbers of tokens of documents: JSON (nested for several batch rows), numbers separated by
    spaces or commas, or the name of a file with either.

    >>> lengths("1K, 24 1000"), lengths("[[3, 5], [8]]")
    ([1024, 24, 1000], [[3, 5], [8]])
    """
    if len(text) < 4096 and os.path.isfile(text):
        try:
            text = (path := Path(text)).read_text()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} holds no text: {error}") from None
    if text.lstrip().startswith("["):
        try:
            value = parse_json(text)
        except ValueError as error:
            raise ValueError(f"the lengths {brief(text)} are no JSON: {error}") from None
        rows = value if value and all(isinstance(row, list) for row in value) else [value]
        if not all(type(n) is int and 0 <= n <= MAX_TOKENS for row in rows for n in row):
            raise ValueError(
                "lengths in JSON are a list of whole numbers, or one such list for each batch row; got "
                + brief(text)
            )
        if not all(rows):
            raise ValueError(f"there are no lengths of documents for a batch row in {brief(text)}")
        return value
    words = [word for word in re.split(r"[\s,]+", text) if word]
    if not words:
        raise ValueError(f"there are no lengths of documents in {brief(text)}")
    try:
        return [count(word) for word in words]
    except ValueError as error:
        raise ValueError(f"{error}; lengths are numbers, JSON, or a file that holds either") from None


def mask_of(text: str, documents: Lengths | None = None) -> MaskFn:
    """Return the mask_mod of an expression, or import that of ``module:function``.

    Names: causal, full, document (of lengths ``documents``, or of its arguments), sliding_window(left,
    right=0) or window, prefix_lm(n) or prefix. Numbers take K and M. Masks are joined with & | ~, or with
    and, or, not.

    >>> mask_of("causal & window(4K) & document", [3, 5])
    and_masks(causal(), sliding_window(4096, 0), document(ids=[8]))
    >>> mask_of("causal & cusal")
    Traceback (most recent call last):
    tritoncp.masks.expressions.ExpressionError: no mask is called 'cusal'; known: causal, document, full, \
prefix, prefix_lm, sliding_window, window
        causal & cusal
                 ^^^^^
    """
    text = re.sub(r"\s", " ", text.strip())
    if is_module_function(text):
        return import_function(text, MASK_ARGUMENTS, "bool")
    text = re.sub(r"\b\d+[KMGkmg]\b", lambda number: str(count(number[0])), text)
    try:
        tree = ast.parse(text, mode="eval")
        return _MaskBuilder(text, documents).mask(tree.body)
    except SyntaxError as error:
        start = max(0, (error.offset or 1) - 1)
        message = "this is no mask expression, as causal & window(1024)"
        raise ExpressionError(message, text, start, start + 1) from None
    except (RecursionError, MemoryError):  # raised by Python's parser for deep nesting
        raise ValueError(f"the mask expression {brief(text)} is nested too deeply") from None


def score_of(text: str, heads: int, device: torch.device | str = "cpu") -> Mod:
    """Return the score_mod of ``softcap``, ``softcap(30)``, ``alibi`` or ``module:function``.

    heads: number of query heads. device: of alibi's slopes; tensors that an imported function captures must
    be there already.

    >>> float(score_of("softcap(30)", 8)(torch.tensor(1e9), 0, 0, 0, 0)), score_of("alibi", 8).__name__
    (30.0, '<lambda>')
    >>> score_of("softcup", 8)
    Traceback (most recent call last):
    tritoncp.masks.expressions.ExpressionError: no score_mod is called so; known: softcap, softcap(CAP), \
alibi, module:function
        softcup
        ^^^^^^^
    """
    name = text.strip()
    if is_module_function(name):
        return import_function(name, SCORE_ARGUMENTS, "score")
    if name == "alibi":
        return alibi(heads, torch.device(device))
    call = re.fullmatch(r"softcap(?:\(\s*(\d{1,12}(?:\.\d{,12})?)\s*\))?", name, re.ASCII)
    if call is None or float(call[1] or 1) == 0:
        names = "softcap, softcap(CAP), alibi, module:function"
        raise ExpressionError(f"no score_mod is called so; known: {names}", text, 0, len(text))
    return softcap(float(call[1])) if call[1] else softcap()


def is_module_function(text: str) -> bool:
    """Whether a text has the form ``module:function``."""
    return re.fullmatch(r"[\w.]+:[\w.]+", text.strip()) is not None


def import_function(name: str, arguments: Sequence[str], result: str) -> Any:
    """Import the function of ``module:function``, also from the current directory. It is not called.

    arguments, result: names of the arguments and of the result that the function must have, for messages

    Raises ValueError if the import fails, or if the function takes another number of arguments.
    """
    kind = "score_mod" if "score" in arguments else "mask_mod"
    usage = f"a {kind} is a function ({', '.join(arguments)}) -> {result}"
    module, _, path = name.partition(":")
    sys.path.insert(0, "")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is the command's own
            function: Any = importlib.import_module(module)
        for part in path.split("."):
            function = getattr(function, part)
    except (Exception, SystemExit) as error:  # an imported module can raise any exception
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(f"{name} cannot be imported ({cause}); {usage}, as module:function") from error
    finally:
        with contextlib.suppress(ValueError):  # the module edited sys.path itself
            sys.path.remove("")
    if type(function).__module__.partition(".")[0] == "triton":
        return function  # its use raises an error that explains it
    if not callable(function) or isinstance(function, type):
        raise ValueError(f"{name} is {type(function).__name__}, not a {kind}; {usage}")
    parameters = _parameters(function)
    if parameters is None:
        raise ValueError(f"{name} has no signature to check; {usage}, in Python")
    if len(parameters) != len(arguments):
        raise ValueError(f"{name} takes ({', '.join(parameters)}); {usage}")
    return function


def _parameters(function: Any) -> list[str] | None:
    """Names of the arguments that a function requires; None where it has no signature."""
    function = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variable]


def _operands(node: ast.BinOp | ast.BoolOp) -> list[ast.expr]:
    """List the operands of ``a & b & c``, which Python parses as two nested operations."""
    if isinstance(node, ast.BoolOp):
        return node.values
    if isinstance(node.left, ast.BinOp) and type(node.left.op) is type(node.op):
        return [*_operands(node.left), node.right]
    return [node.left, node.right]


class _MaskBuilder:
    """Builds a mask_mod from a syntax tree."""

    def __init__(self, text: str, documents: Lengths | None) -> None:
        self.text, self.documents = text, documents
        # By name: the constructor, and its arguments for messages.
        self.constructors: dict[str, tuple[Callable[..., MaskFn], str]] = {
            "causal": (causal, " alone"),
            "document": (self._document, " alone, or (lengths...)"),
            "full": (lambda: sliding_window(-1, -1), " alone"),
            "prefix": (prefix_lm, "(n)"),
            "prefix_lm": (prefix_lm, "(n)"),
            "sliding_window": (sliding_window, "(left, right=0)"),
            "window": (sliding_window, "(left, right=0)"),
        }

    def mask(self, node: ast.AST) -> MaskFn:
        """Build the mask_mod of a syntax tree."""
        if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](*map(self.mask, _operands(node)))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert | ast.Not):
            return not_(self.mask(node.operand))
        if isinstance(node, ast.Name):
            return self._call(node, node, (), {})
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            numbers = [self._number(argument) for argument in node.args]
            keywords = {keyword.arg or "**": self._number(keyword.value) for keyword in node.keywords}
            return self._call(node, node.func, numbers, keywords)
        raise self._error("a mask is a name, a call of one, or masks joined with & | ~", node)

    def _call(
        self, node: ast.AST, name: ast.Name, numbers: Sequence[int], keywords: dict[str, int]
    ) -> MaskFn:
        """Build the closed form that a name calls; mistakes raise ExpressionError at ``node``."""
        if name.id not in self.constructors:
            raise self._error(
                f"no mask is called {name.id!r}; known: {', '.join(sorted(self.constructors))}", name
            )
        constructor, arguments = self.constructors[name.id]
        try:
            return constructor(*numbers, **keywords)
        except TypeError:
            raise self._error(f"it is {name.id}{arguments}", node) from None
        except ValueError as error:
            raise self._error(str(error), node) from None

    def _document(self, *lengths: int) -> MaskFn:
        """Build the document mask of the lengths in the expression, else of ``self.documents``."""
        documents: Any = lengths or self.documents
        if sum(lengths) > MAX_DOCUMENT_TOKENS:
            raise ValueError(f"documents of more than {MAX_DOCUMENT_TOKENS} tokens together are not planned")
        if documents:
            return document(lengths=list(documents))
        raise ValueError("document needs to know the documents: --lengths, or document(4096, 8192, ...)")

    def _number(self, node: ast.expr) -> int:
        """Read a whole number."""
        try:
            value = ast.literal_eval(node)
        except (TypeError, ValueError):
            value = None
        if type(value) is not int:
            raise self._error("this has to be a whole number, as 1024 or 4K", node)
        if value > MAX_TOKENS:
            raise self._error("this is more tokens than any sequence has; -1 leaves a window open", node)
        return value

    def _error(self, message: str, node: Any) -> ExpressionError:
        """Make an error that marks the text of ``node``."""
        offsets = (node.col_offset, node.end_col_offset)  # in bytes
        start, end = (len(self.text.encode()[:offset].decode()) for offset in offsets)
        return ExpressionError(message, self.text, start, end)
