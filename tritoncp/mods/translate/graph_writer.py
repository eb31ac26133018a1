"""Interpreter of a torch graph on symbolic values, which emits a line of Triton source for each operation.

Tensors with dimensions are functions of an index, see `symbolic`: source is emitted for elements only.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tritoncp.core.opaque_integers import LARGE, SHIFT, SMALL
from tritoncp.mods.errors import Untranslatable
from tritoncp.mods.translate import gradient
from tritoncp.mods.translate.graph_passes import decompose
from tritoncp.mods.translate.index_maps import TooLong, broadcast, element_address, element_at
from tritoncp.mods.translate.integer_ranges import INDEX, IntegerRange, dtype_interval
from tritoncp.mods.translate.pointwise_ops import BINARY, COMPARE, UNARY, where
from tritoncp.mods.translate.reductions import SHORT_TENSORS
from tritoncp.mods.translate.symbolic import (
    NO_AXES,
    TRITON_NAME,
    Block,
    Dim,
    Indices,
    Lazy,
    Scalar,
    Value,
    as_flag,
    as_rep,
    constant,
    fixed_dim,
    weak_scalar,
)
from tritoncp.mods.translate.trace import ModTrace
from tritoncp.mods.translate.view_ops import VIEWS, op_name

_INPUTS = {
    "score": frozenset({"score", "q", "kv"}),
    "dscore": frozenset({"score", "q", "kv"}),
    "b": NO_AXES,
    "h": NO_AXES,
    "q_idx": frozenset({"q"}),
    "kv_idx": frozenset({"kv"}),
}
_IDENTITIES = frozenset(["clone", "detach", "alias", "lift_fresh_copy", "lift_fresh"])
_FILL_VALUES = {
    **dict.fromkeys(("zeros_like", "_efficientzerotensor"), 0),
    **dict.fromkeys(("empty", "new_empty", "empty_like", "empty_permuted", "empty_strided"), 0),
    "ones_like": 1,
}
_FILL_POSITIONS = {"scalar_tensor": 0, "full": 1, "full_like": 1, "new_full": 2}  # of the argument
_RULED = frozenset(["iota", "where", "clamp", "copy"]).union(
    _FILL_POSITIONS, _IDENTITIES, _FILL_VALUES, UNARY, BINARY, COMPARE, VIEWS, SHORT_TENSORS, gradient.RULES
)


class GraphWriter:
    """Interpreter of a graph on symbolic values, which emits its operations into one Block.

    values: the symbolic value of each node; None for an input without users
    """

    def __init__(self, trace: ModTrace) -> None:
        self.trace = trace
        self.block = Block(not trace.is_score, dict.fromkeys((*_INPUTS, "keep", "caps", "dcaps"), 1))
        self.values: dict[fx.Node, Value | None] = {}
        self._num_casts = 0  # number of first lines, which convert b and h
        self.load_axes = 0  # max number of axes ("q", "kv") on which the address of a load depends

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

    def lines(self) -> list[str]:
        """Return the emitted lines, after lines that unpack the captures they use."""
        used = set(re.findall(r"\w+", "\n".join(self.block.lines)))
        names = ([f"t{i}", f"t{i}_sizes", f"t{i}_strides"] for i in range(len(self.trace.tensors)))
        unpacked = [f"{', '.join(own)} = caps[{i}]" for i, own in enumerate(names) if used & {*own}]
        lines = self.block.lines
        return [*lines[: self._num_casts], *unpacked, *lines[self._num_casts :]]

    # inputs

    def _input(self, node: fx.Node) -> Value | None:
        name = node.name
        if not node.users:
            return None
        if "number" in node.meta:
            return self._number(name, node.meta["number"])
        if name not in _INPUTS:
            return self._capture(int(name[1:]))
        if name in ("score", "dscore"):
            return Scalar(name, self.trace.dtype, TRITON_NAME[self.trace.dtype], None, None, _INPUTS[name])
        if name in ("b", "h"):
            self.block.lines.append(f"{name} = tl.cast({name}, tl.int32)")
            self._num_casts += 1
        return Scalar(name, torch.int64, "int32", INDEX, None, _INPUTS[name])

    def _number(self, name: str, number: int | float) -> Scalar:
        place = len(self.trace.tensors) + int(name[1:])
        if isinstance(number, float):
            text = self.block.name(f"tl.cast(caps[{place}], tl.float32)", name)
            self.block.uniform.add(text)
            return Scalar(text, torch.float32, "float32", weak=True)
        is_small = -SMALL <= number < SMALL
        bits, most = (32, SMALL) if is_small else (64, LARGE)
        text = self.block.name(f"tl.cast(caps[{place}] >> {SHIFT}, tl.int{bits})", name)
        interval = IntegerRange(-most, -1) if number < 0 else IntegerRange(0, most - 1)
        return Scalar(text, torch.int64, f"int{bits}", interval, weak=True)

    def _shape(self, place: int) -> tuple[Dim, ...]:
        """Return the dimensions of a captured tensor, with their names in the emitted source."""
        sizes = self.trace.tensors[place].shape
        return tuple(Dim(size, f"t{place}_sizes[{i}]") for i, size in enumerate(sizes))

    def name_dimensions(self, gradient: fx.Node, place: int) -> None:
        """Name the dimensions of a captured tensor's gradient, so that the emitted source serves other
        sizes."""
        nodes, shape = [gradient], self.trace.tensors[place].shape
        while nodes:
            node = nodes.pop()
            value = node.meta.get("val")
            if isinstance(value, Tensor) and value.shape == shape and "dimensions" not in node.meta:
                node.meta["dimensions"] = self._shape(place)
                nodes += node.all_input_nodes

    def _capture(self, place: int) -> Scalar | Lazy:
        tensor, shape = self.trace.tensors[place], self._shape(place)

        def load(indices: Indices) -> Scalar:
            address, valid = element_address(self.block, f"t{place}", indices)
            text = f"tl.load({address}, mask={valid}, other=0)" if valid else f"tl.load({address})"
            axes = NO_AXES.union(*(index.at.axes for index in indices))
            self.load_axes = max(self.load_axes, len(axes & {"q", "kv"}))
            if tensor.dtype is torch.bool:
                text = as_flag(f"{text} != 0", axes)
            name = self.block.name(text, f"t{place}_value")
            return Scalar(
                name, tensor.dtype, TRITON_NAME[tensor.dtype], dtype_interval(tensor.dtype), None, axes
            )

        return Lazy(shape, tensor.dtype, load) if shape else load(())

    # operations

    def _call(self, node: fx.Node) -> Value | None:
        try:
            return self._operation(node)
        except (NotImplementedError, KeyError, AssertionError) as error:
            reason = str(error) if isinstance(error, NotImplementedError) else "there is no rule for it"
            line = node.stack_trace or self.trace.origin
            remedy = (error.remedy,) if isinstance(error, TooLong) else ()
            raise Untranslatable(str(node.target), line, reason, *remedy) from error

    def _value(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return self.values[argument]
        if isinstance(argument, bool | int | float):
            return weak_scalar(argument)
        if isinstance(argument, list | tuple):
            return [self.values[a] if isinstance(a, fx.Node) else a for a in argument]
        return argument

    def _operation(self, node: fx.Node) -> Value | None:
        name = op_name(node.target)
        result = node.meta.get("val")
        inputs = [self._value(a) for a in node.args]
        if node.target is operator.getitem:
            return inputs[0][node.args[1]]
        if name not in _RULED and (part := decompose(node, _RULED)) is not None:
            return self._decomposed(node, part)
        if name in _FILL_VALUES or name in _FILL_POSITIONS:
            return self._fill(node, name, result)
        if gradient.has_sparse(inputs) or name in gradient.MAKERS:
            try:
                return gradient.emit_operation(self.block, self._rule, node, name, inputs)
            except NotImplementedError:
                if name in gradient.MAKERS:
                    raise
                inputs = gradient.make_dense(self.block, inputs)
        if name in SHORT_TENSORS:
            return SHORT_TENSORS[name](self.block, node, inputs, result)
        assert isinstance(result, Tensor), "an operation that gives several results"
        if name in _IDENTITIES:
            return inputs[0]
        if name == "iota":
            return self._iota(node, result)
        view = VIEWS.get(name)
        if view is not None:
            return view(self.block, node, inputs, result)
        return self.pointwise(node, name, inputs, result)

    def _decomposed(self, node: fx.Node, part: fx.Graph) -> Any:
        """Emit the operations of a node's decomposition."""
        inputs = iter(node.all_input_nodes)
        for step in part.nodes:
            if step.op == "placeholder":
                self.values[step] = self.values[next(inputs)]
            elif step.op == "output":
                return self._value(step.args[0])
            else:
                assert step.op == "call_function", "a decomposition with constants"
                self.values[step] = self._operation(step)
        raise AssertionError("a graph ends in its output")

    def _fill(self, node: fx.Node, name: str, result: Any) -> Scalar | Lazy:
        position = _FILL_POSITIONS.get(name)
        fill = self._value(node.args[position]) if position is not None else weak_scalar(_FILL_VALUES[name])
        value = self.block.convert(fill, result.dtype)
        if not result.ndim:
            return value
        shape = tuple(fixed_dim(size) for size in result.shape)
        return Lazy(shape, result.dtype, lambda _: value, value.const)

    def _iota(self, node: fx.Node, result: Tensor) -> Lazy:
        start, step = int(node.kwargs["start"]), int(node.kwargs["step"])  # type: ignore[arg-type]

        def place(indices: Indices) -> Scalar:
            (index,) = indices
            if index.at.const is not None:
                return constant(start + step * int(index.at.const), result.dtype)
            reach = IntegerRange(-(2**62) if index.valid else 0, 2**62)  # an index out of range has any value
            text = as_rep(index.at, "int64")
            position = Scalar(text, torch.int64, "int64", reach, None, index.at.axes)
            scaled = BINARY["mul"](self.block, torch.int64, position, weak_scalar(step))
            return self.block.convert(
                BINARY["add"](self.block, torch.int64, scaled, weak_scalar(start)), result.dtype
            )

        return Lazy((fixed_dim(result.shape[0]),), result.dtype, place)

    def pointwise(self, node: fx.Node, name: str, inputs: Sequence[Any], result: Tensor) -> Scalar | Lazy:
        """Apply a rule of `pointwise_ops` to each element."""
        rule, operands = self._rule(node, name, list(inputs), result)
        if all(isinstance(o, Scalar) for o in operands):
            return rule(*operands)
        shape = broadcast(list(result.shape), operands)
        rank = len(shape)
        return Lazy(
            shape, result.dtype, lambda indices: rule(*(element_at(o, indices, rank) for o in operands))
        )

    def _rule(
        self, node: fx.Node, name: str, inputs: list[Any], result: Tensor
    ) -> tuple[Callable[..., Scalar], list[Any]]:
        block, dtype = self.block, result.dtype
        if name in COMPARE:
            common = torch.result_type(*(_example(a) for a in node.args))
            return (lambda a, b: COMPARE[name](block, common, a, b)), inputs
        if name == "where":
            return (lambda c, a, b: where(block, dtype, c, a, b)), inputs
        if name == "copy":
            return (lambda a, b: block.convert(b, dtype)), inputs[:2]
        if name in ("_to_copy", "convert_element_type"):
            return (lambda a: block.convert(a, dtype)), inputs[:1]
        if name == "clamp":
            return self._clamp(dtype, inputs)
        if name not in UNARY and name not in BINARY:
            raise NotImplementedError("there is no rule for it")
        options = _options(node, 2 if name in BINARY else 1)
        if name == "div" and "rounding_mode" in options:
            name = f"div_{options.pop('rounding_mode')}"
        alpha = options.pop("alpha", 1) if name in BINARY else 1
        if name == "round" and options.get("decimals") == 0:
            del options["decimals"]
        for option, value in options.items():
            raise NotImplementedError(f"its argument {option}={value} has no rule")
        if name in UNARY:
            return (lambda a: UNARY[name](block, dtype, a)), inputs[:1]
        if alpha == 1:
            return (lambda a, b: BINARY[name](block, dtype, a, b)), inputs[:2]

        def scale(x: Scalar) -> Scalar:
            return BINARY["mul"](block, dtype, x, weak_scalar(alpha))

        return (lambda a, b: BINARY[name](block, dtype, a, scale(b))), inputs[:2]

    def _clamp(self, dtype: torch.dtype, inputs: list[Any]) -> tuple[Callable[..., Scalar], list[Any]]:
        limits = zip(("maximum", "minimum"), inputs[1:], strict=False)
        names = [name for name, limit in limits if limit is not None]

        def rule(a: Scalar, *limits: Scalar) -> Scalar:
            a = self.block.convert(a, dtype)
            for name, limit in zip(names, limits, strict=True):
                a = BINARY[name](self.block, dtype, a, limit)
            return a

        return rule, [i for i in inputs[:3] if i is not None]


def _options(node: fx.Node, num_operands: int) -> dict[str, Any]:
    """Return the arguments of an aten operation, after its operands, that differ from their defaults."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    values = dict(zip((argument.name for argument in schema), node.args)) | node.kwargs
    options = schema[num_operands:]
    return {a.name: values[a.name] for a in options if values.get(a.name, a.default_value) != a.default_value}


def _example(argument: Any) -> Any:
    """Return an example of the operand's dtype and kind (tensor or number), for torch.result_type."""
    if isinstance(argument, fx.Node):
        return argument.meta["number"] if "number" in argument.meta else argument.meta["val"]
    return argument
