"""A traced mask_mod as an expression: "and" and "or" of comparisons and predicates.

``(q >= kv) & (doc[q] == doc[kv])`` is ``Both((Relation("ge", q, kv), Relation("eq", doc[q], doc[kv])))``. If
each side of a comparison depends on the query alone or on the key alone, the visible keys of a row are
intervals (`row_intervals`). A comparison of any other form is a predicate of pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from tritoncp.masks.classification.interval_arithmetic import COPIES, is_integer
from tritoncp.mods.tracing import SHAPE_ONLY, dtype_of, operation_name

BATCH, HEAD, QUERY, KEY, DISTANCE = (1 << place for place in range(5))  # DISTANCE: q_idx - kv_idx
PAIR = QUERY | KEY
Term = tuple[int, Any]  # (sign, node or Python number)


class Both(NamedTuple):
    """Pairs for which every part holds."""

    parts: tuple[Expression, ...]


class Either(NamedTuple):
    """Pairs for which any part holds."""

    parts: tuple[Expression, ...]


class Predicate(NamedTuple):
    """Pairs for which a value of the graph is true; false where ``holds`` is False.

    of: QUERY, KEY or DISTANCE if the value depends on nothing else besides b and h; PAIR if it does
    """

    value: fx.Node | bool
    holds: bool
    of: int


class Relation(NamedTuple):
    """Pairs for which ``op`` holds between a sum that depends on the query and one that depends on the key.

    ``q - kv < 4`` is ``Relation("lt", ((1, q), (-1, 4)), ((1, kv),), limits)``: q - 4 < kv.

    op:     "lt", "le", "gt", "ge", "eq" or "ne"
    limits: range of the integer types in which the mask_mod computes these sums, outside of which they wrap
    """

    op: str
    query: tuple[Term, ...]
    key: tuple[Term, ...]
    limits: tuple[int, int]


Expression = Both | Either | Predicate | Relation
NEGATED = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}
MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}  # a op b = b mirrored a
_AND, _OR, _XOR, _NOT = (
    (f"bitwise_{name}", f"__{name}__", f"logical_{name}") for name in ("and", "or", "xor", "not")
)
WIDEST = -(1 << 61), 1 << 61  # sums in this range have differences and negatives that do not wrap


class _NotSeparable(Exception):
    """A comparison whose sides cannot be separated into query and key."""


class Reader:
    """Reads expressions off the graph of a mask_mod.

    depends: what each node depends on
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        self.graph = graph
        self.depends: dict[fx.Node, int] = {}
        indices = [node for node in graph.graph.nodes if node.op == "placeholder"]
        for node in graph.graph.nodes:
            depends = 0
            if node in indices:
                depends = (BATCH, HEAD, QUERY, KEY)[indices.index(node)]
            elif is_distance(node, indices):
                depends = DISTANCE
            elif operation_name(node) not in SHAPE_ONLY:
                for operand in node.all_input_nodes:
                    depends |= self.depends[operand]
            self.depends[node] = depends

    def read(self, value: Any, holds: bool = True) -> Expression:
        """Return the expression of the pairs for which a value is true, or false if ``holds`` is False."""
        side = self._side(value)
        if side == PAIR:
            try:
                return self._read_pairs(value, holds)
            except _NotSeparable:  # it is bounded over tiles, or evaluated at its pairs
                return Predicate(value, holds, PAIR)
        return Predicate(value, holds, side)

    def _read_pairs(self, value: fx.Node, holds: bool) -> Expression:
        name, args = operation_name(value), value.args
        of_bools = all(dtype_of(arg) is torch.bool for arg in value.all_input_nodes)
        if name in NEGATED:
            try:
                return self._compare(name if holds else NEGATED[name], args[0], args[1])
            except _NotSeparable:
                if not of_bools or name not in ("eq", "ne"):
                    raise
            name, holds = "logical_xor", holds == (name == "ne")
        if dtype_of(value) is not torch.bool or not of_bools:
            raise _NotSeparable
        if name in COPIES or name in _NOT:
            return self.read(args[0], holds == (name in COPIES))
        if name in (*_AND, "mul"):
            return _join(holds, [self.read(arg, holds) for arg in args])
        if name in (*_OR, "add"):
            return _join(not holds, [self.read(arg, holds) for arg in args[:2]])
        if name in _XOR:
            return self._select(args[0], self.read(args[1], not holds), self.read(args[1], holds))
        if name == "where":
            return self._select(args[0], self.read(args[1], holds), self.read(args[2], holds))
        raise _NotSeparable

    def _select(self, condition: Any, where_true: Expression, where_false: Expression) -> Expression:
        """Return the pairs of one expression where a condition is true, and of another where it is false."""
        chosen = [
            _join(True, [self.read(condition), where_true]),
            _join(True, [self.read(condition, False), where_false]),
        ]
        return _join(False, chosen)

    def _compare(self, op: str, left: Any, right: Any) -> Expression:
        """Return the expression of ``left op right``."""
        for a, b, sign in ((left, right, op), (right, left, MIRRORED[op])):
            if self._side(a) in (PAIR, DISTANCE) and _is_whole(a) and _is_whole(b):
                parts = self._split(sign, a, b)
                if parts is not None:
                    return parts
        return _separate(op, self.depends, [(1, left), *((-1, right),)])

    def _split(self, op: str, a: fx.Node, b: Any) -> Expression | None:
        """Return the expression of ``a op b`` where a is an absolute value, a minimum or maximum, or a choice
        (where)."""
        name, args, is_order = operation_name(a), a.args, op not in ("eq", "ne")
        below = op in ("lt", "le")
        if name == "abs" and is_order:  # |x| < b is x < b and -x < b
            signed = [_separate(op, self.depends, [(sign, args[0]), (-1, b)]) for sign in (1, -1)]
            return _join(below, signed)
        if name in ("maximum", "minimum") and is_order:
            return _join(below == (name == "maximum"), [self._compare(op, arg, b) for arg in args])
        if name == "where" and all(map(_is_whole, args[1:])):
            return self._select(args[0], *(self._compare(op, arg, b) for arg in args[1:]))
        return None

    def _side(self, value: Any) -> int:
        depends = self.depends[value] & ~(BATCH | HEAD) if isinstance(value, fx.Node) else 0
        return (depends if depends in (KEY, DISTANCE) else PAIR) if depends & ~QUERY else QUERY


def leaves(expression: Expression) -> Iterator[Predicate | Relation]:
    """List the predicates and comparisons of an expression."""
    if isinstance(expression, Both | Either):
        for part in expression.parts:
            yield from leaves(part)
    else:
        yield expression


def is_distance(node: fx.Node, indices: Sequence[fx.Node]) -> bool:
    """Return whether a node is q_idx - kv_idx."""
    return operation_name(node) == "sub" and node.args == tuple(indices[2:4]) and not node.kwargs


def _join(every: bool, parts: Sequence[Expression]) -> Expression:
    """Join parts as Both or Either, and flatten nested ones of the same kind."""
    kind = Both if every else Either
    flat = [inner for part in parts for inner in (part.parts if isinstance(part, kind) else (part,))]
    return kind(tuple(flat)) if len(flat) > 1 else flat[0]


def _separate(op: str, depends: dict[fx.Node, int], terms: Sequence[Term]) -> Expression:
    """Move the terms of ``sum of terms op 0`` so that one side depends on the query and the other on the
    key."""
    limits = [WIDEST]
    split = _split_sums(terms, depends, limits)
    side = [(depends[x] if isinstance(x, fx.Node) else 0) & ~(BATCH | HEAD) for _, x in split]
    if not set(side) <= {0, QUERY, KEY} or KEY not in side:
        raise _NotSeparable
    query = [term for term, of in zip(split, side) if of != KEY]
    key = [(-sign, x) for (sign, x), of in zip(split, side) if of == KEY]
    if not all(_is_whole(x) for _, x in split):  # to move a real term would round it
        if len(query) != 1 or len(key) != 1:
            raise _NotSeparable
        if query[0][0] < 0:  # -query op -key
            op, query, key = MIRRORED[op], [(1, query[0][1])], [(1, key[0][1])]
    return Relation(
        op, tuple(query), tuple(key), (max(low for low, _ in limits), min(high for _, high in limits))
    )


def _split_sums(
    terms: Sequence[Term], depends: dict[fx.Node, int], limits: list[tuple[int, int]]
) -> list[Term]:
    """Split sums that depend on query and key into their terms; append the range of each sum's type to
    ``limits``."""
    out: list[Term] = []
    for sign, x in terms:
        is_pair = isinstance(x, fx.Node) and depends[x] & ~(BATCH | HEAD) not in (0, QUERY, KEY)
        if not is_pair or not _is_whole(x):
            out.append((sign, x))
            continue
        name, args = operation_name(x), x.args
        signs = {"add": (sign, sign), "sub": (sign, -sign), "rsub": (-sign, sign), "neg": (-sign,)}.get(
            name, (sign,) if name in COPIES else ()
        )
        scaled = len(args) > 2 or "alpha" in x.kwargs
        if len(signs) != len(args) or scaled or not all(map(_is_whole, args)) or dtype_of(x) is torch.bool:
            raise _NotSeparable
        for dtype in map(dtype_of, (x, *x.all_input_nodes)):
            if dtype is not None and dtype is not torch.bool:
                limits.append((torch.iinfo(dtype).min, torch.iinfo(dtype).max))
        out += _split_sums(list(zip(signs, args)), depends, limits)
    return out


def _is_whole(x: Any) -> bool:
    """Return whether a value is an integer or a bool."""
    if isinstance(x, fx.Node):
        dtype = dtype_of(x)
        return dtype is not None and (dtype is torch.bool or is_integer(dtype))
    return isinstance(x, int)
