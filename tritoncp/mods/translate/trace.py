"""Tracing of a mask_mod or score_mod to a torch graph for one pair of query and key.

The function runs on 0-d fake tensors (score, b, h, q_idx, kv_idx), and `mods.tracing.GraphRecorder` records
it. The result is an aten graph whose inputs are these five, all captured tensors in order of first use, and
the captured numbers that may change while the graph stays the same. Under `mods.tracing.TensorIndexing` an
index by a 0-d tensor is traced as a gather.
"""

from __future__ import annotations

import itertools
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from tritoncp.core.host_copy import plain_autograd
from tritoncp.mods.errors import Untranslatable
from tritoncp.mods.fingerprint import ModState
from tritoncp.mods.tracing import TensorIndexing, returns_view, written_tensors
from tritoncp.mods.translate.graph_passes import FakeRecorder, copy_graph, make_pure, split_outputs
from tritoncp.mods.translate.number_captures import lift_numbers, lift_offsets
from tritoncp.mods.translate.symbolic import TRITON_NAME
from tritoncp.mods.user_code import (
    HAS_DATA_DEPENDENT_SHAPE,
    IS_RANDOM,
    MUST_NOT_WRITE,
    READS_VALUE,
    Operands,
    call_mod,
    check_result,
    describe,
    last_user_line,
    origin,
    user_line,
    user_operands,
)

aten = torch.ops.aten
INDEX_NAMES = ("b", "h", "q_idx", "kv_idx")


@dataclass(frozen=True)
class ModTrace:
    """Traced graphs and captures of a mask_mod or score_mod.

    forward(score?, b, h, q_idx, kv_idx, *tensors, *numbers) -> out
    joint(dscore, score, b, h, q_idx, kv_idx, *tensors, *numbers)
        -> (gradient of the score, *gradients of tensors[i] for i in wants)
    back: the same -> (gradient of the score,)

    name, origin: name and file:line of the function, for messages
    dtype: dtype of scores
    constants: indices in `tensors` of the constant tensors that the function makes
    offsets: integers in addresses, see :mod:`tritoncp.mods.translate.number_captures`
    lifted: the trace with the offsets among its numbers; None without offsets
    """

    name: str
    origin: str
    is_score: bool
    dtype: torch.dtype
    forward: fx.GraphModule
    joint: fx.GraphModule | None
    back: fx.GraphModule | None
    tensors: tuple[Tensor, ...]
    numbers: tuple[int | float, ...]
    wants: tuple[int, ...]
    constants: tuple[int, ...]
    offsets: tuple[int, ...] = ()
    lifted: ModTrace | None = None


def trace_mod(fn: Callable[..., Any], is_score: bool, dtype: torch.dtype, state: ModState) -> ModTrace:
    """Trace `fn`, and replace constants of the graph that are captured numbers by inputs."""
    device = _device(state.tensors)
    recorder = _Recorder(fn)
    leaves, own_gradients = _record(fn, is_score, dtype, device, recorder)
    graph, tensors = recorder.graph, recorder.tensors
    make_pure(graph, origin(fn))
    numbers = lift_numbers(graph, state.numbers)
    grads = {i: k for i, t in enumerate(tensors) for k, leaf in enumerate(leaves) if leaf is t}

    def finish(graph: fx.Graph, *own: int, **fields: Any) -> ModTrace:
        forward, joint, back = split_outputs(graph, is_score, list(grads.values()))
        forward.meta["own_gradients"] = own_gradients, back
        return ModTrace(
            describe(fn), origin(fn), is_score, dtype, forward, joint, back, tuple(tensors),
            (*numbers, *own), tuple(grads), tuple(recorder.constants), **fields,
        )  # fmt: skip

    with_inputs = copy_graph(graph)
    offsets = lift_offsets(with_inputs)
    return finish(graph, offsets=offsets, lifted=finish(with_inputs, *offsets) if offsets else None)


def _device(tensors: Sequence[Tensor]) -> torch.device:
    """Return the device of the captured tensors. 0-d tensors, which may be CPU scalars, count only if there
    are no others."""
    devices = [t.device for t in tensors if t.ndim] or [t.device for t in tensors]
    return devices[0] if devices else torch.device("cpu")


def _record(
    fn: Callable[..., Any], is_score: bool, dtype: torch.dtype, device: torch.device, recorder: _Recorder
) -> tuple[list[Tensor], list[str]]:
    """Record one run of a function on fake tensors. Return (captured tensors that require grad, in the order
    of the graph's gradients; names of the user's autograd.Functions on the way to the result)."""
    leaves: list[Tensor] = []
    own_gradients: list[str] = []
    kind = "score_mod" if is_score else "mask_mod"

    def call(*args: Tensor) -> Tensor:
        with _ValueChecks(), TensorIndexing():
            return check_result(call_mod(fn, kind, *args), fn, kind)

    def joint(dscore: Tensor, score: Tensor, *rest: Tensor) -> Any:
        out = call(score.clone(), *rest).to(dtype)  # clone: the function may edit it in place
        leaves.extend(t for t in recorder.captures if t.requires_grad and t.is_floating_point())
        own_gradients.extend(_function_gradients(out, recorder.captures))
        recorder.detaches = False
        if not out.requires_grad:
            return out, torch.zeros_like(score), *(None for _ in leaves)
        grads = torch.autograd.grad(out, [score, *leaves], dscore, allow_unused=True)
        return out, torch.zeros_like(score) if grads[0] is None else grads[0], *grads[1:]

    recorder.callers = call.__code__, joint.__code__
    # torch's cache of fake results is unbounded, with an entry for each value of a captured number.
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    fake.cache_enabled = False
    try:
        with plain_autograd(), torch.set_grad_enabled(is_score), fake:
            indices = [torch.zeros((), dtype=torch.int64, device=device) for _ in INDEX_NAMES]
            if is_score:
                recorder.detaches = True
                dscore, score = (torch.zeros((), dtype=dtype, device=device) for _ in range(2))
                names = ("dscore", "score", *INDEX_NAMES)
                recorder.record(joint, [dscore, score.requires_grad_(), *indices], names)
            else:
                recorder.record(call, indices, INDEX_NAMES)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        line = last_user_line(traceback.extract_tb(error.__traceback__), origin(fn))
        why = "its result depends on data that only the kernel has"
        raise Untranslatable(str(error.func), line, why) from error
    except RuntimeError as error:
        if "leaf Variable that requires grad" not in str(error):  # raised before the recorder sees the write
            raise
        line = last_user_line(traceback.extract_tb(error.__traceback__), origin(fn))
        raise _write("an operation in place", line) from error
    return leaves, own_gradients


def _function_gradients(out: Tensor, captures: Sequence[Tensor]) -> list[str]:
    """Return the names of the user's autograd.Functions between captured tensors and a result."""
    nodes, names = [out.grad_fn], {capture.grad_fn: "" for capture in captures}
    while nodes:
        node = nodes.pop()
        if node is not None and node not in names:
            own = isinstance(node, torch.autograd.function.BackwardCFunction)
            names[node] = type(node).__name__.removesuffix("Backward") if own else ""
            nodes += [parent for parent, _ in node.next_functions]
    return sorted({name for name in names.values() if name})


class _Recorder(FakeRecorder):
    """Recorder that makes captured tensors inputs t0, t1, ... of the graph, and raises Untranslatable for
    operations that a kernel cannot run.

    tensors: these inputs, in order of first use. constants: indices of the tensors that the function makes
    detaches: whether to record detach() of results that do not require grad, so that the torch form has the
        function's gradient
    fn, callers: the function, and the code that calls it, for the lines of errors
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn
        self.callers: tuple[CodeType, ...] = ()
        self.tensors: list[Tensor] = []
        self.constants: list[int] = []
        self.detaches = False
        # Lines and operands of forward operations, by sequence number of the autograd node.
        self._forward: dict[int, tuple[str, Operands]] = {}
        self._views: list[Tensor] = []  # views and their bases

    @property
    def captures(self) -> list[Tensor]:
        """The tensors other than constants that the function makes."""
        return [tensor for i, tensor in enumerate(self.tensors) if i not in self.constants]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.detaches:  # in the forward pass
            self._forward.setdefault(torch.autograd._get_sequence_nr() - 1, (self._line(), self._operands()))
        self._refuse(func, args, kwargs or {})
        last = next(iter(reversed(self.graph.nodes)))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        new = list(itertools.takewhile(lambda node: node is not last, reversed(self.graph.nodes)))
        for node in new:
            node.stack_trace = node.stack_trace or self._line()
            node.meta.setdefault("operands", self._operands())
        if returns_view(func):
            self._views += [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        # Under no_grad an in-place operation keeps the gradient of the edited tensor: torch.cosine_similarity
        # clamps its norms so.
        is_edit = getattr(func, "_schema", None) is not None and func._schema.is_mutable
        if self.detaches and not torch.is_grad_enabled() and not is_edit and self._nodes.get(id(out)) in new:
            self._note(out, self.graph.call_function(aten.detach.default, (self._node(out),)))
        return out

    def _lift(self, value: Tensor) -> fx.Node:
        before, node = len(self.tensors), super()._lift(value)
        self.constants += range(before, len(self.tensors))
        return node

    def _node(self, tensor: Tensor) -> fx.Node:
        if id(tensor) not in self._nodes:
            dense = not tensor.is_nested and tensor.layout == torch.strided
            if not dense or is_traceable_wrapper_subclass(tensor) or tensor.dtype not in TRITON_NAME:
                kind = f"{type(tensor).__name__} ({tensor.dtype}, {tensor.layout})"
                why = f"it is a {kind}; plain dense tensors are needed"
                raise Untranslatable("a captured tensor", self._line(), why)
            last_input = [node for node in self.graph.nodes if node.op == "placeholder"][-1]
            with self.graph.inserting_after(last_input):
                self._note(tensor, self.graph.placeholder(f"t{len(self.tensors)}"))
            self.tensors.append(tensor)
        return self._nodes[id(tensor)]

    def _line(self) -> str:
        """Return the user's line of the current operation; in the backward pass, the line of the forward
        operation."""
        forward = self._forward_operation()
        return user_line(forward[0] if forward else origin(self.fn), self.callers)

    def _operands(self) -> Operands:
        """Return the operands in the user's source of the operation of :meth:`_line`."""
        forward = self._forward_operation()
        return forward[1] if forward else user_operands(self.callers)

    def _forward_operation(self) -> tuple[str, Operands] | None:
        """In the backward pass, return line and operands of the forward operation."""
        node = torch._C._current_autograd_node()
        return self._forward.get(node._sequence_nr()) if node is not None else None

    def _is_capture(self, node: fx.Node) -> bool:
        return node.op == "placeholder" and re.fullmatch(r"t\d+", node.name) is not None

    def _refuse(self, func: Any, args: Any, kwargs: Any) -> None:
        if func is aten._local_scalar_dense.default:
            raise Untranslatable(
                "Tensor.item(), bool(), int() or float() of a tensor", self._line(), READS_VALUE
            )
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            raise Untranslatable(str(func), self._line(), IS_RANDOM)
        if torch.Tag.dynamic_output_shape in getattr(func, "tags", ()) and _has_dynamic_shape(func, args):
            raise Untranslatable(str(func), self._line(), HAS_DATA_DEPENDENT_SHAPE)
        if self._writes_capture(func, args, kwargs):
            raise _write(str(func), self._line())
        edited = written_tensors(func, args, kwargs)
        if any(view is tensor for view in self._views for tensor in edited):
            raise Untranslatable(str(func), self._line(), "an edit in place of a view, or of what has one")


class _ValueChecks(TorchFunctionMode):
    """Torch function mode that raises Untranslatable for `tolist` and `numpy`, which cannot be traced, and
    for a write to a captured tensor or to an element whose index depends on the pair."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__setitem__:
            _check_write("tensor[...] = value", *args[:2])
        elif kwargs and kwargs.get("out") is not None:
            _check_write(f"{func.__name__}(out=tensor)", kwargs["out"])
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            raise Untranslatable(
                f"Tensor.{func.__name__}()", user_line(), "its values are read while the function runs"
            )
        return func(*args, **(kwargs or {}))


def _check_write(operation: str, target: Any, index: Any = ()) -> None:
    """Raise Untranslatable for a write to a captured tensor, or to an element whose index is a tensor."""
    if isinstance(target, Tensor) and not isinstance(target, FakeTensor):
        raise _write(operation, user_line())
    if any(isinstance(x, Tensor) and not x.ndim for x in tree_leaves(index)):
        why = f"the place of the edit depends on the pair (use torch.where), and {MUST_NOT_WRITE}"
        raise Untranslatable(operation, user_line(), why)


def _write(operation: str, line: str) -> Untranslatable:
    """Return the error of a write to a captured tensor."""
    remedy = "Return the value, or edit the tensor between calls."
    return Untranslatable(operation, line, MUST_NOT_WRITE, remedy)


def _has_dynamic_shape(func: Any, args: Any) -> bool:
    """Return whether the result's shape depends on data; for gathers and scatters, only with a bool index."""
    if func.overloadpacket not in (aten.index, aten.index_put, aten._unsafe_index):
        return True
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
