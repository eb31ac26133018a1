"""Bounds of a mask_mod over a tile of pairs, by interval arithmetic on its graph.

A traced mask_mod is evaluated on ranges, q_idx in [q0, q1) and kv_idx in [k0, k1), through every operation of
its graph, many tiles at once. A tile is decided if the result can only be True, or only False. A decision is
never wrong; operations without a rule leave tiles undecided.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from tritoncp.masks.classification.interval_arithmetic import (
    BOOL_RULES,
    COPIES,
    HALF_TYPES,
    OPERAND_RULES,
    RESULT_RULES,
    SUPPORTED_TYPES,
    Rule,
    ValueRange,
    cast_range,
    is_integer,
    limit_range,
    tensor_max,
    tensor_min,
    unknown_range,
)
from tritoncp.mods.tracing import SHAPE_ONLY, Mod, ancestors, dtype_of, graph_of, operation_name, result_of


class PartialIndex(NamedTuple):
    """A captured tensor indexed in its first dimensions only: ``table[b]`` of ``table[b][q_idx]``."""

    table: Tensor
    indices: tuple[ValueRange, ...]
    varies: tuple[bool, ...]  # for each index, whether it varies inside a tile


Value = Tensor | ValueRange | PartialIndex | None  # None: a tensor that has dimensions but no bounds


def trace(mask_mod: Mod, device: str | torch.device = "cpu") -> fx.GraphModule | None:
    """Return the graph of a mask_mod that captures tensors on ``device``; None if the mask_mod has to be
    evaluated pair by pair."""
    graph = graph_of(mask_mod, device)
    if graph is None:
        return None
    nodes, output = list(graph.graph.nodes), result_of(graph)
    is_bool = isinstance(output, fx.Node) and dtype_of(output) is torch.bool
    scalar_bool = is_bool and not output.meta["val"].ndim
    random = any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in nodes)
    mutates = any(map(_is_mutation, nodes))  # an operation in place would make the ranges of aliases stale
    captures = [getattr(graph, str(n.target)) for n in nodes if n.op == "get_attr"]
    tensors_only = all(isinstance(capture, Tensor) for capture in captures)  # torch.cond captures graphs
    return graph if scalar_bool and tensors_only and not random and not mutates else None


class Bounds:
    """A bool in the graph of a mask_mod, its result by default, that can be bounded over tiles. Captured
    tensors are read at construction.

    >>> bounds = Bounds(trace(lambda b, h, q, kv: q >= kv))
    >>> zero, q, kv = torch.zeros(3).long(), torch.tensor([0, 0, 4]), torch.tensor([0, 4, 0])
    >>> some, every = bounds(zero, zero, q, q + 4, kv, kv + 4)
    >>> some.tolist(), every.tolist()     # on the diagonal, above it, below it
    ([True, False, True], [False, False, True])
    """

    def __init__(self, graph: fx.GraphModule, value: fx.Node | None = None) -> None:
        self._bounded = result_of(graph) if value is None else value
        self._constants: dict[fx.Node, Value] = {}  # results that do not depend on the tile
        self._steps: list[tuple[fx.Node, RuledOperation | None]] = []  # operations that depend on the tile
        self._varies: dict[fx.Node, bool] = {}  # whether a result varies inside a tile
        self._tables: dict[tuple[int, tuple[bool, ...]], Pyramid] = {}
        self._indices = [node for node in graph.graph.nodes if node.op == "placeholder"]
        for node in ancestors(graph, [self._bounded]):
            self._varies[node] = node in self._indices[2:] or any(
                self._varies[operand] for operand in node.all_input_nodes
            )
            if node.op == "get_attr":
                self._constants[node] = getattr(graph, str(node.target)).detach().cpu()
            elif node.op == "call_function":
                self._fold(node)

    def __call__(
        self, b: Tensor, h: Tensor, q0: Tensor, q1: Tensor, k0: Tensor, k1: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Bound n tiles, q0 <= q < q1 and k0 <= kv < k1, none of them empty; arguments are int64 [n].

        Returns (some, every), bool [n]. some: a pair of the tile may be visible. every: all pairs are
        visible.
        """
        values: dict[fx.Node, Value] = dict(self._constants)
        for node, lo, hi in zip(self._indices, (b, h, q0, k0), (b, h, q1 - 1, k1 - 1), strict=True):
            values[node] = ValueRange(lo.double(), hi.double(), torch.int64)
        for node, step in self._steps:
            values[node] = self._value(node, step, values)
        visible = self._range(self._bounded, values, torch.bool) or unknown_range(torch.bool)
        return visible.hi.expand(len(b)), visible.lo.expand(len(b))

    def _fold(self, node: fx.Node) -> None:
        """Evaluate an operation at once if it does not depend on the tile, else append it to the steps."""
        operands = node.all_input_nodes
        if operation_name(node) in SHAPE_ONLY:
            inputs = {n: torch.zeros(n.meta["val"].shape, dtype=dtype_of(n)) for n in operands}
        else:
            inputs = {n: v for n in operands if isinstance(v := self._constants.get(n), Tensor)}
        if len(inputs) < len(operands):
            mixed = any(dtype_of(n) is not dtype_of(o) for n in inputs for o in operands)
            # with a constant of another dtype, vmap promotes these operations differently from the trace
            ambiguous = mixed and operation_name(node) in (*OPERAND_RULES, "where", "clamp")
            self._steps.append((node, None if ambiguous else _plan_step(node)))
            return
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), inputs.__getitem__)
        on_cpu = {"device": torch.device("cpu")} if kwargs.get("device") is not None else {}
        self._constants[node] = node.target(*args, **{**kwargs, **on_cpu})  # type: ignore[operator]

    def _value(self, node: fx.Node, step: RuledOperation | None, values: dict[fx.Node, Value]) -> Value:
        """Bound the result of one operation. values: of the operations before it."""
        val = node.meta["val"]
        if not isinstance(val, Tensor) or val.dtype not in SUPPORTED_TYPES:  # many results, or no bounds
            return None
        dtype = val.dtype
        if operation_name(node) in GATHERS:
            return self._gather(node, values)
        if val.ndim:
            return None
        ranges = [self._range(arg, values, kind) for arg, kind in step.operands] if step else [None]
        if any(x is None for x in ranges):
            return unknown_range(dtype)
        return limit_range(step.rule(dtype, *ranges), dtype)  # type: ignore[union-attr]

    def _range(self, arg: Any, values: dict[fx.Node, Value], dtype: torch.dtype) -> ValueRange | None:
        """Return an operand's range in the type the operation computes in; None unless it is one element."""
        value = values[arg] if isinstance(arg, fx.Node) else _number_tensor(arg)
        if isinstance(value, Tensor) and not value.ndim:
            bound = value.double() if is_integer(value.dtype) else value
            value = ValueRange(bound, bound, value.dtype)
        return cast_range(value, dtype) if isinstance(value, ValueRange) else None

    def _index(self, arg: Any, values: dict[fx.Node, Value]) -> ValueRange | None:
        """Return the range of an index; None for a slice and for a boolean mask."""
        selects = isinstance(arg, fx.Node) and dtype_of(arg) in (torch.bool, torch.uint8)
        return None if arg is None or selects else self._range(arg, values, torch.int64)

    def _gather(self, node: fx.Node, values: dict[fx.Node, Value]) -> Value:
        """Bound ``table[index, ...]``: a PartialIndex until every dimension of the table has an index."""
        source, indices = values[node.args[0]], node.args[1]  # type: ignore[index]
        if operation_name(node) == "select":
            indices = [node.args[2]] if indices == 0 else [None]
        ranges = [self._index(i, values) for i in indices]  # type: ignore[union-attr]
        if isinstance(source, Tensor):
            source = PartialIndex(source, (), ())
        if not isinstance(source, PartialIndex) or not source.table.numel() or None in ranges:
            return None if node.meta["val"].ndim else unknown_range(node.meta["val"].dtype)
        varies = (isinstance(i, fx.Node) and self._varies[i] for i in indices)  # type: ignore[union-attr]
        part = PartialIndex(source.table, (*source.indices, *ranges), (*source.varies, *varies))  # type: ignore[arg-type]
        if len(part.indices) < part.table.ndim:
            return part
        key = id(part.table), part.varies  # self._constants keeps the table alive
        if key not in self._tables:
            self._tables[key] = Pyramid(part.table, part.varies)
        return self._tables[key](part.indices)


class Pyramid:
    """Min and max within any box of a table, from levels of halved resolution (a mip map).

    In each dimension, two cells of size 2^k cover the box, for the min k with 2^k >= its length. Dimensions
    whose index does not vary inside a tile are not halved.
    """

    def __init__(self, table: Tensor, varies: Sequence[bool]) -> None:
        self.dtype = table.dtype
        self.order = sorted(range(table.ndim), key=lambda d: varies[d])  # constant indices first
        self.num_constant = table.ndim - sum(varies)
        lo = hi = table.permute(self.order)
        self.sizes = lo.shape
        los, his, strides = [lo.flatten()], [hi.flatten()], [lo.contiguous().stride()]
        while any(size > 1 for size in lo.shape[self.num_constant :]):
            for dim in range(self.num_constant, table.ndim):
                lo, hi = _halve(lo, dim, greatest=False), _halve(hi, dim, greatest=True)
            los, his = [*los, lo.flatten()], [*his, hi.flatten()]
            strides.append(lo.contiguous().stride())
        self.lo, self.hi = torch.cat(los), torch.cat(his)
        self.first = torch.tensor([0, *map(len, los[:-1])]).cumsum(0)  # [levels]
        self.strides = torch.tensor(strides).view(len(strides), table.ndim)

    def __call__(self, indices: Sequence[ValueRange]) -> ValueRange:
        """Bound table[i, j, ...] for indices anywhere in their ranges; unknown if one may be out of range."""
        boxes = [_wrap_index(indices[d], size) for d, size in zip(self.order, self.sizes, strict=True)]
        valid = torch.tensor(True)
        level = torch.tensor(0)
        for place, (lo, hi, inside) in enumerate(boxes):
            valid = valid & inside
            if place < self.num_constant:
                valid = valid & (lo == hi)
            else:  # frexp's exponent of n - 1 is the min k with 2^k >= n
                level = torch.maximum(level, torch.frexp((hi - lo).double()).exponent.long())
        level = torch.where(valid, level, 0)
        strides = self.strides[level]  # [n, dims]
        sides = []
        for place, (lo, hi, _) in enumerate(boxes):
            ends = [lo] if place < self.num_constant else [lo >> level, hi >> level]
            sides.append([torch.where(valid, end, 0) * strides[..., place] for end in ends])
        cells = [self.first[level] + sum(steps) for steps in itertools.product(*sides)]
        lo, hi = self.lo[cells[0]], self.hi[cells[0]]
        for cell in cells[1:]:
            lo, hi = tensor_min(lo, self.lo[cell]), tensor_max(hi, self.hi[cell])
        if is_integer(self.dtype):
            lo, hi = lo.double(), hi.double()
        unknown = unknown_range(self.dtype)
        lo, hi = torch.where(valid, lo, unknown.lo), torch.where(valid, hi, unknown.hi)
        return limit_range(ValueRange(lo, hi, self.dtype), self.dtype)


def _wrap_index(index: ValueRange, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first and last index of a range, int64, and whether both are in range.

    Negative indices count from the end. A range from negative to non-negative is not in range.
    """
    bounded = ~(index.lo.isnan() | index.hi.isnan())
    lo, hi = (torch.where(bounded, end, 0).long() for end in (index.lo, index.hi))
    inside = bounded & (lo >= -size) & (hi < size) & ((lo < 0) == (hi < 0))
    return torch.where(lo < 0, lo + size, lo), torch.where(hi < 0, hi + size, hi), inside


def _halve(x: Tensor, dim: int, greatest: bool) -> Tensor:
    """Return the maxima (or minima) of neighbouring pairs along a dimension; an odd last element stays."""
    half, odd = divmod(x.shape[dim], 2)
    if not half:
        return x
    pairs = x.narrow(dim, 0, 2 * half).unflatten(dim, (half, 2))
    out = (tensor_max if greatest else tensor_min)(pairs.select(dim + 1, 0), pairs.select(dim + 1, 1))
    return torch.cat([out, x.narrow(dim, 2 * half, 1)], dim) if odd else out


def _number_tensor(arg: Any) -> Tensor | None:
    """Return a Python number as a tensor of no dimensions."""
    return torch.tensor(arg, dtype=torch.float64 if isinstance(arg, float) else None)


GATHERS = ("index", "_unsafe_index", "select")


class RuledOperation(NamedTuple):
    """An operation that can be bounded: its rule, and each operand with the type in which it is passed."""

    rule: Rule
    operands: list[tuple[Any, torch.dtype]]


def _plan_step(node: fx.Node) -> RuledOperation | None:
    """Return the rule and operands that bound one operation; None if there is no rule for it."""
    name, args = operation_name(node), list(node.args)
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
    rule = {**RESULT_RULES, **OPERAND_RULES, **BOOL_RULES}.get(name)
    if rule is None or options:
        return None
    common = (
        _comparison_dtype(args) if name in OPERAND_RULES else torch.bool if name in BOOL_RULES else result
    )
    types = [torch.bool, result, result] if name == "where" else [common] * len(args)
    if any(t not in SUPPORTED_TYPES for t in types):
        return None
    if any(t in HALF_TYPES for t in types) and name not in COPIES:
        return None
    return RuledOperation(rule, list(zip(args, types, strict=True)))


def _is_mutation(node: fx.Node) -> bool:
    """Return whether the operation changes an operand in place."""
    return bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False))


def _comparison_dtype(args: Sequence[Any]) -> torch.dtype:
    """Return the type in which operands are compared; int64 for bools."""
    examples = (torch.empty((), dtype=dtype_of(arg)) if isinstance(arg, fx.Node) else arg for arg in args)
    dtype = torch.result_type(*examples)
    return torch.int64 if dtype is torch.bool else dtype
