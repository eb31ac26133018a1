"""Dependencies between the nodes of a graph: values, memory that is written, and side effects."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from tritoncp.chunking.streams.storages import Storages, is_collective, is_wait


def dependencies_of(gm: GraphModule, storages: Storages) -> dict[Node, list[Node]]:
    """List the nodes that each node has to follow: the nodes of its inputs; for memory that is written,
    all earlier users of it before the write and the write before all later users; for side effects and random
    numbers, the one before. Inputs of the graph come first, in their order, and its output last."""
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
    """Whether a node has an effect beside its result and the memory that it writes: assertions, prints,
    random numbers (which come in the order of their calls), and calls whose effects are not known.
    Collectives and waits, which torch calls impure so that they are not removed, have none."""
    if is_collective(node) or is_wait(node):
        return False
    schema, tags = getattr(node.target, "_schema", None), getattr(node.target, "tags", ())
    if node.op in ("call_module", "call_method") or torch.Tag.nondeterministic_seeded in tags:
        return True
    return node.op == "call_function" and node.is_impure() and not (schema and schema.is_mutable)
