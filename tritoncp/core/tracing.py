"""How torch calls a user's mask_mod or score_mod: on index scalars, vmapped.

`table[q_idx]` with a vmapped q_idx works only under torch's getitem-to-index transform, a private
API; in the rooms that import torch alone it is used here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from tritoncp.core.host_copy import host

Mod = Callable[..., Tensor]
InDims = tuple[int | None, ...]

# These read the shape, dtype or device of their argument, not its value.
SHAPE_ONLY = {f"new_{fill}" for fill in ("ones", "zeros", "full", "empty")}
SHAPE_ONLY |= {f"{fill}_like" for fill in ("ones", "zeros", "full", "empty")}


def _keys() -> tuple[torch._C.DispatchKeySet, torch._C.DispatchKeySet]:
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


with ThreadPoolExecutor(1) as _thread:
    _FRESH = _thread.submit(_keys).result()


@contextmanager
def fresh_dispatch() -> Iterator[None]:
    """Within an op, dispatch as in a new thread, without gradients.

    An op runs below autograd, and where a dispatch mode is on (the first call of a compiled graph, selective
    checkpointing) below functorch as well; translating a mod and the eager engine need both.
    """
    with torch._C._ForceDispatchKeyGuard(*_FRESH), torch.no_grad(), host():
        yield


def _getitem_to_index() -> AbstractContextManager[object]:
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # a second to import

    return TransformGetItemToIndex()


class IndexByTensors(TorchFunctionMode):
    """Function mode that makes x[i, :, j] with 0-d tensors i, j a gather, which may be vmapped.

    Without it, torch reads the value of a 0-d index. torch's own mode takes no slices beside tensors, and its
    gradients are wrong under vmap where x is vmapped, or a row: it sums them over the vmapped dimension.

    gather: (x, indices of its first dimensions) -> the element or row

    >>> table = torch.arange(6).view(2, 3)
    >>> with IndexByTensors():
    ...     torch.vmap(lambda i: table[:, i].sum())(torch.arange(3))
    tensor([3, 5, 7])
    """

    def __init__(self, gather: Callable[[Tensor, tuple[Any, ...]], Tensor] | None = None) -> None:
        super().__init__()
        self.gather = gather or _gather

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            items = args[1] if isinstance(args[1], tuple) else (args[1],)
            parts = _tensors_first(args[0], items)
            if parts is not None:
                return self.gather(*parts)
        return func(*args, **(kwargs or {}))


def _gather(x: Tensor, indices: tuple[Any, ...]) -> Tensor:
    tensors = [
        i if isinstance(i, Tensor) else torch.tensor(i, dtype=torch.int64, device=x.device) for i in indices
    ]
    return torch.ops.aten.index(x, tensors)


def _tensors_first(x: Any, items: tuple[Any, ...]) -> tuple[Tensor, tuple[Any, ...]] | None:
    """A view of x, and the indices of its first dimensions, that make x[items]; None if it is no gather."""
    tensors = [item for item in items if isinstance(item, Tensor)]
    if not isinstance(x, Tensor) or not tensors:
        return None
    plain = [isinstance(item, Tensor | int) and not isinstance(item, bool) for item in items]
    if all(plain):
        return x, items
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
    """Apply torch.vmap to mod once for each of `levels` (in_dims), the innermost first.

    >>> f = vmapped(lambda q, kv: q >= kv, (None, 0), (0, None))
    >>> f(torch.arange(2), torch.arange(3)).tolist()
    [[True, False, False], [True, True, False]]
    """
    for in_dims in levels:
        mod = torch.vmap(mod, in_dims=in_dims)

    def call(*args: Tensor) -> Tensor:
        with IndexByTensors():
            return mod(*args)

    return call


class Rounding(torch.autograd.Function):
    """Rounding of values to a narrower type within the wide type; gradients pass unchanged."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class WideGradients(torch.fx.Interpreter):
    """A score_mod's graph around captures that were widened to ``dtype``: the values are those of the narrow
    types it was traced with, rounded after each operation, and gradients are summed in ``dtype``.

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
        out = super().run_node(n)
        traced = n.meta.get("val")
        if n.op != "call_function" or not isinstance(traced, Tensor) or not self._is_narrow(traced.dtype):
            return out
        return Rounding.apply(out.to(self.dtype), traced.dtype)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run an op with the wide type in place of narrow dtype arguments; `run_node` rounds its result."""
        args, kwargs = tree_map_only(torch.dtype, self._widened, (args, kwargs))
        return super().call_function(target, args, kwargs)

    def _widened(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype if self._is_narrow(dtype) else dtype

    def _is_narrow(self, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point and dtype.itemsize < self.dtype.itemsize


def graph_of(mask_mod: Mod, device: str | torch.device = "cpu") -> torch.fx.GraphModule | None:
    """Trace the mask_mod to a graph of int64 scalars (b, h, q_idx, kv_idx); None if it cannot be traced."""
    from torch.fx.experimental.proxy_tensor import make_fx

    scalars = tuple(torch.zeros((), dtype=torch.int64, device=device) for _ in range(4))
    try:
        with torch.no_grad(), _getitem_to_index(), IndexByTensors(lambda x, i: x[i]):
            graph = make_fx(mask_mod)(*scalars)
    except Exception:  # any error of the user's code: the mask_mod can still be evaluated pair by pair
        return None
    graph.graph.eliminate_dead_code()
    return graph


def is_read(index: torch.fx.Node) -> bool:
    """Return whether the graph reads the value of an input, not only its shape."""
    return any(getattr(user.target, "_opname", "") not in SHAPE_ONLY for user in index.users)


def reads_batch_or_head(mask_mod: Mod, device: str | torch.device = "cpu") -> tuple[bool, bool]:
    """Return whether the mask_mod may depend on b, and on h; (True, True) if it cannot be traced.

    >>> reads_batch_or_head(lambda b, h, q, kv: q + h >= kv)
    (False, True)
    """
    graph = graph_of(mask_mod, device)
    if graph is None:
        return True, True
    b, h = [node for node in graph.graph.nodes if node.op == "placeholder"][:2]
    return is_read(b), is_read(h)
