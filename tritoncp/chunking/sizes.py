"""The size that is cut into chunks: its mark before capture, its symbol, and the metadata of chunks with
their sizes.

Sizes are substituted in fake values. If values were computed again, guards would be added to the shape
environment, and a guard on 1 makes a constant of a symbol.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sympy
import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch._dynamo.decorators import mark_unbacked
from torch.fx import Graph, Node
from torch.utils._sympy.functions import FloorDiv

from tritoncp.chunking.report import ChunkingError, describe_node
from tritoncp.planning.parts import chunk_size

Symbols = dict[Any, Any]  # sympy symbol -> expression
MAX_ROWS = 1 << 30  # kernels count in 32 bits


def mark(x: Tensor, dim: int, chunks: int) -> None:
    """Mark a dimension of an input, so that a captured graph has a symbol for its size and can be cut.

    >>> import torch
    >>> x = torch.ones(2, 12)
    >>> mark(x, dim=1, chunks=4)                # then capture the graph of a function of x
    >>> mark(torch.ones(9), 0, 4)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    tritoncp.chunking.report.ChunkingError: 9 rows of dimension 0 in 4 chunks of 3 leave none for the last...

    Mark the same size of every input: marked sizes are taken to be equal where they meet. The symbol is
    unbacked:
    code that branches on the size, which would make a constant of it, raises an error that names the line.

    Args:
        x: an input of the compiled function.
        dim: dimension of x, the batch or the sequence.
        chunks: number of chunks.

    Returns:
        None; x is marked.

    Raises:
        ChunkingError: a ValueError, for a size that cannot be cut into so many chunks.
    """
    rows = x.shape[dim]
    check_rows(rows, chunks, f"{rows} rows of dimension {dim}")
    mark_unbacked(x, dim, hint_override=rows, min=chunks + 1, max=MAX_ROWS, shape_id=f"rows of {rows}")


def check_rows(rows: int, chunks: int, name: str) -> None:
    """Raise ChunkingError unless every chunk but the last has at least two rows, and the last one or more."""
    try:
        size = chunk_size(rows, chunks, name)
    except ValueError as error:
        raise ChunkingError(str(error)) from None
    if size < 2:
        raise ChunkingError(
            f"{name} in {chunks} chunks: chunks of one row make a constant of their size, as torch guards on "
            f"1; cut {rows // 2} chunks or fewer"
        )


def expression(size: Any) -> Any:
    """Return a size as a sympy expression or a plain number."""
    return size.node.expr if isinstance(size, SymInt | SymFloat | SymBool) else size


def free_symbols(value: Any) -> set[Any]:
    """Collect the symbols in the sizes and strides of a node's value."""
    if isinstance(value, Tensor):
        return set().union(*(free_symbols(size) for size in (*value.shape, *_strides(value))))
    if isinstance(value, tuple | list):
        return set().union(*map(free_symbols, value))
    expr = expression(value)
    return set(expr.free_symbols) if isinstance(expr, sympy.Basic) else set()


def hint_of(expr: Any, env: Any, fallback: int | None = None) -> int | None:
    """Return the number that an expression is expected to be, with ``fallback`` for symbols without a hint;
    None if it is unknown."""
    if not isinstance(expr, sympy.Basic):
        return int(expr)
    numbers = {}
    for symbol in expr.free_symbols:
        number = env.backed_var_to_val.get(symbol, env.var_to_hint_override.get(symbol, fallback))
        if number is None:
            return None
        numbers[symbol] = number
    result = expr.subs(numbers)
    return int(result) if result.is_number else None


def _strides(value: Tensor) -> Sequence[Any]:
    return value.stride() if value.layout is torch.strided else ()


def substitute(value: Any, symbols: Symbols) -> Any:
    """Return a node's value with expressions, or numbers, in place of symbols."""
    if isinstance(value, tuple | list):
        return type(value)([substitute(x, symbols) for x in value])
    if not free_symbols(value) & set(symbols):
        return value
    if isinstance(value, Tensor):
        shape, stride = ([substitute(n, symbols) for n in x] for x in (value.shape, value.stride()))
        fake_mode: Any = value.fake_mode  # type: ignore[attr-defined] # a FakeTensor
        with fake_mode, fake_mode.shape_env.suppress_guards():
            return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
    env: Any = value.node.shape_env
    expr: Any = env.simplify(expression(value).xreplace(symbols))
    if expr in (sympy.true, sympy.false):
        return bool(expr)
    if isinstance(value, SymBool):
        return env.create_symboolnode(expr)
    if expr.is_number:
        return float(expr) if isinstance(value, SymFloat) else int(expr)
    if isinstance(value, SymFloat):
        return env.create_symfloatnode(expr, hint=None)
    return env.create_symintnode(expr, hint=hint_of(expr, env))


class CutSymbol:
    """The symbol of a graph that chunks cut.

    symbol: symbol of the size; whole: the size, which is the symbol times ``unit``; part: the symbol's value
        in all chunks but the last, which has the rest; chunks: number of chunks
    """

    def __init__(self, chunks: int, size: Any, fake_mode: Any) -> None:
        self.env, self.fake_mode, self.chunks = size.node.shape_env, fake_mode, chunks
        self.whole = expression(size)
        (self.symbol,) = self.whole.free_symbols
        self.unit = int(self.whole / self.symbol)
        self.part = FloorDiv(self.symbol + chunks - 1, chunks)
        self.rows = self.hint(self.whole)
        if self.rows is not None:
            check_rows(self.rows // self.unit, chunks, f"{self.rows} rows")

    def check_units(self) -> None:
        """Raise ChunkingError if chunks of a multiple of the symbol would not have the rows that plans
        assume."""
        if self.rows is not None and self.unit > 1 and self.rows // self.unit % self.chunks:
            raise ChunkingError(
                f"{self.rows} rows are {self.unit} * {self.symbol}: {self.chunks} chunks are not equal; pad "
                f"them to a multiple of {self.unit * self.chunks}, or export the size as a separate Dim"
            )

    def hint(self, expr: Any) -> int | None:
        """Return the number that an expression is expected to be, None if none is known."""
        return hint_of(expr, self.env)

    def holds(self, value: Any) -> bool:
        """Return whether a node's value has the symbol in a size."""
        return self.symbol in free_symbols(value)

    def dims(self, value: Tensor) -> list[int]:
        """List the dimensions of a tensor whose size has the symbol."""
        return [d for d, size in enumerate(value.shape) if self.symbol in free_symbols(size)]

    def size_of(self, chunks: range) -> Any:
        """Return the value of the symbol in some chunks that follow each other."""
        if chunks.stop == self.chunks:
            return self.symbol - chunks.start * self.part
        return len(chunks) * self.part

    def cut(self, value: Any, chunks: range, fresh: Symbols | None = None) -> Any:
        """Return a node's value with the sizes of some chunks that follow each other.

        fresh: symbols of the chunk in place of symbols that are read from data
        """
        return substitute(value, {self.symbol: self.size_of(chunks), **(fresh or {})})

    def shape_of(self, value: Tensor, c: int) -> list[int]:
        """Return the shape that a tensor is expected to have in a chunk, empty if a size has no hint."""
        part = {self.symbol: self.size_of(range(c, c + 1))}
        exprs = [expression(size) for size in value.shape]
        numbers = [self.hint(x.xreplace(part) if isinstance(x, sympy.Basic) else x) for x in exprs]
        return [n for n in numbers if n is not None] if None not in numbers else []

    def bind(self, copy: Node, fresh: Symbols) -> None:
        """Give a copied node new symbols for the sizes that it reads from data, and add them to ``fresh``."""
        renamed = {}
        for raw, path in (copy.meta.get("unbacked_bindings") or {}).items():
            resolved = self.env.unbacked_renamings.get(raw, raw)
            present = self.env.replace(resolved)
            old = present if present.is_Symbol else resolved
            with self.env.ignore_fresh_unbacked_symbols():
                new = self.env.create_unbacked_symint().node.expr
            if old in self.env.var_to_range:
                self.env.var_to_range[new] = self.env.var_to_range[old]
            if (number := self.env.var_to_hint_override.get(old)) is not None:
                self.env.var_to_hint_override[new] = max(1, number // self.chunks)
            fresh.update({raw: new, resolved: new, old: new})
            renamed[new] = path
        if renamed:
            copy.meta["unbacked_bindings"] = renamed

    def assert_sizes(self, fresh: Sequence[Symbols]) -> None:
        """Add assertions that compilers need: the last chunk has a row, which torch cannot tell from its
        size, a difference; and sizes that a chunk reads from data have the properties that torch asserts for
        the whole."""
        if self.symbol not in self.env.backed_var_to_val:
            last = self.size_of(range(self.chunks - 1, self.chunks))
            message = f"a size in {self.chunks} chunks leaves no row for the last: cut fewer chunks"
            self.env.guard_or_defer_runtime_assert(sympy.Gt(last, 0), message)
        asserts = [x for group in self.env.deferred_runtime_asserts.values() for x in group]
        for c, own in enumerate(fresh):
            symbols = {self.symbol: self.size_of(range(c, c + 1)), **own}
            for whole in asserts:
                if whole.expr.free_symbols & own.keys():
                    self.env.guard_or_defer_runtime_assert(whole.expr.xreplace(symbols), whole.msg)


def input_symbols(graph: Graph) -> set[Any]:
    """Collect the symbols in the sizes of a graph's inputs."""
    return set().union(
        *(free_symbols(n.meta.get("val")) for n in graph.nodes if n.op == "placeholder"), set()
    )


def cut_symbol(dim: str, queries: Iterable[Node], live_ins: Iterable[Node], graph: Graph) -> Any:
    """Return the symbol of the batch or the sequence, as a SymInt. It is read from the queries of an
    attention, or from the first tensor [B, S, ...] that enters a region, else from the first [B, S].

    Raises ChunkingError if that size is a constant.
    """
    known, index = input_symbols(graph), {"batch": 0, "seq": 2}[dim]
    entering = sorted(live_ins, key=lambda node: node.meta["val"].ndim < 3)  # weights last
    nodes = [(node, index) for node in queries] or [(node, min(index, 1)) for node in entering]
    for node, d in nodes:
        value = node.meta["val"]
        if not isinstance(value, Tensor) or value.ndim <= max(d, 1) or not isinstance(value.shape[d], SymInt):
            continue
        size = value.shape[d]
        symbols = free_symbols(size) & known
        if len(symbols) == 1 and (expression(size) / next(iter(symbols))).is_Integer:
            return size
    where = describe_node(nodes[0][0]) if nodes else "no tensor enters the region"
    raise ChunkingError(
        f"no input has a symbol for the {'sequence' if dim == 'seq' else dim}: {where}. Mark the size before "
        "the graph is captured, with tritoncp.chunking.mark(x, dim, chunks); an op that needs a number, or a "
        "view with one, makes a constant of it"
    )
