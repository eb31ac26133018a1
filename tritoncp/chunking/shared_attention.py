"""Graph nodes of an attention over several ranks whose chunks share one exchange of keys: the exchange, each
chunk's attention on the buffer, and the return of the keys' gradients."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import CallMethodKey
from torch.fx.node import map_arg
from torch.utils._pytree import SequenceKey

from tritoncp.chunking import attention
from tritoncp.chunking.sizes import expression
from tritoncp.chunking.step_graph import RETURN, SEND
from tritoncp.ops.graph.key_exchange import (
    backward_part_op,
    forward_part_op,
    land_gradients_op,
    send_gradients_op,
    send_keys_op,
)

wait_op = torch.ops._c10d_functional.wait_tensor.default


def send(rewrite: Any, node: Node) -> Node:
    """Add the exchange of an attention's keys, forward or backward; return the node of the buffer."""
    k, v = _keys(rewrite, node)
    backward = node.target is attention.backward_op
    args = (k, v, backward, *_call(rewrite, node))
    one, other = (x.meta["val"] for x in attention.keys_of(node))
    shape = one.shape[1], one.shape[3] + other.shape[3]
    return _exchange(rewrite, node, send_keys_op, args, shape, one.dtype)


def part_call(rewrite: Any, node: Node, c: int) -> tuple[Any, tuple[Any, ...]]:
    """Return (op, arguments) for the attention of one chunk of the queries."""

    def chunk(x: Node) -> Node:
        return rewrite.chunk_node(x, c)

    own: Any = node.args
    chunks = rewrite.sizes.chunks
    rest = c, chunks, *_call(rewrite, node)
    q, buffer = chunk(attention.argument(node, "q")), rewrite.value(node, SEND)
    if node.target is attention.forward_op:
        return forward_part_op, (q, buffer, *rest)
    dout, dlse, _, _, _, out, lse, *_ = own
    dlse = None if dlse is None else chunk(dlse)
    return backward_part_op, (chunk(dout), dlse, q, buffer, chunk(out), chunk(lse), *rest)


def gradient_values(rewrite: Any, node: Node) -> list[Tensor]:
    """Return fake values of a chunk's terms of dk and dv, for the rows of the buffer."""
    own: Any = node.args
    buffer, dtype = rewrite.value(node, SEND).meta["val"], own[6].meta["val"].dtype
    d = attention.argument(node, "q").meta["val"].shape[3]
    sizes = d, buffer.shape[2] - d
    rows, heads = buffer.shape[:2]
    return [_empty(rewrite, (rows, heads, size), dtype, buffer.device) for size in sizes]


def return_gradients(rewrite: Any, node: Node) -> Node:
    """Add nodes that sum dk and dv over chunks and send them back; return the node of (dk, dv)."""
    stage, chunks = rewrite.stage_of(node), range(rewrite.sizes.chunks)
    dk, dv = gradient_values(rewrite, node)
    parts = [
        [
            rewrite.add_call(operator.getitem, (rewrite.value(node, c), item), value, stage)
            for c in reversed(chunks)
        ]
        for item, value in enumerate((dk, dv), 1)
    ]
    k, v = _keys(rewrite, node)
    handle, spec = rewrite.whole_node(attention.argument(node, "plan")), attention.argument(node, "spec")
    shape = dk.shape[1], dk.shape[2] + dv.shape[2]
    returned = _exchange(rewrite, node, send_gradients_op, (*parts, k, handle, spec), shape, dk.dtype)
    landed = list(node.meta["val"][1:3])
    return rewrite.add_call(land_gradients_op, (returned, k, v, handle), landed, _stage(node))


def landed_chunks(rewrite: Any, node: Node, item: int) -> list[Node]:
    """Return the chunks of dk (item 1) or dv (item 2), views of the whole gradient."""
    value, stage = node.meta["val"][item], rewrite.stage_of(node)

    def split() -> list[Node]:
        whole = rewrite.add_call(operator.getitem, (rewrite.value(node, RETURN), item - 1), value, stage)
        return rewrite.split(whole, 2, 1, rewrite.sizes.chunks, stage)

    return rewrite.once(("landed", node, item), split)


def _keys(rewrite: Any, node: Node) -> tuple[Node, Node]:
    k, v = attention.keys_of(node)
    count = rewrite.sizes.chunks
    return rewrite.first_keys(k, count, node), rewrite.first_keys(v, count, node)


def _call(rewrite: Any, node: Node) -> tuple[Any, ...]:
    """Return an attention's arguments besides its tensors: :class:`tritoncp.ops.call.OpArguments`."""
    own: Any = node.args
    return map_arg(own[attention.places(node)["captures"] :], rewrite.whole_node)


def _stage(node: Node) -> dict[str, Any]:
    """Return the metadata of an attention node for the nodes of its exchange: all except its value."""
    own = "val", "tensor_meta", "eager_input_vals", "unbacked_bindings"
    return {name: value for name, value in node.meta.items() if name not in own}


def _exchange(
    rewrite: Any, node: Node, op: Any, args: tuple[Any, ...], shape: tuple[Any, Any], dtype: Any
) -> Node:
    """Add a message [n, heads, width], with n unknown before the run, and the wait for it. Tags keep both
    in their pass: without, partitioners would put them in every pass that can run them.

    shape: (heads, width)
    """
    env, sizes = rewrite.sizes.env, rewrite.sizes
    with env.ignore_fresh_unbacked_symbols():
        rows = env.create_unbacked_symint()
    symbol = rows.node.expr
    torch.fx.experimental.symbolic_shapes._constrain_range_for_size(rows)
    q = attention.argument(node, "q").meta["val"]
    plan = attention.plan_between_ranks(node)
    local, batch = sizes.rows, sizes.hint(expression(q.shape[0]))
    assert plan is not None  # or its chunks would not share keys
    if local and batch:
        env.var_to_hint_override[symbol] = plan.world_size * local * batch
    value = _empty(rewrite, (rows, *shape), dtype, q.device)
    tag = "must_be_in_backward" if node.target is attention.backward_op else "must_be_in_forward"
    stage = _stage(node) | {"partitioner_tag": tag}
    message = rewrite.add_call(op, args, value, stage)
    message.meta["unbacked_bindings"] = {symbol: (CallMethodKey("size"), SequenceKey(0))}
    return rewrite.add_call(wait_op, (message,), value, stage)


def _empty(rewrite: Any, shape: tuple[Any, ...], dtype: Any, device: Any) -> Tensor:
    sizes = rewrite.sizes
    with sizes.fake_mode, sizes.env.suppress_guards():
        return torch.empty_strided(shape, (shape[1] * shape[2], shape[2], 1), dtype=dtype, device=device)
