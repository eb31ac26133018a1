"""Regions of a graph: the nodes that belong to modules whose paths match a pattern, forward and backward."""

from __future__ import annotations

import operator
import re
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from tritoncp.chunking.sizes import free_symbols

WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def op_name(node: Node) -> str:
    """Return the name of a node's op without its overload, as "aten::mm"; "" if it has none."""
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else schema.name


def module_path(node: Node) -> str:
    """Return the path of the innermost module that a node was traced in, "" if unknown: from the metadata
    ``nn_module_stack`` (forward), ``fwd_nn_module_stack`` (backward), or ``module_fqn`` of torchtitan's graph
    trainer.

    >>> node = torch.fx.Graph().placeholder("x")
    >>> for name in ("L['self']._modules['_orig_mod'].layers.0.mlp", "Layers.0", "Head.0"):
    ...     node.meta["nn_module_stack"] = {"": (name, "MLP")}
    ...     print(module_path(node))
    layers.0.mlp
    Layers.0
    Head.0
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return str((node.meta.get("custom") or {}).get("module_fqn", ""))
    path = str(list(stack.values())[-1][0])
    path = re.sub(r"\._modules\[['\"]([^'\"]+)['\"]\]", r".\1", path)
    path = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path)
    parts = [part for part in path.split(".") if part and part not in WRAPPERS]
    return ".".join(parts[2:] if parts[:1] == ["L"] else parts)


def matched_region(path: str, pattern: str) -> str:
    """Return the shortest prefix of a module path that ends with a match of the pattern, "" if none does.

    >>> [matched_region(path, "layers.*") for path in ("model.layers.3.mlp.up", "norm", "model.layers")]
    ['model.layers.3', '', '']
    """
    parts, globs = path.split("."), pattern.split(".")
    for end in range(len(globs), len(parts) + 1):
        if all(map(fnmatchcase, parts[end - len(globs) : end], globs)):
            return ".".join(parts[:end])
    return ""


def is_backward(node: Node) -> bool:
    """Return whether a node belongs to the backward pass."""
    if node.meta.get("partitioner_tag") == "is_backward":
        return True
    return "fwd_nn_module_stack" in node.meta or bool(node.meta.get("autograd_backward"))


def is_recomputed(node: Node) -> bool:
    """Return whether a node repeats a node of the forward pass in the backward pass, for a checkpoint."""
    again = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE
    return not is_backward(node) and node.meta.get("recompute") in again


def describe_modules(graph: Graph) -> str:
    """Format, for errors, the modules of a graph and the region of the whole graph."""
    paths = [path for path in dict.fromkeys(map(module_path, graph.nodes)) if path]
    text = (
        "Its nodes have no module paths: capture it by torch.compile, torch.export or "
        "aot_export_joint_with_descriptors of a graph from Dynamo; aot_export_module(trace_joint=True) "
        "traces the graph again, without them"
    )
    if paths:
        modules = ", ".join(paths[:8]) + ", ..." * (len(paths) > 8)
        text = f"Its modules are {modules}; paths begin at the module that is compiled"
    return f'{text}. region="" is the whole graph, as for a block that is compiled alone'


def has_tensor(node: Node) -> bool:
    """Return whether a node's value is a tensor or a sequence with tensors."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor | tuple | list)


def tensors_of(node: Node) -> list[Tensor]:
    """Return the tensors of a node's fake value, nested sequences included."""
    return tensors_in(node.meta.get("val"))


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a value, nested sequences included."""
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def regions_of(graph: Graph, pattern: str) -> dict[Node, str]:
    """Return {node: path of its region} for all nodes inside regions.

    A node without a module is inside if all its tensor inputs and users are; a sum of gradients is inside
    also if it adds a gradient from outside. Its region is the region of its last tensor input. A getitem node
    is in the region of its sequence. With the pattern "" all calls are inside one region, "".
    """
    if not pattern:
        return {node: "" for node in graph.nodes if node.op == "call_function"}
    inside: dict[Node, str] = {}
    candidates = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        path = module_path(node)
        if node.target is operator.getitem and isinstance(node.args[0].meta.get("val"), tuple | list):
            if node.args[0] in inside:
                inside[node] = inside[node.args[0]]
        elif path:
            if region := matched_region(path, pattern):
                inside[node] = region
        elif has_tensor(node):
            candidates.append(node)
    members = set(candidates)
    while True:
        wrong = [node for node in members if not _is_surrounded(node, inside, members)]
        if not wrong:
            break
        members.difference_update(wrong)
    for node in candidates:
        if node in members:
            inside[node] = next(inside[x] for x in reversed(_tensors(node)) if x in inside)
    return {node: inside[node] for node in graph.nodes if node in inside}


def _tensors(node: Node) -> list[Node]:
    return [x for x in node.all_input_nodes if has_tensor(x)]


def _is_surrounded(node: Node, inside: dict[Node, str], members: set[Node]) -> bool:
    """Return whether all inputs and users of a node are inside regions. For a sum of gradients one of them is
    enough: an input from outside is cut, and a result for outside is joined once. Sums of gradients of
    parameters are outside, since autograd adds the gradients of several calls of a module there."""
    tensors = _tensors(node)
    sources = [x in inside or x in members for x in tensors]
    users = [x in inside or x in members for x in node.users]
    if not users or not tensors:
        return False
    if node.target is torch.ops.aten.add.Tensor and len(tensors) > 1:
        if is_backward(node) and not free_symbols(node.meta["val"]):
            return False
        return any(sources) and (all(users) or (is_backward(node) and all(sources)))
    return all(sources) and all(users)
