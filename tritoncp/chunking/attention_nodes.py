"""Chunks of tritoncp's attention: the arguments that are cut, and how many chunks of keys a chunk of queries
reads."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

from torch import SymInt, Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.fx.node import map_arg

from tritoncp.call.autograd import backward_op, forward_op
from tritoncp.call.traced import plan_op
from tritoncp.chunking import torch_attention
from tritoncp.chunking.regions import op_name
from tritoncp.chunking.report import ChunkingError
from tritoncp.chunking.sizes import hint_of
from tritoncp.core.bounded_cache import computed_once
from tritoncp.core.handles import object_of
from tritoncp.distributed.schedules import shared_keys
from tritoncp.graph.handle_ops import batch_rows_op, block_mask_op, part_op, view_op
from tritoncp.graph.spec import decode_spec
from tritoncp.mods.tracing import fresh_dispatch
from tritoncp.planning.plan import Plan

# Indices of the arguments of the two ops: query, key, value, captures, numbers, plan.
FORWARD = {"q": 0, "k": 1, "v": 2, "captures": 3, "ints": 4, "plan": 6, "spec": 7}
HANDLE = '"h"'  # structure of a tritoncp::plan node whose only tensor is the handle of a plan or mask
COPIES = {f"aten::{name}" for name in ("alias", "clone", "detach", "lift_fresh", "lift_fresh_copy")}
BACKWARD = {"q": 2, "k": 3, "v": 4, "captures": 7, "ints": 8, "plan": 10, "spec": 11}


def is_attention(node: Node) -> bool:
    return node.target in (forward_op, backward_op)


def is_plan(node: Node) -> bool:
    """Return whether a node makes a plan or a mask, which all chunks share."""
    return node.target in (plan_op, block_mask_op, part_op, batch_rows_op, view_op)


def places(node: Node) -> dict[str, int]:
    return FORWARD if node.target is forward_op else BACKWARD


def argument(node: Node, name: str) -> Any:
    """Return an argument of an attention node by name."""
    return node.args[places(node)[name]]


def keys_of(node: Node) -> tuple[Node, Node]:
    """Return the (key, value) nodes of an attention node."""
    return argument(node, "k"), argument(node, "v")


def whole_inputs(node: Node) -> set[Node]:
    """Return the inputs of a node that are not cut: the plan, and captures and numbers of mods, which are
    indexed by global positions. Selected keys have a row for each query, and are cut."""
    if torch_attention.is_torch_attention(node):
        return torch_attention.captures(node)
    if not is_attention(node):
        return set()
    lists = argument(node, "captures"), argument(node, "ints")
    whole = {x for values in lists for x in values if isinstance(x, Node)} | {argument(node, "plan")}
    return whole - {selected_indices(node)}


def selected_indices(node: Node) -> Any:
    """Return the indices of the selected keys of an attention node, None without any."""
    return argument(node, "captures")[-1] if decode_spec(argument(node, "spec")).selected else None


def chunk_captures(node: Node, whole: Callable[[Any], Any], chunk: Callable[[Any], Any]) -> list[Any]:
    """Return the captures of a chunk's copy of an attention node. whole, chunk: return the node of a whole
    value, and of a chunk of it"""
    captures = list(argument(node, "captures"))
    indices = captures.pop() if selected_indices(node) is not None else None
    return [*map(whole, captures), *([] if indices is None else [chunk(indices)])]


def fault(node: Node, cut: Any) -> str:
    """Return why an attention node cannot be cut, "" if it can."""
    spec = decode_spec(argument(node, "spec"))
    if spec.selected is not None and cut.dim == "seq" and not _selects_by_query(node, cut):
        return (
            "has selected= without a row for each query that is cut: pass indices [B, heads, S_local, n] "
            'with query_block=1, or pass dim="batch"'
        )
    if spec.sizes is not None:
        return "has expand=, and each chunk would compute keys and values again: expand before the call"
    if dict(spec.options).get("invariant"):
        return "has the kernel option invariant=True, which holds for whole calls alone: omit the option"
    if spec.world and cut.dim == "seq" and not cut.repeat and not shares_keys(node, cut):
        plan, names = plan_between_ranks(node), " or ".join(map(repr, shared_keys.SCHEDULES))
        known = f"the schedule {plan.schedule!r}" if plan else "a schedule that is not known in the graph"
        return (
            f"exchanges keys between ranks by {known}: chunks share one exchange by a tritoncp.Plan of the "
            f"schedule {names}, of keys that are cut along with the queries; pass such a plan, or "
            "repeat=True to have each chunk exchange its keys again"
        )
    captures = argument(node, "captures")
    return fault_of_inputs(cut, keys_of(node), [captures[i].meta["val"] for i in spec.wants])


def _selects_by_query(node: Node, cut: Any) -> bool:
    """Return whether the selected keys of an attention are cut as its queries."""
    (_, query_block), queries = decode_spec(argument(node, "spec")).selected or (1, 1), argument(node, "q")
    return query_block == 1 and cut.carries(selected_indices(node)) == cut.carries(queries)


def fault_of_inputs(cut: Any, keys: Iterable[Node], learned: Any) -> str:
    """Return why an attention with these keys, and these captures that require grad, cannot be cut; "" if it
    can."""
    if cut.sizes.holds(learned):
        return (
            "has a capture that has the size that is cut and requires grad: detach it, or cut the other dim"
        )
    if cut.dim == "batch" and not all(map(cut.carries, keys)):
        return "has keys without the batch dimension that is cut: expand them to the batch"
    return ""


def shares_keys(node: Node, cut: Any) -> bool:
    """Return whether the chunks of an attention can share one exchange of keys between ranks: the sequence is
    cut, and the plan, if the graph shows it, has a schedule that sends keys unchanged."""
    if cut.dim != "seq" or cut.repeat or not all(map(cut.carries, keys_of(node))):
        return False
    plan = plan_between_ranks(node)
    return plan is not None and plan.world_size > 1 and plan.schedule in shared_keys.SCHEDULES


def plan_between_ranks(node: Node) -> Plan | None:
    """Return the plan of an attention over several ranks; None on a single rank, and if the graph does not
    have the plan as a constant."""
    if not decode_spec(argument(node, "spec")).world:
        return None
    with fresh_dispatch():
        return known_plan(argument(node, "plan"))


def item_of(node: Node) -> tuple[Node, int] | None:
    """Return (attention node, index of the result) if a node selects a result of attention's backward op."""
    args: Any = node.args
    if node.target is operator.getitem and getattr(args[0], "target", None) is backward_op:
        return args[0], args[1]
    return None


class Keys:
    """How many chunks of keys each chunk of queries reads: all chunks up to the last one that it sees.

    needs: bool [chunks, chunks], an argument of the caller; None: from the plans that are constants of the
        graph, and all keys where the plan is unknown
    """

    def __init__(self, cut: Any, needs: Tensor | None) -> None:
        self.cut, self.chunks = cut, cut.sizes.chunks
        if needs is not None and tuple(needs.shape) != (self.chunks, self.chunks):
            raise ChunkingError(
                f"needs has the shape {tuple(needs.shape)}; [{self.chunks}, {self.chunks}] is needed: pass "
                f"plan.needs({self.chunks})"
            )
        with fresh_dispatch():
            self.common = None if needs is None else prefixes(needs, self.chunks)

    def counts(self, node: Node) -> tuple[int, ...]:
        """Return how many chunks of keys each chunk of an attention node reads."""
        return self._counts_of(argument(node, "plan"))

    @computed_once
    def _counts_of(self, handle: Node) -> tuple[int, ...]:
        counts = self.common
        if counts is None and self.cut.dim == "seq":
            with fresh_dispatch():
                plan = known_plan(handle)
                counts = None if plan is None else prefixes(plan.needs(self.chunks), self.chunks)
        return counts or (self.chunks,) * self.chunks

    @computed_once
    def are_shared(self, node: Node) -> bool:
        """Return whether the chunks of an attention share one exchange of keys between ranks."""
        return shares_keys(node, self.cut)

    def are_cut(self, node: Node) -> bool:
        """Return whether the keys of an attention node are cut by sequence, as its queries."""
        return self.cut.dim == "seq" and all(map(self.cut.carries, keys_of(node)))

    def readers(self, node: Node, index: int) -> list[int]:
        """Return the chunks of queries that read chunk ``index`` of the keys, in descending order."""
        counts = self.counts(node)
        return [c for c in reversed(range(self.chunks)) if counts[c] > index]


def prefixes(needs: Tensor, chunks: int) -> tuple[int, ...]:
    """Return, for each query chunk, the length (>= 1) of the shortest prefix of key chunks that it needs.

    >>> import torch
    >>> prefixes(torch.tensor([[0, 0, 0], [1, 1, 0], [0, 0, 1]]), 3)
    (1, 2, 3)
    """
    rows = needs.tolist()
    return tuple(max([j + 1 for j in range(chunks) if row[j]], default=1) for row in rows)


def known_plan(handle: Node) -> Plan | None:
    """Return the plan of a handle's node, for the hinted sizes; None if it depends on inputs of the graph
    whose values are unknown. Called outside of fake tensor modes."""
    target: Any = handle.target
    if target in (part_op, batch_rows_op):
        return None
    if target is not plan_op:
        value = value_of(handle)
        return None if value is None or int(value) < 0 else object_of(value)
    try:
        args: Any = map_arg(handle.args, _constant)
        tensors, ints, shape, structure, world, *rest = args
        if structure == HANDLE and isinstance(plan := object_of(tensors[0]), Plan):
            return plan
        if world:
            return None  # evaluating it would communicate
        rest = [shape, structure, world, *rest]
        return object_of(plan_op(list(tensors), list(ints), list(rest[0]), *rest[1:]))
    except _Unknown:
        return None


class _Unknown(Exception):
    """Raised for an argument without a value before the graph runs."""


def _constant(node: Node) -> Any:
    value = node.meta.get("val")
    number: int | Tensor | None
    if isinstance(value, SymInt):
        number = hint_of(value.node.expr, value.node.shape_env)
    elif isinstance(value, int):
        number = value
    else:
        number = value_of(node)
    if number is None:
        raise _Unknown
    return number


def value_of(node: Node) -> Tensor | None:
    """Return the real tensor of a node: a constant of the graph, a copy of one, or an example input while
    torch.compile traces; else None."""
    if node.op == "get_attr":
        value: Any = node.graph.owning_module
        for name in str(node.target).split("."):
            value = getattr(value, name, None)
        return value if isinstance(value, Tensor) and not isinstance(value, FakeTensor) else None
    if op_name(node) in COPIES:
        return value_of(node.all_input_nodes[0])
    value = node.meta.get("val")
    if isinstance(value, FakeTensor):
        return value.constant if value.constant is not None else _example(value)
    return None


def _example(fake: FakeTensor) -> Tensor | None:
    """Return the real tensor behind a fake input: AOTAutograd's fake inputs share storage with Dynamo's fake
    tensors, which are made from real inputs."""
    converter = fake.fake_mode.fake_tensor_converter
    memory = fake.untyped_storage()._cdata
    numbers = {n for n, x in converter.tensor_memo.items() if x.untyped_storage()._cdata == memory}
    described = converter.meta_converter.describer.lookup_tensor
    tensors = [x for x, n in list(described.items()) if n in numbers and not isinstance(x, FakeTensor)]
    return tensors[0] if tensors else None
