"""Calls of mask_mods and score_mods in torch: vmapped over index scalars, recorded, and differentiated.

`table[q_idx]` with a vmapped q_idx works only if the index remains a tensor: see :class:`TensorIndexing`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from tritoncp.core.host_copy import host, no_saved_tensor_hooks
from tritoncp.mods.user_code import call_mod, check_result, explained_errors, write_refused

aten = torch.ops.aten
Mod = Callable[..., Tensor]
InDims = tuple[int | None, ...]

# Operations that read the shape, dtype or device of their argument, not its value.
SHAPE_ONLY = {f"new_{fill}" for fill in ("ones", "zeros", "full", "empty")}
SHAPE_ONLY |= {f"{fill}_like" for fill in ("ones", "zeros", "full", "empty")}


with ThreadPoolExecutor(1) as _thread:
    _FRESH = (
        _thread.submit(torch._C._dispatch_tls_local_include_set).result(),
        _thread.submit(torch._C._dispatch_tls_local_exclude_set).result(),
    )


@contextmanager
def fresh_dispatch() -> Iterator[None]:
    """Context inside an op with the dispatch keys of a new thread, without gradients and saved-tensor hooks.

    An op runs below autograd, and under a dispatch mode (the first call of a compiled graph, selective
    checkpointing) also below functorch; translation of mods and the CPU engine need both.
    """
    with torch._C._ForceDispatchKeyGuard(*_FRESH), torch.no_grad(), host(), no_saved_tensor_hooks():
        yield


class TensorIndexing(TorchFunctionMode):
    """Torch function mode that turns x[i, :, j] with 0-d tensors i, j into a gather, which vmap supports.

    Without it, torch reads the value of a 0-d index. torch's own mode does not support slices beside tensors,
    and its gradients are wrong under vmap if x is vmapped, or a row: it sums over the vmapped dimension.

    >>> table = torch.arange(6).view(2, 3)
    >>> with TensorIndexing():
    ...     torch.vmap(lambda i: table[:, i].sum())(torch.arange(3))
    tensor([3, 5, 7])
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            items = args[1] if isinstance(args[1], tuple) else (args[1],)
            parts = _tensors_first(args[0], items)
            if parts is not None:
                return _gather(*parts)
        return func(*args, **(kwargs or {}))


def _gather(x: Tensor, indices: tuple[Any, ...]) -> Tensor:
    tensors = [
        i if isinstance(i, Tensor) else torch.tensor(i, dtype=torch.int64, device=x.device) for i in indices
    ]
    return torch.ops.aten.index(x, tensors)


def _tensors_first(x: Any, items: tuple[Any, ...]) -> tuple[Tensor, tuple[Any, ...]] | None:
    """Return (view of x, indices of its first dimensions) whose gather is x[items]; None if it is no
    gather."""
    if not isinstance(x, Tensor) or not items:
        return None
    plain = [isinstance(item, Tensor | int) and not isinstance(item, bool) for item in items]
    if all(plain):
        return x, items
    tensors = [item for item in items if isinstance(item, Tensor)]
    if not tensors:
        return None
    sliced = all(p or isinstance(i, slice) or i is Ellipsis for p, i in zip(plain, items))
    if not sliced or any(t.ndim or t.dtype in (torch.bool, torch.uint8) for t in tensors):
        return None
    if Ellipsis in [i for i in items if not isinstance(i, Tensor)]:
        at = next(n for n, item in enumerate(items) if item is Ellipsis)
        items = (*items[:at], *[slice(None)] * (x.ndim - len(items) + 1), *items[at + 1 :])
    view = x[tuple(item if isinstance(item, slice) else slice(None) for item in items)]
    dims = [n for n, item in enumerate(items) if not isinstance(item, slice)]
    return view.movedim(dims, list(range(len(dims)))), tuple(items[d] for d in dims)


def vmapped(mod: Mod, *levels: InDims) -> Mod:
    """Apply torch.vmap to a mask_mod (four arguments) or score_mod (five) once for each of `levels`
    (in_dims), the innermost first.

    Calls raise TypeError, with the line of mod and the remedy, if a result is not a 0-d tensor (of bool, for
    a mask_mod), and for operations that vmap does not support: branches on tensors, `.item()`, random
    numbers.

    >>> f = vmapped(lambda q, kv: q >= kv, (None, 0), (0, None))
    >>> f(torch.arange(2), torch.arange(3)).tolist()
    [[True, False, False], [True, True, False]]
    """
    kind = {4: "mask_mod", 5: "score_mod"}.get(len(levels[0]), "function")

    def element(*args: Tensor) -> Tensor:
        return check_result(call_mod(mod, kind, *args), mod, kind)

    batched = element
    for in_dims in levels:
        batched = torch.vmap(batched, in_dims=in_dims)

    def call(*args: Tensor) -> Tensor:
        with TensorIndexing(), explained_errors(mod, kind):
            return batched(*args)

    return call


class WideGradients(torch.fx.Interpreter):
    """Interpreter of a score_mod's graph with captures converted to a wider ``dtype``: results are rounded
    after each operation to the narrow dtypes of tracing, and gradients are accumulated in ``dtype``.

    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> def f(t, i):
    ...     return t[i] * 3
    >>> args = torch.tensor([0.1], dtype=torch.bfloat16), torch.tensor([0])
    >>> graph = make_fx(f)(*args)
    >>> wide = args[0].float().requires_grad_()
    >>> out = WideGradients(graph, torch.float32).run(wide, args[1])
    >>> out.dtype, out.item() == f(*args).item(), torch.autograd.grad(out, wide)
    (torch.float32, True, (tensor([3.]),))
    """

    def __init__(self, graph: torch.fx.GraphModule, dtype: torch.dtype) -> None:
        super().__init__(graph)
        self.dtype = dtype

    def run_node(self, n: torch.fx.Node) -> Any:
        out, traced = super().run_node(n), n.meta.get("val")
        if n.op != "call_function" or not isinstance(traced, Tensor):
            return out
        is_narrow = traced.dtype.is_floating_point and traced.dtype.itemsize < self.dtype.itemsize
        return out.to(traced.dtype).to(self.dtype) if is_narrow else out


class WriteToCapture(RuntimeError):
    """Raised in place of an operation that writes to a captured tensor."""


class GraphRecorder(TorchDispatchMode):
    """Dispatch mode that records the aten operations of a function as a torch.fx graph; it raises
    WriteToCapture in place of a write to a captured tensor.

    graph: the recorded operations; root: the module whose attributes are tensors that are neither arguments
    nor results. `node.meta["val"]` is a result without data. The graph is that of torch's `make_fx`, which
    takes a second, since it imports Dynamo and Inductor.

    device: device of each ``node.meta["val"]``; None: the result's, under a mode that makes fake tensors
    keeps_detach: whether detach() is recorded
    """

    def __init__(self, device: str | None = "meta", keeps_detach: bool = False) -> None:
        super().__init__()
        self._device, self._keeps_detach = device, keeps_detach
        self.graph, self.root = torch.fx.Graph(), torch.nn.Module()
        self._nodes: dict[int, torch.fx.Node] = {}  # by id of the tensor
        self._tensors: list[Tensor] = []  # keeps tensors alive, so that ids are not reused
        self._constants: set[torch.fx.Node] = set()  # computed from Python numbers and captures alone

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return True; otherwise torch would import Dynamo, for a second, to exclude the mode from
        compilation."""
        return False

    def record(self, fn: Callable[..., Any], arguments: Sequence[Tensor], names: Sequence[str] = ()) -> None:
        """Record one run of ``fn``. Passes on its exceptions; raises RuntimeError where a Python value
        depends on a tensor of the graph."""
        for argument, name in zip(arguments, names or [f"arg{i}_1" for i in range(len(arguments))]):
            self._note(argument, self.graph.placeholder(name))
        with self:
            out = fn(*arguments)
        self.graph.output(tree_map_only(Tensor, self._node, out))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # called for fake tensors
            return func(*args)
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        if self._writes_capture(func, args, kwargs):
            raise WriteToCapture(str(func))
        nodes = [self._nodes.get(id(leaf)) for leaf in tree_leaves((args, kwargs))]
        inputs = [node for node in nodes if node is not None and node.op != "get_attr"]
        is_constant = self._constants.issuperset(inputs)
        if torch.Tag.data_dependent_output in func.tags and not is_constant:
            raise RuntimeError(f"{func} reads a value of the graph")
        out = func(*args, **kwargs)
        if torch.Tag.data_dependent_output in func.tags:
            return out
        if func is aten.detach.default and not self._keeps_detach:
            self._note(out, self._node(args[0]))
            return out
        if func is aten.lift_fresh.default:
            node = self._lift(args[0])
        else:
            node = self.graph.call_function(func, *tree_map_only(Tensor, self._node, (args, kwargs)))
        self._note(out, node)
        random = torch.Tag.nondeterministic_seeded in func.tags
        if func is aten.lift_fresh.default or (inputs and is_constant and not random):
            self._constants.add(node)
        return out

    def _writes_capture(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Return whether an operation writes to a captured tensor or to a view of one."""
        for tensor in written_tensors(func, args, kwargs):
            node = self._nodes.get(id(tensor))
            while node is not None and node.op == "call_function" and returns_view(node.target):
                node = node.all_input_nodes[0]
            if node is None or self._is_capture(node):
                return True
        return False

    def _is_capture(self, node: torch.fx.Node) -> bool:
        return node.op == "get_attr"

    def _lift(self, value: Tensor) -> torch.fx.Node:
        """Add the node of a constant tensor of Python numbers."""
        with _disable_current_modes():
            copy = value.clone()  # in-place operations on the result would change the constant
        return self.graph.call_function(aten.lift_fresh_copy.default, (self._node(copy),))

    def _node(self, tensor: Tensor) -> torch.fx.Node:
        """Return the node of a tensor; for a capture, add an attribute of the module."""
        if id(tensor) not in self._nodes:
            name = f"_tensor_constant{len(self._tensors)}"
            self.root.register_buffer(name, tensor)
            self._note(tensor, self.graph.get_attr(name))
        return self._nodes[id(tensor)]

    def _note(self, out: Any, node: torch.fx.Node) -> None:
        """Record ``node`` as the node of ``out``: a tensor, or a sequence, each item of which gets a node."""
        if isinstance(out, Tensor):
            self._nodes[id(out)] = node
            self._tensors.append(out)
            node.meta["val"] = torch.empty(out.shape, dtype=out.dtype, device=self._device or out.device)
        elif isinstance(out, tuple | list):
            node.meta["val"] = out
            for index, item in enumerate(out):
                self._note(item, self.graph.call_function(operator.getitem, (node, index)))


def returns_view(func: Any) -> bool:
    """Return whether an operation's result is a view of an operand."""
    schema = getattr(func, "_schema", None)
    if schema is None or schema.is_mutable or func is aten.lift_fresh.default:
        return False
    return any(result.alias_info for result in schema.returns)


def written_tensors(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operation writes to."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = dict(zip((argument.name for argument in schema.arguments), args)) | kwargs
    written = (a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return [x for x in tree_leaves([given.get(name) for name in written]) if isinstance(x, Tensor)]


def graph_of(mask_mod: Mod, device: str | torch.device = "cpu") -> torch.fx.GraphModule | None:
    """Trace the mask_mod to a graph of int64 scalars (b, h, q_idx, kv_idx); None if it cannot be traced.

    Raises TypeError for a mask_mod that writes to a captured tensor."""
    scalars = tuple(torch.zeros((), dtype=torch.int64, device=device) for _ in range(4))
    try:
        with torch.no_grad(), TensorIndexing():
            recorder = GraphRecorder()
            recorder.record(mask_mod, scalars)
    except WriteToCapture as error:
        raise write_refused(mask_mod, error) from error
    except Exception:  # raised by user code; the mask_mod can still be evaluated pair by pair
        return None
    recorder.graph.eliminate_dead_code()
    return torch.fx.GraphModule(recorder.root, recorder.graph)


def result_of(graph: torch.fx.GraphModule) -> Any:
    """Return what the graph returns: a node, or a Python number."""
    return next(node for node in graph.graph.nodes if node.op == "output").args[0]


def ancestors(
    graph: torch.fx.GraphModule, nodes: Sequence[torch.fx.Node], ends: Sequence[torch.fx.Node] = ()
) -> list[torch.fx.Node]:
    """List nodes and what they are computed from, in order; ``ends`` without what these are computed from."""
    needed: set[torch.fx.Node] = set()
    stack = list(nodes)
    while stack:
        if (node := stack.pop()) not in needed:
            needed.add(node)
            stack += [] if node in ends else node.all_input_nodes
    return [node for node in graph.graph.nodes if node in needed]


def operation_name(node: torch.fx.Node) -> str:
    """Return the name of a node's operation without its overload, as "add"; "" if it is no operation."""
    return getattr(node.target, "_opname", "")


def dtype_of(node: torch.fx.Node) -> torch.dtype | None:
    """Return the dtype of a node's result; None for several results."""
    return getattr(node.meta["val"], "dtype", None)


def is_read(index: torch.fx.Node) -> bool:
    """Return whether the graph reads the value of an input, not only its shape."""
    return any(operation_name(user) not in SHAPE_ONLY for user in index.users)


def reads_batch_or_head(mask_mod: Mod, device: str | torch.device = "cpu") -> tuple[bool, bool]:
    """Return whether the mask_mod may depend on b, and on h; (True, True) if it cannot be traced.

    >>> reads_batch_or_head(lambda b, h, q, kv: q + h >= kv)
    (False, True)
    """
    graph = graph_of(mask_mod, device)
    return (True, True) if graph is None else read_batch_and_head(graph)


def read_batch_and_head(graph: torch.fx.GraphModule) -> tuple[bool, bool]:
    """Return whether the graph of a mask_mod reads b, and whether it reads h."""
    b, h = [node for node in graph.graph.nodes if node.op == "placeholder"][:2]
    return is_read(b), is_read(h)


class OwnGradient(torch.autograd.Function):
    """Autograd function of a score_mod, in whose graph the user's autograd.Functions are not visible.

    back: (gradient of the result, *arguments) -> (gradient of the score,)
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(run: Callable[..., Tensor], back: Callable[..., Any], *arguments: Tensor) -> Tensor:
        return run(*arguments).clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.back, *arguments = inputs
        ctx.save_for_backward(*arguments)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, *ctx.back(grad, *ctx.saved_tensors), None, None, None, None
