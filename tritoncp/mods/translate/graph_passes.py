"""Passes over the aten graph of a mod: removal of in-place edits, splitting by outputs, and torch's
decompositions of operations without a rule."""

from __future__ import annotations

import functools
import linecache
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import global_decomposition_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import graph_module
from torch.utils._python_dispatch import _disable_current_modes

from tritoncp.mods.errors import Untranslatable
from tritoncp.mods.tracing import GraphRecorder
from tritoncp.mods.translate.view_ops import op_name

aten = torch.ops.aten


class FakeRecorder(GraphRecorder):
    """Recorder of operations on fake tensors. table: decompositions, which replace operations"""

    def __init__(self, table: dict[Any, Callable[..., Any]] | None = None) -> None:
        super().__init__(device=None, keeps_detach=True)
        self._table = table or {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._table:
            with self:
                out = self._table[func](*args, **(kwargs or {}))
            if out is not NotImplemented:
                return out
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _lift(self, value: Tensor) -> fx.Node:
        if value.ndim:
            return super()._lift(value)
        with _disable_current_modes():
            number = value.item()
        options: Any = {"dtype": value.dtype, "device": value.device}
        return self.graph.call_function(aten.scalar_tensor.default, (number,), options)


def make_pure(graph: fx.Graph, origin: str) -> None:
    """Replace in-place operations by functional ones. origin: file:line of the function, for errors"""
    for node in list(graph.nodes):
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            _replace_edit(graph, node, origin)
    _erase_unused_nodes(graph)


def _replace_edit(graph: fx.Graph, node: fx.Node, origin: str) -> None:
    """Replace add_ by add and a cast to the dtype of the edited tensor.

    In the traced graph, later uses of the edited tensor are uses of the result already.
    """
    target: Any = node.target
    packet = getattr(aten, target.overloadpacket.__name__.removesuffix("_"), None)
    pure = getattr(packet, target._overloadname, None)
    if pure is None:
        raise Untranslatable(str(target), node.stack_trace or origin, "there is no rule for it")
    node.target = pure
    result = node.meta["val"]
    operands: list[Any] = [a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args[:2]]
    numeric = all(isinstance(o, Tensor | int | float) for o in operands) and len(operands) == 2
    promoted = torch.result_type(*operands) if numeric else result.dtype
    if promoted != result.dtype and packet is not aten.masked_fill:
        with graph.inserting_after(node):
            cast = graph.call_function(aten._to_copy.default, (node,), {"dtype": result.dtype})
        cast.meta.update(node.meta)
        node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
        node.meta["val"] = result.to(promoted)


def _erase_unused_nodes(graph: fx.Graph) -> None:
    """Erase operations that no output needs. (Operations of a mod have no side effects.)"""
    for node in reversed(list(graph.nodes)):
        if node.op not in ("placeholder", "output") and not node.users:
            graph.erase_node(node)


# -- outputs ---------------------------------------------------------------------------------------------


def split_outputs(
    graph: fx.Graph, is_score: bool, order: Sequence[int]
) -> tuple[fx.GraphModule, fx.GraphModule | None, fx.GraphModule | None]:
    """Split a graph of (out, dscore, *gradients) into graphs of out, of (dscore, *gradients) and of dscore; a
    mask_mod has only the first.

    order: indices of the gradients that the second graph returns
    """
    if not is_score:
        return make_module(graph), None, None
    (outputs,) = next(n for n in graph.nodes if n.op == "output").args
    out, dscore, *grads = outputs
    parts: list[fx.GraphModule] = []
    for result in (out, (dscore, *(grads[i] for i in order)), (dscore,)):
        part, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        part.graph_copy(graph, copies)
        part.output(fx.node.map_arg(result, copies.__getitem__))
        _erase_unused_nodes(part)
        if result is out:
            part.erase_node(next(node for node in part.nodes if node.name == "dscore"))
        parts.append(make_module(part))
    return parts[0], parts[1], parts[2]


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Copy a graph with the metadata of its nodes."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


def make_module(graph: fx.Graph) -> fx.GraphModule:
    """Make the GraphModule of a graph, and remove its source from linecache and torch's cache, which never
    free it. Only tracebacks read these copies; ``module.code`` has the source too."""
    module = fx.GraphModule(torch.nn.Module(), graph)
    name = type(module).forward.__code__.co_filename
    linecache.cache.pop(name, None)
    graph_module._loader.eval_cache.pop(name, None)
    return module


# -- decompositions --------------------------------------------------------------------------------------


@functools.lru_cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return torch's decompositions of operations, and the decompositions of this module."""
    table = {
        op: decomposition
        for op, decomposition in global_decomposition_table["post_autograd"].items()
        if isinstance(op, torch._ops.OpOverload)
    }
    return table | {
        aten.mm.default: _sum_of_products,
        aten.bmm.default: _sum_of_products,
        aten.max.default: lambda x: x.amax(),
        aten.min.default: lambda x: x.amin(),
        aten.split.Tensor: lambda x, size, dim=0: [
            x.narrow(dim, i, min(size, x.shape[dim] - i)) for i in range(0, x.shape[dim], size)
        ],
        aten.mean.default: _mean,
        aten.mean.dim: _mean,
        aten.var.correction: _variance,
        aten.std.correction: lambda *args, **kwargs: _variance(*args, **kwargs).sqrt(),
        aten.var_mean.correction: lambda x, dim=None, *, correction=1, keepdim=False: (
            _variance(x, dim, correction=correction, keepdim=keepdim), _mean(x, dim, keepdim)
        ),
        aten.sign.default: _sign,
        aten.signbit.default: lambda x: torch.copysign(torch.ones_like(x), x) < 0,
        aten.flip.default: _flip,
        aten.fmax.default: lambda a, b: torch.where(b.isnan() | (a >= b), a, b),
        aten.fmin.default: lambda a, b: torch.where(b.isnan() | (a <= b), a, b),
        aten.softshrink_backward.default: _shrink_backward,
        aten.hardshrink_backward.default: _shrink_backward,
    }  # fmt: skip


def _sum_of_products(a: Tensor, b: Tensor) -> Tensor:
    """Decompose a @ b into products and a sum, in float32 for half precisions."""
    wide = torch.float32 if a.is_floating_point() and a.itemsize == 2 else a.dtype
    return (a.to(wide).unsqueeze(-1) * b.to(wide).unsqueeze(-3)).sum(-2).to(a.dtype)


def _mean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Decompose mean, in float32 for half precisions."""
    dims, dtype = list(dim) if dim else list(range(x.ndim)), dtype or x.dtype
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    return (x.sum(dims, keepdim, dtype=wide) / math.prod(x.shape[d] for d in dims)).to(dtype)


def _variance(x: Tensor, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Tensor:
    """Decompose var, in float32 for half precisions."""
    wide = x.float() if x.itemsize == 2 else x
    dims = list(dim) if dim else list(range(x.ndim))
    count = math.prod(x.shape[d] for d in dims)
    correction = 1 if correction is None else correction
    squares = (wide - _mean(wide, dims, True)).square()
    return (squares.sum(dims, keepdim) / max(count - correction, 0)).to(x.dtype)


def _sign(x: Tensor) -> Tensor:
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


def _flip(x: Tensor, dims: Sequence[int]) -> Tensor:
    for dim in dims:
        x = x.movedim(dim, 0)[torch.arange(x.shape[dim] - 1, -1, -1, device=x.device)].movedim(0, dim)
    return x


def _shrink_backward(grad: Tensor, x: Tensor, bound: float) -> Tensor:
    return torch.where((x >= -bound) & (x <= bound), 0, grad)


@functools.lru_cache
def _decompositions_into(ruled: frozenset[str]) -> dict[Any, Callable[..., Any]]:
    """Return the decompositions of operations that are not named in `ruled`."""
    return {op: decomposition for op, decomposition in decompositions().items() if op_name(op) not in ruled}


def decompose(node: fx.Node, ruled: frozenset[str]) -> fx.Graph | None:
    """Return the graph of an operation's decomposition into operations named in `ruled`, or None.

    Its inputs are `node.all_input_nodes`, in order.
    """
    if node.target not in decompositions():
        return None
    if "decomposition" not in node.meta:
        table, inputs = _decompositions_into(ruled), node.all_input_nodes

        def call(*values: Tensor) -> Any:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), dict(zip(inputs, values)).__getitem__)
            return node.target(*args, **kwargs)  # type: ignore[operator]

        values = [n.meta["val"] for n in inputs]
        recorder, fake = FakeRecorder(table), FakeTensorMode() if not values else values[0].fake_mode
        with _disable_current_modes(), torch.no_grad(), torch.inference_mode(False), fake:
            recorder.record(call, values)
        make_pure(recorder.graph, node.stack_trace or "")
        for part in recorder.graph.nodes:
            part.stack_trace = node.stack_trace
        node.meta["decomposition"] = recorder.graph
    return node.meta["decomposition"]
