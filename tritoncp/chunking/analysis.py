"""Analysis of a graph before chunking: nodes to copy, share, cut and join, and the errors of graphs that
cannot be chunked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    SubclassGetAttrAOTOutput,
)
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

from tritoncp.chunking import attention_nodes, torch_attention
from tritoncp.chunking.regions import (
    describe_modules,
    has_tensor,
    is_backward,
    op_name,
    regions_of,
    tensors_of,
)
from tritoncp.chunking.report import NO_ROWS, ChunkingError, describe_node
from tritoncp.chunking.sizes import CutSymbol, cut_symbol, expression, free_symbols, input_symbols
from tritoncp.core.caller import warn_caller
from tritoncp.core.log_lines import area_logger

log = area_logger("chunking")
aten = torch.ops.aten

# Operators that compute along a dimension: if that is the cut one, from other rows. Sorts are left out, since
# experts sort tokens; sums are judged by the use of their results.
ALONG = {
    *("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "topk", "kthvalue", "median", "roll", "flip"),
    *("_softmax", "_log_softmax", "logsumexp"),
}  # fmt: skip
CASTS = {"aten::_to_copy", "prims::convert_element_type", "aten::to"}
REDUCTIONS = {"_c10d_functional::reduce_scatter_tensor", "_c10d_functional::all_reduce"}
GATHERS = {f"_c10d_functional::{name}" for name in ("all_gather_into_tensor", "reduce_scatter_tensor")}
EXCHANGES = {f"_c10d_functional::{name}" for name in ("all_to_all_single", "all_reduce", "wait_tensor")}
VIEWS = (
    *("t", "transpose", "permute", "view", "_unsafe_view", "reshape", "clone", "alias", "detach"),
    *("squeeze", "unsqueeze"),
)
RESHAPES = {f"aten::{name}" for name in ("view", "_unsafe_view", "reshape")}
COUNTS, SLICES = {"aten::arange", "prims::iota"}, {"aten::slice", "aten::narrow"}
LINEAR = CASTS | REDUCTIONS | {f"aten::{name}" for name in VIEWS} | {"_c10d_functional::wait_tensor"}
NO_BACKWARD = (
    ", as far as can be seen, since no node is marked as backward: capture the graph by torch.compile, "
    "torchtitan's graph trainer or aot_export_joint_with_descriptors, which mark these nodes (make_fx alone "
    "and aot_export_module(trace_joint=True), which traces the graph again, do not)"
)
TORCH_ATTENTION = ("scaled_dot_product", "flash_attention", "efficient_attention", "cudnn_attention")


def is_size(node: Node) -> bool:
    """Return whether a node computes a size or a condition on sizes."""
    return isinstance(node.meta.get("val"), SymInt | SymFloat | SymBool)


def operator_of(node: Node) -> str:
    """Return the name of an operator; for a part of a decomposed operator, the name of the latter."""
    return getattr(node.meta.get("original_aten"), "_opname", "") or op_name(node).partition("::")[2]


def dims_along(node: Node) -> set[int]:
    """Return the dimensions of the first argument along which an operator computes, for operators in ALONG
    and convolutions. For a decomposed operator these are the dimensions of its reductions."""
    source = node.all_input_nodes[0].meta.get("val") if node.all_input_nodes else None
    if not isinstance(source, Tensor) or not source.ndim:
        return set()
    if op_name(node) == "aten::convolution":
        kernel = node.all_input_nodes[1].meta["val"].shape
        return {d for d in range(2, source.ndim) if kernel[d] != 1}
    schema = getattr(node.target, "_schema", None)
    if operator_of(node) not in ALONG or schema is None:
        return set()
    for place, argument in enumerate(schema.arguments):
        if argument.name in ("dim", "dims"):
            given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            given = argument.default_value if given is None else given
            dims: Any = range(source.ndim) if given is None else given
            return {d % source.ndim for d in ((dims,) if isinstance(dims, int) else dims)}
    return set()


def size_argument(node: Node) -> Sequence[Any]:
    """Return the argument of an op that is the shape of its result, () if it has none."""
    schema = getattr(node.target, "_schema", None)
    for argument, sizes in zip(schema.arguments if schema is not None else (), node.args, strict=False):
        if argument.name in ("size", "shape"):
            return sizes if isinstance(sizes, list | tuple) else ()
    return ()


class Cut:
    """The nodes of a graph by their role in chunking.

    inside:  node -> region, for nodes in a region
    copied:  nodes that are copied for each chunk
    chained: mutated input -> node of its new value, if a region computes the value
    joined:  copied node with users outside -> how its chunks are joined: "cat", "sum" or "chain"
    """

    def __init__(self, graph: Graph, region: str, dim: str, chunks: int, repeat: bool) -> None:
        self.graph, self.dim, self.repeat = graph, dim, repeat
        self.inside = regions_of(graph, region)
        self._check_passes(region)
        calls = [node for node in self.inside if attention_nodes.is_attention(node)]
        entering = [x for node in self.inside for x in node.all_input_nodes if x not in self.inside]
        live_ins = [x for x in entering if isinstance(x.meta.get("val"), Tensor)]
        queries = [attention_nodes.argument(node, "q") for node in calls]
        size = cut_symbol(dim, queries, live_ins, graph)
        values = [x.meta.get("val") for x in graph.nodes]
        fake_mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
        self.sizes = CutSymbol(chunks, size, fake_mode)
        self.pure_symbols = input_symbols(graph)
        self.outputs = list(self._outputs())
        self.chained = self._new_values()
        self.copied = self._dependents()
        self._warn_of_first_rows()
        self._warn_of_mixed_rows()
        self._share_reductions()
        self._check_ops()
        self.joined = {node: self._kind_of_join(node) for node in self.inside if self._has_other_users(node)}
        self.sizes.check_units()

    def _check_passes(self, region: str) -> None:
        if not self.inside:
            raise ChunkingError(
                f"region={region!r} matches no module of the graph. {describe_modules(self.graph)}"
            )
        if all(map(is_backward, self.inside)):
            raise ChunkingError(
                "the graph is a backward graph, whose inputs are values of the whole forward pass: cut the "
                "joint graph, before it is partitioned"
            )

    def _outputs(self) -> Iterator[tuple[Node | None, Any]]:
        """Yield (output, its descriptor or None)."""
        output = self.graph.output_node()
        values: Any = output.args[0]
        values = list(values) if isinstance(values, tuple | list) else [values]
        descriptors = output.meta.get("desc")
        if not isinstance(descriptors, tuple | list) or len(descriptors) != len(values):
            descriptors = [None] * len(values)
        for value, descriptor in zip(values, descriptors, strict=True):
            while isinstance(descriptor, SubclassGetAttrAOTOutput):  # this is the local tensor of a DTensor
                descriptor = descriptor.base
            yield value, descriptor

    def _new_values(self) -> dict[Node, Node]:
        """Return {mutated input: node of its new value} for the new values that a region computes."""
        inputs = {
            x.meta["desc"]: x
            for x in self.graph.nodes
            if x.op == "placeholder" and x.meta.get("desc") is not None
        }
        pairs = []
        for value, descriptor in self.outputs:
            if isinstance(descriptor, InputMutationAOTOutput):
                pairs.append((inputs.get(descriptor.mutated_input), value))
        for node in self.graph.nodes:
            if op_name(node) == "aten::copy_" and node.args[0].op == "placeholder":
                pairs.append((node.args[0], node.args[1]))
        return {old: new for old, new in pairs if old is not None and new in self.inside}

    def is_whole_size(self, node: Node) -> bool:
        """Return whether a node is the whole size that is cut."""
        return is_size(node) and expression(node.meta["val"]) == self.sizes.whole

    def is_pure_size(self, node: Node) -> bool:
        """Return whether a node computes a size from sizes of inputs, not from data."""
        return is_size(node) and free_symbols(node.meta["val"]) <= self.pure_symbols

    def _is_size_check(self, node: Node) -> bool:
        """Return whether a node asserts something about input sizes, which is true for the whole only."""
        return op_name(node) == "aten::_assert_scalar" and all(map(self.is_pure_size, node.all_input_nodes))

    def carries(self, node: Node) -> bool:
        """Return whether a node's value has the cut dimension, or depends on the rows of a chunk."""
        return self.sizes.holds(node.meta.get("val"))

    def _dependents(self) -> set[Node]:
        """Return the nodes to copy for each chunk: nodes inside regions that depend on the cut rows, the cut
        size or new values of inputs, and size nodes outside that they read."""
        copied: set[Node] = set()
        for node in self.graph.nodes:
            if node not in self.inside or self._is_size_check(node):
                continue
            if not attention_nodes.is_plan(node) and not self.is_whole_size(node):
                inputs = node.all_input_nodes
                if any(x in copied or self.carries(x) or x in self.chained for x in inputs):
                    copied.add(node)
        pending = [x for node in copied for x in node.all_input_nodes]
        while pending:
            x = pending.pop()
            if is_size(x) and self.carries(x) and not self.is_whole_size(x) and x not in copied:
                copied.add(x)
                pending += x.all_input_nodes
        return copied

    def _warn_of_first_rows(self) -> None:
        """Warn about tensors made from the sequence length inside a region, such as torch.arange(S): every
        chunk gets the first rows, not the rows at its place. :class:`tritoncp.chunking.Eager` does the
        same."""
        for node in self.graph.nodes:
            name, value, inputs = op_name(node), node.meta.get("val"), node.all_input_nodes
            if self.dim != "seq" or node not in self.copied or name not in COUNTS | SLICES:
                continue
            if any(has_tensor(x) and (x in self.copied or self.carries(x)) for x in inputs):
                continue  # rows of the chunk
            if not any(is_size(x) and self.carries(x) for x in inputs):
                continue  # new values of an input
            if name in SLICES or any(expression(size) == self.sizes.whole for size in value.shape):
                warn_caller(
                    f"{describe_node(node)} makes rows from the sequence length in a region: each chunk gets "
                    "the first ones, not the ones at its place. If these are positions or rotary tables, "
                    "make them outside of the region and pass them in"
                )

    def _warn_of_mixed_rows(self) -> None:
        """Warn, once for each operator, about operators that mix rows along the sequence in a region: a chunk
        sees only its rows."""
        warned: set[str] = set()
        for node, meets_rows in self._mixed_rows():
            name = operator_of(node)
            if name in warned:
                continue
            warned.add(name)
            warn_caller(
                f"{describe_node(node)} is {name.strip('_')} along the sequence in a region"
                f"{', and its result meets the rows again' if meets_rows else ''}: it has only the rows of a "
                "chunk, so that results differ from the whole. Move it out of the region, or pass "
                'dim="batch"'
            )

    def _mixed_rows(self) -> Iterator[tuple[Node, bool]]:
        """Yield (node, False) for recurrences, convolutions and other operators along the sequence, and
        (node, True) for a total over rows that is combined with rows again, such as a mean that is
        subtracted. Totals that leave the region, and integers such as counts of experts' tokens, are not
        yielded."""
        totals: dict[Node, Node] = {}  # value without rows -> node that computed it from rows
        for node in self.graph.nodes:
            if self.dim != "seq" or node not in self.copied or is_backward(node):
                continue
            along = dims_along(node)
            if along and along & {*self.sizes.dims(node.all_input_nodes[0].meta["val"])}:
                yield node, False
            has_rows = any(self.sizes.dims(x) for y in node.all_input_nodes for x in tensors_of(y))
            source = next((totals[x] for x in node.all_input_nodes if x in totals), None)
            if source is not None and has_rows:
                yield source, True
            elif self._is_total(node) and (has_rows or source is not None):
                totals[node] = source or node

    def _is_total(self, node: Node) -> bool:
        """Return whether a node has floating-point numbers, and no size that depends on rows or on data."""
        floating = [x for x in tensors_of(node) if x.is_floating_point()]
        return not op_name(node).startswith("aten::new_") and any(
            not self.sizes.dims(x) and free_symbols(x) <= self.pure_symbols for x in floating
        )

    def region_of(self, node: Node) -> str:
        """Return the region of a copied node; of a size outside, the region of a user."""
        while node not in self.inside:
            node = next(user for user in node.users if user in self.copied)
        return self.inside[node]

    def _has_other_users(self, node: Node) -> bool:
        if node not in self.copied or self.is_pure_size(node):
            return False
        return any(self._reads_whole(user, node) for user in node.users)

    def _reads_whole(self, user: Node, node: Node) -> bool:
        """Return whether a user reads the whole value of a copied node: it is outside, or captures the value
        in a mod."""
        if self.is_whole_size(user):
            return False
        return user not in self.copied or node in attention_nodes.whole_inputs(user)

    def _share_reductions(self) -> None:
        """Move the sum over chunks of a parameter's gradient before its cast or reduce-scatter, so that these
        run once."""
        casts = {x.meta.get("seq_nr") for x in self.graph.nodes if op_name(x) in CASTS and not is_backward(x)}
        for node in list(self.inside):
            if not self._has_other_users(node) or self.carries(node):
                continue
            chain, at = [], None
            while op_name(node) in LINEAR and not self.carries(node) and is_backward(node):
                chain.append(node)
                is_cast = op_name(node) in CASTS and node.meta.get("seq_nr") in casts - {None}
                if is_cast or op_name(node) in REDUCTIONS:
                    at = len(chain)
                node = node.all_input_nodes[0]
                if len(node.users) > 1 or node not in self.copied:
                    break
            if at is not None and not self.carries(node) and node in self.copied:
                self.copied.difference_update(chain[:at])
                log.debug("%s is summed before %s", node.name, chain[at - 1].name)

    def _kind_of_join(self, node: Node) -> str:
        """Return how the chunks of a node with users outside are joined: "cat", "sum" or "chain". Raises
        ChunkingError."""
        value = node.meta.get("val")
        if node in self.chained.values():
            return "chain"
        if isinstance(value, Tensor) and self.carries(node):
            return "cat"
        is_gradient = (
            isinstance(value, Tensor) and is_backward(node) and free_symbols(value) <= self.pure_symbols
        )
        if is_gradient and self._reaches_gradients_alone(node):
            return "sum"
        raise ChunkingError(
            f"{describe_node(node, users=True)} {NO_ROWS}. It is not a gradient or a new value of an "
            f"input{'' if any(map(is_backward, self.graph.nodes)) else NO_BACKWARD}"
        )

    def _reaches_gradients_alone(self, node: Node) -> bool:
        """Return whether all outputs that depend on a node are gradients of inputs: by their descriptors, or,
        without descriptors, because they are nodes of the backward pass."""
        described = any(descriptor for _, descriptor in self.outputs)
        is_gradient: dict[Node, bool] = {}
        for value, descriptor in self.outputs:
            if isinstance(value, Node):
                is_one = isinstance(descriptor, GradAOTOutput) if described else is_backward(value)
                is_gradient[value] = is_gradient.get(value, True) and is_one
        reached, pending = {node}, [node]
        while pending:
            for user in pending.pop().users:
                if user not in reached and user.op != "output":
                    reached.add(user)
                    pending.append(user)
        ends = [is_gradient[x] for x in reached if x in is_gradient]
        return bool(ends) and all(ends)

    def _check_ops(self) -> None:
        """Raise ChunkingError for a copied node whose op cannot be computed in chunks."""
        for node in self.graph.nodes:
            reason = node in self.copied and (self._op_fault(node) or self._shape_fault(node))
            if reason:
                raise ChunkingError(f"{describe_node(node, users=True)} {reason}")

    def _op_fault(self, node: Node) -> str:
        name = op_name(node) or str(node.target)
        if name in ("tritoncp::select_keys", "tritoncp::probabilities"):
            return "reads the mask and the keys of the whole call: move it out of the region"
        if attention_nodes.is_attention(node):
            return attention_nodes.fault(node, self)
        if torch_attention.is_torch_attention(node):
            if self.dim == "seq":
                return (
                    "is torch's flex attention, which cannot be cut by sequence: call "
                    'tritoncp.flex_attention in the region, or pass dim="batch"'
                )
            args: Any = node.args
            learned = node.meta["val"][3] if node.target is torch_attention.backward_op else ()
            return attention_nodes.fault_of_inputs(self, args[1:3], learned)
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return (
                f"is the higher-order op {node.target.name()}, whose function may mix rows (only torch's "
                "flex attention can be cut, by batch): move it out of the region"
            )
        if any(part in name for part in TORCH_ATTENTION) and self.dim == "seq":
            return "is torch's attention, whose chunks need all keys: call tritoncp.flex_attention"
        if self._is_random(node):
            return "draws random numbers, which would differ from the whole: move it out of the region"
        if "c10d" in name and self.dim == "seq" and self.carries(node):
            if name in GATHERS and any(map(attention_nodes.is_attention, self.inside)):
                return (
                    "gathers rows of all ranks in a region with attention, where the rows of a chunk are not "
                    'adjacent: pass dim="batch", or a region without attention, as the feed-forward network'
                )
            if name not in GATHERS | EXCHANGES:
                return (
                    "is a collective that cannot be cut by sequence (all-reduce, all-gather, reduce-scatter "
                    'and all-to-all of experts can): move it out of the region, or pass dim="batch"'
                )
        return ""

    def _is_random(self, node: Node) -> bool:
        """Return whether an op draws random numbers: it has torch's tag, and its dropout is not 0."""
        if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            return False
        arguments = enumerate(node.target._schema.arguments)  # type: ignore[union-attr] # it is an op
        places = [i for i, argument in arguments if argument.name == "dropout_p"]
        dropout = [node.args[i] if i < len(node.args) else node.kwargs.get("dropout_p", 0.0) for i in places]
        return dropout != [0.0]

    def _shape_fault(self, node: Node) -> str:
        value = node.meta.get("val")
        for x in value if isinstance(value, tuple | list) else (value,):
            if isinstance(x, Tensor) and len(self.sizes.dims(x)) > 1:
                return (
                    f"has two dimensions of the size that is cut, {list(x.shape)}: move it out of the region"
                )
        sizes = size_argument(node)
        if isinstance(value, Tensor):
            for size, number in zip(value.shape, sizes, strict=False):
                if self.sizes.symbol in free_symbols(size) and type(number) is int and number != -1:
                    return f"has the constant {number} for the size {size}: write x.shape[i], or -1"
        source = node.all_input_nodes[0].meta.get("val") if op_name(node) in RESHAPES else None
        if isinstance(value, Tensor) and isinstance(source, Tensor):
            for c in range(self.sizes.chunks):
                shapes = [self.sizes.shape_of(x, c) for x in (source, value)]
                if all(shapes) and math.prod(shapes[0]) != math.prod(shapes[1]):
                    return (
                        f"cannot view {shapes[0]} as {shapes[1]} in chunk {c}: pass another number of "
                        "chunks, or pad the rows, so that the view divides each chunk"
                    )
        return ""

    def cut_dim(self, node: Node) -> int:
        """Return the dimension along which a tensor is cut or joined. Raises ChunkingError."""
        value = node.meta["val"]
        dims = self.sizes.dims(value) if isinstance(value, Tensor) else []
        if len(dims) != 1:
            raise ChunkingError(
                f"{describe_node(node, users=True)} has {len(dims)} dimensions of the size that is cut; "
                "exactly one is needed where a tensor enters or leaves a region"
            )
        expr = expression(value.shape[dims[0]])
        if expr != self.sizes.whole and not (self.dim == "batch" and (expr / self.sizes.whole).is_Integer):
            raise ChunkingError(
                f"{describe_node(node, users=True)}: dimension {dims[0]} is {expr}, where the rows of a "
                "chunk are not adjacent: move the view that makes it into the region, or out of it"
            )
        return dims[0]

    def factor(self, node: Node, dim: int) -> int:
        """Return the ratio of the size of dimension ``dim`` to the size that is cut."""
        return int(expression(node.meta["val"].shape[dim]) / self.sizes.whole)
