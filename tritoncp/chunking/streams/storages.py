"""Memory of a graph: which nodes share a storage or write to it, live bytes, and dependencies between nodes.

Two values share memory if the op's schema says so, or if the fake values of a node and of one of its
arguments have the same storage. Other nodes are not compared, since copies of a node may share its fake
value.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from tritoncp.chunking.regions import op_name, tensors_in, tensors_of
from tritoncp.chunking.sizes import hint_of

COLLECTIVES = ("_c10d_functional::", "_c10d_functional_autograd::", "c10d_functional::")
KEY_EXCHANGES = ("tritoncp::send_keys", "tritoncp::send_gradients")
UNLISTED_VIEW = "aten::_unsafe_view"  # ops that share memory without saying so in their schema
UNBACKED_SIZE = 8192  # assumed value of a size that depends on data and has no hint


def hint(size: Any) -> int:
    """Return a size as a number: symbols by their hints, UNBACKED_SIZE for a symbol without one."""
    if not isinstance(size, SymInt):
        return int(size)
    number = hint_of(size.node.expr, size.node.shape_env, UNBACKED_SIZE)
    return UNBACKED_SIZE if number is None else number


def bytes_of(*nodes: Node) -> int:
    """Return the bytes of all tensors of these nodes."""
    return sum(math.prod(map(hint, x.shape)) * x.dtype.itemsize for node in nodes for x in tensors_of(node))


def is_wait(node: Node) -> bool:
    """Return whether a node waits for a collective."""
    return op_name(node).startswith(COLLECTIVES) and op_name(node).endswith("::wait_tensor")


def is_collective(node: Node) -> bool:
    """Return whether a node starts an asynchronous collective: torch's, or an exchange of keys."""
    return op_name(node).startswith((*COLLECTIVES, *KEY_EXCHANGES)) and not is_wait(node)


def is_view(node: Node) -> bool:
    """Return whether a node's op is a view by its schema."""
    op = node.target
    return op_name(node) == UNLISTED_VIEW or (
        isinstance(op, torch._ops.OpOverload) and op.is_view and not _may_copy(op)
    )


def _may_copy(op: torch._ops.OpOverload) -> bool:
    """Return whether an op with an alias in its schema may copy, as reshape() and contiguous() do."""
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return op.is_view and torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), composite)


class Storages:
    """The storages of a graph, numbered.

    of:     storages of each node's value, one per tensor
    size:   bytes of each storage
    is_input: whether the caller owns the storage, which is true of inputs and constants
    uses:   storages that a node reads, writes or makes
    writes: storages that a node writes
    new_bytes: bytes of the storages that a node allocates
    """

    def __init__(self, gm: GraphModule) -> None:
        self.of: dict[Node, list[int]] = {}
        self.size: list[int] = []
        self.is_input: list[bool] = []
        self.uses: dict[Node, list[int]] = {}
        self.writes: dict[Node, set[int]] = {}
        self.new_bytes: Counter[Node] = Counter()
        inputs: dict[Any, int] = {}
        # storage that a collective fills -> inputs of the collective, which live until its wait
        source: dict[int, list[int]] = {}
        for node in gm.graph.nodes:
            self.of[node] = self._results(node, inputs)
            arguments = [number for arg in node.all_input_nodes for number in self.of[arg]]
            if is_collective(node):
                source.update(dict.fromkeys(self.of[node], arguments))
            if is_wait(node):
                arguments += [number for message in arguments for number in source.get(message, ())]
            self.uses[node] = sorted({*arguments, *self.of[node]})
            self.writes[node] = {number for arg in _written(node) for number in self.of[arg]}

    def _results(self, node: Node, inputs: dict[Any, int]) -> list[int]:
        """Return the storages of a node's value; add those that it allocates."""
        if node.op == "output":
            return []
        if node.target is operator.getitem:
            return self._items(node)
        if is_wait(node) or op_name(node) == UNLISTED_VIEW:
            return self.of[node.all_input_nodes[0]]
        if shared := [number for x in _aliased(node) for number in self.of[x]]:
            return shared
        present = inputs if node.op == "placeholder" else {
            _key(x): number
            for arg in node.all_input_nodes
            for x, number in zip(tensors_of(arg), self.of[arg], strict=False)
        }  # fmt: skip
        numbers = []
        for x in tensors_of(node):
            if _key(x) not in present:
                self.size.append(_storage_bytes(x))
                self.is_input.append(node.op in ("placeholder", "get_attr"))
                self.new_bytes[node] += self.size[-1]
            numbers.append(present.get(_key(x), len(self.size) - 1))
            if node.op == "placeholder":
                inputs[_key(x)] = numbers[-1]
        return numbers

    def _items(self, node: Node) -> list[int]:
        """Return the storages of a getitem node; of the whole sequence if the index is unknown."""
        (source,), index = node.all_input_nodes[:1], node.args[1]
        value = source.meta.get("val")
        if not isinstance(value, list | tuple) or not isinstance(index, int):
            return self.of[source]
        ends = list(itertools.accumulate((len(tensors_in(item)) for item in value), initial=0))
        index %= len(value)
        return self.of[source][ends[index] : ends[index + 1]]


def _alias_arguments(node: Node) -> list[tuple[Any, list[Node]]]:
    """Return (alias annotation, nodes) of each argument that has one in the op's schema."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    schema = node.target._schema.arguments
    values = [*zip(schema, node.args), *((x, node.kwargs[x.name]) for x in schema if x.name in node.kwargs)]
    return [
        (entry.alias_info, [x for x in tree_leaves(value) if isinstance(x, Node)])
        for entry, value in values
        if entry.alias_info is not None
    ]


def _aliased(node: Node) -> list[Node]:
    """Return the arguments that a node's results alias by the op's schema."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or _may_copy(op):
        return []
    names = [x.alias_info.before_set for x in op._schema.returns if x.alias_info is not None]
    arguments = _alias_arguments(node)
    return [x for own in names for alias, nodes in arguments if own & alias.before_set for x in nodes]


def _written(node: Node) -> list[Node]:
    """Return the inputs that a node mutates by the op's schema; all inputs without a schema, except items."""
    if isinstance(node.target, torch._ops.OpOverload):
        return [x for alias, nodes in _alias_arguments(node) if alias.is_write for x in nodes]
    return [] if node.target is operator.getitem else node.all_input_nodes


def _storage_bytes(x: Tensor) -> int:
    """Return the bytes from the first to the last element of a tensor: its storage's, unless it is a view.

    >>> _storage_bytes(torch.empty(4, 6)[:, :2]), _storage_bytes(torch.empty(0, 6))
    (80, 0)
    """
    sizes = [hint(size) for size in x.shape]
    if not math.prod(sizes) or x.layout != torch.strided:
        return math.prod(sizes) * x.dtype.itemsize
    last = sum((size - 1) * hint(stride) for size, stride in zip(sizes, x.stride()))
    return (last + 1) * x.dtype.itemsize


def _key(x: Tensor) -> Any:
    """Return a key of a fake tensor's storage; a unique key if it has no storage."""
    return StorageWeakRef(x.untyped_storage()) if x.layout == torch.strided else id(x)


class LiveBytes:
    """Counter of live bytes while the nodes of a graph are run in some order.

    A storage is live from the node that allocates it to the last node that uses it or a view of it. Inputs
    are live to the end, since the caller owns them, or with ``boxed`` to their last user, as in compiled
    backward passes.
    """

    def __init__(self, storages: Storages, boxed: bool) -> None:
        self.storages, self.boxed = storages, boxed
        self.users = Counter(itertools.chain(*storages.uses.values()))  # number of users still to run
        self.live = self.peak = 0  # bytes now, and their maximum

    def during(self, node: Node) -> int:
        """Return the bytes live during a node, if it is run next."""
        return self.live + self.storages.new_bytes[node]

    def after(self, node: Node) -> int:
        """Return the bytes live after a node, if it is run next."""
        return self.during(node) - sum(
            self.storages.size[number]
            for number in self.storages.uses[node]
            if self.users[number] == 1 and (self.boxed or not self.storages.is_input[number])
        )

    def run(self, node: Node) -> None:
        """Run a node: allocate its storages, then free the storages whose last user it is."""
        self.peak = max(self.peak, self.during(node))
        self.live = self.after(node)
        self.users.subtract(self.storages.uses[node])


def dependencies_of(gm: GraphModule, storages: Storages) -> dict[Node, list[Node]]:
    """Return {node: nodes that must run before it}: its inputs; all earlier users of memory that it writes,
    and the last write to memory that it uses; for side effects and random numbers, the previous such node.
    Inputs of the graph are first, in their order, and the output is last."""
    before: dict[Node, dict[Node, None]] = {}
    writer: dict[int, Node] = {}
    readers: dict[int, list[Node]] = {}
    effect: Node | None = None
    last_input: Node | None = None
    for node in gm.graph.nodes:
        needs = dict.fromkeys(node.all_input_nodes)
        if node.op == "placeholder":
            needs, last_input = dict.fromkeys([last_input] if last_input else []), node
        elif last_input is not None:
            needs.setdefault(last_input)
        if node.op == "output":
            needs.update(dict.fromkeys(before))
        elif node.op != "placeholder" and has_effect(node):
            needs.update(dict.fromkeys([effect] if effect else []))
            effect = node
        for number in storages.uses[node]:
            if number in writer:
                needs.setdefault(writer[number])
            if number in storages.writes[node]:
                needs.update(dict.fromkeys(readers.pop(number, ())))
                writer[number] = node
            else:
                readers.setdefault(number, []).append(node)
        needs.pop(node, None)
        before[node] = needs
    return {node: list(needs) for node, needs in before.items()}


def has_effect(node: Node) -> bool:
    """Return whether a node has an effect besides its result and memory writes: an assertion, a print, random
    numbers (which depend on the order of calls), or a call with unknown effects. Collectives and waits, which
    torch declares impure so that they are not removed, have none."""
    if is_collective(node) or is_wait(node):
        return False
    schema, tags = getattr(node.target, "_schema", None), getattr(node.target, "tags", ())
    if node.op in ("call_module", "call_method") or torch.Tag.nondeterministic_seeded in tags:
        return True
    return node.op == "call_function" and node.is_impure() and not (schema and schema.is_mutable)
