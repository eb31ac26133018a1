"""The row intervals of a traced mask_mod: its expression, solved with vectors of its values.

A value that depends only on the query is evaluated once for every query, by the mask_mod's operations on the
device of its tensors; likewise for keys, and for distances q_idx - kv_idx. No pair is evaluated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor, fx

from tritoncp.core.host_copy import is_remote, to_host
from tritoncp.masks.classification.expression import (
    BATCH,
    DISTANCE,
    HEAD,
    KEY,
    PAIR,
    QUERY,
    WIDEST,
    Both,
    Either,
    Expression,
    Predicate,
    Reader,
    Relation,
    is_distance,
    leaves,
)
from tritoncp.masks.classification.interval_arithmetic import HALF_TYPES, SUPPORTED_TYPES
from tritoncp.masks.classification.row_intervals import (
    RowIntervals,
    compare,
    find_true,
    find_true_distances,
    keep_rows,
)
from tritoncp.mods.tracing import ancestors

Value = tuple[fx.Node, int]  # a node, and QUERY, KEY or DISTANCE


def solve(expression: Expression, vectors: Vectors, within: RowIntervals) -> RowIntervals | None:
    """Return the keys of ``within`` that an expression shows; None if a row has many intervals, or if finding
    them takes evaluating pairs."""
    if isinstance(expression, Both):
        return _solve_both(sorted(expression.parts, key=_effort), vectors, within)
    if isinstance(expression, Either):
        found: RowIntervals | None = None
        for place, part in enumerate(expression.parts):
            shown = solve(part, vectors, within)
            found = shown if not place or shown is None else found and found.unite(shown)
            if found is None:
                return None
        return found
    if isinstance(expression, Relation):
        sides = vectors.sides(expression)
        return None if sides is None else compare(expression.op, *sides, within)
    if expression.of == PAIR:
        return None
    find = {QUERY: keep_rows, KEY: find_true, DISTANCE: find_true_distances}[expression.of]
    return find(vectors.shown(expression), within)


def _solve_both(parts: list[Expression], vectors: Vectors, within: RowIntervals) -> RowIntervals | None:
    """Return the keys of ``within`` that every part shows. Some parts can be solved only within the result of
    others: positions that restart in every document ascend only within a document."""
    while parts:
        unsolved = []
        for part in parts:
            found = solve(part, vectors, within)
            if found is None:
                unsolved.append(part)
            else:
                within = found
        if len(unsolved) == len(parts):
            return None
        parts = unsolved
    return within


def _effort(expression: Expression) -> int:
    """Return the rank of an expression: the parts of Both are solved in ascending order."""
    if isinstance(expression, Both | Either):
        return 4 + max(map(_effort, expression.parts))
    if isinstance(expression, Relation):
        return {"eq": 2, "ne": 3}.get(expression.op, 1)
    return {QUERY: 0, DISTANCE: 1, KEY: 3, PAIR: 9}[expression.of]


def _values(expression: Expression) -> Iterator[Value]:
    """List the values of queries, keys and distances that an expression is made of."""
    for leaf in leaves(expression):
        if isinstance(leaf, Relation):
            for side, terms in ((QUERY, leaf.query), (KEY, leaf.key)):
                yield from ((x, side) for _, x in terms if isinstance(x, fx.Node))
        elif isinstance(leaf.value, fx.Node) and leaf.of != PAIR:
            yield leaf.value, leaf.of


class Vectors:
    """Values that an expression is made of, for every query, key or distance, on the host.

    reader: of the graph of the mask_mod, which captures tensors of ``device``
    n:      numbers of batch rows and of heads that see different keys
    """

    def __init__(
        self,
        expression: Expression,
        reader: Reader,
        n: tuple[int, int],
        lengths: tuple[int, int],
        device: torch.device,
    ) -> None:
        graph, depends, wanted = reader.graph, reader.depends, set(_values(expression))
        self.graph, self.lengths = graph, lengths
        q_len, kv_len = lengths
        index = {
            QUERY: torch.arange(q_len, device=device),
            KEY: torch.arange(kv_len, device=device),
            DISTANCE: torch.arange(1 - kv_len, q_len, device=device),
        }
        batch = torch.arange(n[0], device=device).repeat_interleave(n[1])
        head = torch.arange(n[1], device=device).repeat(n[0])
        found: dict[Value, Tensor] = {}
        for side in (QUERY, KEY, DISTANCE):
            for shared in (True, False):  # for all batch rows and heads
                nodes = [x for x, of in wanted if of == side and shared == (not depends[x] & (BATCH | HEAD))]
                if not nodes:
                    continue
                run = torch.vmap(_Subgraph(graph, nodes, side), (None, None, 0))
                if not shared:
                    run = torch.vmap(run, (0, 0, None))
                b, h = (batch[0], head[0]) if shared else (batch, head)
                outs = run(b, h, index[side])
                found |= {(node, side): out[None] if shared else out for node, out in zip(nodes, outs)}
        self._values = dict(zip(found, _copy_to_host(list(found.values()))))

    def shown(self, predicate: Predicate) -> Tensor:
        """Return where a predicate of queries, keys or distances holds: bool [n or 1, number of values or
        1]."""
        value, holds, of = predicate
        return (
            self._values[value, of] == holds
            if isinstance(value, fx.Node)
            else torch.tensor([[value == holds]])
        )

    def sides(self, comparison: Relation) -> tuple[Tensor, Tensor] | None:
        """Return both sides of a comparison, [n or 1, queries] and [n or 1, keys], int64 or of one
        floating-point type; None where the mask_mod's integers may wrap, or are compared as real numbers."""
        query, key = (
            [
                (sign, self._values[x, side] if isinstance(x, fx.Node) else torch.tensor([[x]]))
                for sign, x in terms
            ]
            for side, terms in ((QUERY, comparison.query), (KEY, comparison.key))
        )
        terms = [*query, *key]
        types = {x.dtype for _, x in terms}
        if not types <= set(SUPPORTED_TYPES):
            return None
        if any(dtype.is_floating_point for dtype in types):
            one, other = query[0][1], key[0][1]
            half = one.dtype in HALF_TYPES
            return None if len(types) > 1 else (one.float(), other.float()) if half else (one, other)
        ends = [[sign * int(end) for end in x.aminmax()] for sign, x in terms]
        least, most = sum(min(0, *pair) for pair in ends), sum(max(0, *pair) for pair in ends)
        # torch.vmap may compare, and add, in the narrower type of two
        narrow = [torch.iinfo(dtype) for dtype in types if dtype is not torch.bool]
        low, high = comparison.limits
        low, high = max([low, *(x.min for x in narrow)]), min([high, *(x.max for x in narrow)])
        as_they_are = len(terms) == 2 and len(types) == 1
        if least < WIDEST[0] or most > WIDEST[1] or ((least < low or most > high) and not as_they_are):
            return None
        return self._add(query).expand(-1, self.lengths[0]), self._add(key)

    @staticmethod
    def _add(terms: list[tuple[int, Tensor]]) -> Tensor:
        return reduce(torch.add, [sign * x.long() for sign, x in terms], torch.zeros(1, 1, dtype=torch.int64))


class _Subgraph:
    """Some nodes of a graph as a function of (b, h, index). side: what index counts, QUERY, KEY or
    DISTANCE"""

    def __init__(self, graph: fx.GraphModule, nodes: Sequence[fx.Node], side: int) -> None:
        self._graph, self._nodes = graph, nodes
        self._inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
        is_index = [n for n in graph.graph.nodes if side == DISTANCE and is_distance(n, self._inputs)]
        self._indices = [*self._inputs[2:], *is_index]
        self._steps = ancestors(graph, nodes, self._indices)

    def __call__(self, b: Tensor, h: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip(self._inputs, (b, h))) | dict.fromkeys(self._indices, index)
        for node in self._steps:
            if node.op == "get_attr":
                values[node] = getattr(self._graph, str(node.target))
            elif node not in values:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return tuple(values[node] for node in self._nodes)


def _copy_to_host(tensors: list[Tensor]) -> list[Tensor]:
    """Copy tensors to the CPU, with one copy per device."""
    return to_host(tensors) if any(map(is_remote, tensors)) else tensors
