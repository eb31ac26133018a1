"""Bounds of a mask_mod over a whole tile, without evaluating each pair: interval arithmetic on its graph.

A traced mask_mod is evaluated on ranges (R. E. Moore, "Interval Analysis", 1966): q_idx in [q0, q1), kv_idx
in [k0, k1), and so on through every operation, many tiles at once. Where the result can only be True, or
only False, the tile is decided. A decision is never wrong; operations without a rule leave tiles undecided.

Floats are bounded in their own type, where rounding is monotone: the bounds of a sum are the sums of the
bounds. Integers of every type are bounded exactly, in float64, as long as they stay below 2^51.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from tritoncp.core.tracing import SHAPE_ONLY, Mod, graph_of, is_read

_MOST = 1 << 51  # below it, float64 also divides integers exactly: floor(a / b) is what integers give
_TYPES = (  # of others nothing is known
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip
_HALF = (torch.float16, torch.bfloat16)  # torch rounds these otherwise with Python numbers than alone


class Span(NamedTuple):
    """Bounds lo <= value <= hi in each tile; NaN where there is no bound.

    lo, hi: [n] or [], bool for bools, float64 for integers, else of the type itself.
    most:   of integers, a bound of the magnitude of all values with bounds.
    """

    lo: Tensor
    hi: Tensor
    dtype: torch.dtype
    most: int = 0


class Part(NamedTuple):
    """A table indexed in its first dimensions only: `table[b]`, before the `[q_idx]`."""

    table: Tensor
    at: tuple[Span, ...]
    moves: tuple[bool, ...]  # whether the index varies inside a tile


Value = Tensor | Span | Part | None  # None: it has dimensions, and nothing is known of it
Rule = Callable[..., Span | None]  # (type of the result, *operands)


class Bounds:
    """A mask_mod, ready to be asked about tiles. The tensors it captures are read now.

    >>> bounds = Bounds.of(lambda b, h, q, kv: q >= kv)
    >>> zero, q, kv = torch.zeros(3).long(), torch.tensor([0, 0, 4]), torch.tensor([0, 4, 0])
    >>> some, every = bounds(zero, zero, q, q + 4, kv, kv + 4)
    >>> some.tolist(), every.tolist()     # on the diagonal, above it, below it
    ([True, False, True], [False, False, True])
    """

    def __init__(self, graph: fx.GraphModule, output: fx.Node) -> None:
        self._output = output
        self._known: dict[fx.Node, Value] = {}
        self._open: list[tuple[fx.Node, _Step | None]] = []  # what depends on the tile
        self._moves: dict[fx.Node, bool] = {}  # what varies inside a tile
        self._tables: dict[tuple[int, tuple[bool, ...]], _Pyramid] = {}
        self._indices = [node for node in graph.graph.nodes if node.op == "placeholder"]
        self.reads = is_read(self._indices[0]), is_read(self._indices[1])  # b, h
        for node in graph.graph.nodes:
            self._moves[node] = node in self._indices[2:] or any(
                self._moves[operand] for operand in node.all_input_nodes
            )
            if node.op == "get_attr":
                self._known[node] = getattr(graph, str(node.target)).detach().cpu()
            elif node.op == "call_function":
                self._fold(node)

    @classmethod
    def of(cls, mask_mod: Mod, device: str | torch.device = "cpu") -> Bounds | None:
        """None for a mask_mod that cannot be traced: it has to be asked pair by pair.

        device: of the tensors it captures; they are copied to the CPU.
        """
        graph = graph_of(mask_mod, device)
        if graph is None:
            return None
        nodes = list(graph.graph.nodes)
        output = nodes[-1].args[0]
        drawn = any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in nodes)
        one = isinstance(output, fx.Node) and _dtype(output) is torch.bool and not output.meta["val"].ndim
        plain = all(isinstance(getattr(graph, str(n.target)), Tensor) for n in nodes if n.op == "get_attr")
        if not one or drawn or not plain:  # plain: no branches of torch.cond
            return None
        bounds = cls(graph, output)
        return None if any(_edits(node) for node, _ in bounds._open) else bounds  # other names of it go stale

    def __call__(
        self, b: Tensor, h: Tensor, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor
    ) -> tuple[Tensor, Tensor]:
        """int64 [n] each; q0 <= q < q1 and k0 <= kv < k1, no tile empty -> (some, every), bool [n].

        some: a pair of the tile may be visible. every: all of them surely are.
        """
        values: dict[fx.Node, Value] = dict(self._known)
        for node, lo, hi in zip(self._indices, (b, h, q0, k0), (b, h, q1 - 1, k1 - 1), strict=True):
            values[node] = Span(lo.double(), hi.double(), torch.int64, int(hi.max()) if len(hi) else 0)
        for node, step in self._open:
            values[node] = self._value(node, step, values)
        answer = self._span(self._output, values, torch.bool) or _unknown(torch.bool)
        return answer.hi.expand(len(b)), answer.lo.expand(len(b))

    def _fold(self, node: fx.Node) -> None:
        """Compute the operations that do not depend on the tile once."""
        operands = node.all_input_nodes
        if _name(node) in SHAPE_ONLY:
            given = {n: torch.zeros(n.meta["val"].shape, dtype=_dtype(n)) for n in operands}
        else:
            given = {n: v for n in operands if isinstance(v := self._known.get(n), Tensor)}
        if len(given) < len(operands):
            still = any(_dtype(n) is not _dtype(o) for n in given for o in operands)
            # vmap promotes what does not vary differently in these than a trace does
            odd = still and _name(node) in (*_OF_OPERANDS, "where", "clamp")
            self._open.append((node, None if odd else _step(node)))
            return
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), given.__getitem__)
        here = {"device": torch.device("cpu")} if kwargs.get("device") is not None else {}
        self._known[node] = node.target(*args, **{**kwargs, **here})  # type: ignore[operator]

    def _value(self, node: fx.Node, step: _Step | None, values: dict[fx.Node, Value]) -> Value:
        val = node.meta["val"]
        if not isinstance(val, Tensor) or val.dtype not in _TYPES:  # not a tensor: several results
            return None
        dtype = val.dtype
        if _name(node) in _GATHERS:
            return self._gather(node, values)
        if val.ndim:
            return None
        spans = [self._span(arg, values, each) for arg, each in step.operands] if step else [None]
        if any(span is None for span in spans):
            return _unknown(dtype)
        return _within(step.rule(dtype, *spans), dtype)  # type: ignore[union-attr]

    def _span(self, arg: Any, values: dict[fx.Node, Value], dtype: torch.dtype) -> Span | None:
        """An operand in the type the operation computes in; None if it is no single element."""
        value = values[arg] if isinstance(arg, fx.Node) else _number(arg)
        if isinstance(value, Tensor) and not value.ndim:
            plain = value.double() if _integral(value.dtype) else value
            value = Span(plain, plain, value.dtype, abs(int(value)) if _integral(value.dtype) else 0)
        return _cast(value, dtype) if isinstance(value, Span) else None

    def _index(self, arg: Any, values: dict[fx.Node, Value]) -> Span | None:
        selects = isinstance(arg, fx.Node) and _dtype(arg) in (torch.bool, torch.uint8)
        return None if arg is None or selects else self._span(arg, values, torch.int64)

    def _gather(self, node: fx.Node, values: dict[fx.Node, Value]) -> Value:
        source, indices = values[node.args[0]], node.args[1]  # type: ignore[index]
        if _name(node) == "select":
            indices = [node.args[2]] if indices == 0 else [None]
        spans = [self._index(i, values) for i in indices]  # type: ignore[union-attr]
        if isinstance(source, Tensor):
            source = Part(source, (), ())
        if not isinstance(source, Part) or not source.table.numel() or None in spans:
            return None if node.meta["val"].ndim else _unknown(node.meta["val"].dtype)
        moves = (isinstance(i, fx.Node) and self._moves[i] for i in indices)  # type: ignore[union-attr]
        part = Part(source.table, (*source.at, *spans), (*source.moves, *moves))  # type: ignore[arg-type]
        if len(part.at) < part.table.ndim:
            return part
        key = id(part.table), part.moves  # self._known keeps the table alive
        if key not in self._tables:
            self._tables[key] = _Pyramid(part.table, part.moves)
        return self._tables[key](part.at)


# -- tables ----------------------------------------------------------------------------------------------


class _Pyramid:
    """Least and greatest element within any box of a table, which is halved again and again (a mip map).

    Two cells of the least 2^k that is no shorter than the box cover it in each dimension. Dimensions whose
    index does not vary inside a tile are not halved.
    """

    def __init__(self, table: Tensor, moves: Sequence[bool]) -> None:
        self.dtype = table.dtype
        self.order = sorted(range(table.ndim), key=lambda d: moves[d])  # still ones first
        self.still = table.ndim - sum(moves)
        lo = hi = table.permute(self.order)
        self.sizes = lo.shape
        los, his, strides = [lo.flatten()], [hi.flatten()], [_strides(lo.shape)]
        while any(size > 1 for size in lo.shape[self.still :]):
            for dim in range(self.still, table.ndim):
                lo, hi = _halved(lo, dim, greatest=False), _halved(hi, dim, greatest=True)
            los, his = [*los, lo.flatten()], [*his, hi.flatten()]
            strides.append(_strides(lo.shape))
        self.lo, self.hi = torch.cat(los), torch.cat(his)
        self.first = torch.tensor([0, *map(len, los[:-1])]).cumsum(0)  # [levels]
        self.strides = torch.tensor(strides).view(len(strides), table.ndim)
        ends = (int(los[-1].min()), int(his[-1].max())) if _integral(self.dtype) else (0,)
        self.most = max(map(abs, ends))

    def __call__(self, at: Sequence[Span]) -> Span:
        """Of table[i, j, ...] with each index anywhere in its span. Unknown where one may be out of range."""
        boxes = [_wrapped(at[d], size) for d, size in zip(self.order, self.sizes, strict=True)]
        sure = torch.tensor(True)
        level = torch.tensor(0)
        for place, (lo, hi, inside) in enumerate(boxes):
            sure = sure & inside
            if place < self.still:
                sure = sure & (lo == hi)
            else:  # the exponent of n - 1 is how often 2 is doubled to reach n
                level = torch.maximum(level, torch.frexp((hi - lo).double()).exponent.long())
        level = torch.where(sure, level, 0)
        strides = self.strides[level]  # [n, dims]
        sides = []
        for place, (lo, hi, _) in enumerate(boxes):
            ends = [lo] if place < self.still else [lo >> level, hi >> level]
            sides.append([torch.where(sure, end, 0) * strides[..., place] for end in ends])
        cells = [self.first[level] + sum(steps) for steps in itertools.product(*sides)]
        lo, hi = self.lo[cells[0]], self.hi[cells[0]]
        for cell in cells[1:]:
            lo, hi = _least(lo, self.lo[cell]), _greatest(hi, self.hi[cell])
        if _integral(self.dtype):
            lo, hi = lo.double(), hi.double()
        nothing = _unknown(self.dtype)
        known = Span(
            torch.where(sure, lo, nothing.lo), torch.where(sure, hi, nothing.hi), self.dtype, self.most
        )
        return known if self.most < _MOST else nothing


def _wrapped(at: Span, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """First and last index (int64), negative ones counted from the end; whether they surely are indices."""
    known = at.lo.eq(at.lo) & at.hi.eq(at.hi)  # no NaN
    lo, hi = (torch.where(known, end, 0).long() for end in (at.lo, at.hi))
    inside = known & (lo >= -size) & (hi < size) & ((lo < 0) == (hi < 0))
    return torch.where(lo < 0, lo + size, lo), torch.where(hi < 0, hi + size, hi), inside


def _halved(x: Tensor, dim: int, greatest: bool) -> Tensor:
    half, odd = divmod(x.shape[dim], 2)
    if not half:
        return x
    pairs = x.narrow(dim, 0, 2 * half).unflatten(dim, (half, 2))
    out = (_greatest if greatest else _least)(pairs.select(dim + 1, 0), pairs.select(dim + 1, 1))
    return torch.cat([out, x.narrow(dim, 2 * half, 1)], dim) if odd else out


def _strides(shape: Sequence[int]) -> list[int]:
    return [torch.Size(shape[d + 1 :]).numel() for d in range(len(shape))]


# -- spans -----------------------------------------------------------------------------------------------


def _integral(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.bool


def _unknown(dtype: torch.dtype) -> Span:
    if dtype is torch.bool:
        return Span(torch.tensor(False), torch.tensor(True), dtype)
    nan = torch.tensor(float("nan"), dtype=torch.float64 if _integral(dtype) else dtype)
    return Span(nan, nan, dtype)


def _number(arg: Any) -> Tensor | None:
    """Return a Python number that has no type yet."""
    return torch.tensor(arg, dtype=torch.float64 if isinstance(arg, float) else None)


def _least(a: Tensor, b: Tensor) -> Tensor:
    return a & b if a.dtype is torch.bool else torch.minimum(a, b)


def _greatest(a: Tensor, b: Tensor) -> Tensor:
    return a | b if a.dtype is torch.bool else torch.maximum(a, b)


def _hull(dtype: torch.dtype, most: int, *corners: Tensor) -> Span:
    lo = hi = corners[0]
    for corner in corners[1:]:
        lo, hi = torch.minimum(lo, corner), torch.maximum(hi, corner)
    return Span(lo, hi, dtype, most)


def _within(span: Span | None, dtype: torch.dtype) -> Span:
    """A result in its type: an integer that might wrap, or might not be exact here, is unknown."""
    if span is None or span.most >= _MOST or (_integral(dtype) and span.most > torch.iinfo(dtype).max):
        return _unknown(dtype)
    if dtype is torch.uint8:
        lo, hi = (end.masked_fill(span.lo < 0, torch.nan) for end in (span.lo, span.hi))
        return Span(lo, hi, dtype, span.most)
    return span._replace(dtype=dtype)


def _cast(x: Span, dtype: torch.dtype) -> Span:
    """`value.to(dtype)`: monotone between any two types."""
    if dtype == x.dtype:
        return x
    if dtype is torch.bool:
        return Span((x.lo > 0) | (x.hi < 0), ~((x.lo == 0) & (x.hi == 0)), dtype)
    if not _integral(dtype):
        return Span(x.lo.to(dtype), x.hi.to(dtype), dtype)
    if x.dtype is torch.bool or _integral(x.dtype):
        return _within(Span(x.lo.double(), x.hi.double(), dtype, max(x.most, 1)), dtype)
    limit = min(torch.iinfo(dtype).max, _MOST - 1)
    ends = (end.double().trunc() for end in (x.lo, x.hi))
    lo, hi = (end.masked_fill(~(end.abs() <= limit), torch.nan) for end in ends)
    most = max((int(end.nan_to_num().abs().max()) for end in (lo, hi) if end.numel()), default=0)
    return _within(Span(lo, hi, dtype, most), dtype)


# -- rules -----------------------------------------------------------------------------------------------
# Of (result type, operands in the type the operation computes in) -> span; None: nothing is known.


def _sure(x: Span) -> Span:
    """Unknown where a float may be infinite: inf - inf and 0 * inf are NaN, which no two bounds enclose."""
    if not x.dtype.is_floating_point:
        return x
    endless = x.lo.isinf() | x.hi.isinf()
    return x._replace(lo=x.lo.masked_fill(endless, torch.nan), hi=x.hi.masked_fill(endless, torch.nan))


def _add(dtype: torch.dtype, a: Span, b: Span) -> Span:
    return _sure(Span(a.lo + b.lo, a.hi + b.hi, dtype, a.most + b.most))


def _sub(dtype: torch.dtype, a: Span, b: Span) -> Span:
    return _sure(Span(a.lo - b.hi, a.hi - b.lo, dtype, a.most + b.most))


def _mul(dtype: torch.dtype, a: Span, b: Span) -> Span:
    return _sure(_hull(dtype, a.most * b.most, a.lo * b.lo, a.lo * b.hi, a.hi * b.lo, a.hi * b.hi))


def _square(dtype: torch.dtype, a: Span) -> Span:
    size = _abs(dtype, a)
    return Span(size.lo * size.lo, size.hi * size.hi, dtype, a.most**2)


def _neg(dtype: torch.dtype, a: Span) -> Span:
    return Span(-a.hi, -a.lo, dtype, a.most)


def _abs(dtype: torch.dtype, a: Span) -> Span:
    least = torch.maximum(torch.maximum(a.lo, -a.hi), torch.zeros_like(a.lo))
    return Span(least, torch.maximum(-a.lo, a.hi), dtype, a.most)


def _sign(dtype: torch.dtype, a: Span) -> Span:
    if dtype is torch.bool:
        return a
    return Span(a.lo.sign() + 0 * a.lo, a.hi.sign() + 0 * a.hi, dtype, 1)  # the sign of NaN is 0


def _maximum(dtype: torch.dtype, a: Span, b: Span) -> Span:
    return Span(torch.maximum(a.lo, b.lo), torch.maximum(a.hi, b.hi), dtype, max(a.most, b.most))


def _minimum(dtype: torch.dtype, a: Span, b: Span) -> Span:
    return Span(torch.minimum(a.lo, b.lo), torch.minimum(a.hi, b.hi), dtype, max(a.most, b.most))


def _clamp(dtype: torch.dtype, a: Span, least: Span, most: Span) -> Span:
    return _minimum(dtype, _maximum(dtype, a, least), most)


def _relu(dtype: torch.dtype, a: Span) -> Span:
    return Span(a.lo.relu(), a.hi.relu(), dtype, a.most)


def _divide(dtype: torch.dtype, a: Span, b: Span) -> Span:
    """True division: corners, where the divisor cannot be zero."""
    zero = ~((b.lo > 0) | (b.hi < 0))
    lo, hi = b.lo.masked_fill(zero, torch.nan), b.hi.masked_fill(zero, torch.nan)
    return _hull(dtype, a.most, a.lo / lo, a.lo / hi, a.hi / lo, a.hi / hi)


def _floor_divide(dtype: torch.dtype, a: Span, b: Span) -> Span | None:
    """Of integers: torch's floor division of floats is not the floor of the quotient."""
    return _rounding(torch.floor)(torch.float64, _divide(dtype, a, b)) if _integral(dtype) else None


def _trunc_divide(dtype: torch.dtype, a: Span, b: Span) -> Span | None:
    return _rounding(torch.trunc)(torch.float64, _divide(dtype, a, b)) if _integral(dtype) else None


def _remainder(dtype: torch.dtype, a: Span, b: Span) -> Span | None:
    """Of positive divisors: exact within one period, else from 0 to the divisor."""
    if not _integral(dtype):
        return None
    one, positive = (b.lo == b.hi), b.lo > 0
    first, last = torch.floor(a.lo / b.lo), torch.floor(a.hi / b.lo)
    period = one & (first == last)
    lo = torch.where(period, a.lo - first * b.lo, 0 * b.lo).masked_fill(~positive, torch.nan)
    hi = torch.where(period, a.hi - first * b.lo, b.hi - 1).masked_fill(~positive, torch.nan)
    return Span(lo + 0 * a.lo, hi + 0 * a.hi, dtype, b.most)


def _shift_right(dtype: torch.dtype, a: Span, b: Span) -> Span | None:
    return _floor_divide(dtype, a, _power_of_two(b))


def _shift_left(dtype: torch.dtype, a: Span, b: Span) -> Span:
    return _mul(dtype, a, _power_of_two(b))


def _power_of_two(b: Span) -> Span:
    usable = (b.lo >= 0) & (b.hi < 51)
    lo, hi = (torch.exp2(end).masked_fill(~usable, torch.nan) for end in (b.lo, b.hi))
    return Span(lo, hi, b.dtype, 1 << min(b.most, 51))


def _bits(op: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Span]:
    """& | ^ of integers: known where both operands are, no longer than the longer where none is negative."""

    def rule(dtype: torch.dtype, a: Span, b: Span) -> Span:
        one = (a.lo == a.hi) & (b.lo == b.hi)
        exact = op(torch.where(one, a.lo, 0).long(), torch.where(one, b.lo, 0).long()).double()
        positive = (a.lo >= 0) & (b.lo >= 0)
        most = 1 << max(a.most.bit_length(), b.most.bit_length())  # reached by negative ones: -5 ^ 3 = -8
        lo = torch.where(one, exact, torch.where(positive, 0.0, torch.nan))
        longest = torch.minimum(a.hi, b.hi) if op is torch.bitwise_and else torch.full_like(lo, most)
        return Span(lo, torch.where(one, exact, torch.where(positive, longest, torch.nan)), dtype, most)

    return rule


def _and(dtype: torch.dtype, a: Span, b: Span) -> Span:
    return Span(a.lo & b.lo, a.hi & b.hi, dtype)


def _or(dtype: torch.dtype, a: Span, b: Span) -> Span:
    return Span(a.lo | b.lo, a.hi | b.hi, dtype)


def _xor(dtype: torch.dtype, a: Span, b: Span) -> Span:
    sure = (a.lo == a.hi) & (b.lo == b.hi)
    return Span(sure & (a.lo ^ b.lo), ~sure | (a.lo ^ b.lo), dtype)


def _not(dtype: torch.dtype, a: Span) -> Span:
    if dtype is torch.bool:
        return Span(~a.hi, ~a.lo, dtype)
    return Span(-a.hi - 1, -a.lo - 1, dtype, a.most + 1)


def _either(logical: Callable[..., Span], op: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Span]:
    numeric = _bits(op)
    return lambda dtype, a, b: (logical if dtype is torch.bool else numeric)(dtype, a, b)


def _less(dtype: torch.dtype, a: Span, b: Span) -> Span:
    return Span(a.hi < b.lo, ~(a.lo >= b.hi), dtype)


def _at_most(dtype: torch.dtype, a: Span, b: Span) -> Span:
    return Span(a.hi <= b.lo, ~(a.lo > b.hi), dtype)


def _equal(dtype: torch.dtype, a: Span, b: Span) -> Span:
    return Span((a.lo == b.hi) & (a.hi == b.lo), ~((a.hi < b.lo) | (a.lo > b.hi)), dtype)


def _where(dtype: torch.dtype, condition: Span, a: Span, b: Span) -> Span:
    lo = torch.where(condition.lo, a.lo, torch.where(condition.hi, _least(a.lo, b.lo), b.lo))
    hi = torch.where(condition.lo, a.hi, torch.where(condition.hi, _greatest(a.hi, b.hi), b.hi))
    return Span(lo, hi, dtype, max(a.most, b.most))


def _rounding(op: Callable[[Tensor], Tensor]) -> Callable[..., Span]:
    return lambda dtype, a: a if _integral(dtype) else Span(op(a.lo), op(a.hi), dtype, a.most)


# What each operation does, by the type it computes in: of its result, of its operands together, bool.
_SAME = ("_to_copy", "clone", "detach", "alias", "lift_fresh_copy")
_OF_RESULT: dict[str, Rule] = {
    "add": _add, "sub": _sub, "rsub": lambda dtype, a, b: _sub(dtype, b, a), "mul": _mul, "neg": _neg,
    "abs": _abs, "sign": _sign, "sgn": _sign, "square": _square, "maximum": _maximum, "minimum": _minimum,
    "clamp_min": _maximum, "clamp_max": _minimum, "div": _divide, "floor_divide": _floor_divide,
    "div_floor": _floor_divide, "div_trunc": _trunc_divide, "remainder": _remainder,
    "bitwise_left_shift": _shift_left, "__lshift__": _shift_left,
    "bitwise_right_shift": _shift_right, "__rshift__": _shift_right,
    "bitwise_and": _either(_and, torch.bitwise_and), "__and__": _either(_and, torch.bitwise_and),
    "bitwise_or": _either(_or, torch.bitwise_or), "__or__": _either(_or, torch.bitwise_or),
    "bitwise_xor": _either(_xor, torch.bitwise_xor), "__xor__": _either(_xor, torch.bitwise_xor),
    "bitwise_not": _not, "where": _where, "relu": _relu,
    "floor": _rounding(torch.floor), "ceil": _rounding(torch.ceil), "trunc": _rounding(torch.trunc),
    "round": _rounding(torch.round),
    "clamp": _clamp, **dict.fromkeys(_SAME, lambda dtype, a: a),
}  # fmt: skip
_OF_OPERANDS: dict[str, Rule] = {
    "lt": _less, "gt": lambda dtype, a, b: _less(dtype, b, a),
    "le": _at_most, "ge": lambda dtype, a, b: _at_most(dtype, b, a),
    "eq": _equal, "ne": lambda dtype, a, b: _not(dtype, _equal(dtype, a, b)),
}  # fmt: skip
_OF_BOOLS: dict[str, Rule] = {
    "logical_and": _and, "logical_or": _or, "logical_xor": _xor, "logical_not": _not,
}  # fmt: skip
_GATHERS = ("index", "_unsafe_index", "select")


class _Step(NamedTuple):
    """A rule, with the operands it takes and the types it takes them in."""

    rule: Rule
    operands: list[tuple[Any, torch.dtype]]


def _step(node: fx.Node) -> _Step | None:
    """How to bound one operation; None where there is no rule."""
    name, args = _name(node), list(node.args)
    if not isinstance(node.meta["val"], Tensor) or (name == "rsub" and len(args) > 2):  # its alpha
        return None
    result: torch.dtype = node.meta["val"].dtype
    options = {} if name == "_to_copy" else {k: v for k, v in node.kwargs.items() if v is not None}
    if name == "div" and "rounding_mode" in options:
        name = f"div_{options.pop('rounding_mode')}"
    elif name == "clamp" and None in (least := [*args[1:], None][0], most := [*args[1:], None, None][1]):
        name, args = ("clamp_max", [args[0], most]) if least is None else ("clamp_min", [args[0], least])
    elif name == "pow" and args[1] == 2:
        name, args = "square", args[:1]
    rule = {**_OF_RESULT, **_OF_OPERANDS, **_OF_BOOLS}.get(name)
    if rule is None or options:
        return None
    common = torch.bool if name in _OF_BOOLS else _together(args) if name in _OF_OPERANDS else result
    types = [torch.bool, result, result] if name == "where" else [common] * len(args)
    if any(t not in _TYPES for t in types):
        return None
    if any(t in _HALF for t in types) and name not in _SAME:
        return None
    return _Step(rule, list(zip(args, types, strict=True)))


def _edits(node: fx.Node) -> bool:
    return bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False))


def _name(node: fx.Node) -> str:
    return getattr(node.target, "_opname", "")


def _dtype(node: fx.Node) -> torch.dtype | None:
    return getattr(node.meta["val"], "dtype", None)


def _together(args: Sequence[Any]) -> torch.dtype:
    """The type in which operands are compared; bools as numbers."""
    plain = (torch.empty((), dtype=_dtype(arg)) if isinstance(arg, fx.Node) else arg for arg in args)
    dtype = torch.result_type(*plain)
    return torch.int64 if dtype is torch.bool else dtype
