"""Predicted seconds of each node of a graph: products, attention, messages, and memory traffic for the rest.

Every figure is a function of the graph and of numbers that all ranks share, so that ranks derive one order.
"""

from __future__ import annotations

import enum
import math
import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.utils.flop_counter import flop_registry

from tritoncp.chunking.attention import HANDLE
from tritoncp.chunking.streams.storages import is_collective, is_view, is_wait, namespace_of, op_name
from tritoncp.chunking.streams.value_sizes import bytes_read, hint, on_meta, tensors_in, value_of
from tritoncp.core.handles import object_of
from tritoncp.core.tracing import fresh_dispatch
from tritoncp.frontend.dynamo import plan_op
from tritoncp.ops.flop_formulas import count_flops
from tritoncp.planning.cost import Hardware, costs
from tritoncp.planning.memory import Shape
from tritoncp.planning.plan_data import PlanData

ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
LOOKUPS = {"embedding", "gather", "index", "index_select"}  # read as many rows as they return
COPIES = {"alias", "clone", "detach", "lift_fresh", "lift_fresh_copy"}


class Kind(enum.Enum):
    """The quantity that a node's time is predicted from."""

    NOTHING = "nothing"  # inputs, views, sizes
    PRODUCT = "product"
    ATTENTION = "attention"
    MEMORY = "memory"  # bytes read and written
    MESSAGE = "message"
    WAIT = "wait"


class Cost(NamedTuple):
    """Seconds of one node, and what they are predicted from."""

    kind: Kind
    seconds: float


def node_costs(gm: GraphModule, hardware: Hardware) -> dict[Node, Cost]:
    """Predict the seconds of every node of a graph."""
    with fresh_dispatch():  # a pass may run under a mode for fake tensors
        return {node: _cost(gm, node, hardware) for node in gm.graph.nodes}


def _cost(gm: GraphModule, node: Node, hardware: Hardware) -> Cost:
    if is_wait(node):
        return Cost(Kind.WAIT, 0.0)
    if is_collective(node):
        is_ours = namespace_of(node) == "tritoncp"
        seconds = _key_seconds(gm, node, hardware) if is_ours else _message_seconds(node, hardware)
        return Cost(Kind.MESSAGE, seconds)
    if node.op in ("placeholder", "get_attr", "output") or is_view(node) or node.target is operator.getitem:
        return Cost(Kind.NOTHING, 0.0)
    if not any(True for _ in tensors_in(value_of(node))) or op_name(node) in ALLOCATIONS:
        return Cost(Kind.NOTHING, 0.0)
    if namespace_of(node) == "tritoncp":
        if op_name(node) in ("forward", "backward"):
            return Cost(Kind.ATTENTION, _attention_seconds(gm, node, hardware))
        if op_name(node) in ("forward_part", "backward_part"):
            return Cost(Kind.ATTENTION, _part_seconds(gm, node, hardware))
        if value_of(node) is not None and all(x.dim() == 0 for x in tensors_in(value_of(node))):
            return Cost(Kind.NOTHING, 0.0)  # handles
    seconds = _traffic(node) / hardware.memory
    flops = _flops(node)
    if flops:
        return Cost(Kind.PRODUCT, max(flops / hardware.flops, seconds))
    return Cost(Kind.MEMORY, seconds)


def _traffic(node: Node) -> int:
    """Count the bytes that a node reads and writes."""
    written = bytes_read(value_of(node))
    arguments = [bytes_read(value_of(arg)) for arg in node.all_input_nodes]
    if arguments and op_name(node) in LOOKUPS:
        arguments[0] = min(arguments[0], written)
    return written + sum(arguments)


def _flops(node: Node) -> int:
    """Count the operations of a product by torch's formulas, 0 for other nodes."""
    target = node.target
    packet = target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda arg: on_meta(value_of(arg)))
    return int(formula(*args, **kwargs, out_val=on_meta(value_of(node))))


def _message_seconds(node: Node, hardware: Hardware) -> float:
    """Predict a collective's time from the bytes that a rank sends: a tensor's share of other ranks once for
    an exchange or a sum to one rank each, twice for a sum to all, the tensor to each of the others for a
    gather."""
    name = op_name(node)
    sent = bytes_read([value_of(arg) for arg in node.all_input_nodes])
    world = _group_size(node)
    remote = 1.0 if world is None else (world - 1) / world
    rate = hardware.bandwidth
    if name.startswith("all_gather"):
        sent *= (world or 2) - 1
    elif name.startswith("all_reduce"):
        sent = math.ceil(2 * remote * sent)
    else:
        sent = math.ceil(remote * sent)
        rate *= hardware.scattered if name.startswith("all_to_all") else 1.0
    return sent / rate + hardware.latency


def _key_seconds(gm: GraphModule, node: Node, hardware: Hardware) -> float:
    """Predict the time of an exchange of keys, or of the return of their gradients, of the rank that sends
    most; as between two ranks if the graph does not tell the plan."""
    args: Any = node.args
    forward = op_name(node) == "send_keys"
    k = value_of(args[0] if forward else args[2])
    width = value_of(node).shape[2] - k.shape[3]
    plan = plan_of(gm, _argument(node, "plan"))
    if plan is None:
        return bytes_read(value_of(node)) / 2 / hardware.bandwidth + hardware.latency
    shape = {"batch": k.shape[0], "kv_heads": k.shape[1], "head_dim": k.shape[3], "v_head_dim": width}
    sizes = {name: hint(size) for name, size in shape.items()} | {"itemsize": k.dtype.itemsize}
    sent = max(bytes_of_pass(plan.for_rank(rank), forward, sizes) for rank in range(plan.world_size))
    rate = hardware.bandwidth * (hardware.scattered if plan.schedule == "fetch" else 1.0)
    return sent / rate + hardware.latency


def bytes_of_pass(plan: Any, keys: bool, sizes: dict[str, int]) -> int:
    """Count the bytes of keys and values that a rank sends in one pass, or else of their gradients.

    sizes: of the layer, see :meth:`tritoncp.Plan.bytes_sent`
    """
    forward = plan.bytes_sent(**sizes, backward=False)
    return forward if keys else plan.bytes_sent(**sizes) - 2 * forward


def _part_seconds(gm: GraphModule, node: Node, hardware: Hardware) -> float:
    """Predict the time of the attention of a chunk on keys that were sent before."""
    q, buffer = (value_of(_argument(node, name)) for name in ("query", "buffer"))
    batch, heads, rows, dim = (hint(size) for size in q.shape)
    whole = plan_of(gm, _argument(node, "plan"))
    index, count = (_argument(node, name) for name in ("index", "count"))
    pairs = rows * hint(buffer.shape[0]) / batch if whole is None else _pairs(whole.part(index, count))
    v_dim = hint(buffer.shape[2]) - dim
    flops = count_flops(math.ceil(batch * heads * pairs), dim, v_dim, op_name(node) == "forward_part")
    return flops / hardware.flops


def _argument(node: Node, name: str) -> Any:
    """Return an argument of an op by its name in the op's schema."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return node.args[names.index(name)]


def _group_size(node: Node) -> int | None:
    """Return the ranks of a collective's group; None where only a process of the group could tell."""
    arguments = {schema.name: at for at, schema in enumerate(node.target._schema.arguments)}  # type: ignore[union-attr]
    for name in ("group_size", "output_split_sizes"):
        if name in arguments and arguments[name] < len(node.args):
            value = node.args[arguments[name]]
            size = len(value) if isinstance(value, list | tuple) else value
            return size if isinstance(size, int) and size > 0 else None
    return None


def _attention_seconds(gm: GraphModule, node: Node, hardware: Hardware) -> float:
    """Predict the time of an attention op from its plan's blocks, of the slowest rank; from all pairs of its
    rows if the graph does not tell the plan. Messages inside the op count as its time."""
    forward = op_name(node) == "forward"
    q, k, v = (value_of(_argument(node, name)) for name in ("query", "key", "value"))
    plan = plan_of(gm, _argument(node, "plan"))
    (batch, heads, rows, dim), v_dim = (hint(size) for size in q.shape), hint(v.shape[3])
    if plan is not None and plan.world_size > 1:
        shape = Shape(batch, heads, hint(k.shape[1]), dim, v_dim, q.dtype.itemsize)
        estimate = _schedule_cost(plan, shape, hardware)
        return float(estimate.forward if forward else estimate.backward)
    pairs = rows * hint(k.shape[2]) if plan is None else _pairs(plan)
    return count_flops(math.ceil(batch * heads * pairs), dim, v_dim, forward) / hardware.flops


def _schedule_cost(plan: Any, shape: Shape, hardware: Hardware) -> Any:
    """Return the predicted cost of the plan's own schedule."""
    name = plan.schedule.partition("+")[0]
    return next(one for one in costs(plan, shape, hardware) if one.schedule == name)


def _pairs(plan: Any) -> float:
    """Count the pairs in a plan's visible blocks, masked blocks by their cost: of one head and batch row."""
    mask = plan.mask
    block = min(mask.q_block, mask.q_len) * min(mask.kv_block, mask.kv_len)
    return max(plan.work) * block / (plan.batch * mask.H)


def plan_of(gm: GraphModule, handle: Any) -> Any:
    """Return the plan behind a handle of a graph: a constant, a part of one, or made in the graph from
    constants alone. None if only a run tells it."""
    if not isinstance(handle, Node):
        return None
    if namespace_of(handle) == "tritoncp" and op_name(handle) == "part":
        whole = plan_of(gm, handle.args[0])
        index, count, dim, keys = (*handle.args[1:], None)[:4]
        return None if whole is None else whole.part(index, count, dim=dim, keys=keys)
    if namespace_of(handle) == "tritoncp" and op_name(handle) == "plan":
        return _planned(gm, handle)
    value = constant_of(gm, handle)
    return None if value is None or value.dim() or int(value) < 0 else object_of(value)


def _planned(gm: GraphModule, node: Node) -> Any:
    """Return the plan that the op tritoncp::plan makes, if its inputs are constants and no other rank is
    asked."""
    args: Any = torch.fx.node.map_arg(
        node.args, lambda arg: arg if isinstance(value_of(arg), Tensor) else hint(value_of(arg))
    )
    tensors, ints, shape, structure, world, *rest = args
    constants = [constant for one in tensors if (constant := constant_of(gm, one)) is not None]
    if len(constants) < len(tensors) or any(isinstance(one, Node) for one in rest):
        return None
    if structure == HANDLE and isinstance(plan := object_of(constants[0]), PlanData):
        return plan
    return None if world else object_of(plan_op(constants, list(ints), list(shape), structure, world, *rest))


def constant_of(gm: GraphModule, node: Any) -> Tensor | None:
    """Return the value of a node that is a constant tensor or a copy of one, None for other nodes."""
    if not isinstance(node, Node):
        return None
    if op_name(node) in COPIES:
        return constant_of(gm, node.args[0])
    value = _attribute(gm, str(node.target)) if node.op == "get_attr" else value_of(node)
    if isinstance(value, FakeTensor):
        value = value.constant
    return value if isinstance(value, Tensor) and not value.is_meta else None


def _attribute(gm: GraphModule, name: str) -> Any:
    """Return the attribute of a module at a dotted name."""
    value: Any = gm
    for part in name.split("."):
        value = getattr(value, part)
    return value
