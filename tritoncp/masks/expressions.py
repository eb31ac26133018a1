"""Texts of the command line that describe masks and scores: expressions, lengths of documents, numbers of
tokens.

An expression is parsed with Python's own parser, and its mask built from the tree; no code in it is run.
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

from tritoncp.core.checked_json import parse_json, read_bounded
from tritoncp.masks.closed_forms import causal, document, prefix_lm, sliding_window
from tritoncp.masks.mask_mod import MaskFn, and_masks, not_, or_masks
from tritoncp.perf.suite.cases import CAP, Mod, alibi, softcap

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
JOINED = {ast.BitAnd: and_masks, ast.BitOr: or_masks, ast.And: and_masks, ast.Or: or_masks}
Lengths = Sequence[int] | Sequence[Sequence[int]]
MOST_TOKENS = 1 << 40  # of any number of tokens: far from the end of int64, and no sequence is as long
MOST_IN_DOCUMENTS = 1 << 27  # tokens: a mask of documents holds a number for each
MOST_NESTED = 50  # masks within each other in an expression
MASK_ARGUMENTS = ("b", "h", "q_idx", "kv_idx")
SCORE_ARGUMENTS = ("score", *MASK_ARGUMENTS)


class ExpressionError(ValueError):
    """An error in an expression, shown with a mark under its place."""

    def __init__(self, said: str, text: str, start: int, end: int) -> None:
        first = max(0, start - 60) if len(text) > 160 else 0  # of a long text, the part around the place
        text, start, end = text[first : first + 160], start - first, min(end - first, 160)
        super().__init__(f"{said}\n    {text}\n    {' ' * start}{'^' * max(1, end - start)}")


def brief(text: str, most: int = 80) -> str:
    """A text as Python writes it, of which a message can hold the beginning.

    >>> brief("ab"), brief("9" * 100, 4)
    ("'ab'", "'9999'...")
    """
    return repr(text) if len(text) <= most else f"{text[:most]!r}..."


def count(text: str) -> int:
    """
    >>> count("128K"), count("1M"), count("1000"), count("0.5M")
    (131072, 1048576, 1000, 524288)
    """
    match = re.fullmatch(r"(\d{1,40}(?:\.\d{1,40})?)([KMG]?)", text.strip(), re.IGNORECASE | re.ASCII)
    size = Fraction(match[1]) * UNITS.get(match[2].upper(), 1) if match else Fraction(1, 2)
    if size.denominator != 1:
        raise ValueError(f"{brief(text)} is no whole number of tokens, as 1000, 128K or 1M")
    if size > MOST_TOKENS:
        raise ValueError(f"{brief(text)} is more than any sequence has; at most 1024G tokens can be counted")
    return int(size)


def lengths(text: str) -> Lengths:
    """Tokens of each document: JSON (nested for several batch rows), numbers between spaces and commas, or
    the name of a file that holds either.

    >>> lengths("1K, 24 1000"), lengths("[[3, 5], [8]]")
    ([1024, 24, 1000], [[3, 5], [8]])
    """
    if len(text) < 4096 and os.path.isfile(text):
        try:
            text = read_bounded(path := Path(text)).decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} holds no text: {error}") from None
    if text.lstrip().startswith("["):
        try:
            value = parse_json(text)
        except ValueError as error:
            raise ValueError(f"the lengths {brief(text)} are no JSON: {error}") from None
        rows = value if value and all(isinstance(row, list) for row in value) else [value]
        if not all(type(n) is int and 0 <= n <= MOST_TOKENS for row in rows for n in row):
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
    """The mask_mod that an expression, or ``module:function``, names.

    Names: causal, full, document (its lengths are ``documents``, or given to it), sliding_window(left,
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
    if named(text):
        return import_function(text, MASK_ARGUMENTS, "bool")
    plain = re.sub(r"\b(\d+)([KMGkmg])\b", r"\2\1", text)  # 4K as a name of the same length: K4
    try:
        tree = ast.parse(plain, mode="eval")
        return _Reader(text, documents).mask(tree.body)
    except SyntaxError as error:
        at = max(0, (error.offset or 1) - 1)
        raise ExpressionError(
            "this is no mask expression, as causal & window(1024)", text, at, at + 1
        ) from None
    except (RecursionError, MemoryError):  # how Python's parser says so
        raise ValueError(f"the mask expression {brief(text)} is nested too deeply") from None


def score_of(text: str, heads: int, device: torch.device | str = "cpu") -> Mod:
    """The score_mod that ``softcap``, ``softcap(30)``, ``alibi`` or ``module:function`` names, for so many
    query heads.  A function's captured tensors have to be on the device already.

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
    if named(name):
        return import_function(name, SCORE_ARGUMENTS, "score")
    if name == "alibi":
        return alibi(heads, torch.device(device))
    cap = re.fullmatch(r"softcap(?:\(\s*(\d{1,12}(?:\.\d{,12})?)\s*\))?", name, re.ASCII)
    if cap is None or float(cap[1] or CAP) == 0:
        names = "softcap, softcap(CAP), alibi, module:function"
        raise ExpressionError(f"no score_mod is called so; known: {names}", text, 0, len(text))
    return softcap(float(cap[1] or CAP))


def named(text: str) -> bool:
    """Whether this is ``module:function``."""
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
        said = f"{type(error).__name__}: {error}"
        raise ValueError(f"{name} cannot be imported ({said}); {usage}, as module:function") from error
    finally:
        with contextlib.suppress(ValueError):  # the module edited sys.path itself
            sys.path.remove("")
    if type(function).__module__.partition(".")[0] == "triton":
        return function  # its own errors say what is wrong
    if not callable(function) or isinstance(function, type):
        raise ValueError(f"{name} is {type(function).__name__}, not a {kind}; {usage}")
    takes = _parameters(function)
    if takes is None:
        raise ValueError(f"{name} says nothing of its arguments; {usage}, in Python")
    if len(takes) != len(arguments):
        raise ValueError(f"{name} takes ({', '.join(takes)}); {usage}")
    return function


def _parameters(function: Any) -> list[str] | None:
    """Names of the arguments that a function requires; None where it has no signature."""
    function = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        takes = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in takes if one.default is one.empty and one.kind not in variable]


class _Reader:
    """Builds a mask_mod from a syntax tree."""

    def __init__(self, text: str, documents: Lengths | None) -> None:
        self.text, self.documents = text, documents
        self.depth = 0
        self.makers: dict[str, Callable[..., MaskFn]] = {
            "causal": causal,
            "document": self._document,
            "full": lambda: sliding_window(-1, -1),
            "prefix": prefix_lm,
            "prefix_lm": prefix_lm,
            "sliding_window": sliding_window,
            "window": sliding_window,
        }

    def mask(self, node: ast.AST) -> MaskFn:
        if self.depth > MOST_NESTED:
            raise self._wrong(f"masks are nested more than {MOST_NESTED} deep", node)
        self.depth += 1
        try:
            return self._mask(node)
        finally:
            self.depth -= 1

    def _mask(self, node: ast.AST) -> MaskFn:
        if isinstance(node, ast.BinOp) and type(node.op) in JOINED:
            return JOINED[type(node.op)](*self._flat(node, type(node.op)))
        if isinstance(node, ast.BoolOp):
            return JOINED[type(node.op)](*map(self.mask, node.values))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert | ast.Not):
            return not_(self.mask(node.operand))
        if isinstance(node, ast.Name):
            return self._call(node, node, (), {})
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            named = {keyword.arg or "**": self._number(keyword.value) for keyword in node.keywords}
            return self._call(node, node.func, [self._number(argument) for argument in node.args], named)
        raise self._wrong("a mask is a name, a call of one, or masks joined with & | ~", node)

    def _flat(self, node: ast.AST, kind: type) -> list[MaskFn]:
        """The operands of a & b & c as three parts, without nesting."""
        if isinstance(node, ast.BinOp) and type(node.op) is kind:
            return [*self._flat(node.left, kind), *self._flat(node.right, kind)]
        return [self.mask(node)]

    def _call(self, node: ast.AST, name: ast.Name, numbers: Sequence[int], named: dict[str, int]) -> MaskFn:
        if name.id not in self.makers:
            raise self._wrong(f"no mask is called {name.id!r}; known: {', '.join(sorted(self.makers))}", name)
        try:
            return self.makers[name.id](*numbers, **named)
        except TypeError:
            signs = {"window": "(left, right=0)", "sliding_window": "(left, right=0)", "prefix": "(n)"}
            signs |= {"prefix_lm": "(n)", "document": " alone, or (lengths...)"}
            raise self._wrong(f"it is {name.id}{signs.get(name.id, ' alone')}", node) from None
        except ValueError as error:
            raise self._wrong(str(error), node) from None

    def _document(self, *own: int) -> MaskFn:
        documents: Any = own or self.documents
        if sum(own) > MOST_IN_DOCUMENTS:
            raise ValueError(f"documents of more than {MOST_IN_DOCUMENTS} tokens together are not planned")
        if documents:
            return document(lengths=list(documents))
        raise ValueError("document needs to know the documents: --lengths, or document(4096, 8192, ...)")

    def _number(self, node: ast.AST) -> int:
        sign = 1
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            sign, node = -1, node.operand
        value: int | None = None
        if isinstance(node, ast.Constant) and type(node.value) is int:
            value = node.value
        elif isinstance(node, ast.Name) and re.fullmatch(r"[KMGkmg]\d{1,40}", node.id):
            value = int(node.id[1:]) * UNITS[node.id[0].upper()]
        if value is None:
            raise self._wrong("this has to be a whole number, as 1024 or 4K", node)
        if value > MOST_TOKENS:
            raise self._wrong("this is more tokens than any sequence has; -1 leaves a window open", node)
        return sign * value

    def _wrong(self, said: str, node: Any) -> ExpressionError:
        start, end = (len(self.text.encode()[:at].decode()) for at in (node.col_offset, node.end_col_offset))
        return ExpressionError(said, self.text, start, end)
