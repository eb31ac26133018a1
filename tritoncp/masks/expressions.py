"""Parser of masks and score_mods written as text: mask expressions, lengths of documents, sizes in tokens.

An expression is parsed with Python's parser, and its mask built from the syntax tree; it is never run.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from tritoncp.core.files import parse_json
from tritoncp.masks.closed_forms import causal, document, prefix_lm, sliding_window
from tritoncp.masks.mask_mod import MaskFn, and_masks, not_, or_masks
from tritoncp.masks.named import alibi, softcap
from tritoncp.mods.tracing import Mod

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
OPERATORS = {ast.BitAnd: and_masks, ast.BitOr: or_masks, ast.And: and_masks, ast.Or: or_masks}
Lengths = Sequence[int] | Sequence[Sequence[int]]
MAX_TOKENS = 1 << 40  # limit of a number of tokens, far below the end of int64
MAX_DOCUMENT_TOKENS = 1 << 27  # limit of tokens in documents, since a document mask holds a number per token
MASK_ARGUMENTS = ("b", "h", "q_idx", "kv_idx")
SCORE_ARGUMENTS = ("score", *MASK_ARGUMENTS)
CONSTRUCTORS: dict[str, Callable[..., MaskFn]] = {
    "causal": causal, "full": lambda: sliding_window(-1, -1), "prefix": prefix_lm, "prefix_lm": prefix_lm,
    "sliding_window": sliding_window, "window": sliding_window,
}  # fmt: skip


def brief(text: str, most: int = 80) -> str:
    """Return the repr of a text, shortened to ``most`` characters for a message.

    >>> brief("ab", 2), brief("9" * 100, 4), len(brief("9" * 81))
    ("'ab'", "'9999'...", 85)
    """
    return repr(text) if len(text) <= most else f"{text[:most]!r}..."


def count(text: str) -> int:
    """Parse a number of tokens, with a unit of 1024, 1024^2 or 1024^3. Raises ValueError for other text.

    >>> count("128K"), count("1M"), count("1000"), count("0.5M")
    (131072, 1048576, 1000, 524288)
    """
    match = re.fullmatch(r"(\d{1,40}(?:\.\d{1,40})?)([KMG]?)", text.strip(), re.IGNORECASE | re.ASCII)
    size = Fraction(match[1]) * UNITS[match[2].upper()] if match else Fraction(1, 2)
    if size.denominator != 1:
        raise ValueError(f"{brief(text)} is no whole number of tokens, as 1000, 128K or 1M")
    if size > MAX_TOKENS:
        raise ValueError(f"{brief(text)} is more tokens than any sequence has; at most 1024G can be counted")
    return int(size)


def lengths(text: str) -> Lengths:
    """Parse the lengths of documents: JSON (nested for several batch rows), numbers separated by
    spaces or commas, or the name of a file with either.

    >>> lengths("1K, 24 1000"), lengths("[[3, 5], [8]]")
    ([1024, 24, 1000], [[3, 5], [8]])
    """
    try:
        text = Path(text).read_text() if len(text) < 4096 and os.path.isfile(text) else text
    except UnicodeDecodeError as error:
        raise ValueError(f"{text} holds no text: {error}") from None
    if re.search(r"[/\\]|\.[A-Za-z]+$", text) and not os.path.exists(text):
        raise ValueError(
            f"there is no file {brief(text)}; lengths are numbers, JSON, or a file that holds either"
        )
    is_json = text.lstrip().startswith("[")
    try:
        value: Any = (
            parse_json(text) if is_json else [count(word) for word in re.split(r"[\s,]+", text) if word]
        )
    except ValueError as error:
        raise ValueError(
            f"{error}; lengths are numbers, JSON, or a file that holds either, not {brief(text)}"
        ) from None
    rows = value if value and all(isinstance(row, list) for row in value) else [value]
    if not all(rows):
        raise ValueError(f"there are no lengths of documents for a batch row in {brief(text)}")
    if not all(type(n) is int and 0 <= n <= MAX_TOKENS for row in rows for n in row):
        raise ValueError(f"lengths are whole numbers, or a list of them for each batch row: {brief(text)}")
    return value


def mask_of(text: str, documents: Lengths | None = None) -> MaskFn:
    """Parse an expression as a mask_mod, or import the mask_mod ``module:function``.

    Names: causal, full, document (with ``documents`` as lengths, or with arguments), sliding_window(left,
    right=0) or window, prefix_lm(n) or prefix. Numbers take K and M. Masks are joined with & | ~, or with
    and, or, not.

    >>> mask_of("causal & window(4K) & document", [3, 5])
    and_masks(and_masks(causal(), sliding_window(4096, 0)), document(ids=[8]))
    >>> mask_of("causal & cusal")
    Traceback (most recent call last):
    ValueError: no mask is called 'cusal'; pass one of causal, document, full, prefix, prefix_lm, \
sliding_window, window
    """
    text = text.strip()
    if is_module_function(text):
        return import_function(text, MASK_ARGUMENTS, "bool")
    try:
        numbered = re.sub(r"\b\d+[KMGkmg]\b", lambda number: str(count(number[0])), text)
        return _mask_of_node(ast.parse(re.sub(r"\s", " ", numbered), mode="eval").body, documents)
    except SyntaxError:
        raise ValueError(
            f"{brief(text)} is not a mask expression; pass for example causal & window(1024)"
        ) from None
    except (RecursionError, MemoryError):  # raised by Python's parser for deep nesting
        raise ValueError(f"the mask expression {brief(text)} is nested too deeply") from None


def _mask_of_node(node: ast.expr, documents: Lengths | None) -> MaskFn:
    """Build the mask_mod of a syntax tree. Raises ValueError that names the part which is not a mask."""
    if isinstance(node, ast.BoolOp | ast.BinOp) and type(node.op) in OPERATORS:
        parts = node.values if isinstance(node, ast.BoolOp) else (node.left, node.right)
        return OPERATORS[type(node.op)](*(_mask_of_node(part, documents) for part in parts))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert | ast.Not):
        return not_(_mask_of_node(node.operand, documents))
    source, function = brief(ast.unparse(node)), node.func if isinstance(node, ast.Call) else node
    if not isinstance(function, ast.Name):
        raise ValueError(f"{source} is no mask: a name, a call of one, or masks joined with & | ~")
    known = {**CONSTRUCTORS, "document": lambda *lengths: _documents(lengths or documents)}
    if function.id not in known:
        raise ValueError(f"no mask is called {function.id!r}; pass one of {', '.join(sorted(known))}")
    arguments = node.args if isinstance(node, ast.Call) else []
    keywords = node.keywords if isinstance(node, ast.Call) else []
    try:
        numbers = [_number(argument) for argument in arguments]
        return known[function.id](*numbers, **{word.arg or "": _number(word.value) for word in keywords})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source}: {error}") from None


def _documents(lengths: Any) -> MaskFn:
    """Build the document mask of these lengths."""
    if not lengths:
        raise ValueError("document needs to know the documents: --lengths, or document(4096, 8192, ...)")
    if type(lengths[0]) is int and sum(lengths) > MAX_DOCUMENT_TOKENS:
        raise ValueError(f"documents of more than {MAX_DOCUMENT_TOKENS} tokens together are not planned")
    return document(lengths=list(lengths))


def _number(node: ast.expr) -> int:
    """Read a whole number."""
    with contextlib.suppress(TypeError, ValueError):
        value = ast.literal_eval(node)
        if type(value) is int and value <= MAX_TOKENS:
            return value
    raise ValueError("its arguments are whole numbers, as 1024 or 4K, of tokens that a sequence can have")


def score_of(text: str, heads: int, device: torch.device | str = "cpu") -> Mod:
    """Return the score_mod of ``softcap``, ``softcap(30)``, ``alibi`` or ``module:function``.

    heads: number of query heads. device: of alibi's slopes; tensors that an imported function captures must
    be there already.

    >>> float(score_of("softcap(30)", 8)(torch.tensor(1e9), 0, 0, 0, 0)), score_of("alibi", 8).__name__
    (30.0, '<lambda>')
    >>> score_of("softcup", 8)
    Traceback (most recent call last):
    ValueError: no score_mod is called 'softcup'; pass softcap, softcap(CAP), alibi or module:function
    """
    name = text.strip()
    if is_module_function(name):
        return import_function(name, SCORE_ARGUMENTS, "score")
    if name == "alibi":
        return alibi(heads, torch.device(device))
    call = re.fullmatch(r"softcap(?:\(\s*(\d{1,12}(?:\.\d{,12})?)\s*\))?", name, re.ASCII)
    if call is None or float(call[1] or 1) == 0:
        names = "softcap, softcap(CAP), alibi or module:function"
        raise ValueError(f"no score_mod is called {brief(text)}; pass {names}")
    return softcap(float(call[1])) if call[1] else softcap()


def is_module_function(text: str) -> bool:
    """Return whether a text has the form ``module:function``."""
    return re.fullmatch(r"[\w.]+:[\w.]+", text.strip()) is not None


def import_function(name: str, arguments: Sequence[str], result: str) -> Any:
    """Import the function of ``module:function``, also from the current directory. It is not called.

    arguments, result: names of the arguments and of the result that the function must have, for messages

    Raises ValueError if the import fails, or if the function takes another number of arguments.
    """
    kind = "score_mod" if "score" in arguments else "mask_mod"
    usage = f"a {kind} is a function ({', '.join(arguments)}) -> {result}"
    sys.path.insert(0, "")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the output of the command
            function: Any = pkgutil.resolve_name(name)
    except (Exception, SystemExit) as error:  # an imported module can raise any exception
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(f"{name} cannot be imported ({cause}); {usage}, as module:function") from error
    finally:
        with contextlib.suppress(ValueError):  # the module edited sys.path itself
            sys.path.remove("")
    if type(function).__module__.partition(".")[0] == "triton":
        return function  # calling it raises an error that explains
    if not callable(function) or isinstance(function, type):
        raise ValueError(f"{name} is {type(function).__name__}, not a {kind}; {usage}")
    plain = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        parameters = inspect.signature(plain).parameters.values()
    except (TypeError, ValueError):
        raise ValueError(f"{name} has no signature to check; {usage}, in Python") from None
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in variable]
    if len(needed) != len(arguments):
        raise ValueError(f"{name} takes ({', '.join(needed)}); {usage}")
    return function
