"""Storages of a graph: which nodes share memory, which write it, and when it is free.

Two values share memory if the op's schema says so, or if the fake values of a node and of its own argument
have one storage. Storages of nodes that are not joined by an argument are not compared: copies of a node may
share its fake value.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef

from tritoncp.chunking.streams.value_sizes import storage_bytes, tensors_in, value_of

COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional")  # namespaces of ops
KEY_EXCHANGES = ("send_keys", "send_gradients")  # of tritoncp
UNLISTED_VIEW = "_unsafe_view"  # shares memory although its schema does not say so


def namespace_of(node: Node) -> str:
    """Return the namespace of the op that a node calls, "" for other nodes."""
    return node.target.namespace if isinstance(node.target, torch._ops.OpOverload) else ""


def op_name(node: Node) -> str:
    """Return the name of the op that a node calls, without namespace and overload; "" for other nodes."""
    return node.target._schema.name.split("::")[1] if isinstance(node.target, torch._ops.OpOverload) else ""


def target_name(node: Node) -> str:
    """Return what a node calls or reads as text without addresses, the same in every process."""
    target = node.target
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


def is_wait(node: Node) -> bool:
    """Whether a node waits for a collective."""
    return namespace_of(node) in COLLECTIVES and op_name(node) == "wait_tensor"


def is_collective(node: Node) -> bool:
    """Whether a node starts a collective, which a wait ends: torch's, or an exchange of keys that chunks
    share."""
    if namespace_of(node) == "tritoncp":
        return op_name(node) in KEY_EXCHANGES
    return namespace_of(node) in COLLECTIVES and op_name(node) != "wait_tensor"


@dataclass
class Storages:
    """The storages of a graph, by number.

    of:     storages of each node's value, one for each tensor of it
    size:   bytes of each storage
    held:   whether the caller holds the storage: inputs and constants
    uses:   storages that a node reads, writes or makes
    writes: storages that a node writes
    made:   storages that a node allocates
    """

    of: dict[Node, list[int]] = field(default_factory=dict)
    size: list[int] = field(default_factory=list)
    held: list[bool] = field(default_factory=list)
    uses: dict[Node, list[int]] = field(default_factory=dict)
    writes: dict[Node, list[int]] = field(default_factory=dict)
    made: dict[Node, list[int]] = field(default_factory=dict)

    def new_bytes(self, node: Node) -> int:
        """Count the bytes of the storages that a node makes."""
        return sum(self.size[number] for number in self.made.get(node, ()))

    def add(self, node: Node, x: Tensor) -> int:
        """Add the storage of a tensor that a node makes, and return its number."""
        self.size.append(storage_bytes(x))
        self.held.append(node.op in ("placeholder", "get_attr"))
        self.made.setdefault(node, []).append(len(self.size) - 1)
        return len(self.size) - 1


def storages_of(gm: GraphModule) -> Storages:
    """Number the storages of a graph."""
    storages = Storages()
    inputs: dict[StorageWeakRef, int] = {}
    source: dict[int, list[int]] = {}  # inputs of the collective that makes a storage, read until its wait
    for node in gm.graph.nodes:
        storages.of[node] = _result_storages(storages, node, inputs)
        arguments = [number for arg in node.all_input_nodes for number in storages.of[arg]]
        if is_collective(node):
            source.update(dict.fromkeys(storages.of[node], arguments))
        if is_wait(node):
            arguments += [number for made in arguments for number in source.get(made, ())]
        storages.uses[node] = sorted({*arguments, *storages.of[node]})
        storages.writes[node] = _written(storages, node)
    return storages


def _result_storages(storages: Storages, node: Node, inputs: dict[StorageWeakRef, int]) -> list[int]:
    """Return the storages of a node's value; storages that it makes are added."""
    if node.op == "output":
        return []
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        return _item_storages(storages.of[node.args[0]], node)
    results = list(tensors_in(value_of(node)))
    if node.op == "placeholder":
        for x in results:
            if _key(x) not in inputs:
                inputs[_key(x)] = storages.add(node, x)
        return [inputs[_key(x)] for x in results]
    shared = _shared_with(storages, node)
    if shared:
        return shared * max(1, len(results)) if len(shared) == 1 else shared
    by_key = {
        _key(x): storages.of[arg][at]
        for arg in node.all_input_nodes
        for at, x in enumerate(tensors_in(value_of(arg)))
        if at < len(storages.of[arg])
    }
    return [by_key[_key(x)] if _key(x) in by_key else storages.add(node, x) for x in results]


def _item_storages(storages: list[int], node: Node) -> list[int]:
    """Return the storages of one item of a sequence, all of them if the item's place is not known."""
    value, index = value_of(node.args[0]), node.args[1]  # type: ignore[arg-type]
    if not isinstance(value, list | tuple) or not isinstance(index, int):
        return storages
    counts = [len(list(tensors_in(item))) for item in value]
    index %= len(counts)
    return storages[sum(counts[:index]) : sum(counts[: index + 1])]


def _shared_with(storages: Storages, node: Node) -> list[int]:
    """Return the storages of the argument that a node's result shares memory with, by the op's schema."""
    if is_wait(node) or op_name(node) == UNLISTED_VIEW:
        return storages.of[node.args[0]]  # type: ignore[index]
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or may_copy(op):
        return []
    shared = []
    for result in op._schema.returns:
        names = result.alias_info.before_set if result.alias_info is not None else set()
        for schema, arg in arguments_of(node):
            if schema.alias_info is not None and names & schema.alias_info.before_set:
                shared += [number for one in _nodes_in(arg) for number in storages.of[one]]
    return shared


def may_copy(op: torch._ops.OpOverload) -> bool:
    """Whether an op with an alias in its schema copies for some layouts, as reshape() and contiguous()."""
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return op.is_view and torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), composite)


def is_view(node: Node) -> bool:
    """Whether a node's op is a view by its schema."""
    if op_name(node) == UNLISTED_VIEW:
        return True
    return (
        isinstance(node.target, torch._ops.OpOverload) and node.target.is_view and not may_copy(node.target)
    )


def arguments_of(node: Node) -> list[tuple[Any, Any]]:
    """List the arguments of an op's call, each with its entry of the schema."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    by_place = list(zip(schema, node.args))
    return by_place + [(entry, node.kwargs[entry.name]) for entry in schema if entry.name in node.kwargs]


def _written(storages: Storages, node: Node) -> list[int]:
    """Return the storages that a node writes: by the op's schema, all arguments' for a call that has none."""
    if node.op in ("call_module", "call_method"):
        changed = node.all_input_nodes
    elif isinstance(node.target, torch._ops.OpOverload):
        changed = [
            one
            for schema, arg in arguments_of(node)
            if schema.alias_info is not None and schema.alias_info.is_write
            for one in _nodes_in(arg)
        ]
    elif isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name().endswith("mutation"):
        changed = node.all_input_nodes
    else:
        changed = []
    return sorted({number for one in changed for number in storages.of[one]})


def _nodes_in(arg: Any) -> list[Node]:
    nodes: list[Node] = []
    torch.fx.node.map_arg(arg, nodes.append)
    return nodes


def _key(x: Tensor) -> Any:
    """Return a key of a fake value's storage; one of its own for a tensor that has none."""
    return StorageWeakRef(x.untyped_storage()) if x.layout == torch.strided else id(x)


class LiveBytes:
    """Bytes of the storages alive while the nodes of a graph run, in any order.

    A storage lives from the node that makes it until the last node that uses it or a view of it. Inputs live
    to the end, as their caller holds them, or with ``boxed`` until their last user, as in compiled backward
    passes.
    """

    def __init__(self, storages: Storages, boxed: bool) -> None:
        self.storages, self.boxed = storages, boxed
        self.users = [0] * len(storages.size)  # that have still to run
        for uses in storages.uses.values():
            for number in uses:
                self.users[number] += 1
        self.live = self.peak = self.step = 0  # bytes now, at most, and while the last node ran
        self.peak_node = ""

    def run(self, node: Node) -> None:
        """Make a node's storages, then free those that it uses last."""
        self.step = self.live + self.storages.new_bytes(node)
        if self.step > self.peak:
            self.peak, self.peak_node = self.step, node.name
        self.live = self.step - self.freed(node)
        for number in self.storages.uses[node]:
            self.users[number] -= 1

    def freed(self, node: Node) -> int:
        """Count the bytes that are free once a node has run."""
        return sum(
            self.storages.size[number]
            for number in self.storages.uses[node]
            if self.users[number] == 1 and (self.boxed or not self.storages.held[number])
        )
