"""Python callable -> torch graph of one attention element.

The function is run once on 0-d fake tensors (score, b, h, q_idx, kv_idx) under `make_fx`. The result
is an aten graph whose inputs are those five, then every captured tensor in order of first use, then the
captured numbers that may change without changing the graph. This is the only module that touches torch's
private tracing API (`TransformGetItemToIndex`: indexing by a 0-d tensor stays a gather).
"""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import get_decompositions
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from tritoncp.mods.captures import captured_numbers, describe, origin
from tritoncp.mods.errors import Untranslatable
from tritoncp.mods.recording import State, read_state
from tritoncp.mods.translate.number_captures import Path, constant_places, number_places

aten = torch.ops.aten
INDEX_NAMES = ("b", "h", "q_idx", "kv_idx")
CAPTURED_DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip

_DECOMPOSED = (
    aten.silu, aten.silu_backward, aten.gelu, aten.gelu_backward, aten.softplus, aten.softplus_backward,
    aten.leaky_relu, aten.leaky_relu_backward, aten.elu, aten.elu_backward, aten.hardtanh, aten.relu6,
    aten.hardtanh_backward, aten.hardsigmoid, aten.hardswish, aten.mish, aten.log_sigmoid_forward,
    aten.log_sigmoid_backward, aten.addcmul, aten.addcdiv, aten.lerp, aten.logit, aten.tanh_backward,
    aten.sigmoid_backward, aten.threshold, aten.threshold_backward, aten.frac, aten.xlogy, aten.logaddexp,
    aten.deg2rad, aten.heaviside, aten.sinc,
)  # fmt: skip


@dataclass(frozen=True)
class Traced:
    """A traced mod: its graphs, and its captures.

    forward(score?, b, h, q_idx, kv_idx, *tensors, *numbers) -> out
    joint(dscore, score, b, h, q_idx, kv_idx, *tensors, *numbers) -> (dscore_in, *gradients of the wanted)
    """

    name: str
    origin: str  # file:line of its definition
    is_score: bool
    dtype: torch.dtype
    forward: fx.GraphModule
    joint: fx.GraphModule | None
    tensors: tuple[Tensor, ...]
    numbers: tuple[int | float, ...]
    wants: tuple[int, ...]
    made: tuple[int, ...]  # which tensors the function makes itself, the same at every call


def trace(fn: Callable[..., Any], is_score: bool, dtype: torch.dtype, state: State | None = None) -> Traced:
    """Trace `fn` once more than needed to learn which constants are captured numbers."""
    state = state or read_state(fn, is_score, dtype)
    device = _device(state.tensors)
    values = captured_numbers(fn)
    first = _run(fn, is_score, dtype, device)
    places = number_places(first.graph, fn, values, lambda other: _run(other, is_score, dtype, device).graph)
    places |= constant_places(first.graph, state.numbers, len(values), places)
    return _finish(first, fn, is_score, dtype, [*values, *state.numbers], places)


@dataclass(frozen=True)
class _Raw:
    graph: fx.GraphModule
    wants: tuple[Tensor, ...]
    captured: tuple[Tensor, ...]


def _device(tensors: Sequence[Tensor]) -> torch.device:
    placed = [t.device for t in tensors if t.ndim] or [t.device for t in tensors]
    return placed[0] if placed else torch.device("cpu")


@torch.inference_mode(False)
def _run(fn: Callable[..., Any], is_score: bool, dtype: torch.dtype, device: torch.device) -> _Raw:
    watch = _Watch()
    indices = [torch.zeros((), dtype=torch.int64, device=device) for _ in INDEX_NAMES]
    scores = [torch.zeros((), dtype=dtype, device=device) for _ in range(2)]
    wanted: list[Tensor] = []

    def call(*args: Tensor) -> Tensor:
        with watch, _Values(), TransformGetItemToIndex(), fx.traceback.preserve_node_meta():
            return _as_tensor(fn(*args), fn, args[0])

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        with torch.no_grad():
            out = call(b, h, q_idx, kv_idx)
            return out if out.dtype == torch.bool else out != 0

    def joint(dscore: Tensor, score: Tensor, *rest: Tensor) -> Any:
        score = score.detach().requires_grad_()
        with torch.enable_grad():
            out = call(score.clone(), *rest).to(dtype)  # a copy: the function may edit it in place
        wanted.extend(t for t in watch.captured if t.requires_grad and t.is_floating_point())
        if not out.requires_grad:
            return out, torch.zeros_like(score), *(None for _ in wanted)
        grads = torch.autograd.grad(out, [score, *wanted], dscore, allow_unused=True)
        return out, torch.zeros_like(score) if grads[0] is None else grads[0], *grads[1:]

    tracer = make_fx(
        joint if is_score else mask,
        decomposition_table=get_decompositions(_DECOMPOSED),  # type: ignore[arg-type]
        tracing_mode="fake",
        _allow_non_fake_inputs=True,
    )
    try:
        # hooks around the call (offloading of activations, say) are not for the fake tensors of a trace
        with torch.inference_mode(False), saved_tensors_hooks(lambda x: x, lambda x: x):
            graph = tracer(*scores, *indices) if is_score else tracer(*indices)
    except (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException) as error:
        where = _line(traceback.extract_tb(error.__traceback__), origin(fn))
        raise Untranslatable(
            _operation(error), where, "its result depends on data known only in the kernel"
        ) from error
    release_source(graph)
    return _Raw(_normalise(_attached(graph), origin(fn)), tuple(wanted), tuple(watch.captured))


def _attached(graph: fx.GraphModule) -> fx.GraphModule:
    """Without joint()'s own detach of the score, so that the torch form can be differentiated.

    A user's detach acts on the copy that joint() hands over, never on the input itself.
    """
    for node in [n for n in graph.graph.nodes if n.target is torch.ops.aten.detach.default]:
        if node.args[0].op == "placeholder":
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    return graph


def _as_tensor(out: Any, fn: Callable[..., Any], like: Tensor) -> Tensor:
    if isinstance(out, bool | int | float):
        out = torch.scalar_tensor(
            out, dtype=torch.bool if isinstance(out, bool) else None, device=like.device
        )
    if not isinstance(out, Tensor) or out.ndim:
        what = (
            f"a tensor of shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
        )
        raise Untranslatable(
            "return", origin(fn), f"it gives {what} where one value per (q, kv) pair is needed"
        )
    return out


def _operation(error: Exception) -> str:
    func = getattr(error, "func", None)
    return str(func) if func is not None else "data-dependent control flow"


class _Watch(TorchDispatchMode):
    """A mode that sees each operation of the user's function before tracing, and refuses unsupported ones."""

    def __init__(self) -> None:
        super().__init__()
        self.captured: list[Tensor] = []  # in order of first use
        self._aliased: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._refuse(func, args)
        if func is not aten.lift_fresh.default:
            for tensor in tensors:
                self._note(tensor, func)
        fx.traceback.set_stack_trace([_user_line()])
        out = func(*args, **kwargs)
        if _is_view(func):
            self._aliased += [*tensors, *(t for t in tree_leaves(out) if isinstance(t, Tensor))]
        return out

    def _refuse(self, func: Any, args: Any) -> None:
        if func is aten._local_scalar_dense.default:
            raise Untranslatable(
                "Tensor.item(), bool(), int() or float() of a tensor", _user_line(),
                "a Python value or branch cannot depend on a tensor, which differs at every element "
                "(use torch.where, & | ~, or capture a Python number)",
            )  # fmt: skip
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            raise Untranslatable(str(func), _user_line(), "random numbers differ at every evaluation")
        if torch.Tag.dynamic_output_shape in getattr(func, "tags", ()) and _dynamic(func, args):
            raise Untranslatable(str(func), _user_line(), "the shape of its result depends on data")
        if getattr(func, "_schema", None) is not None and func._schema.is_mutable and args:
            target = args[0]
            if not isinstance(target, FakeTensor) or target.ndim or any(t is target for t in self._aliased):
                raise Untranslatable(
                    str(func), _user_line(), "an edit in place of a captured tensor or a view"
                )

    def _note(self, tensor: Tensor, func: Any) -> None:
        if isinstance(tensor, FakeTensor) or any(t is tensor for t in self.captured):
            return
        strange = tensor.is_nested or tensor.layout != torch.strided or is_traceable_wrapper_subclass(tensor)
        if strange or tensor.dtype not in CAPTURED_DTYPES:
            what = f"{type(tensor).__name__} ({tensor.dtype}, {tensor.layout})"
            raise Untranslatable(
                str(func), _user_line(), f"it reads a captured {what}; plain dense tensors are needed"
            )
        self.captured.append(tensor)


class _Values(TorchFunctionMode):
    """A mode that refuses reads of a tensor's values without an operation: the trace would freeze them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            raise Untranslatable(
                f"Tensor.{func.__name__}()", _user_line(), "its values are read while the function runs"
            )
        return func(*args, **(kwargs or {}))


def _is_view(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    if schema is None or schema.is_mutable or func is aten.lift_fresh.default:
        return False
    return any(result.alias_info for result in schema.returns)


def _dynamic(func: Any, args: Any) -> bool:
    if func.overloadpacket not in (aten.index, aten.index_put, aten._unsafe_index):
        return True
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])


_OUTSIDE = (
    torch.__file__.rsplit("/", 1)[0],
    __file__.rsplit("/", 2)[0],  # tritoncp/mods
    "<string>",
    "<eval_with_key>",
    "<frozen",
)


def _is_users(filename: str) -> bool:
    return not filename.startswith(_OUTSIDE) and "/contextlib.py" not in filename


def _user_line() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "an unknown line"


def _line(stack: Sequence[traceback.FrameSummary], otherwise: str) -> str:
    users = [f"{frame.filename}:{frame.lineno}" for frame in stack if _is_users(frame.filename)]
    return users[-1] if users else otherwise


def node_line(node: fx.Node, otherwise: str) -> str:
    """file:line of the user's code behind a graph node; backward nodes have none of their own."""
    return node.stack_trace or otherwise


# -- constants -------------------------------------------------------------------------------------------


def _normalise(graph: fx.GraphModule, name: str) -> fx.GraphModule:
    """`torch.tensor(3)`, made inside the function, becomes a scalar_tensor; edits in place become pure."""
    for node in list(graph.graph.nodes):
        if node.target is aten.lift_fresh_copy.default and node.args[0].op == "get_attr":
            value = getattr(graph, str(node.args[0].target))
            if value.ndim == 0:
                node.target, node.args = aten.scalar_tensor.default, (value.item(),)
                node.kwargs = {"dtype": value.dtype, "device": value.device}
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            _purify(graph.graph, node, name)
    _drop_dead(graph.graph)
    return graph


def _purify(graph: fx.Graph, node: fx.Node, name: str) -> None:
    """Replace add_ by add, cast back to the type of the edited tensor.

    Tracing has already turned later uses of the edited tensor into uses of the result.
    """
    target: Any = node.target
    packet = getattr(aten, target.overloadpacket.__name__.removesuffix("_"), None)
    pure = getattr(packet, target._overloadname, None)
    if pure is None:
        raise Untranslatable(str(target), node_line(node, name), "there is no rule for it")
    node.target = pure
    edited = node.meta["val"]
    given: list[Any] = [a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args[:2]]
    numeric = all(isinstance(g, Tensor | int | float) for g in given) and len(given) == 2
    natural = torch.result_type(*given) if numeric else edited.dtype
    if natural != edited.dtype and packet is not aten.masked_fill:
        with graph.inserting_after(node):
            cast = graph.call_function(aten._to_copy.default, (node,), {"dtype": edited.dtype})
        cast.meta.update(node.meta)
        node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
        node.meta["val"] = edited.to(natural)


def _drop_dead(graph: fx.Graph) -> None:
    """Remove operations that no output needs; operations of a mod have no side effects."""
    for node in reversed(list(graph.nodes)):
        if node.op not in ("placeholder", "output") and not node.users:
            graph.erase_node(node)


# -- lifting ---------------------------------------------------------------------------------------------


def _finish(
    raw: _Raw,
    fn: Any,
    is_score: bool,
    dtype: torch.dtype,
    values: list[int | float],
    places: dict[Path, int],
) -> Traced:
    graph = raw.graph.graph
    nodes = list(graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    for node, argument in zip(inputs, (("dscore", "score") if is_score else ()) + INDEX_NAMES, strict=True):
        node.name = node.target = argument
    tensors: list[Tensor] = []
    lifted: list[fx.Node] = []
    after = inputs[-1]
    for node in nodes:
        if node.op != "get_attr":
            continue
        tensor = getattr(raw.graph, str(node.target))
        at = next((i for i, known in enumerate(tensors) if known is tensor), None)
        if at is None:
            at = len(tensors)
            tensors.append(tensor)
            lifted.append(_placeholder(graph, after, f"t{at}", val=node.meta.get("val", tensor)))
            after = lifted[-1]
        node.replace_all_uses_with(lifted[at])
        graph.erase_node(node)
    numbers = _lift_numbers(graph, nodes, after, values, places)
    wants = tuple(i for i, t in enumerate(tensors) if any(t is w for w in raw.wants))
    order = [next(k for k, w in enumerate(raw.wants) if w is tensors[i]) for i in wants]
    forward, joint = _split(graph, is_score, order)
    made = tuple(i for i, t in enumerate(tensors) if not any(t is c for c in raw.captured))
    return Traced(
        describe(fn), origin(fn), is_score, dtype, forward, joint, tuple(tensors), numbers, wants, made
    )


def _placeholder(graph: fx.Graph, after: fx.Node, name: str, **meta: Any) -> fx.Node:
    with graph.inserting_after(after):
        node = graph.placeholder(name)
    node.meta.update(meta)
    return node


def _lift_numbers(
    graph: fx.Graph, nodes: list[fx.Node], after: fx.Node, values: list[int | float], places: dict[Path, int]
) -> tuple[int | float, ...]:
    lifted: dict[int, fx.Node] = {}
    for (i, key), which in places.items():
        if which not in lifted:
            after = _placeholder(graph, after, f"n{len(lifted)}", number=values[which])
            lifted[which] = after
        node = nodes[i]
        if isinstance(key, int):
            node.update_arg(key, lifted[which])
        else:
            node.update_kwarg(key, lifted[which])
    return tuple(values[which] for which in lifted)


def _split(graph: fx.Graph, is_score: bool, order: list[int]) -> tuple[fx.GraphModule, fx.GraphModule | None]:
    root = torch.nn.Module()
    if not is_score:
        return _module(root, graph), None
    (outputs,) = next(n for n in graph.nodes if n.op == "output").args
    out, dscore_in, *grads = outputs
    forward, joint = fx.Graph(), fx.Graph()
    for new, picked in ((forward, out), (joint, (dscore_in, *(grads[k] for k in order)))):
        copied: dict[fx.Node, fx.Node] = {}
        new.graph_copy(graph, copied)
        new.output(fx.node.map_arg(picked, copied.__getitem__))
        _drop_dead(new)
    for node in list(forward.nodes):
        if node.name == "dscore":
            forward.erase_node(node)
    return _module(root, forward), _module(root, joint)


def _module(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    module = fx.GraphModule(root, graph)
    release_source(module)
    return module


def release_source(module: fx.GraphModule) -> None:
    """Remove a graph's Python source from torch's cache, which keeps that of every graph for ever, and from
    linecache: it is for tracebacks only, and ``module.code`` has it too."""
    name = type(module).forward.__code__.co_filename
    linecache.cache.pop(name, None)
    graph_module._loader.eval_cache.pop(name, None)
