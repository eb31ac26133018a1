"""Predicted time of each node of a graph: matrix products, attention, messages; memory traffic for the rest.

Times depend only on the graph and on numbers that are equal on all ranks, so that all ranks derive the same
order of nodes.
"""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import torch
from torch import SymInt, Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from tritoncp.call.key_exchange import backward_part_op, forward_part_op
from tritoncp.chunking import attention_nodes
from tritoncp.chunking.regions import op_name, tensors_of
from tritoncp.chunking.streams.storages import bytes_of, hint, is_collective, is_view, is_wait
from tritoncp.graph.flop_formulas import count_flops
from tritoncp.graph.handle_ops import batch_rows_op, part_op
from tritoncp.mods.tracing import fresh_dispatch
from tritoncp.planning.costs.hardware import Hardware
from tritoncp.planning.plan import Plan

ALLOCATIONS = {
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
}
# Ops that read as many rows as they return.
LOOKUPS = {f"aten::{name}" for name in ("embedding", "gather", "index", "index_select")}
# Indices of the query (the keys follow), the chunk's index and the plan's handle among the arguments of the
# ops forward_part and backward_part.
PART_PLACES = {forward_part_op: (0, 2, 7), backward_part_op: (2, 6, 11)}


class NodeCost(NamedTuple):
    """Predicted seconds of one node, and the quantity from which they are computed.

    kind: "product", "attention", "memory" (bytes read and written), "message", "wait", or "nothing": inputs,
        views, sizes, allocations and handles
    """

    kind: str
    seconds: float


def node_costs(gm: GraphModule, hardware: Hardware) -> dict[Node, NodeCost]:
    """Predict the time of every node of a graph."""
    with fresh_dispatch():  # a compiler pass may run under a fake tensor mode
        return {node: _cost(node, hardware) for node in gm.graph.nodes}


def _cost(node: Node, hardware: Hardware) -> NodeCost:
    if is_wait(node):
        return NodeCost("wait", 0.0)
    if is_collective(node):
        return NodeCost("message", _message_seconds(node, hardware))
    if attention_nodes.is_attention(node) or node.target in PART_PLACES:
        return NodeCost("attention", _attention_flops(node) / hardware.flops)
    if _computes_nothing(node):
        return NodeCost("nothing", 0.0)
    seconds, flops = _traffic(node) / hardware.memory, _product_flops(node)
    if flops:
        return NodeCost("product", max(flops / hardware.flops, seconds))
    return NodeCost("memory", seconds)


def _computes_nothing(node: Node) -> bool:
    """Return whether a node takes no time: an input, a view, an allocation, a size or a plan's handle."""
    if not node.op.startswith("call") or node.target is operator.getitem or is_view(node):
        return True
    is_handle = op_name(node).startswith("tritoncp::") and all(x.dim() == 0 for x in tensors_of(node))
    return op_name(node) in ALLOCATIONS or is_handle or not tensors_of(node)


def _traffic(node: Node) -> int:
    """Count the bytes that a node reads and writes."""
    written, read = bytes_of(node), [bytes_of(x) for x in node.all_input_nodes]
    if read and op_name(node) in LOOKUPS:
        read[0] = min(read[0], written)
    return written + sum(read)


def _message_seconds(node: Node, hardware: Hardware) -> float:
    """Predict the time of a collective from the bytes of its arguments or its result (the larger of the two),
    doubled for an all-reduce."""
    moved, name = max(bytes_of(*node.all_input_nodes), bytes_of(node)), op_name(node)
    rate = hardware.bandwidth * (hardware.scattered if "::all_to_all" in name else 1.0)
    return moved * (2 if "::all_reduce" in name else 1) / rate + hardware.latency


def _product_flops(node: Node) -> int:
    """Return the FLOPs of a matrix product by torch's formulas, 0 for other nodes."""
    formula = flop_registry.get(getattr(node.target, "overloadpacket", node.target))
    if formula is None:
        return 0
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda x: _to_meta(x.meta.get("val")))
    return int(formula(*args, **kwargs, out_val=_to_meta(node.meta.get("val"))))


def _to_meta(value: Any) -> Any:
    """Replace tensors by meta tensors of hinted sizes, and symbols by numbers: FLOP formulas compare sizes,
    which raises for unbacked symbols."""

    def convert(x: Any) -> Any:
        if isinstance(x, SymInt):
            return hint(x)
        return torch.empty([hint(size) for size in x.shape], dtype=x.dtype, device="meta")

    return tree_map_only(Tensor | SymInt, convert, value)


def _attention_flops(node: Node) -> int:
    """Return an attention's FLOPs: from the blocks of its plan, on the rank with the max work, or from all
    pairs of rows if the graph does not show the plan. Messages inside the op are not counted."""
    args: Any = node.args
    if node.target in PART_PLACES:
        q_at, index_at, plan_at = PART_PLACES[node.target]
        q, buffer = args[q_at].meta["val"], args[q_at + 1].meta["val"]
        v_dim, keys = buffer.shape[2] - q.shape[3], hint(buffer.shape[0]) / hint(q.shape[0])
        whole = _plan_of_handle(args[plan_at])
        plan = None if whole is None else whole.part(*args[index_at : index_at + 2])
    else:
        q, value = (attention_nodes.argument(node, name).meta["val"] for name in ("q", "v"))
        v_dim, keys = value.shape[3], hint(value.shape[2])
        plan = _plan_of_handle(attention_nodes.argument(node, "plan"))
    batch, heads, rows, dim = map(hint, q.shape)
    pairs = rows * keys if plan is None else _pairs(plan)
    forward = node.target in (attention_nodes.forward_op, forward_part_op)
    return count_flops(math.ceil(batch * heads * pairs), dim, hint(v_dim), forward)


def _plan_of_handle(handle: Node) -> Plan | None:
    """Return the plan, or part of a plan, of a handle's node; None if it is unknown before the run."""
    if handle.target not in (part_op, batch_rows_op):
        return attention_nodes.known_plan(handle)
    whole = _plan_of_handle(handle.all_input_nodes[0])
    rest: Any = [hint(x.meta["val"]) if isinstance(x, Node) else x for x in handle.args[1:]]
    if whole is None:
        return None
    if handle.target is batch_rows_op:
        return whole.batch_rows(*rest)
    index, count, keys = (*rest, None)[:3]
    return whole.part(index, count, keys=keys)


def _pairs(plan: Plan) -> float:
    """Return the max over ranks of the pairs in visible blocks, per head and batch row; masked blocks are
    weighted by their cost."""
    mask = plan.mask
    block = min(mask.q_block, mask.q_len) * min(mask.kv_block, mask.kv_len)
    return max(plan.work) * block / (plan.batch * mask.H)
