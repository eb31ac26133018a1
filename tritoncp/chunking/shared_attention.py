"""Graph nodes for chunks that share one exchange of keys between ranks: the exchange, the attention of each
chunk on the buffer, and the return of the keys' gradients."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import CallMethodKey
from torch.fx.node import map_arg
from torch.utils._pytree import SequenceKey

from tritoncp.call.key_exchange import (
    backward_part_op,
    forward_part_op,
    land_gradients_op,
    send_gradients_op,
    send_keys_op,
)
from tritoncp.chunking import attention_nodes
from tritoncp.chunking.regions import is_recomputed
from tritoncp.chunking.sizes import expression
from tritoncp.chunking.step_graph import RETURN, SEND

wait_op = torch.ops._c10d_functional.wait_tensor.default


def send(rewrite: Any, node: Node) -> Node:
    """Add the exchange of an attention's keys, forward or backward; return the node of the buffer."""
    backward = node.target is attention_nodes.backward_op
    return _exchange(rewrite, node, send_keys_op, (*_keys(rewrite, node), backward, *_call(rewrite, node, 0)))


def part_call(rewrite: Any, node: Node, c: int) -> tuple[Any, tuple[Any, ...]]:
    """Return (op, arguments) for the attention of one chunk of the queries."""

    def chunk(x: Node) -> Node:
        return rewrite.chunk_node(x, c)

    own: Any = node.args
    chunks = rewrite.sizes.chunks
    rest = c, chunks, *_call(rewrite, node, c)
    q, buffer = chunk(attention_nodes.argument(node, "q")), rewrite.value(node, SEND)
    if node.target is attention_nodes.forward_op:
        return forward_part_op, (q, buffer, *rest)
    dout, dlse, _, _, _, out, lse, *_ = own
    dlse = None if dlse is None else chunk(dlse)
    return backward_part_op, (chunk(dout), dlse, q, buffer, chunk(out), chunk(lse), *rest)


def gradient_values(rewrite: Any, node: Node) -> list[Tensor]:
    """Return fake values of a chunk's parts of dk and dv, for the rows of the buffer."""
    own: Any = node.args
    buffer, d = (
        rewrite.value(node, SEND).meta["val"],
        attention_nodes.argument(node, "q").meta["val"].shape[3],
    )
    rows, heads, width = buffer.shape
    return [buffer.new_empty(rows, heads, n, dtype=own[6].meta["val"].dtype) for n in (d, width - d)]


def return_gradients(rewrite: Any, node: Node) -> Node:
    """Add nodes that sum dk and dv over chunks and send them back; return the node of (dk, dv)."""
    stage, chunks = rewrite.stage_of(node), range(rewrite.sizes.chunks)
    parts = [
        [rewrite.add_call(operator.getitem, (rewrite.value(node, c), item), stage) for c in reversed(chunks)]
        for item in (1, 2)
    ]
    k, v = _keys(rewrite, node)
    handle, spec = (
        rewrite.whole_node(attention_nodes.argument(node, "plan")),
        attention_nodes.argument(node, "spec"),
    )
    returned = _exchange(rewrite, node, send_gradients_op, (*parts, k, handle, spec))
    landed: Node = rewrite.add_call(land_gradients_op, (returned, k, v, handle), _stage(node))
    return landed


def landed_chunks(rewrite: Any, node: Node, item: int) -> list[Node]:
    """Return the chunks of dk (item 1) or dv (item 2), views of the whole gradient."""
    stage = rewrite.stage_of(node)

    def split() -> list[Node]:
        whole = rewrite.add_call(operator.getitem, (rewrite.value(node, RETURN), item - 1), stage)
        return rewrite.split(whole, 2, 1, rewrite.sizes.chunks, stage)

    return rewrite.once(("landed", node, item), split)


def _keys(rewrite: Any, node: Node) -> tuple[Node, Node]:
    k, v = attention_nodes.keys_of(node)
    count = rewrite.sizes.chunks
    return rewrite.first_keys(k, count, node), rewrite.first_keys(v, count, node)


def _call(rewrite: Any, node: Node, c: int) -> tuple[Any, ...]:
    """Return the :class:`tritoncp.call.op_arguments.OpArguments` of an attention, with the selected keys of a
    chunk. The exchange of keys reads only how many they are."""
    own, whole = node.args, rewrite.whole_node
    captures = attention_nodes.chunk_captures(node, whole, lambda x: rewrite.chunk_node(x, c))
    rest: Any = own[attention_nodes.places(node)["captures"] + 1 :]
    return (captures, *map_arg(rest, whole))


def _stage(node: Node) -> dict[str, Any]:
    """Return the metadata of an attention node for the nodes of its exchange: all except its value."""
    own = "val", "tensor_meta", "eager_input_vals", "unbacked_bindings"
    return {name: value for name, value in node.meta.items() if name not in own}


def _exchange(rewrite: Any, node: Node, op: Any, args: tuple[Any, ...]) -> Node:
    """Add a message, whose number of rows is unknown before the run, and the wait for it. Tags keep both in
    the forward or backward pass; without tags, partitioners would put them in every pass that can run them.
    If a checkpoint recomputes the attention, its exchange has no tag, since it runs in both passes."""
    env, sizes = rewrite.sizes.env, rewrite.sizes
    stage = _stage(node)
    if not is_recomputed(node):
        of_pass = "backward" if node.target is attention_nodes.backward_op else "forward"
        stage["partitioner_tag"] = f"must_be_in_{of_pass}"
    with env.ignore_fresh_unbacked_symbols():
        message = rewrite.add_call(op, args, stage)
    symbol = message.meta["val"].shape[0].node.expr
    message.meta["unbacked_bindings"] = {symbol: (CallMethodKey("size"), SequenceKey(0))}
    plan = attention_nodes.plan_between_ranks(node)
    local, batch = (
        sizes.rows,
        sizes.hint(expression(attention_nodes.argument(node, "q").meta["val"].shape[0])),
    )
    assert plan is not None  # only attention between ranks shares keys
    if local and batch:
        env.var_to_hint_override[symbol] = plan.world_size * local * batch
    wait: Node = rewrite.add_call(wait_op, (message,), stage)
    return wait
