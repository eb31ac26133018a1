"""Torch graph -> readable Triton source: one line an operation.

Nothing with dimensions is ever made: see `values`. The names, types and helpers of the emitted source come
from fixed tables; from the user only numbers and a cleaned function name get in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tritoncp.mods.errors import Untranslatable
from tritoncp.mods.translate import gradient, triton_helpers
from tritoncp.mods.translate.index_maps import as_sparse, at, broadcast
from tritoncp.mods.translate.integer_ranges import INDEX, Interval, whole
from tritoncp.mods.translate.pointwise_ops import BINARY, COMPARE, UNARY, where
from tritoncp.mods.translate.symbolic import (
    TRITON_NAME,
    Block,
    Dim,
    Indices,
    Lazy,
    Scalar,
    Sparse,
    Value,
    as_rep,
    fixed,
    literal,
    weak,
)
from tritoncp.mods.translate.trace import Traced, node_line
from tritoncp.mods.translate.view_ops import VIEWS, op_name

_UNIFORM = frozenset[str]()
_INPUTS = {
    "score": frozenset({"score", "q", "kv"}),
    "dscore": frozenset({"score", "q", "kv"}),
    "b": _UNIFORM,
    "h": _UNIFORM,
    "q_idx": frozenset({"q"}),
    "kv_idx": frozenset({"kv"}),
}
_SAME = frozenset(
    ["clone", "detach", "alias", "lift_fresh_copy", "lift_fresh", "contiguous", "positive", "view_as"]
)
_FILLED = {"zeros": 0, "new_zeros": 0, "zeros_like": 0, "ones": 1, "new_ones": 1, "ones_like": 1}


def emit(traced: Traced) -> str:
    """The source of a module with `mask_mod`, or `score_mod` and `score_grad`."""
    if traced.is_score:
        assert traced.joint is not None
        parts = [
            _function("score_mod", "score, b, h, q_idx, kv_idx, caps", _forward(traced)),
            _function(
                "score_grad",
                "dscore, score, b, h, q_idx, kv_idx, keep, caps, dcaps",
                _backward(traced, traced.joint),
            ),
        ]
    else:
        parts = [_function("mask_mod", "b, h, q_idx, kv_idx, caps", _forward(traced))]
    body = "\n\n\n".join(parts) + "\n"
    return _header(traced, body) + body


def loads(traced: Traced) -> int:
    """Return with how many sides of a tile the mod's loads vary: 0 where at most b and h choose the
    address, 2 where each score has its own."""
    writer = Writer(traced)
    writer.run(traced.forward.graph)
    return writer.sides


def _function(name: str, arguments: str, lines: list[str]) -> str:
    return "\n".join(["@triton.jit", f"def {name}({arguments}):", *("    " + line for line in lines)])


def _header(traced: Traced, body: str) -> str:
    kind = f"score_mod ({TRITON_NAME[traced.dtype]} scores)" if traced.is_score else "mask_mod"
    lines = [f'"""The {kind} `{traced.name}`, translated from Python by tritoncp.', ""]
    for i, tensor in enumerate(traced.tensors):
        grad = ", wants a gradient" if i in traced.wants else ""
        lines.append(f"caps[{i}]  t{i}: captured {TRITON_NAME[tensor.dtype]} tensor, {tensor.ndim}-d{grad}")
    for i, number in enumerate(traced.numbers, start=len(traced.tensors)):
        lines.append(f"caps[{i}]  n{i - len(traced.tensors)}: captured {type(number).__name__}")
    if not traced.tensors and not traced.numbers:
        lines.append("It captures nothing: caps is empty.")
    helpers = sorted(name for name in vars(triton_helpers) if f"{name}(" in body and _is_helper(name, body))
    imports = ["import triton", "import triton.language as tl"]
    if helpers:
        imports += ["", f"from tritoncp.mods.translate.triton_helpers import {', '.join(helpers)}"]
    return "\n".join([*lines, '"""', "", *imports, "", "", ""])


def _is_helper(name: str, body: str) -> bool:
    places = [i for i in range(len(body)) if body.startswith(f"{name}(", i)]
    return hasattr(getattr(triton_helpers, name), "fn") and any(
        not (body[i - 1].isalnum() or body[i - 1] in "_.") for i in places
    )


def _forward(traced: Traced) -> list[str]:
    writer = Writer(traced)
    (out,) = writer.run(traced.forward.graph)
    dtype = traced.dtype if traced.is_score else torch.bool
    value = writer.block.convert(_scalar(out), dtype)
    return [*writer.block.lines, f"return {as_rep(value, TRITON_NAME[dtype])}"]


def _backward(traced: Traced, joint: fx.GraphModule) -> list[str]:
    writer = Writer(traced)
    writer.kept = traced.wants
    block = writer.block
    dscore, *grads = writer.run(joint.graph)
    for place, grad in enumerate(grads):
        if grad is not None:
            try:
                _accumulate(block, place, grad)
            except NotImplementedError as error:
                what = f"the gradient of captured tensor {traced.wants[place]}"
                raise Untranslatable(what, traced.origin, str(error)) from error
    value = block.convert(_scalar(dscore), traced.dtype)
    return [*_used(block.lines), f"return {as_rep(value, TRITON_NAME[traced.dtype])}"]


def _used(lines: list[str]) -> list[str]:
    """Without the captures that were unpacked and then not needed."""
    text = "\n".join(line for line in lines if " = caps[" not in line)
    return [line for line in lines if " = caps[" not in line or _mentioned(line, text)]


def _mentioned(line: str, text: str) -> bool:
    names = line.split(" = ")[0].split(", ")
    return any(re.search(rf"\b{name}\b", text) for name in names)


def _scalar(value: Value | None) -> Scalar:
    assert isinstance(value, Scalar), "traced to something with dimensions"
    return value


def _accumulate(block: Block, place: int, grad: Value) -> None:
    entries = as_sparse(grad).entries
    if entries:
        block.lines.append(f"d{place}, d{place}_sizes, d{place}_strides = dcaps[{place}]")
    for entry in entries:
        address, valid = _address(block, f"d{place}", entry.indices)
        uniform = not any(index.at.axes for index in entry.indices)
        name = "accumulate_sum" if uniform else "accumulate"
        value = as_rep(entry.value, entry.value.rep)
        block.lines.append(f"{name}({address}, {value}, {valid or literal(True, 'int1')}, keep)")


def _address(block: Block, base: str, indices: Indices) -> tuple[str, str]:
    """Source of the pointer to an element, and of "every index is in range" ("" where that is certain).

    Terms that are the same for the whole tile are added first: 64 bits once, not for each element."""
    of_tile, of_each = list[str](), list[str]()
    for i, index in enumerate(indices):
        if index.at.const != 0:
            terms = of_each if index.at.axes else of_tile
            terms.append(f"{as_rep(index.at, 'int64')} * {base}_strides[{i}]")
    if of_tile and of_each:
        base = block.name(" + ".join([base, *of_tile]), f"{base}_tile")
        of_tile = []
    checks = list(dict.fromkeys(index.valid for index in indices if index.valid))
    valid = " & ".join(checks)
    if " & " in valid:
        valid = block.name(valid, "in_range")
    elif valid.startswith("("):
        valid = valid[1:-1]
    return " + ".join([base, *of_tile, *of_each]), valid


class Writer:
    """Evaluates a graph on `values`, writing lines into one Block."""

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.block = Block(exact=not traced.is_score)
        self.block.reserve(*_INPUTS, "keep", "caps", "dcaps")
        self.values: dict[fx.Node, Value | None] = {}
        self.kept: tuple[int, ...] = ()  # captures whose sizes the gradient may need
        self.sides = 0  # of a tile, "q" and "kv", with which a load varies

    def run(self, graph: fx.Graph) -> list[Value | None]:
        for node in graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self._input(node)
            elif node.op == "call_function":
                self.values[node] = self._call(node)
            elif node.op == "output":
                outputs = node.args[0] if isinstance(node.args[0], tuple | list) else (node.args[0],)
                return [self.values[out] if isinstance(out, fx.Node) else None for out in outputs]
        raise AssertionError("a graph ends in its output")

    # inputs

    def _input(self, node: fx.Node) -> Value | None:
        name = node.name
        if not node.users and (name in _INPUTS or "number" in node.meta or int(name[1:]) not in self.kept):
            return None
        if "number" in node.meta:
            return self._number(name, node.meta["number"])
        if name not in _INPUTS:
            return self._capture(node, int(name[1:]))
        if name in ("score", "dscore"):
            return Scalar(name, self.traced.dtype, TRITON_NAME[self.traced.dtype], None, None, _INPUTS[name])
        if name in ("b", "h"):
            self.block.lines.append(f"{name} = tl.cast({name}, tl.int32)")
        return Scalar(name, torch.int64, "int32", INDEX, None, _INPUTS[name])

    def _number(self, name: str, number: int | float) -> Scalar:
        place = len(self.traced.tensors) + int(name[1:])
        if isinstance(number, float):
            text = self.block.name(f"tl.cast(caps[{place}], tl.float32)", name)
            return Scalar(text, torch.float32, "float32", weak=True)
        bits = 32 if Interval(number, number).fits(32) else 64
        text = self.block.name(f"tl.cast(caps[{place}], tl.int{bits})", name)
        interval = whole(torch.int32 if bits == 32 else torch.int64)
        return Scalar(text, torch.int64, f"int{bits}", interval, weak=True)

    def _shape(self, place: int) -> tuple[Dim, ...]:
        """The dimensions of a captured tensor, as the emitted source reads them."""
        sizes = self.traced.tensors[place].shape
        return tuple(Dim(size, f"t{place}_sizes[{i}]") for i, size in enumerate(sizes))

    def _capture(self, node: fx.Node, place: int) -> Scalar | Lazy:
        tensor, shape = self.traced.tensors[place], self._shape(place)
        self.block.lines.append(f"t{place}, t{place}_sizes, t{place}_strides = caps[{place}]")

        def load(indices: Indices) -> Scalar:
            address, valid = _address(self.block, f"t{place}", indices)
            text = f"tl.load({address}, mask={valid}, other=0)" if valid else f"tl.load({address})"
            axes = _UNIFORM.union(*(index.at.axes for index in indices))
            self.sides = max(self.sides, len(axes & {"q", "kv"}))
            if tensor.dtype is torch.bool:
                text = f"{text} != 0" if axes else f"flag({text} != 0)"
            name = self.block.name(text, f"t{place}_value")
            return Scalar(name, tensor.dtype, TRITON_NAME[tensor.dtype], whole(tensor.dtype), None, axes)

        return Lazy(shape, tensor.dtype, load) if shape or not node.users else load(())

    # operations

    def _call(self, node: fx.Node) -> Value | None:
        try:
            return self._operation(node)
        except (NotImplementedError, KeyError, AssertionError) as error:
            why = str(error) if isinstance(error, NotImplementedError) else "there is no rule for it"
            raise Untranslatable(str(node.target), node_line(node, self.traced.origin), why) from error

    def _value(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return self.values[argument]
        if isinstance(argument, bool | int | float):
            return weak(argument)
        if isinstance(argument, list | tuple):
            return [self.values[a] if isinstance(a, fx.Node) else a for a in argument]
        return argument

    def _operation(self, node: fx.Node) -> Value | None:
        name = op_name(node)
        args = list(node.args)
        result = node.meta.get("val")
        assert isinstance(result, Tensor), "an operation that gives several results"
        inputs = [self._value(a) for a in args]
        if (
            any(isinstance(i, Sparse) for i in inputs)
            or name in ("zeros_and_scatter", "select_backward")
            or (name in ("slice_backward", "index_put", "sum"))
        ):
            scope = gradient.GradientScope(self.block, tuple(map(self._shape, self.traced.wants)))
            return gradient.emit_operation(scope, node, name, inputs)
        if name in _SAME:
            return inputs[0]
        if name in _FILLED or name in ("full", "full_like", "new_full", "scalar_tensor"):
            return self._filled(node, name, result)
        if name == "arange":
            return self._arange(node, result)
        view = VIEWS.get(name)
        if view is not None:
            return view(self.block, node, inputs, result)
        return self.pointwise(node, name, inputs, result)

    def _filled(self, node: fx.Node, name: str, result: Tensor) -> Scalar | Lazy:
        position = {"scalar_tensor": 0, "full": 1, "full_like": 1, "new_full": 2}.get(name)
        given = self._value(node.args[position]) if position is not None else weak(_FILLED[name])
        value = self.block.convert(given, result.dtype)
        if not result.ndim:
            return value
        shape = tuple(fixed(size) for size in result.shape)
        return Lazy(shape, result.dtype, lambda _: value, value.const)

    def _arange(self, node: fx.Node, result: Tensor) -> Lazy:
        bounds = [a for a in node.args if isinstance(a, int)]
        if len(bounds) != len(node.args) or result.dtype.is_floating_point:
            raise NotImplementedError("a range with bounds that are not Python integers")
        start, step = (bounds[0] if len(bounds) > 1 else 0), (bounds[2] if len(bounds) > 2 else 1)

        def place(indices: Indices) -> Scalar:
            (index,) = indices
            at_ = index.at._replace(dtype=torch.int64)
            reach = Interval(-(2**62) if index.valid else 0, 2**62)  # what is out of range may be anything
            at_ = Scalar(as_rep(at_, "int64"), torch.int64, "int64", reach, at_.const, at_.axes)
            moved = BINARY["mul"](self.block, torch.int64, at_, weak(step))
            return self.block.convert(
                BINARY["add"](self.block, torch.int64, moved, weak(start)), result.dtype
            )

        return Lazy((fixed(result.shape[0]),), result.dtype, place)

    def pointwise(self, node: fx.Node, name: str, inputs: Sequence[Any], result: Tensor) -> Scalar | Lazy:
        """A rule of `ops`, element by element."""
        rule, operands = self._rule(node, name, list(inputs), result)
        if all(isinstance(o, Scalar) for o in operands):
            return rule(*operands)
        shape = broadcast(list(result.shape), operands)
        rank = len(shape)
        return Lazy(shape, result.dtype, lambda indices: rule(*(at(o, indices, rank) for o in operands)))

    def _rule(
        self, node: fx.Node, name: str, inputs: list[Any], result: Tensor
    ) -> tuple[Callable[..., Scalar], list[Any]]:
        block, dtype = self.block, result.dtype
        if name in COMPARE:
            common = torch.result_type(*(_example(a) for a in node.args))
            return (lambda a, b: COMPARE[name](block, common, a, b)), inputs
        if name == "where":
            return (lambda c, a, b: where(block, dtype, c, a, b)), inputs
        if name == "masked_fill":
            return (lambda a, m, v: where(block, dtype, m, v, a)), inputs
        if name in ("_to_copy", "to", "convert_element_type"):
            return (lambda a: block.convert(a, dtype)), inputs[:1]
        if name == "clamp":
            return self._clamp(dtype, inputs)
        if name == "div" and node.kwargs.get("rounding_mode"):
            name = f"div_{node.kwargs['rounding_mode']}"
        if name in BINARY:
            alpha = node.kwargs.get("alpha", 1)
            first = 0 if name == "rsub" else 1
            if alpha != 1 and len(inputs) == 2:
                return self._scaled(name, dtype, weak(alpha), first), inputs  # type: ignore[arg-type]
            return (lambda a, b: BINARY[name](block, dtype, a, b)), inputs[:2]
        return (lambda a: UNARY[name](block, dtype, a)), [_known(name, inputs)]

    def _scaled(self, name: str, dtype: torch.dtype, alpha: Scalar, which: int) -> Callable[..., Scalar]:
        def rule(a: Scalar, b: Scalar) -> Scalar:
            pair = [a, b]
            pair[which] = BINARY["mul"](self.block, dtype, pair[which], alpha)
            return BINARY[name](self.block, dtype, *pair)

        return rule

    def _clamp(self, dtype: torch.dtype, inputs: list[Any]) -> tuple[Callable[..., Scalar], list[Any]]:
        low, high = [*inputs, None, None][1:3]

        def rule(a: Scalar, *limits: Scalar) -> Scalar:
            rest = list(limits)
            a = self.block.convert(a, dtype)
            if low is not None:
                a = BINARY["maximum"](self.block, dtype, a, rest.pop(0))
            return BINARY["minimum"](self.block, dtype, a, rest.pop(0)) if high is not None else a

        return rule, [i for i in (inputs[0], low, high) if i is not None]


def _known(name: str, inputs: list[Any]) -> Any:
    if name not in UNARY:
        raise NotImplementedError("there is no rule for it")
    if name == "round" and len(inputs) > 1:
        raise NotImplementedError("rounding to decimals has no rule")
    return inputs[0]


def _example(argument: Any) -> Any:
    """Return an example of an operand for torch.result_type."""
    if isinstance(argument, fx.Node):
        return argument.meta["number"] if "number" in argument.meta else argument.meta["val"]
    return argument
