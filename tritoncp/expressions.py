"""What the command line is told about masks and scores, as text: expressions, lengths of documents, numbers
of tokens.

An expression is read with Python's own parser and put together here, piece by piece; nothing in it is run.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tritoncp.closed_forms import (
    MaskFn,
    and_masks,
    causal,
    document,
    not_,
    or_masks,
    prefix_lm,
    sliding_window,
)
from tritoncp.perf.cases import CAP, Mod, alibi, softcap

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
JOINED = {ast.BitAnd: and_masks, ast.BitOr: or_masks, ast.And: and_masks, ast.Or: or_masks}
Lengths = Sequence[int] | Sequence[Sequence[int]]


class ExpressionError(ValueError):
    """What is wrong with an expression, and a mark under the place."""

    def __init__(self, said: str, text: str, start: int, end: int) -> None:
        super().__init__(f"{said}\n    {text}\n    {' ' * start}{'^' * max(1, end - start)}")


def count(text: str) -> int:
    """
    >>> count("128K"), count("1M"), count("1000"), count("0.5M")
    (131072, 1048576, 1000, 524288)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text.strip(), re.IGNORECASE)
    size = float(found[1]) * UNITS.get(found[2].upper(), 1) if found else 0.0
    if not found or size != int(size):
        raise ValueError(f"{text!r} is no whole number of tokens, as 1000, 128K or 1M")
    return int(size)


def lengths(text: str) -> Lengths:
    """Tokens of each document: JSON (nested for several batch rows) or numbers between spaces and commas, and
    where a file has that name, what it holds.

    >>> lengths("1K, 24 1000"), lengths("[[3, 5], [8]]")
    ([1024, 24, 1000], [[3, 5], [8]])
    """
    path = Path(text)
    if len(text) < 4096 and path.is_file():
        text = path.read_text()
    if text.lstrip().startswith("["):
        found = json.loads(text)
        rows = found if found and all(isinstance(row, list) for row in found) else [found]
        if not all(isinstance(n, int) and n >= 0 for row in rows for n in row):
            raise ValueError(
                "lengths in JSON are a list of whole numbers, or one such list for each batch row"
            )
        return found
    words = [word for word in re.split(r"[\s,]+", text) if word]
    if not words:
        raise ValueError("there are no lengths of documents here")
    try:
        return [count(word) for word in words]
    except ValueError as error:
        raise ValueError(f"{error}; lengths are numbers, JSON, or a file that holds either") from None


def mask_of(text: str, documents: Lengths | None = None) -> MaskFn:
    """The mask_mod that an expression, or ``module:function``, names.

    Names: causal, full, document (its lengths are ``documents``, or given to it), sliding_window(left,
    right=0) or window, prefix_lm(n) or prefix. Numbers take K and M. What is named is joined with & | ~, or
    with and, or, not.

    >>> mask_of("causal & window(4K) & document", [3, 5])
    and_masks(causal(), sliding_window(4096, 0), document(ids=[8]))
    >>> mask_of("causal & cusal")
    Traceback (most recent call last):
    tritoncp.expressions.ExpressionError: no mask is called 'cusal'; known: causal, document, full, prefix, \
prefix_lm, sliding_window, window
        causal & cusal
                 ^^^^^
    """
    if named(text):
        return imported(text.strip(), "mask_mod (b, h, q_idx, kv_idx) -> bool")
    plain = re.sub(r"\b(\d+)([KMG])\b", r"\2\1", text)  # 4K as a name of the same length: K4
    try:
        tree = ast.parse(plain.replace("\n", " "), mode="eval")
    except SyntaxError as error:
        at = max(0, (error.offset or 1) - 1)
        raise ExpressionError(
            "this is no mask expression, as causal & window(1024)", text, at, at + 1
        ) from None
    return _Reader(text, documents).mask(tree.body)


def score_of(text: str, heads: int, device: torch.device | str = "cpu") -> Mod:
    """The score_mod that ``softcap``, ``softcap(30)``, ``alibi`` or ``module:function`` names, for so many
    query heads.  A function's captured tensors have to be on the device already.

    >>> float(score_of("softcap(30)", 8)(torch.tensor(1e9), 0, 0, 0, 0)), score_of("alibi", 8).__name__
    (30.0, '<lambda>')
    >>> score_of("softcup", 8)
    Traceback (most recent call last):
    tritoncp.expressions.ExpressionError: no score_mod is called so; known: softcap, softcap(CAP), alibi, \
module:function
        softcup
        ^^^^^^^
    """
    given = text.strip()
    if named(given):
        return imported(given, "score_mod (score, b, h, q_idx, kv_idx) -> score")
    if given == "alibi":
        return alibi(heads, torch.device(device))
    cap = re.fullmatch(r"softcap(?:\(\s*(\d+(?:\.\d*)?)\s*\))?", given)
    if cap is None or float(cap[1] or CAP) == 0:
        known = "softcap, softcap(CAP), alibi, module:function"
        raise ExpressionError(f"no score_mod is called so; known: {known}", text, 0, len(text))
    return softcap(float(cap[1] or CAP))


def named(text: str) -> bool:
    """Whether this is ``module:function``."""
    return re.fullmatch(r"[\w.]+:[\w.]+", text.strip()) is not None


def imported(name: str, what: str) -> Any:
    """The function of ``module:function``, the module as Python finds it from here.

    what: what it has to be, for people
    """
    module, _, path = name.partition(":")
    sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        kind = what.partition(" ")[0]
        raise ValueError(f"{name}: {error}; a {kind} is named as module:function") from error
    finally:
        sys.path.remove("")
    if not callable(found):
        raise ValueError(f"{name} is {type(found).__name__}, not a {what}")
    return found


class _Reader:
    """From a syntax tree to a mask_mod."""

    def __init__(self, text: str, documents: Lengths | None) -> None:
        self.text, self.documents = text, documents
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
        if isinstance(node, ast.BinOp) and type(node.op) in JOINED:
            return JOINED[type(node.op)](*self._flat(node, type(node.op)))
        if isinstance(node, ast.BoolOp):
            return JOINED[type(node.op)](*map(self.mask, node.values))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert | ast.Not):
            return not_(self.mask(node.operand))
        if isinstance(node, ast.Name):
            return self._made(node, node, (), {})
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            named = {each.arg or "**": self._number(each.value) for each in node.keywords}
            return self._made(node, node.func, [self._number(each) for each in node.args], named)
        raise self._wrong("a mask is a name, a call of one, or masks joined with & | ~", node)

    def _flat(self, node: ast.AST, kind: type) -> list[MaskFn]:
        """a & b & c as three parts, not as two of which one is two."""
        if isinstance(node, ast.BinOp) and type(node.op) is kind:
            return [*self._flat(node.left, kind), *self._flat(node.right, kind)]
        return [self.mask(node)]

    def _made(self, node: ast.AST, name: ast.Name, given: Sequence[int], named: dict[str, int]) -> MaskFn:
        if name.id not in self.makers:
            raise self._wrong(f"no mask is called {name.id!r}; known: {', '.join(sorted(self.makers))}", name)
        try:
            return self.makers[name.id](*given, **named)
        except TypeError:
            signs = {"window": "(left, right=0)", "sliding_window": "(left, right=0)", "prefix": "(n)"}
            signs |= {"prefix_lm": "(n)", "document": " alone, or (lengths...)"}
            raise self._wrong(f"it is {name.id}{signs.get(name.id, ' alone')}", node) from None
        except ValueError as error:
            raise self._wrong(str(error), node) from None

    def _document(self, *own: int) -> MaskFn:
        known: Any = own or self.documents
        if known:
            return document(lengths=list(known))
        raise ValueError("document needs to know the documents: --lengths, or document(4096, 8192, ...)")

    def _number(self, node: ast.AST) -> int:
        sign = 1
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            sign, node = -1, node.operand
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return sign * node.value
        if isinstance(node, ast.Name) and re.fullmatch(r"[KMG]\d+", node.id):
            return sign * int(node.id[1:]) * UNITS[node.id[0]]
        raise self._wrong("this has to be a whole number, as 1024 or 4K", node)

    def _wrong(self, said: str, node: Any) -> ExpressionError:
        start, end = (len(self.text.encode()[:at].decode()) for at in (node.col_offset, node.end_col_offset))
        return ExpressionError(said, self.text, start, end)
